"""The load to plan for: requests/s in each kind of hour of a month, how it grows, how it comes.

    forecast = Forecast(loads=day_loads(DAYS["office"], weekend=0.1, peak_rate=50.0))
    forecast.at(month=11)[0].rate       # of the busiest hour

Loads are sorted, busiest first. `Shape` draws the arrivals inside an hour at any rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.workload.arrivals import (
    SERVEGEN_SMALL_DAY,
    Constant,
    Gamma,
    OnOff,
    Poisson,
    Times,
    due_times,
    generator,
)
from loadtests.workload.traces import load_trace
from reports.errors import ReportError

HOURS_A_MONTH = 730.5
WEEKEND_SHARE = 2 / 7
OFFICE_DAY = (*[0.05] * 7, 0.2, 0.6, *[1.0] * 3, 0.8, *[1.0] * 4, 0.6, 0.3, 0.1, *[0.05] * 4)
NIGHT_DAY = (*[1.0] * 6, 0.5, *[0.05] * 14, 0.2, 0.5, 1.0)
# Rates of the hours of a day over each other, hour 0 first. Office and night are made up.
DAYS: dict[str, tuple[float, ...]] = {
    "flat": (1.0,) * 24,
    "people": SERVEGEN_SMALL_DAY,
    "office": OFFICE_DAY,
    "night": NIGHT_DAY,
}
CYCLES = 8  # of on and off that a simulation holds, where it may be so long
COPY_SECONDS = 60.0  # copies of a recorded window are moved by up to so much against each other

_COPIES = 0x1F  # stream of draws

Arrivals = Constant | Poisson | Gamma | OnOff


class Load(msgspec.Struct, frozen=True):
    """One kind of hour."""

    name: str
    rate: float  # requests/s, mean of the hour
    hours: float  # a month


class Shape:
    """How requests come inside an hour, at a rate that is asked for."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals

    @property
    def is_scale_free(self) -> bool:
        """Arrivals at twice the rate are those at the rate, in half the time."""
        return not isinstance(self.arrivals, OnOff)

    def times(self, rate: float, count: int, seed: int) -> Times:
        """About `count` due times, seconds; the first is due at about 0.

        On and off where a run of `count` requests holds some cycles; else, as each phase is long
        against a request, the rate of the on phase throughout, thinned to no pauses.
        """
        arrivals = self.arrivals
        if isinstance(arrivals, OnOff):
            cycle = arrivals.on_seconds + arrivals.off_seconds
            if CYCLES * cycle * rate > 4 * count:
                on = rate * cycle / arrivals.on_seconds
                return due_times(Poisson(), on, count / on, seed)
            count = max(count, math.ceil(CYCLES * cycle * rate))
        return due_times(arrivals, rate, count / rate, seed)


class RecordedShape(Shape):
    """The requests of a recorded window: thinned for less than its rate, copied for more."""

    def __init__(self, stamps: Sequence[float], span_seconds: float) -> None:
        super().__init__(Poisson())
        self._stamps = np.asarray(stamps, dtype=np.float64)
        self._span = span_seconds

    @property
    def is_scale_free(self) -> bool:
        return False

    def times(self, rate: float, count: int, seed: int) -> Times:
        rng = generator(seed, _COPIES)
        recorded = len(self._stamps) / self._span
        copies = math.ceil(rate / recorded)
        kept = rate / (copies * recorded)
        laps = math.ceil(count / (rate * self._span))
        parts: list[Times] = []
        for lap in range(laps):
            for copy in range(copies):
                moved = float(rng.uniform(0.0, COPY_SECONDS)) if copy else 0.0
                stays = rng.random(len(self._stamps)) < kept
                parts.append(np.sort((self._stamps[stays] + moved) % self._span) + lap * self._span)
        return np.sort(np.concatenate(parts))


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of the first month, busiest first, and what becomes of them."""

    loads: tuple[Load, ...]
    growth_per_month: float = 0.0
    months: int = 1
    shape: Shape = Shape(Poisson())

    def at(self, month: int) -> tuple[Load, ...]:
        """The loads of a month, 0..months - 1."""
        factor = (1.0 + self.growth_per_month) ** month
        return times_as_much(self.loads, factor)

    def scaled(self, factor: float) -> Forecast:
        """Factor times the rate, in every hour."""
        return msgspec.structs.replace(self, loads=times_as_much(self.loads, factor))

    @property
    def busiest_month(self) -> int:
        """The last, unless traffic shrinks."""
        return self.months - 1 if self.growth_per_month > 0 else 0

    @property
    def requests(self) -> float:
        """Of all months together."""
        return sum(
            3600 * load.rate * load.hours for month in range(self.months) for load in self.at(month)
        )


def times_as_much(loads: Sequence[Load], factor: float) -> tuple[Load, ...]:
    """Factor times the rate, in every hour."""
    return tuple(msgspec.structs.replace(one, rate=one.rate * factor) for one in loads)


def sized_rate(loads: Sequence[Load], excused_share: float) -> float:
    """Requests/s of the busiest hour that is not excused; `excused_share`: of the hours."""
    whole = sum(load.hours for load in loads)
    left = excused_share * whole
    for load in loads:
        left -= load.hours
        if left < -1e-9 * whole:
            return load.rate
    return 0.0


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
    kinds = [("weekday", 1.0, 1 - WEEKEND_SHARE), ("weekend", weekend, WEEKEND_SHARE)]
    if weekend == 1.0:
        kinds = [("day", 1.0, 1.0)]
    each = HOURS_A_MONTH / len(day)
    relative = [
        Load(f"{kind} {hour:02d}:00", weight * factor, each * share)
        for kind, factor, share in kinds
        for hour, weight in enumerate(day)
    ]
    if peak_rate is not None:
        unit = max(load.rate for load in relative) / peak_rate
    else:
        assert mean_rate is not None
        unit = sum(load.rate * load.hours for load in relative) / HOURS_A_MONTH / mean_rate
    return _busiest_first(times_as_much(relative, 1 / unit))


def trace_loads(
    path: str, window_seconds: float = 3600.0, times: float = 1.0
) -> tuple[tuple[Load, ...], RecordedShape]:
    """Windows of a recorded trace as kinds of hours, and the busiest window as the shape.

    A trace stands for the whole month, repeated; the last, broken window counts only if it is the
    only one. `times`: so many times the recorded traffic. Raises ReportError for a file without
    stamps, or with fewer than 50 requests in its busiest window.
    """
    try:
        stamps = load_trace(path).seconds
    except LoadError as problem:
        raise ReportError(str(problem)) from problem
    if len(stamps) == 0:
        raise ReportError(f"trace {path}: no row has a stamp, so it says nothing of rates")
    span = float(stamps[-1])
    windows = max(1, int(span // window_seconds))
    length = window_seconds if span >= window_seconds else max(span, 1.0)
    place = (stamps // length).astype(np.int64)
    counts = np.bincount(place[place < windows], minlength=windows)
    busiest = int(counts.argmax())
    if counts[busiest] < 50:
        raise ReportError(
            f"trace {path}: {counts[busiest]} requests in its busiest {length:g} s are too few to "
            "plan for: at least 50 are needed"
        )
    loads = tuple(
        Load(f"window {number + 1}", times * float(count) / length, HOURS_A_MONTH / windows)
        for number, count in enumerate(counts.tolist())
    )
    shape = RecordedShape(stamps[place == busiest] - busiest * length, length)
    return _busiest_first(loads), shape


def _busiest_first(loads: Sequence[Load]) -> tuple[Load, ...]:
    return tuple(sorted(loads, key=lambda load: -load.rate))
