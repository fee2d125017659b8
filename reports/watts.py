"""Power during a level, from the watts that were sampled beside it.

    power_of(samples, start_unix_seconds, end_unix_seconds).gpu_watts     # 569.0, or None

CPU watts are means since the sample before (RAPL's counters); so are a GPU's where it has an energy
counter (NVML). Else its watts are readings of the moment, which stand for that time as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from crossover.loadtests.records.resource_sample import ResourceSample

LONGEST_SECONDS = 5.0  # between two samples (usually 1 s), for the second to tell of the time
MIN_COVERED = 0.9  # of the time, for the power to count


class Power(msgspec.Struct, frozen=True):
    """Mean watts of each device; None: not measured for 90 % of the time."""

    cpu_watts: float | None = None  # of the CPU packages
    gpu_watts: float | None = None

    @property
    def together(self) -> float | None:
        """Of both, as far as either is measured."""
        known = [one for one in (self.cpu_watts, self.gpu_watts) if one is not None]
        return sum(known) if known else None


def power_of(
    samples: Sequence[ResourceSample], start_unix_seconds: float, end_unix_seconds: float
) -> Power:
    """Mean power of each device between two moments."""
    cpu, gpu, cpu_seconds, gpu_seconds = 0.0, 0.0, 0.0, 0.0
    for before, after in pairwise(sorted(samples, key=lambda one: one.unix_seconds)):
        seconds = after.unix_seconds - before.unix_seconds
        begin = max(before.unix_seconds, start_unix_seconds)
        inside = min(after.unix_seconds, end_unix_seconds) - begin
        if inside <= 0 or seconds > LONGEST_SECONDS:
            continue
        if after.cpu_watts is not None:
            cpu += after.cpu_watts * inside
            cpu_seconds += inside
        watts, counted = after.gpu_watts, after.gpu_energy_joules
        if counted is not None and before.gpu_energy_joules is not None:
            joules = counted - before.gpu_energy_joules
            watts = joules / seconds if joules >= 0 else None  # the counter began anew
        if watts is not None:
            gpu += watts * inside
            gpu_seconds += inside
    least = MIN_COVERED * (end_unix_seconds - start_unix_seconds)
    return Power(
        cpu_watts=cpu / cpu_seconds if cpu_seconds >= least > 0 else None,
        gpu_watts=gpu / gpu_seconds if gpu_seconds >= least > 0 else None,
    )
