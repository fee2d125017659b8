"""Whether a level was steady: a queue that grows meets the SLO only until it is long enough.

At 5 % above saturation TTFT grows by 0.05 s every second, so a level of 60 s with a TTFT limit of
5 s looks good to its end. The trend of TTFT over due time shows what the share does not.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

BATCHES = 10
LEAST_REQUESTS = 20

Array = npt.NDArray[np.float64]


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
    if len(due) < LEAST_REQUESTS or not known.any():
        return None
    ttft = np.where(known, ttft, ttft[known].max())
    part = np.minimum(((due - start) / (end - start) * BATCHES).astype(int), BATCHES - 1)
    counts = np.bincount(part, minlength=BATCHES)
    filled = np.flatnonzero(counts)
    if len(filled) < BATCHES - 2:
        return None
    means = np.bincount(part, ttft, minlength=BATCHES)[filled] / counts[filled]
    centred = (filled + 0.5) / BATCHES
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
