"""Do two series of latencies differ? The ratio of a quantile, its interval and a p-value.

    found = difference([before], [after], 0.5)
    found.ratio, found.low, found.high, found.p       # 1.08: the second median is 8 % higher

Each level is resampled in blocks longer than its memory (circular block bootstrap, Politis &
Romano 1992): a busy period makes many requests in a row late. The test is Welch's on the logarithm
of the quantile, with blocks - 1 degrees of freedom. Below six blocks nothing is said. Requests that
never ended well are infinitely late and stay in the series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.metrics.distribution import BEYOND, correlation
from loadtests.workload.arrivals import generator

Array = npt.NDArray[np.float64]

RESAMPLES = 200
LEAST_BLOCKS = 6
LEAST_VALUES = 10
CONFIDENCE = 0.95
_STREAM = 0x0F
MANY = 1e6  # degrees of freedom: normal


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one quantile in two arms, each the levels at one load."""

    first: float
    second: float
    ratio: float  # second over first
    low: float  # of the ratio, 95 % interval
    high: float
    p: float  # of no difference, before any correction for several tests


class Unknown(msgspec.Struct, frozen=True):
    """Why nothing can be said."""

    reason: str


def difference(
    first: Sequence[Array],
    second: Sequence[Array],
    quantile: float,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference | Unknown:
    """Compare a quantile (0..1) of two arms: one series a level, in order of due time.

    inf: never came.
    """
    one = _arm(first, quantile, generator(seed, _STREAM, 0), resamples)
    if isinstance(one, Unknown):
        return one
    other = _arm(second, quantile, generator(seed, _STREAM, 1), resamples)
    return other if isinstance(other, Unknown) else _welch(one, other)


def of_intervals(
    first: tuple[float, float, float], second: tuple[float, float, float], confidence: float
) -> Difference:
    """Compare two (low, estimate, high), each bound at `confidence`; normal in the logarithm."""
    z = NormalDist().inv_cdf(confidence)
    one, other = (
        _Arm(estimate, math.log(high / low) / (2 * z), MANY)
        for low, estimate, high in (first, second)
    )
    return _welch(one, other)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


class _Arm(msgspec.Struct, frozen=True):
    value: float
    error: float  # standard error of ln(value)
    freedom: float


def _arm(
    levels: Sequence[Array], quantile: float, rng: np.random.Generator, resamples: int
) -> _Arm | Unknown:
    levels = [level for level in levels if len(level)]
    count = sum(len(level) for level in levels)
    beyond = count * min(quantile, 1 - quantile)
    if count < LEAST_VALUES or beyond < BEYOND:
        return Unknown(f"{count} requests are too few")
    blocks = [block_length(level) for level in levels]
    pieces = sum(len(level) / block for level, block in zip(levels, blocks, strict=True))
    if pieces < LEAST_BLOCKS:
        return Unknown(f"{count} requests that share their fate count for {pieces:.1f}: too few")
    drawn = np.concatenate(
        [
            _resampled(level, block, rng, resamples)
            for level, block in zip(levels, blocks, strict=True)
        ],
        axis=1,
    )
    value = _quantile(np.concatenate(levels)[None, :], quantile)[0]
    spread = _quantile(drawn, quantile)
    came = spread[np.isfinite(spread) & (spread > 0)]
    if not math.isfinite(value) or value <= 0 or len(came) < 0.95 * len(spread):
        return Unknown("so many requests never came that this is no finite time")
    logs = np.log(came)
    plain = float(np.std(logs, ddof=1))
    if len(came) < len(spread):  # infinite ones have no standard deviation: the middle two thirds
        plain = float(np.quantile(logs, 0.84) - np.quantile(logs, 0.16)) / 2
    return _Arm(float(value), plain * math.sqrt(pieces / (pieces - 1)), pieces - 1)


def block_length(values: Array) -> float:
    """Values resampled together: twice the level's memory, at least the cube root of all."""
    known = [float(value) for value in values if math.isfinite(value)]
    return float(max(2 * (correlation(known) or 1.0), len(values) ** (1 / 3)))


def _resampled(values: Array, block: float, rng: np.random.Generator, resamples: int) -> Array:
    """Rows of `len(values)` values, made of blocks from random places of the closed series."""
    length = max(1, round(block))
    size = len(values)
    starts = rng.integers(size, size=(resamples, math.ceil(size / length)))
    index = (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :size]
    drawn: Array = values[index % size]
    return drawn


def _quantile(rows: Array, quantile: float) -> Array:
    """By nearest rank, which is defined where some values are infinite."""
    rank = max(0, math.ceil(quantile * rows.shape[1] - 1e-9) - 1)
    found: Array = np.partition(rows, rank, axis=1)[:, rank]
    return found


def _welch(first: _Arm, second: _Arm) -> Difference:
    """Welch's test of two logarithms."""
    from scipy import stats

    variances = [max(arm.error, 1e-6) ** 2 for arm in (first, second)]
    variance = sum(variances)
    free = variance**2 / (variances[0] ** 2 / first.freedom + variances[1] ** 2 / second.freedom)
    error = math.sqrt(variance)
    apart = math.log(second.value / first.value)
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, free)) * error
    p = 2 * float(stats.t.sf(abs(apart) / error, free))
    return Difference(
        first=first.value,
        second=second.value,
        ratio=math.exp(apart),
        low=math.exp(apart - reach),
        high=math.exp(apart + reach),
        p=p,
    )
