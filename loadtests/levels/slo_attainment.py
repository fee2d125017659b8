"""What a level's requests tell: how sure their share of good ones is, and whether a queue grew.

    >>> round(wilson(50, 50)[0], 3)          # 50 of 50 prove 94.9 %
    0.949
    >>> good = np.ones(200, bool)
    >>> good[90:100] = False                 # ten in a row, as in one full queue
    >>> design_effect(good) > 5
    True

A stall or a full queue makes a run of requests bad together, so 200 requests tell less than 200
independent ones. How much less, the counts of good ones in batches of neighbours say: their
variance over that of independent requests (batch means).

At 5 % above saturation TTFT grows by 0.05 s every second, so a level of 60 s with a TTFT limit of
5 s looks good to its end. The trend of TTFT over due time shows what the share does not.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PARTS = 10  # of a window, for the trend
MIN_REQUESTS = 20
BATCHES = (20, 10, 5)  # the most of these counts: short batches miss what is longer than they
MIN_PER_BATCH = 5
MIN_AS_ONE = 1.3  # requests of an open loop meet each other, also where none was bad


def wilson(good: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """One-sided lower and upper bounds of a proportion, each at `confidence` (Wilson 1927).

    Counts may be effective ones, of requests that share their fate. (0.0, 1.0) for total = 0.
    """
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(confidence)
    share = good / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # where all are good, or none, one bound is exact, and rounding must not say otherwise
    return (
        max(0.0, centre - half) if good else 0.0,
        min(1.0, centre + half) if good < total else 1.0,
    )


def design_effect(good: npt.NDArray[np.bool_]) -> float:
    """How many requests count as one independent one; `good` is in order of due time."""
    share = float(good.mean()) if len(good) else 1.0
    found = MIN_AS_ONE
    if 0 < share < 1:
        for batches in BATCHES:
            size = len(good) // batches
            if size >= MIN_PER_BATCH:
                means = good[: size * batches].reshape(batches, size).mean(axis=1)
                found = max(found, size * float(means.var(ddof=1)) / (share * (1 - share)))
    return found


def is_steady(
    due: Array, ttft: Array, start: float, end: float, limit_seconds: float | None
) -> bool | None:
    """False where TTFT grows over the window so that it breaks the limit within two more windows.

    Both arrays are [requests], in order of due time, seconds; failures count as the slowest answer
    (inf or nan). The trend is a straight line through the means of ten equal parts of the window
    (batch means take the correlation of neighbours out); it counts where it is above 0 at 95 %.
    Without a limit a trend counts that doubles TTFT within the window.
    None: fewer than 20 requests, or too few parts with some, which tell no trend.
    """
    known = np.isfinite(ttft)
    if len(due) < MIN_REQUESTS or not known.any():
        return None
    ttft = np.where(known, ttft, ttft[known].max())
    part = np.minimum(((due - start) / (end - start) * PARTS).astype(int), PARTS - 1)
    counts = np.bincount(part, minlength=PARTS)
    filled = np.flatnonzero(counts)
    if len(filled) < PARTS - 2:
        return None
    means = np.bincount(part, ttft, minlength=PARTS)[filled] / counts[filled]
    centred = (filled + 0.5) / PARTS
    centred -= centred.mean()
    squares = float(np.dot(centred, centred))
    slope = float(np.dot(centred, means)) / squares  # a window
    rest = means - means.mean() - slope * centred
    error = float(np.sqrt(np.dot(rest, rest) / (len(filled) - 2) / squares))
    from scipy.special import stdtrit  # Student's t, inverse; by its own degrees of freedom

    if slope <= float(stdtrit(len(filled) - 2, 0.95)) * error:
        return True
    if limit_seconds is None:
        return slope < float(means.mean())
    return float(means.mean()) + 2.5 * slope <= limit_seconds


def grows(first: float, last: float) -> bool:
    """Whether mean requests in flight rose beyond a stable queue's wandering.

    Of the first and the last third of a window.
    """
    return last - first > 2.0 + 3.0 * math.sqrt(first + 1.0)
