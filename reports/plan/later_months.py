"""A load that grows: until which month a machine suffices, and what options cost over years.

    growth = growth_of(question, candidates)
    growth.milestones       # what happens in which month
    totals(question, candidates, options)   # title -> dollars over the years of the plan

Month 0 is the forecast, and month m has its rates times (1 + growth)^m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from crossover.reports.plan.api_price import ApiCost
from crossover.reports.plan.load_forecast import Forecast
from crossover.reports.plan.plan_file import Question
from crossover.reports.plan.plan_options import (
    Candidate,
    Option,
    choice_of,
    dollars_of,
    ordered_options,
)

MAX_MONTHS = 120
MAX_GROWTH = 1000.0  # times the forecast's rate, beyond which no month is looked at
MONTH_ROUNDING = 1e-9  # of a month: 6.9999999999 months are 7


class Milestone(msgspec.Struct, frozen=True, kw_only=True):
    """The first month in which one of your machines is no longer enough, in which the choice has
    more machines than today, or in which nothing can be chosen."""

    kind: Literal["no longer enough", "further machine", "no choice"]
    # None: not within MAX_MONTHS. 0: today.
    month: int | None
    rate: float | None = None  # requests/s in the busiest hour of that month
    machine: str = ""  # the machine that is no longer enough
    month_at_best: int | None = None  # if its capacity is at the high end
    option: Option | None = None  # the choice that has more machines


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What a growing load changes."""

    percent_per_month: float
    milestones: tuple[Milestone, ...]


def growth_of(question: Question, candidates: Sequence[Candidate]) -> Growth | None:
    """Return when your machines no longer suffice, and when the choice needs a further machine;
    None: the forecast does not grow."""
    percent = question.keys.forecast.growth_percent_per_month
    if percent is None:
        return None
    milestones = [
        _no_longer_enough(question, machine, percent)
        for machine in candidates
        if machine.owned and not machine.is_uncalibrated
    ]
    if (further := _further_machine(question, candidates)) is not None:
        milestones.append(further)
    return Growth(percent_per_month=percent, milestones=tuple(milestones))


def months_until(rate: float, capacity: float, percent_per_month: float) -> int | None:
    """Return the first month in which a rate that grows is above a capacity; None: not within
    MAX_MONTHS."""
    if rate > capacity:
        return 0
    months = math.log(capacity / rate) / math.log1p(percent_per_month / 100)
    month = math.floor(months + MONTH_ROUNDING) + 1
    return month if month <= MAX_MONTHS else None


def forecast_in(question: Question, month: int) -> Forecast:
    percent = question.keys.forecast.growth_percent_per_month or 0.0
    return question.forecast.scaled((1 + percent / 100) ** month)


def _no_longer_enough(question: Question, machine: Candidate, percent: float) -> Milestone:
    count = max(0, machine.owned - question.keys.spares)

    def month_at(capacity: float | None) -> int | None:
        if not capacity or not count:
            return 0
        return months_until(question.forecast.peak_rate, capacity * count, percent)

    month = month_at(machine.low)
    return Milestone(
        kind="no longer enough",
        month=month,
        rate=None if month is None else forecast_in(question, month).peak_rate,
        machine=machine.label or machine.name,
        month_at_best=month_at(machine.high),
    )


def _further_machine(question: Question, candidates: Sequence[Candidate]) -> Milestone | None:
    """Return when the choice first has more machines than today, or when no option surely serves
    the load at a known price; None: there is no choice today."""
    choice = choice_of(ordered_options(question, candidates, question.forecast))
    if choice is None or choice.machines is None:
        return None
    for month in range(1, MAX_MONTHS + 1):
        forecast = forecast_in(question, month)
        if forecast.peak_rate > question.forecast.peak_rate * MAX_GROWTH:
            break
        later = choice_of(ordered_options(question, candidates, forecast))
        if later is None:
            return Milestone(kind="no choice", month=month, rate=forecast.peak_rate)
        if (later.machines or 0) > choice.machines:
            return Milestone(
                kind="further machine", month=month, rate=forecast.peak_rate, option=later
            )
    return Milestone(kind="further machine", month=None)


def totals(
    question: Question,
    candidates: Sequence[Candidate],
    options: Sequence[Option],
    api: ApiCost | None,
) -> dict[str, float | None]:
    """Return the title of each option -> dollars over the years of the plan; "API": those of the
    API. None: in some month, the option does not serve the load with 90 % confidence, or its cost
    is not known. ({}: the plan has no years.)"""
    years = question.keys.years
    if years is None:
        return {}
    count = 12 * years
    # The last month may be a part of one.
    shares = [min(1.0, count - month) for month in range(math.ceil(count - MONTH_ROUNDING))]
    forecasts = [forecast_in(question, month) for month in range(len(shares))]
    result: dict[str, float | None] = {}
    for option in options:
        months = [dollars_of(question, candidates, option.key, load) for load in forecasts]
        known = [dollars for dollars in months if dollars is not None]
        result[option.title] = _sum(known, shares) if len(known) == len(months) else None
    if api is not None:
        months_of_api = [api.dollars_per_month(forecast.mean_rate) for forecast in forecasts]
        result["API"] = _sum(months_of_api, shares)
    return result


def _sum(dollars: Sequence[float], shares: Sequence[float]) -> float:
    """Return the dollars of months, of each of which a share counts."""
    return sum(each * share for each, share in zip(dollars, shares, strict=True))
