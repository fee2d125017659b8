"""The Ray cluster that work is given to: joined, or started on this machine alone.

    nodes = connect()
    disconnect()

Without RAY_ADDRESS a cluster of this machine is started: on 127.0.0.1, without dashboard, and with
a token (serving.ray.environment), since whoever reaches an open Ray runs code.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import ray

from serving.errors import ServingError
from serving.hardware.facts import allowed_cores
from serving.ray.environment import ADDRESS

NAMESPACE = "crossover"
LOOPBACK = "127.0.0.1"


def connect() -> list[dict[str, Any]]:
    """Join the cluster of RAY_ADDRESS, or start one here. Its living nodes, as Ray describes
    them. Raises ServingError."""
    address = os.environ.get(ADDRESS)
    settings: dict[str, Any] = {}
    if address is None:
        settings = {
            "include_dashboard": False,
            "num_cpus": len(allowed_cores()),
            "_node_ip_address": LOOPBACK,
        }
    try:
        with contextlib.chdir("/"):  # Ray's workers import from the folder that we stand in
            ray.init(
                address=address or "local",
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.WARNING,
                **settings,
            )
    except (ConnectionError, RuntimeError, ValueError) as problem:
        where = f"the Ray cluster of RAY_ADDRESS={address}" if address else "a Ray cluster here"
        raise ServingError(f"{where} cannot be used: {problem}") from problem
    return living_nodes()


def living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    ray.shutdown()


def last_line(message: str) -> str:
    """What a task or a replica raised: the last line of the traceback that Ray quotes."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray does not say why"
