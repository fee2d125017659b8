"""Whether a level was steady: a queue that grows meets the SLO only until it is long enough.

At 5 % above saturation TTFT grows by 0.05 s every second, so a level of 60 s with a TTFT limit of
5 s looks good to its end. The trend of TTFT over due time shows what the share does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtests.metrics.level_summary import Window, mean_in_flight
from loadtests.records.schema import RequestRecord

BATCHES = 10
LEAST_PER_BATCH = 2
T_95 = 1.860  # one-sided 95 % quantile of Student's t with BATCHES - 2 degrees of freedom


def is_steady(
    due_seconds: Sequence[float] | npt.NDArray[np.float64],
    ttft_seconds: Sequence[float] | npt.NDArray[np.float64],
    start_seconds: float,
    end_seconds: float,
    limit_seconds: float | None,
) -> bool | None:
    """False where TTFT grows over the window so that it breaks the limit within two more windows.

    Both sequences are [requests], in order of due time; failures count as the slowest answer (inf
    or nan). The trend is a straight line through the means of ten equal parts of the window (batch
    means take the correlation of neighbours out); it counts where it is above 0 at 95 %.
    Without a limit a trend counts that doubles TTFT within the window.
    None: fewer than 20 requests, which tell no trend.
    """
    due = np.asarray(due_seconds, dtype=np.float64)
    ttft = np.asarray(ttft_seconds, dtype=np.float64)
    known = np.isfinite(ttft)
    if len(due) < BATCHES * LEAST_PER_BATCH or not known.any():
        return None
    ttft = np.where(known, ttft, ttft[known].max())
    part = np.minimum(
        ((due - start_seconds) / (end_seconds - start_seconds) * BATCHES).astype(int), BATCHES - 1
    )
    batches = [np.flatnonzero(part == number) for number in range(BATCHES)]
    filled = [number for number, inside in enumerate(batches) if len(inside)]
    if len(filled) < BATCHES - 2:
        return None
    moments = (np.array(filled) + 0.5) / BATCHES  # of the window
    means = np.array([ttft[batches[number]].mean() for number in filled])
    slope, error = _line(moments, means)
    if slope <= T_95 * error:
        return True
    at_end = float(means.mean()) + slope / 2
    if limit_seconds is None:
        return slope < float(means.mean())
    return at_end + 2 * slope <= limit_seconds


def _line(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The least-squares slope and its standard error."""
    centred = x - x.mean()
    squares = float(np.dot(centred, centred))
    slope = float(np.dot(centred, y)) / squares
    rest = y - y.mean() - slope * centred
    return slope, float(np.sqrt(np.dot(rest, rest) / (len(x) - 2) / squares))


def in_flight_at_ends(records: Sequence[RequestRecord], window: Window) -> tuple[float, float]:
    """Mean requests in flight in the first and in the last third of a window."""
    third = window.seconds / 3
    start, end = window.start_seconds, window.end_seconds
    return (
        mean_in_flight(records, Window(start, start + third)),
        mean_in_flight(records, Window(end - third, end)),
    )


def grows(first: float, last: float) -> bool:
    """Whether requests in flight rose beyond a stable queue's wandering."""
    return last - first > 2.0 + 3.0 * math.sqrt(first + 1.0)
