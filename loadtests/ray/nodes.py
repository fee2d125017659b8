"""Which node measures which cell. Pure: nodes and cells in, assignments out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from loadtests.campaign.cells import Cell
from loadtests.errors import BadCampaign

_ACCELERATOR = "accelerator_type:"


class Node(msgspec.Struct, frozen=True):
    """What a node of the cluster has, as it told Ray. `accelerators`: by Ray's names, e.g. L4."""

    key: str  # Ray's id
    address: str
    cpus: int
    gpus: int = 0
    accelerators: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As people are told."""
        return f"{self.address} ({self.key[:8]})"


def node_of(found: Mapping[str, Any]) -> Node:
    """A row of Ray's table of nodes."""
    has = found["Resources"]
    names = (name.removeprefix(_ACCELERATOR) for name in has if name.startswith(_ACCELERATOR))
    address = found["NodeManagerAddress"]
    cpus, gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0))
    return Node(found["NodeID"], address, cpus, gpus, tuple(sorted(names)))


def fits(cell: Cell, node: Node) -> bool:
    """Whether the node has what the cell's hardware budget names."""
    wanted = cell.hardware.accelerator
    return node.cpus >= (cell.hardware.cores or 1) and (
        wanted is None or (wanted in node.accelerators and node.gpus >= 1)
    )


def needs(cell: Cell, node: Node) -> dict[str, Any]:
    """What a task that measures the cell on this node asks Ray for: all of the node's CPUs, so that
    nothing else that Ray runs disturbs it, and the accelerator."""
    asked: dict[str, Any] = {"num_cpus": node.cpus, "max_retries": 0}
    if cell.hardware.accelerator is not None:
        asked["num_gpus"] = 1
        asked["resources"] = {_ACCELERATOR + cell.hardware.accelerator: 0.001}
    return asked


def kind_of_cell(cell: Cell, kinds: Sequence[Sequence[Node]]) -> int:
    """The kind of machine that measures a cell: of those with a node that fits, the one with most.

    Raises BadCampaign where no node fits.
    """
    counts = [sum(fits(cell, node) for node in kind) for kind in kinds]
    if max(counts, default=0) == 0:
        hardware = cell.hardware
        wanted = [f"{hardware.cores or 1} cores"]
        wanted += [f"accelerator {hardware.accelerator!r}"] * (hardware.accelerator is not None)
        there = "; ".join(_has(node) for kind in kinds for node in kind)
        raise BadCampaign(
            f"cell {cell.key} asks for {' and '.join(wanted)}, which no node of the cluster has "
            f"({there})"
        )
    return counts.index(max(counts))


def next_of(waiting: Iterable[Cell], node: Node) -> Cell | None:
    """The first waiting cell that the node can measure."""
    return next((cell for cell in waiting if fits(cell, node)), None)


def _has(node: Node) -> str:
    accelerators = f", {', '.join(node.accelerators)}" if node.accelerators else ""
    return f"{node.name}: {node.cpus} cores{accelerators}"
