"""The load to plan for: requests/s in each kind of hour of a month, and how it grows.

    forecast = Forecast(loads=day_loads(DAYS["office"], weekend=0.1, peak_rate=50.0))
    forecast.at(month=11)[0].rate       # of the busiest hour

Loads are sorted, busiest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.workload.traces import load_trace
from reports.errors import ReportError

HOURS_A_MONTH = 730.5
WEEKEND_SHARE = 2 / 7
OFFICE_DAY = (*[0.05] * 7, 0.2, 0.6, *[1.0] * 3, 0.8, *[1.0] * 4, 0.6, 0.3, 0.1, *[0.05] * 4)
# Hour-of-day request rates over the daily mean, hour 0 first: ServeGen (Alibaba), language/m-small.
SERVEGEN_DAY = (
    *(0.839, 0.714, 0.733, 0.676, 0.714, 0.66, 0.684, 0.855, 1.015, 1.054, 1.125, 1.093),
    *(1.06, 1.073, 1.06, 1.047, 1.091, 1.079, 1.007, 1.229, 1.456, 1.402, 1.27, 1.063),
)
NIGHT_DAY = (*[1.0] * 6, 0.5, *[0.05] * 14, 0.2, 0.5, 1.0)
# Rates of the hours of a day over each other, hour 0 first. Office and night are made up.
DAYS: dict[str, tuple[float, ...]] = {
    "flat": (1.0,) * 24,
    "people": SERVEGEN_DAY,
    "office": OFFICE_DAY,
    "night": NIGHT_DAY,
}
WINDOW_SECONDS = 3600.0  # of a trace: machines are rented by the hour
LEAST_REQUESTS = 50  # of the busiest window of a trace


class Load(msgspec.Struct, frozen=True):
    """One kind of hour."""

    rate: float  # requests/s, mean of the hour
    hours: float  # a month


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of the first month, busiest first, and what becomes of them."""

    loads: tuple[Load, ...]
    growth_per_month: float = 0.0
    months: int = 1

    def at(self, month: int) -> tuple[Load, ...]:
        """The loads of a month, 0..months - 1."""
        return self.scaled((1.0 + self.growth_per_month) ** month).loads

    def scaled(self, factor: float) -> Forecast:
        """Factor times the rate, in every hour."""
        loads = tuple(Load(one.rate * factor, one.hours) for one in self.loads)
        return msgspec.structs.replace(self, loads=loads)

    @property
    def peak_rate(self) -> float:
        """Requests/s of the busiest hour of all months."""
        return max(self.at(month)[0].rate for month in (0, self.months - 1))

    @property
    def mean_rate(self) -> float:
        """Requests/s over the first month."""
        return sum(one.rate * one.hours for one in self.loads) / HOURS_A_MONTH


def day_loads(
    day: Sequence[float],
    weekend: float = 1.0,
    *,
    peak_rate: float | None = None,
    mean_rate: float | None = None,
) -> tuple[Load, ...]:
    """Of a weekly curve: relative rates of the hours of a day, and those of weekends over them.

    Exactly one of the rate of the busiest hour and the mean of the month, requests/s.
    """
    each = HOURS_A_MONTH / len(day)
    shares = ((1.0, 1 - WEEKEND_SHARE), (weekend, WEEKEND_SHARE))
    relative = [Load(rate * factor, each * share) for factor, share in shares for rate in day]
    if peak_rate is not None:
        unit = peak_rate / max(one.rate for one in relative)
    else:
        assert mean_rate is not None
        unit = mean_rate * HOURS_A_MONTH / sum(one.rate * one.hours for one in relative)
    return _busiest_first([Load(one.rate * unit, one.hours) for one in relative])


def trace_loads(path: str) -> tuple[Load, ...]:
    """The hours of a recorded trace, which stands for the whole month, repeated.

    The last, broken hour counts only if it is the only one. Raises ReportError for a file without
    stamps, or with fewer than 50 requests in its busiest hour.
    """
    try:
        stamps = load_trace(path).seconds
    except LoadError as problem:
        raise ReportError(str(problem)) from problem
    if len(stamps) == 0:
        raise ReportError(f"trace {path}: no row has a stamp, so it says nothing of rates")
    span = float(stamps[-1])
    windows = max(1, int(span // WINDOW_SECONDS))
    length = WINDOW_SECONDS if span >= WINDOW_SECONDS else max(span, 1.0)
    place = (stamps // length).astype(np.int64)
    counts = np.bincount(place[place < windows], minlength=windows)
    if counts.max() < LEAST_REQUESTS:
        raise ReportError(
            f"trace {path}: {counts.max()} requests in its busiest {length:g} s are too few to "
            f"plan for: at least {LEAST_REQUESTS} are needed"
        )
    hours = HOURS_A_MONTH / windows
    return _busiest_first([Load(float(count) / length, hours) for count in counts])


def _busiest_first(loads: Sequence[Load]) -> tuple[Load, ...]:
    """Hours of one rate are one kind of hour."""
    hours: dict[float, float] = {}
    for one in loads:
        hours[one.rate] = hours.get(one.rate, 0.0) + one.hours
    return tuple(Load(rate, hours[rate]) for rate in sorted(hours, reverse=True))
