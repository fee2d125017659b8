"""Wilson's bounds of a proportion: the share of good requests among all. Pure."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(good: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """One-sided lower and upper bounds of a proportion, each at `confidence` (Wilson 1927).

    Counts may be effective ones, of requests that share their fate. (0.0, 1.0) for total = 0.
    Raises ValueError for counts that cannot be.
    """
    if total < 0 or not 0 <= good <= total:
        raise ValueError(f"{good} good of {total} cannot be")
    if total == 0:
        return 0.0, 1.0
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    z = NormalDist().inv_cdf(confidence)
    share = good / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)
