"""Which engines of a model have room on the NUMA nodes of a machine: one on each, or one. Pure.

    splits = fitting_splits(request, facts, engine, arrangements(topology), split_of)
    splits[0]         # where no step times are known

fastest_backend.py compares the splits by step times. Where none are known, one engine on each node
is best: one engine on a single node would leave the others idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossover.serving.hardware.cpu_topology import Arrangement, CoreSplit
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engines import Engine
from crossover.serving.placement.placement_policy import (
    PlacementRequest,
    consider,
    with_settings,
)

# Divides the cores for an arrangement. The second argument is the predicted memory of all engines
# in bytes; 0: not known yet.
SplitOf = Callable[[Arrangement, int], CoreSplit]


def fitting_splits(
    request: PlacementRequest,
    facts: HardwareFacts,
    engine: Engine,
    arrangements: Sequence[Arrangement],
    split_of: SplitOf,
) -> list[CoreSplit]:
    """Return the splits for these arrangements that an engine on the CPU has memory for, in their
    order; [] if it has none. The context must be set.

    Of several arrangements, those in which each engine has one NUMA node count only if its memory
    fits there, and a single engine on one node only if one engine on each node does not fit.
    """
    splits: list[CoreSplit] = []
    for arrangement in arrangements:
        attempt = consider(
            with_settings(request, engines=arrangement.engines), facts, engine
        ).attempt
        if attempt is None:
            continue
        split = split_of(arrangement, attempt.need_bytes)
        if len(arrangements) > 1 and arrangement.nodes is None:
            does_not_fit = any(len(each.memory_nodes) > 1 for each in split.engines)
            if does_not_fit or splits:
                continue
        splits.append(split)
    return splits


def why_one_on_each_node(engines: int) -> str:
    """Return why these engines were chosen although no step times are known."""
    return (
        f"{engines} engines, one on each NUMA node, serve the model from one queue, since the "
        "memory of each fits on its node; --engines 1 uses one node"
    )
