"""Power during a level, from the watts that were sampled beside it.

    watts_of(samples, start_unix_seconds, end_unix_seconds)     # 61.5, or None

CPU watts are means since the sample before (RAPL's counters); so are a GPU's where it has an energy
counter (NVML). Else its watts are readings of the moment, which stand for that time as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from loadtests.records.resource_sample import ResourceSample

LONGEST_SECONDS = 5.0  # between two samples (usually 1 s), for the second to tell of the time
LEAST_COVERED = 0.9  # of the time, for the power to count


def watts_of(
    samples: Sequence[ResourceSample], start_unix_seconds: float, end_unix_seconds: float
) -> float | None:
    """Mean of CPU packages and GPU together between two moments, as far as measured.

    None where less than 90 % of the time was sampled for either device.
    """
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
    least = LEAST_COVERED * (end_unix_seconds - start_unix_seconds)
    devices = ((cpu, cpu_seconds), (gpu, gpu_seconds))
    known = [joules / covered for joules, covered in devices if covered >= least > 0]
    return sum(known) if known else None
