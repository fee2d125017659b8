"""Whether two series of latencies differ: the ratio of a quantile, its interval, and a p-value, for requests that share their fate.

    found = difference([before], [after], 0.5)
    found.ratio, found.low, found.high, found.p       # 1.08: the second one's median is 8 % higher

Latencies of one level are no independent draws: a busy period makes many in a row late. So each level is resampled in blocks (circular
block bootstrap, Politis & Romano 1992) that are longer than its memory, which gives the standard error of the logarithm of the quantile;
few blocks say little about it, so the test is Welch's with as many degrees of freedom as there are blocks less one. Where a level is
shorter than six such blocks nothing is said. Requests that never ended well are infinitely late and stay in the series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.arrivals import generator
from loadtests.summary import BEYOND, correlation

Array = npt.NDArray[np.float64]

RESAMPLES = 200
LEAST_BLOCKS = 6
LEAST_VALUES = 10
CONFIDENCE = 0.95
_STREAM = 0x0F


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one quantile in two arms, each the levels at one load. `ratio` is second over first; `low` and `high` its 95 % interval."""

    first: float
    second: float
    ratio: float
    low: float
    high: float
    p: float  # of no difference, before any correction for several tests


class Unknown(msgspec.Struct, frozen=True):
    """Nothing can be said, and why."""

    reason: str


def difference(first: Sequence[Array], second: Sequence[Array], quantile: float, *, seed: int = 0, resamples: int = RESAMPLES) -> (
    Difference | Unknown
):  # fmt: skip
    """Compares a quantile (0..1) of two arms; each is one series in order of due time per level, inf for what never came."""
    arms = [_arm(series, quantile, generator(seed, _STREAM, position), resamples) for position, series in enumerate((first, second))]
    for arm in arms:
        if isinstance(arm, Unknown):
            return arm
    (a, a_error, a_free), (b, b_error, b_free) = (arm for arm in arms if not isinstance(arm, Unknown))
    return _test(math.log(a), a_error, a_free, math.log(b), b_error, b_free)


def of_intervals(first: tuple[float, float, float], second: tuple[float, float, float], confidence: float) -> Difference:
    """Compares two estimates that come as (low, estimate, high), each bound at `confidence`: capacities. Normal in the logarithm."""
    from scipy import stats

    z = float(stats.norm.ppf(confidence))
    errors = [math.log(high / low) / (2 * z) for low, _, high in (first, second)]
    return _test(math.log(first[1]), errors[0], 1e6, math.log(second[1]), errors[1], 1e6)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order (Holm 1979): the chance that any of them is small by luck stays as stated."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def _arm(levels: Sequence[Array], quantile: float, rng: np.random.Generator, resamples: int) -> tuple[float, float, float] | Unknown:
    """(quantile, standard error of its logarithm, degrees of freedom)."""
    levels = [level for level in levels if len(level)]
    count = sum(len(level) for level in levels)
    beyond = count * min(quantile, 1 - quantile)
    if count < LEAST_VALUES or beyond < BEYOND:
        return Unknown(f"{count} requests are too few")
    blocks = [block_length(level) for level in levels]
    pieces = sum(len(level) / block for level, block in zip(levels, blocks, strict=True))
    if pieces < LEAST_BLOCKS:
        return Unknown(f"{count} requests that share their fate count for {pieces:.1f}: too few")
    drawn = np.concatenate([_resampled(level, block, rng, resamples) for level, block in zip(levels, blocks, strict=True)], axis=1)
    value = _quantile(np.concatenate(levels)[None, :], quantile)[0]
    spread = _quantile(drawn, quantile)
    came = spread[np.isfinite(spread) & (spread > 0)]
    if not math.isfinite(value) or value <= 0 or len(came) < 0.95 * len(spread):
        return Unknown("so many requests never came that this is no finite time")
    # Where a few resamples have no finite quantile, half of the middle two thirds stands for a standard deviation that would have none.
    logs = np.log(spread) if len(came) == len(spread) else np.sort(np.log(came))
    plain = np.std(logs, ddof=1) if len(came) == len(spread) else (np.quantile(logs, 0.84) - np.quantile(logs, 0.16)) / 2
    error = float(plain) * math.sqrt(pieces / (pieces - 1))
    return float(value), error, pieces - 1


def block_length(values: Array) -> float:
    """How many consecutive values are resampled together: twice the level's memory, and no fewer than the cube root of their number."""
    known = [float(value) for value in values if math.isfinite(value)]
    return float(max(2 * (correlation(known) or 1.0), len(values) ** (1 / 3)))


def _resampled(values: Array, block: float, rng: np.random.Generator, resamples: int) -> Array:
    """Rows of `len(values)` values, made of blocks from random places; the series is closed to a circle."""
    length = max(1, round(block))
    count = math.ceil(len(values) / length)
    starts = rng.integers(len(values), size=(resamples, count))
    index = (starts[:, :, None] + np.arange(length)[None, None, :]).reshape(resamples, -1)[:, : len(values)] % len(values)
    drawn: Array = values[index]
    return drawn


def _quantile(rows: Array, quantile: float) -> Array:
    """By nearest rank, which is defined where some values are infinite."""
    rank = max(0, math.ceil(quantile * rows.shape[1] - 1e-9) - 1)
    found: Array = np.partition(rows, rank, axis=1)[:, rank]
    return found


def _test(a: float, a_error: float, a_free: float, b: float, b_error: float, b_free: float) -> Difference:
    """Welch's test of two logarithms."""
    from scipy import stats

    a_error, b_error = max(a_error, 1e-6), max(b_error, 1e-6)
    variance = a_error**2 + b_error**2
    free = variance**2 / (a_error**4 / a_free + b_error**4 / b_free)
    error, apart = math.sqrt(variance), b - a
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, free)) * error
    p = 2 * float(stats.t.sf(abs(apart) / error, free))
    return Difference(
        first=math.exp(a), second=math.exp(b), ratio=math.exp(apart), low=math.exp(apart - reach), high=math.exp(apart + reach), p=p
    )
