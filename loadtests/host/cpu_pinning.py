"""Who runs on which cores: engine, API and load generator beside each other on one machine.

divide_cores((0, 1))             # all share 0 and 1, the engine behind
divide_cores((0, 1, 2, 3))       # the engine on two, API and load generator on one each
"""

from __future__ import annotations

import msgspec

from crossover.models.machine_limits import whole_cores
from crossover.serving.hardware.cpu_topology import SHARED_CORES, physical_of


class Layout(msgspec.Struct, frozen=True):
    """Who runs where. `engine_threads`: one for each physical core of `engine` within the quota."""

    engine: tuple[int, ...]
    api: tuple[int, ...]
    client: tuple[int, ...]
    engine_threads: int
    shared: tuple[str, ...] = ()  # what shares cores: named warnings for the report


def divide_cores(
    usable: tuple[int, ...], engine_cores: int | None = None, quota: float | None = None
) -> Layout:
    """Cores for engine, API and client. `engine_cores` are physical ones; None: as many as can be.
    The engine has a thread for each of them, at most the whole cores of the CPU `quota`.

    Up to SHARED_CORES the engine has all; API and client have them too and go before it. With
    more, or where it asks for so few, API and client get one physical core each, or share one of
    two or three. Hyper-threads of a core stay together. Raises ValueError for too many.
    """
    physical = _physical_cores(usable)
    spare = 2 if len(physical) >= 4 else 1
    apart = max(1, len(physical) - spare)
    most = len(physical) if len(usable) <= SHARED_CORES else apart
    count = engine_cores or most
    if not 1 <= count <= most or engine_cores == 0:
        raise ValueError(
            f"{engine_cores} cores are not available for the engine; this machine has 1 to {most}"
        )
    engine = tuple(core for group in physical[:count] for core in group)
    threads = whole_cores(count, quota)
    if count > apart or len(physical) == 1:
        return Layout(engine, usable, usable, threads)
    shared = ("API and client share a core",) if spare == 1 else ()
    return Layout(engine, physical[-spare], physical[-1], threads, shared)


def _physical_cores(usable: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The usable logical cores, grouped by the physical core they belong to."""
    groups: dict[int, list[int]] = {}
    for core, physical in physical_of(sorted(usable)).items():
        groups.setdefault(physical, []).append(core)
    return [tuple(group) for group in groups.values()]
