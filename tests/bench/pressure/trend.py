"""Does a series of samples grow? Its slope with an interval that knows that samples a few seconds
apart resemble each other.

    >>> trend([0, 5, 10, 15, 20, 25], [7, 8, 7, 8, 7, 8]).verdict
    'flat'

Least squares, the standard error widened by sqrt((1 + r) / (1 - r)) for a lag-1 autocorrelation r
of the residuals, and as many degrees of freedom as samples that stand for themselves, n (1 - r) /
(1 + r) (Bartlett 1935); beside it Theil and Sen's median of slopes, which a few wild samples cannot
move. Resident memory often is a stair: it stays for minutes, then rises by a heap's increment. A
line through two stairs looks sure of itself and is not, so where nine steps of ten are 0 the slope
is the mean of the steps, with the steps' own standard error: two stairs in half an hour cannot be
told from chance, one every two minutes can. Whoever calls this leaves the warm-up out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

STAIR = 0.9  # share of steps that are 0 from which on a series is taken for a stair


@dataclass(frozen=True)
class Trend:
    """Slopes per hour, in the unit of the samples; `low` and `high` bound the first one with 95 %
    confidence.
    """

    samples: int
    mean: float
    slope: float
    low: float
    high: float
    theil_sen: float
    autocorrelation: float

    @property
    def verdict(self) -> str:
        return "grows" if self.low > 0 else "shrinks" if self.high < 0 else "flat"


def trend(seconds: Sequence[float], values: Sequence[float], confidence: float = 0.95) -> Trend:
    """The trend of values over times in seconds. Raises ValueError for fewer than five samples."""
    if len(values) < 5:
        raise ValueError(f"{len(values)} samples say nothing about a trend; 5 at least are needed")
    x, y = np.asarray(seconds, float) / 3600, np.asarray(values, float)
    if np.ptp(y) == 0:
        return Trend(len(y), float(y[0]), 0.0, 0.0, 0.0, 0.0, 0.0)
    fit = stats.linregress(x, y)
    residuals = y - fit.intercept - fit.slope * x
    power = float(residuals @ residuals)
    r = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else 0.0
    r = min(0.99, max(0.0, r))
    if np.mean(np.diff(y) == 0) > STAIR:
        return _drift(x, y, float(stats.theilslopes(y, x).slope), r, confidence)
    own = max(3.0, len(y) * (1 - r) / (1 + r))
    width = float(
        stats.t.ppf((1 + confidence) / 2, own - 2) * fit.stderr * np.sqrt((1 + r) / (1 - r))
    )
    steady = float(stats.theilslopes(y, x).slope)
    return Trend(
        len(y),
        float(y.mean()),
        float(fit.slope),
        float(fit.slope - width),
        float(fit.slope + width),
        steady,
        r,
    )


def _drift(x: Floats, y: Floats, theil_sen: float, r: float, confidence: float) -> Trend:
    """The mean of the steps, per hour, with its interval."""
    steps, hours = np.diff(y), float(x[-1] - x[0]) / (len(x) - 1)
    slope = float(steps.mean()) / hours
    width = (
        float(
            stats.t.ppf((1 + confidence) / 2, len(steps) - 1)
            * steps.std(ddof=1)
            / np.sqrt(len(steps))
        )
        / hours
    )
    return Trend(len(y), float(y.mean()), slope, slope - width, slope + width, theil_sen, r)
