"""A Ray cluster of two nodes on this machine: two raylets, on loopback, closed by a token."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

# Ray reads these when it is imported.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Ray kills replicas where memory is short, and others on this machine may have taken it.
os.environ["RAY_memory_monitor_refresh_ms"] = "0"
REASON = "ray is not installed: make scale-test installs it into an environment of its own"


class Nodes:
    """`ray.cluster_utils.Cluster` with the nodes by number: 0 is the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        settings = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
        self._settings: dict[str, Any] = settings
        self.cluster = Cluster(initialize_head=True, head_node_args=settings)
        self.nodes = [self.cluster.head_node, self.cluster.add_node(**settings)]
        self.address: str = self.cluster.address

    def raylet(self, number: int) -> psutil.Process:
        (found,) = self.nodes[number].all_processes["raylet"]
        return psutil.Process(found.process.pid)

    def workers(self, number: int, name: str) -> list[psutil.Process]:
        """The processes below a node whose title begins so."""
        return [one for one in self.raylet(number).children(True) if title_of(one).startswith(name)]

    def kill(self, number: int) -> None:
        """SIGKILL to all of a node's processes, as when its machine is gone.

        Workers whose raylet alone is killed may bring their task to its end.
        """
        raylet = self.raylet(number)
        for process in [raylet, *raylet.children(True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(**self._settings))


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason=REASON)
    made = Nodes()
    yield made
    made.cluster.shutdown()
