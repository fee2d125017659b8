"""Do two arms of runs differ in one metric? Welch's t-test on the logarithms of the runs' values.

    found = welch(Arm.of([1.02, 0.98, 1.00]), Arm.of([1.21, 1.19, 1.24]), tests=12)
    found.ratio, found.low, found.high, found.p       # 1.21: the second arm is 21 % higher
    found.detectable                                  # 0.09: 9 % would have been found

One run is one value, so that what differs from run to run (memory layout, clocks, neighbours) is in
the variance. Requests within a run share all that and say nothing about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

ALPHA = 0.05
POWER = 0.80
CONFIDENCE = 0.95
LEAST_RUNS = 3  # of an arm
LEAST_ERROR = 1e-4  # standard deviation of ln(value) below which equal values are not believed


class Arm(msgspec.Struct, frozen=True):
    """ln(value) of each run. `error` is the least standard deviation that one run has by itself."""

    logs: tuple[float, ...]
    error: float = LEAST_ERROR

    @classmethod
    def of(cls, values: Sequence[float], error: float = LEAST_ERROR) -> Arm:
        """From values above 0."""
        return cls(tuple(math.log(value) for value in values), max(error, LEAST_ERROR))

    @property
    def mean(self) -> float:
        return sum(self.logs) / len(self.logs)

    @property
    def variance(self) -> float:
        """Of the mean."""
        squares = sum((value - self.mean) ** 2 for value in self.logs)
        return float(max(squares / (len(self.logs) - 1), self.error**2) / len(self.logs))


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one metric in two arms. Without an interval where an arm has too few runs."""

    first: float  # geometric mean of the runs
    second: float
    ratio: float  # second over first
    low: float | None = None  # of the ratio, 95 % interval
    high: float | None = None
    p: float | None = None  # of no difference, before the correction for several tests
    # The difference, as a share, that is found in 80 % of such comparisons after the correction.
    detectable: float | None = None


def welch(first: Arm, second: Arm, tests: int) -> Difference:
    """Compare two arms; `tests` are made in all, of which this is one."""
    plain = Difference(
        first=math.exp(first.mean),
        second=math.exp(second.mean),
        ratio=math.exp(second.mean - first.mean),
    )
    if min(len(first.logs), len(second.logs)) < LEAST_RUNS:
        return plain
    from scipy.special import stdtr, stdtrit  # Student's t: probability, and its inverse

    variances = first.variance, second.variance
    variance = sum(variances)
    free = variance**2 / sum(
        own**2 / (len(arm.logs) - 1) for own, arm in zip(variances, (first, second), strict=True)
    )
    error = math.sqrt(variance)
    apart = second.mean - first.mean
    reach = float(stdtrit(free, 0.5 + CONFIDENCE / 2)) * error
    needed = float(stdtrit(free, 1 - ALPHA / tests / 2) + stdtrit(free, POWER)) * error
    return msgspec.structs.replace(
        plain,
        low=math.exp(apart - reach),
        high=math.exp(apart + reach),
        p=2 * float(stdtr(free, -abs(apart) / error)),
        detectable=math.expm1(needed),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted
