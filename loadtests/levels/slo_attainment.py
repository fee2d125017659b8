"""SLO attainment of a level: its confidence bounds, and whether a queue grew.

    >>> round(wilson(50, 50)[0], 3)          # 50 of 50: at least 94.9 % with 95 % confidence
    0.949
    >>> good = np.ones(200, bool)
    >>> good[90:100] = False                 # ten in a row, as in one full queue
    >>> design_effect(good) > 5
    True

A stall or a full queue makes neighboring requests miss the SLO together, so 200 requests tell less
than 200 independent ones would. The design effect says how much less: it is the variance of the
attainment of batches of neighbors, over that of independent requests (method of batch means).

At 5 % above saturation, TTFT grows by 0.05 s every second. A level of 60 s with a TTFT limit of 5 s
then meets the SLO to its end, although the queue grows without bound. The trend of TTFT over the
scheduled time shows that.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PARTS = 10  # of a window, for the trend of TTFT
MIN_REQUESTS = 20  # for a trend
BATCHES = (20, 10, 5)  # numbers of batches; few long ones show correlations that short ones miss
MIN_PER_BATCH = 5
MIN_DESIGN_EFFECT = 1.3  # requests of an open loop share batches, even if all meet the SLO


def wilson(good: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return one-sided lower and upper bounds of a proportion, each at `confidence` (Wilson 1927).

    Counts may be effective ones (divided by the design effect). (0.0, 1.0) for total = 0.
    """
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(confidence)
    share = good / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # If all are good, or none, one bound is exact; rounding must not move it.
    return (
        max(0.0, centre - half) if good else 0.0,
        min(1.0, centre + half) if good < total else 1.0,
    )


def design_effect(good: npt.NDArray[np.bool_]) -> float:
    """Return how many requests count as one independent request: the largest estimate over BATCHES.

    `good`: [requests] in the order of their scheduled times, whether each meets the SLO. For
    batches of n requests and an attainment p, the estimate is n var(batch means) / (p (1 - p)).
    """
    share = float(good.mean()) if len(good) else 1.0
    effect = MIN_DESIGN_EFFECT
    if 0 < share < 1:
        for batches in BATCHES:
            size = len(good) // batches
            if size >= MIN_PER_BATCH:
                means = good[: size * batches].reshape(batches, size).mean(axis=1)
                effect = max(effect, size * float(means.var(ddof=1)) / (share * (1 - share)))
    return effect


def is_steady(
    due: Array, ttft: Array, start: float, end: float, limit_seconds: float | None
) -> bool | None:
    """Whether TTFT does not grow so fast that it exceeds its limit within two more windows.

    `due`, `ttft`: [requests], seconds, in the order of scheduled times. Failed requests (inf or
    nan) count as the slowest answer. `start`, `end`: of the window. The trend is a straight line
    through the means of ten equal parts of the window (batch means, so that neighbors may be
    correlated); it counts if its slope is above 0 with 95 % confidence. Without a limit, TTFT is
    not steady if it doubles within the window.

    None: fewer than 20 requests, or too many empty parts, to tell.
    """
    known = np.isfinite(ttft)
    if len(due) < MIN_REQUESTS or not known.any():
        return None
    ttft = np.where(known, ttft, ttft[known].max())
    part_of_request = np.minimum(((due - start) / (end - start) * PARTS).astype(int), PARTS - 1)
    counts = np.bincount(part_of_request, minlength=PARTS)
    filled_parts = np.flatnonzero(counts)
    if len(filled_parts) < PARTS - 2:
        return None
    means = np.bincount(part_of_request, ttft, minlength=PARTS)[filled_parts] / counts[filled_parts]
    centered = (filled_parts + 0.5) / PARTS
    centered -= centered.mean()
    squares = float(np.dot(centered, centered))
    slope = float(np.dot(centered, means)) / squares  # seconds of TTFT per window
    residuals = means - means.mean() - slope * centered
    degrees = len(filled_parts) - 2  # of freedom
    error = float(np.sqrt(np.dot(residuals, residuals) / degrees / squares))
    from scipy.special import stdtrit  # inverse of Student's t distribution

    if slope <= float(stdtrit(degrees, 0.95)) * error:
        return True
    if limit_seconds is None:
        return slope < float(means.mean())
    return float(means.mean()) + 2.5 * slope <= limit_seconds


def grows(first: float, last: float) -> bool:
    """Whether the number of requests in flight rose by more than it varies in a stable queue.

    `first`, `last`: its means in the first and in the last third of the window.
    """
    return last - first > 2.0 + 3.0 * math.sqrt(first + 1.0)
