"""How cores are divided for engines, for tests that measure none."""

from __future__ import annotations

from pathlib import Path

from crossover.serving.hardware.cpu_topology import Arrangement, CoreSplit, split_cores
from crossover.serving.placement.node_splits import SplitOf


def split_of_one_core(threads: int = 1) -> SplitOf:
    """One engine on one core, however it is arranged."""

    def split(arrangement: Arrangement, memory_bytes: int) -> CoreSplit:
        return split_cores((0,), threads=threads)

    return split


def split_of_tree(cpus: tuple[int, ...], root: Path) -> SplitOf:
    """Engines on the NUMA nodes of a machine made of files."""

    def split(arrangement: Arrangement, memory_bytes: int) -> CoreSplit:
        engines, nodes = arrangement
        return split_cores(cpus, root=root, memory_bytes=memory_bytes, engines=engines, nodes=nodes)

    return split
