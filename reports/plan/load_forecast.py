"""The load to plan for: requests/s in each kind of hour of a month.

    forecast = Forecast(day_loads(DAYS["office"], weekend=0.1)).scaled(50.0)
    forecast.peak_rate, forecast.mean_rate

Loads are sorted, busiest first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

HOURS_A_MONTH = 730.5
WEEKEND_SHARE = 2 / 7
MAX_TRACE_LOADS = 48  # kinds of hours that a trace has; hours of similar rates are taken together
# Relative rates of the hours of a weekday, hour 0 first. People: ServeGen (Alibaba),
# language/m-small. Office and night are made up.
# fmt: off
DAYS: dict[str, tuple[float, ...]] = {
    "flat": (1.0,) * 24,
    "people": (
        0.839, 0.714, 0.733, 0.676, 0.714, 0.66, 0.684, 0.855, 1.015, 1.054, 1.125, 1.093,
        1.06, 1.073, 1.06, 1.047, 1.091, 1.079, 1.007, 1.229, 1.456, 1.402, 1.27, 1.063,
    ),
    "office": (
        0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.2, 0.6, 1.0, 1.0, 1.0,
        0.8, 1.0, 1.0, 1.0, 1.0, 0.6, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05,
    ),
    "night": (
        1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.05, 0.05, 0.05, 0.05, 0.05,
        0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.2, 0.5, 1.0,
    ),
}
# fmt: on


class Load(msgspec.Struct, frozen=True):
    """One kind of hour."""

    rate: float  # requests/s, mean of the hour
    hours: float  # a month

    def up_to(self, max_rate: float) -> Load:
        """Return the part of the load up to a rate."""
        return Load(min(self.rate, max_rate), self.hours)

    def above(self, rate: float) -> Load:
        """Return the part of the load above a rate."""
        return Load(max(0.0, self.rate - rate), self.hours)


class Forecast(msgspec.Struct, frozen=True):
    """The loads of a month."""

    loads: tuple[Load, ...]

    def scaled(self, factor: float) -> Forecast:
        """Return the forecast with every rate multiplied by a factor."""
        return Forecast(tuple(Load(load.rate * factor, load.hours) for load in self.loads))

    @property
    def peak_rate(self) -> float:
        """Requests/s in the busiest hour."""
        return self.loads[0].rate

    @property
    def mean_rate(self) -> float:
        return sum(load.rate * load.hours for load in self.loads) / HOURS_A_MONTH


def day_loads(day: Sequence[float], weekend: float = 1.0) -> tuple[Load, ...]:
    """Return the loads of a month, whose rates are relative like those of the hours of a weekday
    (`day`). `weekend`: the rate at weekends relative to weekdays."""
    hours: dict[float, float] = defaultdict(float)  # relative rate -> hours of a month with it
    for factor, share in ((1.0, 1 - WEEKEND_SHARE), (weekend, WEEKEND_SHARE)):
        for relative_rate in day:
            hours[relative_rate * factor] += share * HOURS_A_MONTH / len(day)
    return tuple(Load(rate, hours[rate]) for rate in sorted(hours, reverse=True))


def trace_loads(seconds: npt.NDArray[np.float64]) -> tuple[Load, ...]:
    """Return the loads of a month that repeats a trace: the busiest hour at its own rate, and the
    others in groups of similar rates at the mean rate of each.

    `seconds`: the times of at least two requests, ascending from 0, the last one above 0. The trace
    is divided into equal parts of about an hour.
    """
    duration = float(seconds[-1]) * len(seconds) / (len(seconds) - 1)  # with one gap at the end
    parts = max(1, round(duration / 3600))
    part_seconds = duration / parts
    counts = np.bincount((seconds / part_seconds).astype(np.int64), minlength=parts)
    rates = np.sort(counts / part_seconds)[::-1]
    part_hours = HOURS_A_MONTH / parts
    groups = np.array_split(rates[1:], min(len(rates) - 1, MAX_TRACE_LOADS - 1) or 1)
    others = [Load(float(group.mean()), len(group) * part_hours) for group in groups if len(group)]
    return (Load(float(rates[0]), part_hours), *others)
