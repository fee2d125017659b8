"""From which rate on machines cost less than an API.

    even = break_even(question, candidates, api, option)
    even.ranges         # of rates at which the option costs less, ((0.74, None),)
    even.low, even.high # the interval of the first of them, from that of the capacity

The API's cost is a straight line, and that of machines rises in steps, so that they may cross
several times: where a further machine is needed that is not yet busy enough, the API can be cheaper
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from crossover.reports.plan.api_price import ApiCost
from crossover.reports.plan.plan_file import Question
from crossover.reports.plan.plan_options import Candidate, Option, dollars_of, options_of

# Break-evens are searched up to 1,000 times the forecast's rate, and down to 1/1,000 of it. Ranges
# of rates narrower than a step of 5 % may be missed.
MAX_FACTOR = 1000.0
FACTOR_STEP = 1.05
BISECTIONS = 40

CapacityEnd = Literal["low", "rate", "high"]
RateRange = tuple[float, float | None]  # requests/s in the busiest hour; None: there is no end


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """The rates at which an option costs less than the API. All are of the busiest hour."""

    option: str  # its title
    # At the expected capacity; 0.0: from the smallest rates on. (): the API costs less at each rate
    # that the option serves.
    ranges: tuple[RateRange, ...]
    # The first of these rates if the capacity is at the high end of its interval, and at its low
    # end. None: the API always costs less then.
    low: float | None = None
    high: float | None = None
    utilization: float | None = None  # share of the month that machines work, at the first rate

    @property
    def rate(self) -> float | None:
        """The lowest rate at which the option costs less; None: there is none."""
        return self.ranges[0][0] if self.ranges else None


def break_even(
    question: Question, candidates: Sequence[Candidate], api: ApiCost, option: Option
) -> BreakEven | None:
    """Return the rates at which an option costs less than the API; None: the option serves no rate
    with 90 % confidence, or its cost is not known."""
    involved = [one for one in candidates if one.name in (option.machine, option.machine_above)]
    serves = option.certainty == "yes" or (option.kind == "as it is" and involved[0].low)
    if not serves or option.dollars is None or option.energy_unknown:
        return None
    ranges = _cheaper_ranges(question, _with_capacity(involved, "rate"), api, option)
    low, high = (
        _first(_cheaper_ranges(question, _with_capacity(involved, end), api, option))
        for end in ("high", "low")
    )
    rate = _first(ranges)
    return BreakEven(
        option=option.title,
        ranges=tuple(ranges),
        low=low,
        high=high,
        utilization=_utilization(question, involved, option, rate) if rate else None,
    )


def _first(ranges: Sequence[RateRange]) -> float | None:
    return ranges[0][0] if ranges else None


def _with_capacity(candidates: Sequence[Candidate], end: CapacityEnd) -> list[Candidate]:
    """Return the machines as if one end of their interval were known to be their capacity."""

    def certain(machine: Candidate) -> Candidate:
        rate = getattr(machine, end)
        parts = tuple(map(certain, machine.parts))
        return msgspec.structs.replace(machine, low=rate, rate=rate, high=rate, parts=parts)

    return [certain(machine) for machine in candidates]


def _cheaper_ranges(
    question: Question, machines: Sequence[Candidate], api: ApiCost, option: Option
) -> list[RateRange]:
    """Return the ranges of rates at which an option costs less than the API."""
    peak_rate = question.forecast.peak_rate

    def is_cheaper(factor: float) -> bool:
        forecast = question.forecast.scaled(factor)
        dollars = dollars_of(question, machines, option.key, forecast)
        return dollars is not None and dollars < api.dollars_per_month(forecast.mean_rate)

    steps = math.ceil(math.log(MAX_FACTOR) / math.log(FACTOR_STEP))
    ranges: list[RateRange] = []
    start: float | None = None
    previous = 0.0
    for step in range(-steps, steps + 1):
        factor = FACTOR_STEP**step
        if is_cheaper(factor):
            if start is None:
                start = peak_rate * _change(is_cheaper, previous, factor) if previous else 0.0
        elif start is not None:
            ranges.append((start, peak_rate * _change(is_cheaper, previous, factor)))
            start = None
        previous = factor
    if start is not None:
        ranges.append((start, None))
    return ranges


def _change(is_cheaper: Callable[[float], bool], low: float, high: float) -> float:
    """Return the factor between `low` and `high` at which the cheaper side changes."""
    at_low = is_cheaper(low)
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if is_cheaper(middle) == at_low:
            low = middle
        else:
            high = middle
    return high


def _utilization(
    question: Question, involved: Sequence[Candidate], option: Option, rate: float
) -> float | None:
    """Return the share of the month that the machines of an option work, if the busiest hour has
    this rate: mean rate over the capacity of all machines, which is the expected one."""
    machines = _with_capacity(involved, "rate")
    forecast = question.forecast.scaled(rate / question.forecast.peak_rate)
    capacity_by_name = {machine.name: machine.rate or 0.0 for machine in machines}
    for same in options_of(question, machines, forecast):
        if same.key == option.key and same.machines:
            own = next((one.owned for one in machines if one.name == option.machine), 0)
            above = same.machines - own if option.machine_above else 0
            capacity = capacity_by_name[option.machine] * (same.machines - above)
            capacity += capacity_by_name.get(option.machine_above, 0.0) * above
            return forecast.mean_rate / capacity if capacity else None
    return None
