"""Energy of a level, from the watts that were sampled beside it. Joules.

    energy_of(samples, start_unix_seconds, end_unix_seconds)     # Energy, or None

CPU watts are means since the sample before, by RAPL's counters, so their sum is exact whatever the
gaps. So is what a GPU's energy counter says (NVML's total energy). Where it has none, its watts are
readings of the moment: each stands for the time since the sample before, and a gap of more than
`LONGEST_GAP` intervals is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from loadtests.records.resource_sample import ResourceSample

Watts = Callable[[ResourceSample, ResourceSample], float | None]  # between two samples
LONGEST_GAP = 3.0  # usual intervals
LEAST_COVERED = 0.9  # of the time, for the energy to count


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Joules over `seconds` of a level; None: not measured there."""

    cpu_joules: float | None = None  # of all CPU packages, by RAPL
    gpu_joules: float | None = None  # of the GPU, by its driver
    seconds: float

    @property
    def watts(self) -> float | None:
        """Mean over the time of CPU and GPU together, as far as measured."""
        known = [one for one in (self.cpu_joules, self.gpu_joules) if one is not None]
        return sum(known) / self.seconds if known else None


def energy_of(
    samples: Sequence[ResourceSample], start_unix_seconds: float, end_unix_seconds: float
) -> Energy | None:
    """Between two moments; None where less than 90 % of the time was sampled for either device."""
    seconds = end_unix_seconds - start_unix_seconds
    pairs = list(pairwise(sorted(samples, key=lambda one: one.unix_seconds)))
    if seconds <= 0 or not pairs:
        return None
    usual = float(np.median([after.unix_seconds - before.unix_seconds for before, after in pairs]))

    def joules(watts: Watts, longest: float = seconds) -> float | None:
        used = covered = 0.0
        for before, after in pairs:
            power = watts(before, after)
            begin = max(before.unix_seconds, start_unix_seconds)
            lasted = min(after.unix_seconds, end_unix_seconds) - begin
            step = after.unix_seconds - before.unix_seconds
            if power is not None and lasted > 0 and step <= longest:
                used += power * lasted
                covered += lasted
        return used * seconds / covered if covered >= LEAST_COVERED * seconds else None

    gpu = joules(_counted_watts)
    if gpu is None:
        gpu = joules(lambda _, after: after.gpu_watts, LONGEST_GAP * usual)
    cpu = joules(lambda _, after: after.cpu_watts)
    if cpu is None and gpu is None:
        return None
    return Energy(cpu_joules=cpu, gpu_joules=gpu, seconds=seconds)


def _counted_watts(before: ResourceSample, after: ResourceSample) -> float | None:
    """The GPU's mean power between two samples; None where its counter began anew between them."""
    begin, end = before.gpu_energy_joules, after.gpu_energy_joules
    seconds = after.unix_seconds - before.unix_seconds
    if begin is None or end is None or end < begin or seconds <= 0:
        return None
    return (end - begin) / seconds
