"""Power during a level, from the watts that were sampled beside it.

    power_of(samples, start_unix_seconds, end_unix_seconds).gpu_watts     # 569.0, or None

The CPU's watts are means since the sample before (RAPL's counters), and so are a GPU's if it has an
energy counter (NVML). Otherwise a GPU's watts are readings of the moment, which are taken for the
time since the sample before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from crossover.loadtests.records.resource_sample import ResourceSample

MAX_GAP_SECONDS = 5.0  # between two samples (usually 1 s); a longer time counts as not measured
MIN_COVERED_SHARE = 0.9  # of the time that must be measured for the power to count


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
    """Return the mean power of each device between two moments."""
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
