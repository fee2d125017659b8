"""Is a sequence of times what its arrival process says? Moments, dispersion, Kolmogorov-Smirnov.

check(Poisson(), times, rate=20.0, duration_seconds=60.0).as_asked
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from loadtests.workload.arrivals import (
    Arrivals,
    Constant,
    Diurnal,
    Gamma,
    OnOff,
    Piecewise,
    Times,
    Trace,
)

CONSTANT_SECONDS = 0.002  # a request that leaves this much early or late is still on time
LEAST_ARRIVALS = 20
LEAST_P = 0.001
MOST_LAG1_SIGMA = 3.3  # standard deviations: about 0.1 % as well

Against = Literal["exponential", "gamma", "constant", "none"]


class Dispersion(msgspec.Struct, frozen=True):
    """Index of dispersion of counts in windows: variance / mean. Poisson: 1."""

    window_seconds: float
    windows: int
    index: float


class ArrivalCheck(msgspec.Struct, frozen=True):
    """What a sequence of times looks like, beside its process. None: too few arrivals to say.

    `ks_p`: Kolmogorov-Smirnov p-value of the gaps (rescaled to unit rate where the rate moves)
    against the process, where its distribution is known. `as_asked` is False when the sequence
    contradicts the process at 0.1 %.
    """

    count: int
    rate: float  # as it came out
    cv: float | None
    lag1: float | None  # autocorrelation of consecutive gaps
    dispersion: list[Dispersion]
    ks_p: float | None
    as_asked: bool | None
    against: Against


def check(
    arrivals: Arrivals,
    times: Times,
    rate: float,
    duration_seconds: float,
    late_seconds: float = 0.0,
) -> ArrivalCheck:
    """Test due or sent times against the process they were drawn from.

    `late_seconds` is how late requests leave: of shorter gaps only the number is tested.
    """
    times = np.sort(np.asarray(times, dtype=np.float64))
    gaps = np.diff(times)
    against, unit_gaps, ks_p = _fit(
        arrivals, times, rate, duration_seconds, max(late_seconds, 1e-9)
    )
    known = len(times) >= LEAST_ARRIVALS
    as_asked: bool | None = None
    if known and against == "constant":
        off_seconds = np.quantile(np.abs(gaps - 1.0 / rate), 0.99)
        as_asked = bool(off_seconds < max(0.01 / rate, CONSTANT_SECONDS))
    elif known and ks_p is not None:
        lag1 = abs(_lag1(unit_gaps) or 0.0) * math.sqrt(len(gaps))
        as_asked = ks_p >= LEAST_P and lag1 < MOST_LAG1_SIGMA
    dispersions = (
        _dispersion(times, window, duration_seconds) for window in _windows(rate, duration_seconds)
    )
    return ArrivalCheck(
        count=len(times),
        rate=len(times) / duration_seconds,
        cv=float(np.std(gaps) / np.mean(gaps)) if known and np.mean(gaps) > 0 else None,
        lag1=_lag1(gaps) if known else None,
        dispersion=[found for found in dispersions if found is not None],
        ks_p=ks_p if known else None,
        as_asked=as_asked,
        against=against,
    )


def _fit(
    arrivals: Arrivals, times: Times, rate: float, duration_seconds: float, finest_seconds: float
) -> tuple[Against, Times, float | None]:
    """(distribution of the gaps, the gaps as tested, p-value)."""
    gaps = np.diff(times)
    if isinstance(arrivals, Constant):
        return "constant", gaps, None
    if isinstance(arrivals, OnOff | Trace):
        return "none", gaps, None
    against: Against = "gamma" if isinstance(arrivals, Gamma) else "exponential"
    if len(times) < 2:
        return against, gaps, None
    if isinstance(arrivals, Gamma):
        from scipy.special import gammainc  # scipy.stats takes a second to import

        shape = 1.0 / arrivals.cv**2
        unit = _uniform_below(
            np.asarray(gammainc(shape, gaps * shape * rate)),
            float(gammainc(shape, finest_seconds * shape * rate)),
        )
    else:
        gaps = np.diff(expected_count(arrivals, rate, duration_seconds)[0](times))
        unit = _uniform_below(-np.expm1(-gaps), -math.expm1(-finest_seconds * rate))
    return against, gaps, ks_probability(unit)


def ks_probability(unit: Times) -> float:
    """The p-value of Kolmogorov and Smirnov's two-sided test for uniform numbers in [0, 1].

    Kolmogorov's limit with Stephens' correction for n numbers (M. A. Stephens, J. R. Statist. Soc.
    B 32, 1970): within 0.03 of the exact value from n = 10 on, and near 0.001 within a tenth of
    it from n = 20 on.
    """
    count = len(unit)
    ordered = np.sort(unit)
    ranks = np.arange(count + 1) / count
    distance = float(max(np.max(ranks[1:] - ordered), np.max(ordered - ranks[:-1])))
    root = math.sqrt(count)
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # the series needs many terms there, and is 1 within 1e-12
    terms = np.arange(1, 101)
    series = np.where(terms % 2, 1.0, -1.0) * np.exp(-2.0 * (terms * scaled) ** 2)
    return float(min(1.0, max(0.0, 2.0 * series.sum())))


def _uniform_below(unit: Times, finest: float) -> Times:
    """Uniform numbers; those below `finest` are spread evenly: only their number is tested."""
    tiny = unit < finest
    count = int(tiny.sum())
    spread = unit.copy()
    spread[tiny] = (np.arange(count) + 0.5) / max(1, count) * finest
    return spread


def _lag1(gaps: Times) -> float | None:
    if len(gaps) < 3 or np.ptp(gaps) < 1e-9 * float(np.mean(gaps)):
        return None
    centred = gaps - gaps.mean()
    return float(np.dot(centred[1:], centred[:-1]) / np.dot(centred, centred))


def _windows(rate: float, duration_seconds: float) -> list[float]:
    """Windows of 1, 10, 60, 300 s and of 10 mean gaps, as far as twenty of them fit."""
    windows = {10.0 / rate, 1.0, 10.0, 60.0, 300.0}
    return sorted(w for w in windows if 0.5 / rate <= w <= duration_seconds / 20)


def _dispersion(times: Times, window_seconds: float, duration_seconds: float) -> Dispersion | None:
    windows = int(duration_seconds / window_seconds)
    counts, _ = np.histogram(times, bins=windows, range=(0.0, windows * window_seconds))
    if counts.mean() == 0:
        return None
    return Dispersion(window_seconds, windows, float(counts.var(ddof=1) / counts.mean()))


def cycle_seconds(arrivals: Arrivals) -> float | None:
    """How long a cycle lasts, on average, at any rate; None: the arrivals do not come in cycles."""
    match arrivals:
        case OnOff():
            return arrivals.on_seconds + arrivals.off_seconds
        case Piecewise():
            return sum(seconds for seconds, _ in arrivals.steps)
        case Diurnal():
            return arrivals.period_seconds
        case _:
            return None


def phases(arrivals: Arrivals) -> tuple[tuple[float, float], ...]:
    """What a cycle is made of: (share of the requests, rate over the mean) of each kind of time."""
    if isinstance(arrivals, Diurnal):
        arrivals = arrivals.as_steps()
    if isinstance(arrivals, OnOff):
        return ((1.0, (arrivals.on_seconds + arrivals.off_seconds) / arrivals.on_seconds),)
    if isinstance(arrivals, Piecewise):
        seconds, weights = np.array(arrivals.steps).T
        mean = np.dot(seconds, weights) / seconds.sum()
        times = {weight: float(seconds[weights == weight].sum()) for weight in weights.tolist()}
        return tuple(
            (length * weight / float(seconds.sum() * mean), weight / float(mean))
            for weight, length in times.items()
            if weight > 0
        )
    return ((1.0, 1.0),)


def expected_count(
    arrivals: Arrivals, rate: float, duration_seconds: float
) -> tuple[Callable[[Times], Times], Callable[[Times], Times]]:
    """Expected arrivals of a Poisson process before a time, and the inverse."""
    if isinstance(arrivals, Diurnal):
        arrivals = arrivals.as_steps()
    if isinstance(arrivals, Piecewise):
        seconds, weights = np.array(arrivals.steps).T
        scale = rate * seconds.sum() / np.dot(seconds, weights)
        laps = math.ceil(duration_seconds / seconds.sum())
        knots = np.concatenate([[0.0], np.cumsum(np.tile(seconds, laps))])
        counts = np.concatenate([[0.0], np.cumsum(np.tile(seconds * weights * scale, laps))])
        return (lambda t: np.interp(t, knots, counts)), (lambda n: _inverse(n, counts, knots))
    return (lambda t: t * rate), (lambda n: n / rate)


def _inverse(count: Times, counts: Times, knots: Times) -> Times:
    """Times at which the expected count reaches `count`; stretches of zero rate are skipped."""
    right = np.clip(np.searchsorted(counts, count, side="right"), 1, len(counts) - 1)
    left = right - 1
    part = (count - counts[left]) / np.maximum(counts[right] - counts[left], 1e-300)
    times: Times = knots[left] + part * (knots[right] - knots[left])
    return times
