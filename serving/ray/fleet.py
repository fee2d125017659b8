"""What the front and the router of its process share: the replicas, their nodes and addresses."""

from __future__ import annotations

import threading

from serving.ray.frames import Address


class Fleet:
    """The replicas that Ray says are running, and where those are asked that have been found.
    Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, str] = {}
        self._addresses: dict[str, Address] = {}

    def now(self, nodes: dict[str, str]) -> None:
        """Ray's replicas, each with its node."""
        with self._lock:
            self._nodes = nodes
            self._addresses = {name: at for name, at in self._addresses.items() if name in nodes}

    def found(self, name: str, address: Address) -> None:
        with self._lock:
            if name in self._nodes:
                self._addresses[name] = address

    def lost(self, name: str) -> None:
        """It could not be reached, so it is asked nothing until it is found again."""
        with self._lock:
            self._addresses.pop(name, None)

    @property
    def names(self) -> set[str]:
        """All of Ray's replicas."""
        with self._lock:
            return set(self._nodes)

    @property
    def missing(self) -> set[str]:
        """Replicas that have not been found."""
        with self._lock:
            return self._nodes.keys() - self._addresses.keys()

    @property
    def addresses(self) -> dict[str, Address]:
        """Of the replicas that take requests."""
        with self._lock:
            return dict(self._addresses)

    @property
    def replicas(self) -> dict[str, str]:
        """Replica that takes requests -> its node."""
        with self._lock:
            return {name: self._nodes[name] for name in self._addresses}


FLEET = Fleet()  # of this process: Ray makes the router, so it is handed nothing
