"""What the front and the router of its process share: who takes requests, and a request's way."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Way(NamedTuple):
    """What a request's way is chosen by. `avoided`: replicas that have refused it."""

    blocks: tuple[bytes, ...]
    avoided: frozenset[str] = frozenset()


class Fleet:
    """The replicas that take requests, as the router knows them. Read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, str] = {}

    def now(self, nodes: dict[str, str]) -> None:
        with self._lock:
            self._nodes = nodes

    @property
    def replicas(self) -> dict[str, str]:
        """Replica -> its node."""
        with self._lock:
            return dict(self._nodes)


FLEET = Fleet()  # of this process: Ray makes the router, so it is handed nothing
