"""What each replica of `crossover serve --replicas N --on ray` is given. Pure.

least, most = bounds_of("2-4")
share_of(nodes, options)          # Share(replicas=(2, 4), cpus=2, gpus=0, ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from serving.bounds import flags_of
from serving.errors import ServingError
from serving.placement.placement_policy import Policy
from serving.registry.options import ServeOptions

# Options that one process on one machine can honour, and replicas cannot: field -> why.
REFUSED: dict[str, str] = {
    "models_file": "replicas serve one model each, the same",
    "memory_limit": "it is of one machine",
    "max_loaded_models": "replicas serve one model each",
    "idle_unload_seconds": "a replica keeps its model; --replicas MIN-MAX takes replicas away",
    "admin_key_env": "the admin routes change one engine, and there are several",
    "admin_key_file": "the admin routes change one engine, and there are several",
    "admin_port": "the admin routes change one engine, and there are several",
    "api_keys_file": "shares of slots are kept by one server; --api-key-file has one key",
    "cores": "each replica takes cores of its own; --threads says how many",
    "api_cores": "each replica takes cores of its own; --threads says how many",
}


class Node(NamedTuple):
    """What one node of the cluster has, as it told Ray."""

    cpus: int
    gpus: int = 0


class Share(msgspec.Struct, frozen=True):
    """`replicas`: fewest and most. `cpus`, `gpus`: of each."""

    replicas: tuple[int, int]
    cpus: int
    gpus: int

    @property
    def words(self) -> str:
        """ "2 to 4 replicas with 2 cores each"."""
        least, most = self.replicas
        count = str(most) if least == most else f"{least} to {most}"
        has = f"{self.cpus} core{'' if self.cpus == 1 else 's'}"
        has += " and a GPU" if self.gpus else ""
        return f"{count} replica{'' if most == 1 else 's'} with {has}{' each' * (most > 1)}"


def check_options(options: ServeOptions) -> None:
    """Raises ServingError for an option that cannot be honoured as asked."""
    if options.on is None:
        if options.replicas is not None:
            raise ServingError(
                f"--replicas {options.replicas} needs to know where: add --on ray; "
                "this process serves each model with one engine"
            )
        return
    flags = flags_of(ServeOptions)
    for field in msgspec.structs.fields(ServeOptions):
        if field.name in REFUSED and getattr(options, field.name) != field.default:
            raise ServingError(
                f"{flags[field.name]} cannot be honoured with --on ray: {REFUSED[field.name]}"
            )
    if len(options.models) != 1:
        raise ServingError(
            f"--on ray serves one model, and {len(options.models)} are named; "
            "start one server for each"
        )


def bounds_of(replicas: str | None) -> tuple[int, int]:
    """ "3" -> (3, 3), "1-4" -> (1, 4), None -> (1, 1). Raises ServingError."""
    first, dash, last = (replicas or "1").partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 1024):
        raise ServingError(
            f"--replicas {replicas!r} is no number of replicas; write for example 2, or 1-4 to "
            "have as many as the load asks for"
        )
    return int(first), int(last)


def nodes_of(table: Iterable[Mapping[str, Any]]) -> list[Node]:
    """What the nodes of Ray's table of nodes have."""
    return [
        Node(int(one["Resources"].get("CPU", 0)), int(one["Resources"].get("GPU", 0)))
        for one in table
    ]


def share_of(nodes: Sequence[Node], options: ServeOptions) -> Share:
    """What each replica is given on these nodes. Raises ServingError where they hold too few.

    Without --threads the cores are divided: as many to each as lets the most replicas find a place.
    """
    bounds = bounds_of(options.replicas)
    most = bounds[1]
    gpus = _gpus(nodes, options.policy, most)
    hosts = [node for node in nodes if node.gpus >= gpus]
    shown = ", ".join(f"{node.cpus} cores" + f" {node.gpus} GPUs" * bool(gpus) for node in nodes)
    wanted = options.threads
    possible = range(max((node.cpus for node in hosts), default=0), 0, -1)
    for cpus in possible if wanted is None else (wanted,):
        if sum(_places(node, cpus, gpus) for node in hosts) >= most:
            return Share(bounds, cpus, gpus)
    each = "1 core" if wanted is None else f"--threads {wanted}"
    raise ServingError(
        f"--replicas {options.replicas}: {most} with {each} each do not fit on the nodes of the "
        f"cluster ({shown})"
    )


def _places(node: Node, cpus: int, gpus: int) -> int:
    """How many replicas a node has room for."""
    return min(node.cpus // cpus, node.gpus // gpus) if gpus else node.cpus // cpus


def _gpus(nodes: Sequence[Node], policy: Policy, most: int) -> int:
    """GPUs of each replica: 1 or 0. All replicas are alike, so that load is shared evenly."""
    there = sum(node.gpus for node in nodes)
    if policy is Policy.cpu_only or (policy is Policy.auto and there == 0):
        return 0
    if there < most:
        raise ServingError(
            f"--policy {policy.value} and {most} replicas need {most} GPUs, and the cluster has "
            f"{there}: ask for fewer replicas, or for --policy cpu-only"
        )
    return 1
