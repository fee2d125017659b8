"""Which rate to measure next where no law tells the limit: by levels alone. Pure.

    next_rate([], start=1.0)                                        # 1.0
    next_rate([Tried(1.0, True)], start=1.0)                        # 2.0
    next_rate([Tried(1.0, True), Tried(2.0, False)], start=1.0)     # 1.41

Double what held, halve what failed, until both sides are known; then the middle of the two, until
they are within NARROW. "Between X and Y" is then said of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

NARROW = 1.25  # between the highest rate that held and the lowest that failed
LOWEST = 1 / 50  # of the single-stream rate: below it requests hardly ever meet


class Tried(msgspec.Struct, frozen=True):
    """A level at a rate: whether it met the SLO as far as it tells."""

    rate: float
    is_up: bool


def next_rate(tried: Sequence[Tried], start: float) -> float | None:
    """Requests/s; None: both sides are known and near enough, or no rate is left to try.

    `start`: where to begin: the rate of one stream, or what a rough law says.
    """
    if not tried:
        return start
    low, high = sides(tried)
    if high is None:
        assert low is not None
        return 2 * low
    if low is None:
        return high / 2 if high / 2 >= LOWEST * start else None
    return None if high / low <= NARROW * 1.001 else math.sqrt(low * high)


def sides(tried: Sequence[Tried]) -> tuple[float | None, float | None]:
    """The highest rate that held below every one that failed, and the lowest that failed."""
    high = min((one.rate for one in tried if not one.is_up), default=None)
    held = [one.rate for one in tried if one.is_up and (high is None or one.rate < high)]
    return max(held, default=None), high
