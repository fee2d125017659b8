"""Samples of the machine's resources during a load, taken about once a second.

crossover.loadtests.host.resource_sampler takes them. Missing is None.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MAX_OTHER_PROCESSES = 3  # recorded by name


class ProcessSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process group at one moment."""

    rss_bytes: int | None = None


class OtherProcess(msgspec.Struct, frozen=True):
    """A process that is not Crossover's, and its CPU time on the engine's cores."""

    name: str
    pid: int
    cpu_seconds: float


class CoresSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The engine's cores since the sample before: the CPU time that the engine wanted, and the CPU
    time that others had.

    CPU times are core seconds, so the sum over samples is that of a longer sample.
    crossover.loadtests.host.cpu_time_taken reads it.
    """

    seconds: float  # of wall clock
    busy_seconds: float | None = None  # CPU time of all the engine's threads
    work_seconds: float | None = None  # CPU time of its busiest thread
    stalled_seconds: float | None = None  # run-queue delay of the thread that waited longest
    turns: int | None = None  # time slices of the thread that had the most
    ours_seconds: float | None = None  # CPU time of Crossover's other processes on these cores
    # CPU time of all other processes on these cores. Since the kernel's counters advance in ticks,
    # it may be a little below zero.
    other_processes_seconds: float | None = None
    steal_seconds: float | None = None  # taken by the hypervisor from the core that lost most
    throttled_seconds: float | None = None  # by the CPU quota of the engine's control group
    other_processes: list[OtherProcess] = []  # those with the most CPU time


class ResourceSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The machine at one moment of a load."""

    cell: str
    level: str | None = None
    unix_seconds: float
    engine: ProcessSample | None = None
    swap_used_bytes: int | None = None
    gpu_memory_bytes: int | None = None  # used by all processes
    gpu_watts: float | None = None
    gpu_energy_joules: float | None = None  # a counter that starts when the driver is loaded
    # Reasons why the GPU's clock is throttled, except idling. []: it is not; None: not known.
    gpu_throttled: list[str] | None = None
    cpu_watts: float | None = None
    cores: CoresSample | None = None


def busiest(other_processes: Iterable[OtherProcess]) -> list[OtherProcess]:
    """Return the MAX_OTHER_PROCESSES with the most CPU time, the busiest first. CPU times of
    entries with the same process ID are added."""
    by_pid: dict[int, OtherProcess] = {}
    for process in other_processes:
        earlier_seconds = by_pid[process.pid].cpu_seconds if process.pid in by_pid else 0.0
        cpu_seconds = round(earlier_seconds + process.cpu_seconds, 4)
        by_pid[process.pid] = OtherProcess(process.name, process.pid, cpu_seconds)
    ranked = sorted(by_pid.values(), key=lambda process: -process.cpu_seconds)
    return ranked[:MAX_OTHER_PROCESSES]
