"""The machine beside the load, as it is written down about once a second.

crossover.loadtests.host.resource_sampler reads it. Missing is None.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MAX_STRANGERS = 3  # that are named


class ProcessSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process group at one moment."""

    rss_bytes: int | None = None


class OtherProcess(msgspec.Struct, frozen=True):
    """A process that is not ours, and its CPU time on the cores that are watched."""

    name: str
    pid: int
    cpu_seconds: float


class CoresSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The engine's cores since the reading before: CPU it wanted, CPU others had.

    Seconds are of one core; sums over readings are those of a longer one.
    crossover.loadtests.host.cpu_time_taken reads it.
    """

    seconds: float  # of wall clock
    busy_seconds: float | None = None  # CPU time of all the engine's threads
    work_seconds: float | None = None  # CPU time of its busiest thread
    stalled_seconds: float | None = None  # run-queue delay of the thread that waited longest
    turns: int | None = None  # how often the thread that was put on a core most often was
    ours_seconds: float | None = None  # CPU time of our other processes on these cores
    # CPU time of the rest on these cores; tick counters may take it a little below zero
    other_processes_seconds: float | None = None
    steal_seconds: float | None = None  # of the core that lost most
    throttled_seconds: float | None = None  # by the CPU quota of its control group
    other_processes: list[OtherProcess] = []  # those with most CPU time


class ResourceSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The machine beside the load at one moment, in Unix seconds."""

    cell: str
    level: str | None = None
    unix_seconds: float
    engine: ProcessSample | None = None
    swap_used_bytes: int | None = None
    gpu_memory_bytes: int | None = None  # used, by whomever
    gpu_watts: float | None = None
    gpu_energy_joules: float | None = None  # a counter, since its driver was loaded
    # why its clock is held down, idling left out; []: it is not, None: not told
    gpu_throttled: list[str] | None = None
    cpu_watts: float | None = None
    cores: CoresSample | None = None


def busiest(other_processes: Iterable[OtherProcess]) -> list[OtherProcess]:
    """One entry for each process, the busiest first, no more than MAX_STRANGERS."""
    found: dict[int, OtherProcess] = {}
    for one in other_processes:
        before = found[one.pid].cpu_seconds if one.pid in found else 0.0
        found[one.pid] = OtherProcess(one.name, one.pid, round(before + one.cpu_seconds, 4))
    return sorted(found.values(), key=lambda one: -one.cpu_seconds)[:MAX_STRANGERS]
