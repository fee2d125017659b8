"""Percentiles of latencies, and runs of good and bad requests."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

PERCENTILES: tuple[tuple[str, float], ...] = (
    ("p50", 0.50),
    ("p90", 0.90),
    ("p95", 0.95),
    ("p99", 0.99),
)
BEYOND = 3  # observations that must lie beyond a percentile for it to be given


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles over `count` observations, in seconds.

    `late` of them never came and count as infinite; the mean is over the others. A percentile
    is None where fewer than three observations lie beyond it, or where it is infinite: then
    `never` names it.
    """

    count: int
    late: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    never: tuple[str, ...] = ()

    @property
    def median_or_mean(self) -> float | None:
        """The median; the mean where too few observations give no median."""
        return self.mean if self.p50 is None else self.p50


def distribution(values: Iterable[float | None], late: int = 0) -> Distribution:
    """Percentiles of the values that are not None, plus `late` infinite ones."""
    known = np.sort(np.array([value for value in values if value is not None], dtype=np.float64))
    count = len(known) + late
    found: dict[str, float] = {}
    never: list[str] = []
    for name, share in PERCENTILES:
        if count * (1 - share) < BEYOND - 1e-9:
            continue
        rank = math.ceil(share * count - 1e-9) - 1
        if rank < len(known):
            found[name] = float(known[rank])
        else:
            never.append(name)
    mean = float(known.mean()) if len(known) else None
    return Distribution(count=count, late=late, mean=mean, never=tuple(never), **found)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Of the values that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def runs_of(good: Iterable[bool]) -> tuple[int, ...]:
    """Lengths of runs of good, bad, good, ...; the first is 0 where the first request is bad."""
    lengths = [0]
    current = True
    for one in good:
        if one != current:
            lengths.append(0)
            current = one
        lengths[-1] += 1
    return tuple(lengths)
