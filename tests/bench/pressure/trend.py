"""Does a series of samples grow? Its slope with an interval that knows that samples a few seconds apart resemble each other.

    >>> trend([0, 5, 10, 15, 20, 25], [7, 8, 7, 8, 7, 8]).verdict
    'flat'

Least squares, the standard error widened by sqrt((1 + r) / (1 - r)) for a lag-1 autocorrelation r of the residuals, and as many degrees of
freedom as samples that stand for themselves, n (1 - r) / (1 + r) (Bartlett 1935); beside it Theil and Sen's median of slopes, which a few
wild samples cannot move. Memory that is asked for once and kept is no leak but a stair: whoever calls this leaves the warm-up out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Trend:
    """Slopes per hour, in the unit of the samples; `low` and `high` bound the first one with 95 % confidence."""

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
    own = max(3.0, len(y) * (1 - r) / (1 + r))
    width = float(stats.t.ppf((1 + confidence) / 2, own - 2) * fit.stderr * np.sqrt((1 + r) / (1 - r)))
    steady = float(stats.theilslopes(y, x).slope)
    return Trend(len(y), float(y.mean()), float(fit.slope), float(fit.slope - width), float(fit.slope + width), steady, r)
