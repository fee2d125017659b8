"""What an option takes, as dollars and energy, with the intervals of capacity and price together.

Rent by the hour of a device; what is bought over its lifetime; energy of one's own machines, as
rent includes it. Energy is between a machine's power for the time that the work takes at full load
and its power all the time: the estimate is the middle, since nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from reports.plan.candidates import Candidate
from reports.plan.forecast import Load


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate, its 90 % interval, and what suffices with 90 % certainty. None: not known."""

    estimate: float | None = None  # at the middle of the bands
    low: float | None = None  # of the 90 % interval
    high: float | None = None  # of it; none with a low one: no end was found
    certain: float | None = None  # of what suffices with 90 % certainty, at the estimated price

    def times(self, factor: float) -> Range:
        each = (self.estimate, self.low, self.high, self.certain)
        estimate, low, high, certain = (None if one is None else one * factor for one in each)
        return Range(estimate=estimate, low=low, high=high, certain=certain)


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What an option takes at one place of the bands, all months together."""

    replicas: int  # in the busiest hour of all months
    rented_hours: float = 0.0  # of devices
    own_hours: float = 0.0  # of devices that are owned or bought
    bought: int = 0


Months = Sequence[Sequence[Load]]
Uses = Mapping[str, Use | None]  # by place; None: no number of replicas suffices
Part = tuple[Candidate, Months, Uses]  # a machine, its loads, what it takes


def dollars(
    parts: Sequence[Part], months: int, dollars_per_kwh: float
) -> tuple[Range, float | None]:
    """A month, on average; and the same at the fast end of the band and the estimated price."""
    middle = _total(parts, "estimate", "estimate", dollars_per_kwh)
    ends: dict[str, float | None] = {}
    for place in ("low", "high"):
        by_capacity = _total(parts, place, "estimate", dollars_per_kwh)
        by_price = _total(parts, "estimate", place, dollars_per_kwh)
        if middle and by_capacity is not None and by_price is not None:
            # Independent errors: the root of the sum of squares, of logarithms.
            apart = math.hypot(*(math.log(one / middle) for one in (by_capacity, by_price) if one))
            ends[place] = middle * math.exp(apart if place == "high" else -apart)
        else:
            ends[place] = 0.0 if middle == by_capacity == 0 else None
    found = Range(
        estimate=middle,
        certain=_total(parts, "certain", "estimate", dollars_per_kwh),
        **ends,
    )
    fast = _total(parts, "low", "estimate", dollars_per_kwh)
    return found.times(1 / months), None if fast is None else fast / months


def _total(parts: Sequence[Part], place: str, price: str, dollars_per_kwh: float) -> float | None:
    """Of all months; None: a price is not known, or no number of machines suffices."""
    whole = 0.0
    for one, loads, uses in parts:
        use = uses.get(place)
        if use is None:
            return None
        if use.rented_hours:
            if one.dollars_per_hour is None:
                return None
            whole += use.rented_hours * one.dollars_per_hour.at(price)
        if use.bought:
            if one.dollars is None:
                return None
            whole += use.bought * one.dollars.at(price) * len(loads) / one.lifetime_months
        if use.own_hours and one.watts is not None:
            own = msgspec.structs.replace(use, rented_hours=0.0)
            whole += sum(_kwh(one, loads, own)) / 2 * dollars_per_kwh
    return whole


def energy(parts: Sequence[Part]) -> Range:
    """kWh of all months; None: the power of a machine is not known."""
    ends = {place: _energy(parts, place) for place in ("low", "high", "estimate", "certain")}
    low, high, middle, sure = ends.values()
    return Range(
        low=None if low is None else low[0],
        high=None if high is None else high[1],
        estimate=None if middle is None else sum(middle) / 2,
        certain=None if sure is None else sum(sure) / 2,
    )


def _energy(parts: Sequence[Part], place: str) -> tuple[float, float] | None:
    least = most = 0.0
    for one, loads, uses in parts:
        use = uses.get(place)
        if use is None or one.watts is None:
            return None
        low, high = _kwh(one, loads, use)
        least += low
        most += high
    return least, most


def _kwh(one: Candidate, loads: Months, use: Use) -> tuple[float, float]:
    """At least: its power for the time of the work at full load; at most: all the time."""
    assert one.server is not None and one.watts is not None
    requests = sum(3600 * load.rate * load.hours for month in loads for load in month)
    busy = one.devices * requests / (3600 * one.factor * one.server.saturated_rate)
    on = use.rented_hours + use.own_hours
    return one.watts / 1000 * min(busy, on), one.watts / 1000 * on
