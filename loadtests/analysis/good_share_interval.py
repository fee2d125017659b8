"""How sure the share of good requests is, where neighbours share their fate. Pure.

    >>> round(wilson(50, 50)[0], 3)          # 50 of 50 prove 94.9 %
    0.949
    >>> good = np.ones(200, bool)
    >>> good[90:100] = False                 # ten in a row, as in one full queue
    >>> counted_as_one(good) > 5
    True

A stall or a full queue makes a run of requests bad together, so 200 requests tell less than 200
independent ones. How much less, the counts of good ones in batches of neighbours say: their
variance over that of independent requests (batch means).
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

BATCHES = (20, 10, 5)  # the most of these counts: short batches miss what is longer than they
LEAST_PER_BATCH = 5
LEAST_AS_ONE = 1.3  # requests of an open loop meet each other, also where none was bad


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


def counted_as_one(good: npt.NDArray[np.bool_]) -> float:
    """How many requests count as one independent one; `good` is in order of due time."""
    share = float(good.mean()) if len(good) else 1.0
    found = LEAST_AS_ONE
    if 0 < share < 1:
        for batches in BATCHES:
            size = len(good) // batches
            if size >= LEAST_PER_BATCH:
                means = good[: size * batches].reshape(batches, size).mean(axis=1)
                found = max(found, size * float(means.var(ddof=1)) / (share * (1 - share)))
    return found
