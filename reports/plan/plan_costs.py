"""The plan: options that serve a forecast, the choice among them, and where it changes.

    plan = make_plan(question, candidates)
    plan.choice                 # the cheapest that meets the SLO with 90 % confidence, or None

**The rule: choose the cheapest option whose low end (90 %, one-sided) serves the peak.** Costs are
step functions of the rate, so the rates at which the choice changes are found by search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from crossover.models import formatting
from crossover.reports.devices.device_capacity import MixedModel
from crossover.reports.devices.device_step_times import NOT_CALIBRATED
from crossover.reports.plan.api_price import ApiCost, api_cost
from crossover.reports.plan.break_even import BreakEven, break_even
from crossover.reports.plan.buy_or_rent import BuyOrRent, buy_or_rent
from crossover.reports.plan.cold_start import ColdStart, cold_starts
from crossover.reports.plan.later_months import Growth, growth_of, totals
from crossover.reports.plan.mix_alternatives import MixAlternative, mix_alternatives
from crossover.reports.plan.plan_file import SECONDS_A_DAY, Question
from crossover.reports.plan.plan_options import (
    Candidate,
    Option,
    OptionKey,
    OptionKind,
    Terms,
    choice_of,
    options_of,
    ordered_options,
)
from crossover.serving.capacity.binding_limit import BindingLimit
from crossover.serving.capacity.slo import Slo

MAX_ROWS = 6
MAX_CURVES = 6
# A change of the choice is searched from the forecast's rate up to 64 times that rate, and down to
# 1/64 of it, in steps of 2 %.
MAX_FACTOR = 64.0
FACTOR_STEP = 1.02
# A cost curve reaches from 0 to 4 times the forecast's rate; or, where something is marked at up to
# 20 times that rate, such as a break-even with the API, a quarter farther than that.
CURVE_POINTS = 240
CURVE_FACTOR = 4.0
MAX_CURVE_FACTOR = 20.0
MARK_MARGIN = 1.25


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of the busiest hour above (or below) which the plan chooses another option."""

    rate: float  # requests/s
    is_above: bool
    option: Option | None  # None: no option meets the SLO there with 90 % confidence


class CurvePoint(NamedTuple):
    """What an option costs at a rate."""

    peak_rate: float  # requests/s of the busiest hour
    dollars: float  # a month


class CostCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What an option costs at each rate at which it meets the SLO with 90 % confidence."""

    option: str  # its title
    kind: OptionKind
    terms: Terms | None
    points: list[CurvePoint]


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of several models of a plan."""

    model: str
    share: float  # of all requests
    weight_format: str  # on CPUs
    slo: Slo
    lengths: str


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The models of a plan on one machine, at the capacity of all of them."""

    machine: str
    rate: float | None  # requests/s of all models; None: they cannot be served together
    models: tuple[MixedModel, ...]


class CostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a plan file. `options` are all options, `rows` those to show; both begin with
    the choice."""

    kind: Literal["crossover-plan"] = "crossover-plan"
    version: int = 5
    name: str
    model: str
    weight_format: str
    gpu_format: str
    lengths: str
    slo: Slo
    peak_rate: float  # requests/s of the busiest hour
    mean_rate: float  # requests/s over the month
    spares: int
    options: tuple[Option, ...]
    changes: tuple[Change, ...]
    unknown: tuple[str, ...]  # facts that would make the plan more certain, as phrases
    binding: dict[str, BindingLimit] = {}  # machine -> what limits it
    price_date: str = ""  # the oldest date of a list price; "": there is no list price
    cost_curves: tuple[CostCurve, ...] = ()
    dollars_per_kwh: float
    pue: float
    years: float | None = None  # of use of bought machines, over which costs are added up
    residual_share: float = 0.0
    not_counted: tuple[str, ...] = ()  # costs of machines to own that are not known, as phrases
    api: ApiCost | None = None  # None: no prices are given
    break_evens: tuple[BreakEven, ...] = ()  # of the options to show with the API
    purchase: BuyOrRent | None = None  # None: there is nothing to compare
    # Title of an option, or "API" -> dollars over the years of the plan; None: it does not serve
    # the load of all months, or its cost is not known.
    totals: dict[str, float | None] = {}
    growth: Growth | None = None  # None: the forecast does not grow
    cold_starts: tuple[ColdStart, ...] = ()  # of the machines to show, if the plan file asks for it
    models: tuple[PlannedModel, ...] = ()  # of [[models]]; (): the plan is for one model
    mixes: tuple[Mix, ...] = ()  # these models on each machine
    mix_alternatives: tuple[MixAlternative, ...] = ()  # on the machines to show

    @property
    def choice(self) -> Option | None:
        """The cheapest option that meets the SLO with 90 % confidence; None: there is none."""
        return choice_of(self.options)

    @property
    def mixes_to_show(self) -> tuple[Mix, ...]:
        """The mixes on the machines of the options to show, in the order of these."""
        machines = [option.machine_above or option.machine for option in self.rows]
        shown = [mix for mix in self.mixes if mix.machine in machines]
        return tuple(sorted(shown, key=lambda mix: machines.index(mix.machine)))

    @property
    def rows(self) -> tuple[Option, ...]:
        """The options to show, the choice first."""
        return _rows(self.options)

    def requests_a_day(self, peak_rate: float) -> float:
        """Return the requests of a mean day whose month has this rate in its busiest hour."""
        return peak_rate * SECONDS_A_DAY * self.mean_rate / self.peak_rate


def make_plan(question: Question, candidates: Sequence[Candidate]) -> CostPlan:
    """Return the plan. Its options are ordered by certainty, then by cost."""
    options = ordered_options(question, candidates, question.forecast)
    rows = _rows(options)
    api = None if question.keys.api is None else api_cost(question.keys.api, question.demand)
    growth = growth_of(question, candidates)
    break_evens: list[BreakEven] = []
    if api is not None:
        evens = [break_even(question, candidates, api, option) for option in rows]
        break_evens = [even for even in evens if even is not None]
    marked_rates = [even.rate if even.high is None else even.high for even in break_evens]
    marked_rates += [milestone.rate for milestone in growth.milestones] if growth else []
    return CostPlan(
        name=question.keys.name,
        model=question.model,
        weight_format=question.weight_format,
        gpu_format=question.gpu_format,
        lengths=question.lengths,
        slo=question.slo,
        peak_rate=question.forecast.peak_rate,
        mean_rate=question.forecast.mean_rate,
        spares=question.keys.spares,
        options=tuple(options),
        changes=tuple(_changes(question, candidates, choice_of(options))),
        unknown=tuple(_unknown(candidates, options)),
        binding={
            device.name: device.binding
            for device in _devices(candidates)
            if device.binding is not None
        },
        price_date=min(
            (candidate.price_date for candidate in candidates if candidate.price_date), default=""
        ),
        cost_curves=tuple(_cost_curves(question, candidates, rows, marked_rates)),
        dollars_per_kwh=question.keys.dollars_per_kwh,
        pue=question.keys.pue,
        years=question.keys.years,
        residual_share=question.keys.residual_share,
        not_counted=_not_counted(candidates, rows),
        api=api,
        break_evens=tuple(break_evens),
        purchase=buy_or_rent(question, candidates, options),
        totals=totals(question, candidates, rows, api),
        growth=growth,
        cold_starts=tuple(cold_starts(question, candidates, rows)),
        models=tuple(
            PlannedModel(
                model=part.question.spec.name,
                share=part.share,
                weight_format=part.question.weight_format,
                slo=part.question.slo,
                lengths=part.question.lengths,
            )
            for part in question.parts
        ),
        mixes=tuple(
            Mix(machine=candidate.name, rate=candidate.rate, models=candidate.models)
            for candidate in candidates
            if candidate.models
        ),
        mix_alternatives=tuple(mix_alternatives(question, candidates, rows)),
    )


def _devices(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the machines; a machine whose devices serve together is replaced by its devices."""
    for candidate in candidates:
        yield from candidate.parts or (candidate,)


def _rows(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options to show, in their order: your machines as they are (for a machine with a
    CPU and a GPU each device, and both together), more of them, and the cheapest option with
    further machines above yours. The cheapest machines that are rented by the hour fill the other
    rows, up to MAX_ROWS. Machines with a price to reserve or to buy are shown besides.
    """
    as_it_is = [option for option in options if option.kind == "as it is"]
    # More of an option with a label is not shown: it is only one device of your machine.
    own_rows = [
        option
        for option in options
        if option.kind == "as it is"
        or (option.kind == "more of it" and option.terms == "by the hour" and option.label == "")
    ]
    # Your machines have two rows together, or one each if these are more.
    own_rows = own_rows[: max(2, len(as_it_is))]
    own_and_further_rows = [option for option in options if option.kind == "it and rented"][:1]
    free_rows = MAX_ROWS - len(own_rows) - len(own_and_further_rows)
    hourly_rows = [
        option for option in options if option.kind == "rented" and option.terms == "by the hour"
    ]
    priced_rows = [
        option
        for option in options
        if option.kind in ("more of it", "rented") and option.terms != "by the hour"
        if option.label == "" and option.machines is not None
    ]
    shown = [*own_rows, *own_and_further_rows, *hourly_rows[:free_rows], *priced_rows]
    return tuple(option for option in options if option in shown)


def _changes(
    question: Question, candidates: Sequence[Candidate], choice: Option | None
) -> Iterator[Change]:
    """Yield the nearest rates, above and below the forecast, at which the choice is another one."""
    forecast = question.forecast
    for is_above in (True, False):
        distance = 1.0
        while distance < MAX_FACTOR:
            distance *= FACTOR_STEP
            factor = distance if is_above else 1 / distance
            other = choice_of(ordered_options(question, candidates, forecast.scaled(factor)))
            if _key(other) != _key(choice):
                yield Change(rate=forecast.peak_rate * factor, is_above=is_above, option=other)
                break


def _key(option: Option | None) -> OptionKey | None:
    return None if option is None else option.key


def _cost_curves(
    question: Question,
    candidates: Sequence[Candidate],
    rows: Sequence[Option],
    marked_rates: Sequence[float | None],
) -> Iterator[CostCurve]:
    """Yield the cost curves of your machines as they are, of the options to show at the highest
    rate, where further machines are needed, and of those to show at the forecast's rate.

    `marked_rates`: what the curves should reach to, requests/s of the busiest hour.
    """
    peak_rate = question.forecast.peak_rate
    factors = [rate / peak_rate for rate in marked_rates if rate is not None]
    near = [factor for factor in factors if factor <= MAX_CURVE_FACTOR]
    max_factor = max([CURVE_FACTOR, *(factor * MARK_MARGIN for factor in near)])
    busiest = ordered_options(question, candidates, question.forecast.scaled(max_factor))
    shown = [option for option in rows if option.kind == "as it is"]
    shown += [option for option in _rows(busiest) if option.is_sure]
    shown += [option for option in rows if option.is_sure]
    points: dict[OptionKey, list[CurvePoint]] = {}
    for point in range(1, CURVE_POINTS + 1):
        forecast = question.forecast.scaled(max_factor * point / CURVE_POINTS)
        for option in options_of(question, candidates, forecast):
            if option.is_sure and option.dollars is not None:
                point_on_curve = CurvePoint(forecast.peak_rate, option.dollars)
                points.setdefault(option.key, []).append(point_on_curve)
    drawn = {option.key: option for option in shown if option.key in points}
    for key, option in list(drawn.items())[:MAX_CURVES]:
        yield CostCurve(
            option=option.title, kind=option.kind, terms=option.terms, points=points[key]
        )


def _not_counted(candidates: Sequence[Candidate], rows: Sequence[Option]) -> tuple[str, ...]:
    """Return the costs of owned and bought machines that are shown and were not given."""
    bought = {option.machine_above or option.machine for option in rows if option.terms == "bought"}
    owned = {option.machine for option in rows if option.kind == "as it is"}
    phrases: list[str] = []
    for candidate in candidates:
        is_owned = candidate.owned > 0 and candidate.is_paid and candidate.name in owned
        purchase = candidate.purchase if candidate.name in bought else None
        if (is_owned or purchase is not None) and candidate.idle_watts is None:
            # The power of a machine with a label is known only by device.
            name = "your machine" if candidate.label else f"{candidate.name} (idle_watts)"
            phrases.append(f"energy in the idle hours of {name}")
        if purchase is not None and purchase.hosting_dollars_per_month is None:
            phrases.append(f"hosting of {candidate.name} (hosting_dollars_per_month)")
    return tuple(dict.fromkeys(phrases))


def _unknown(candidates: Sequence[Candidate], options: Sequence[Option]) -> Iterator[str]:
    """Yield the facts that would make the plan more certain, the easiest to find out first."""
    if not any(one.owned or one.grade != "predicted" for one in candidates):
        yield "the capacity of your own machine (give it with --run or --machine)"
    for candidate in candidates:
        has_given_price = candidate.dollars_per_hour is not None and not candidate.is_list_price
        if candidate.owned and not candidate.is_paid and not has_given_price:
            yield _unknown_price(candidate)
            break
    choice = choice_of(options)
    for candidate in candidates:
        if choice is None or candidate.name in (choice.machine, choice.machine_above):
            if candidate.grade == "predicted" and not candidate.is_uncalibrated:
                yield f"whether {candidate.name} reaches its predicted capacity"
            values = {"watts": candidate.watts, "dollars_per_hour": candidate.dollars_per_hour}
            missing_keys = [key for key, value in values.items() if value is None]
            if candidate.owned and candidate.is_paid and missing_keys:
                keys = " and ".join(missing_keys)
                yield f"{keys} of {candidate.name} (set in its [[machines]] table)"
    uncalibrated = [option.machine for option in options if option.note == NOT_CALIBRATED]
    if uncalibrated:
        yield f"whether {uncalibrated[0]} meets the SLO: run `crossover calibrate` on it"


def _unknown_price(machine: Candidate) -> str:
    """Return what is not known about the cost of a machine with a GPU, and which option states
    it."""
    how = "set --price, or dollars_per_hour and is_paid in its [[machines]]"
    if machine.dollars_per_hour is None:
        return f"the cost of your machine ({how})"
    price = formatting.dollars_per_hour(machine.dollars_per_hour)
    return (
        f"the cost of your machine: the list price of its {machine.gpu_name}, {price}, is assumed "
        f"({how})"
    )
