"""Samples of the machine's resources during a load, taken about once a second.

crossover.loadtests.host.resource_sampler takes them. Missing is None.

    power_of(samples, start_unix_seconds, end_unix_seconds).gpu_watts     # 569.0, or None
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

MAX_OTHER_PROCESSES = 3  # recorded by name
MAX_GAP_SECONDS = 5.0  # between two samples (usually 1 s); a longer time counts as not measured
MIN_COVERED_SHARE = 0.9  # of the time that must be measured for the power to count


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


class Power(msgspec.Struct, frozen=True):
    """Mean watts of each device; None: not measured for 90 % of the time."""

    cpu_watts: float | None = None  # of the CPU packages
    gpu_watts: float | None = None

    @property
    def together(self) -> float | None:
        """The sum of both, or the one that was measured; None: neither was."""
        known = [watts for watts in (self.cpu_watts, self.gpu_watts) if watts is not None]
        return sum(known) if known else None


def power_of(
    samples: Sequence[ResourceSample], start_unix_seconds: float, end_unix_seconds: float
) -> Power:
    """Return the mean power of each device between two moments.

    Watts of a device with an energy counter (RAPL, NVML) are means since the sample before. Others
    are readings of the moment, which are taken for the time since the sample before.
    """
    cpu_joules, gpu_joules, cpu_seconds, gpu_seconds = 0.0, 0.0, 0.0, 0.0
    for before, after in pairwise(sorted(samples, key=lambda sample: sample.unix_seconds)):
        seconds = after.unix_seconds - before.unix_seconds
        begin = max(before.unix_seconds, start_unix_seconds)
        inside = min(after.unix_seconds, end_unix_seconds) - begin
        if inside <= 0 or seconds > MAX_GAP_SECONDS:
            continue
        if after.cpu_watts is not None:
            cpu_joules += after.cpu_watts * inside
            cpu_seconds += inside
        watts, counter = after.gpu_watts, after.gpu_energy_joules
        if counter is not None and before.gpu_energy_joules is not None:
            joules = counter - before.gpu_energy_joules
            watts = joules / seconds if joules >= 0 else None  # the counter began anew
        if watts is not None:
            gpu_joules += watts * inside
            gpu_seconds += inside
    min_seconds = MIN_COVERED_SHARE * (end_unix_seconds - start_unix_seconds)
    return Power(
        cpu_watts=cpu_joules / cpu_seconds if cpu_seconds >= min_seconds > 0 else None,
        gpu_watts=gpu_joules / gpu_seconds if gpu_seconds >= min_seconds > 0 else None,
    )
