"""Divides the cores of one machine among engine, API and load generator.

divide_cores((0, 1))                       # all share 0 and 1; the engine has the lowest priority
divide_cores((0, 1, 2, 3), engine_cores=2)   # the engine on 0 and 1, the API on 2, the client on 3
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from crossover.models.machine_limits import ROOT, whole_cores
from crossover.serving.hardware.cpu_topology import (
    SHARED_CORES,
    Arrangement,
    best_engine_cores,
    read_topology,
)


class Layout(msgspec.Struct, frozen=True):
    """The logical cores of each process."""

    engine: tuple[int, ...]
    api: tuple[int, ...]
    client: tuple[int, ...]  # the load generator
    engine_threads: int  # one for each physical core of the engine, within the CPU quota
    shared: tuple[str, ...] = ()  # which processes share cores, as phrases for the report


def divide_cores(
    usable: tuple[int, ...],
    engine_cores: int | None = None,
    quota: float | None = None,
    root: Path = ROOT,
    arrangement: Arrangement = Arrangement(),  # noqa: B008  immutable
) -> Layout:
    """Divide the usable logical cores among engine, API and client (the load generator).

    `engine_cores`: physical cores of the engine; None: as many as possible of those on which it
    runs best (best_engine_cores). `quota`: the CPU quota in cores; None: none. The engine has a
    thread for each of its physical cores, but not more than the quota's whole cores. Hyper-threads
    of a physical core stay together. `arrangement`: if it has several engines, the engine's cores
    are those of all of them.

        physical cores   the engine has to itself at most   API and client then get
        1                none                               the core, which all three share
        2 or 3           all but 1                          that core together
        4 or more        all but 2                          a core each

    With up to SHARED_CORES logical cores, the engine may have all physical cores, and has them
    unless `engine_cores` is low enough for the table. API and client then run on all usable cores
    as well, with a higher priority. With more logical cores the table always holds.

    Raises ValueError if the engine cannot have so many cores.
    """
    engines, nodes = arrangement
    topology = read_topology(usable, root)
    best_cores, _ = best_engine_cores(topology, engines=engines, nodes=nodes)
    best = _grouped(best_cores, topology.physical)
    physical = best + _grouped(set(usable) - set(best_cores), topology.physical)
    other_cores = 2 if len(physical) >= 4 else 1  # for API and client
    max_exclusive = max(1, len(physical) - other_cores)
    max_engine = len(physical) if len(usable) <= SHARED_CORES else max_exclusive
    count = min(max_engine, len(best)) if engine_cores is None else engine_cores
    if not 1 <= count <= max_engine:
        raise ValueError(
            f"{engine_cores} cores are not available for the engine; this machine has 1 to "
            f"{max_engine}"
        )
    engine = tuple(core for group in physical[:count] for core in group)
    threads = whole_cores(count, quota)
    if count > max_exclusive or len(physical) == 1:
        return Layout(engine, usable, usable, threads)
    warnings = ("API and client share a core",) if other_cores == 1 else ()
    return Layout(engine, physical[-other_cores], physical[-1], threads, warnings)


def _grouped(cores: Iterable[int], physical: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return the logical cores, grouped by the physical core that they belong to."""
    groups: dict[int, list[int]] = {}
    for core in sorted(cores):
        groups.setdefault(physical[core], []).append(core)
    return [tuple(group) for group in groups.values()]
