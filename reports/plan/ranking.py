"""Options in order, and what would change that order: rate, price, SLO, a measurement.

    plan = make_plan(asked, candidates)
    plan.options[0]           # the cheapest that suffices with 90 % certainty, where one does

Nothing is simulated anew for another rate or price: capacities do not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from loadtests.metrics.slo import Slo
from reports.plan.candidates import Candidate
from reports.plan.file import Question
from reports.plan.forecast import Forecast, sized_rate
from reports.plan.options import Maker, Option, Terms
from reports.planning.machines import Kind

# A new key leaves it as it is; a key that goes, or that means something else, raises it.
VERSION = 1
MOST_TIMES = 64.0  # the forecast, up to which a change of the answer is looked for; and down
PRECISION = 1.02  # of the rate at which the answer changes
OTHER_SLOS = (2.0, 0.5)  # times the limits of the SLO
VIOLATIONS_OF = 5  # options, the first ones, whose violations are simulated
MOST_TO_MEASURE = 4
LEAST_FALL = 0.25  # of a price that may come about; a lower one is not told


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest option under other circumstances; None of all: nothing suffices."""

    kind: str | None = None  # of the option
    machine: str | None = None  # of the peak, where it is mixed
    base: str | None = None  # of a mixed one
    devices_per_replica: int = 1  # tensor parallel
    replicas: float | None = None  # in the busiest hour of all months
    dollars_per_month: float | None = None  # of what suffices with 90 % certainty


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What would change the answer.

    rate: above or below `value` requests/s in the busiest hour; price: `machine` at `value` $/h;
    slo: limits of `value` times the SLO's.
    """

    what: Literal["rate", "price", "slo"]  # what is another
    value: float  # requests/s, $/h, or times the limits
    direction: Literal["above", "below", "at"]  # of the value
    machine: str = ""  # of a price: whose
    answer: Answer  # the cheapest there; of a price, the one that would be as cheap


class ToMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """A machine whose measurement could make the plan cheaper, by up to so much a month."""

    machine: str  # its name
    machine_kind: Kind  # how it is known so far
    is_cpu: bool  # `crossover calibrate` measures it
    is_owned: bool  # it is there
    saves_dollars_per_month: float | None  # None: nothing suffices without it


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a dollar of rent buys of the memory bandwidth that decoding lives on."""

    machine: str  # its name
    is_cpu: bool  # all its sockets
    gb_per_second_per_dollar_hour: float  # peak of the datasheet over the price


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast in numbers, requests/s."""

    sized_rate: float  # of the busiest hour of all months that may not miss the SLO
    peak_rate: float  # of the busiest hour of the first month
    mean_rate: float  # of the first month
    growth_per_month: float  # 0.05: 5 % more each month
    months: int  # planned for
    requests: float  # of all months
    output_tokens: float  # of all months


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan: `options` in order, the answer first where one is sure to suffice."""

    kind: Literal["crossover-plan"] = "crossover-plan"
    version: int = VERSION
    sentence: str = ""  # the answer, for people
    notes: tuple[str, ...] = ()  # what else there is to say
    own_machines: tuple[str, ...] = ()  # of yours: what takes no part, or that none was given
    name: str  # of the plan
    model: str  # the rung's name
    weight_format: str  # of CPUs
    gpu_format: str  # of all others
    lengths: str  # of requests, in words
    slo: Slo  # limits, target and name
    violations: float  # share of the hours that may miss it
    spares: int  # machines that may fail
    dollars_per_kwh: float  # of machines that are owned
    demand: Demand  # the forecast in numbers
    options: tuple[Option, ...]  # in order: the first is the answer, if it suffices
    changes: tuple[Change, ...]  # of the answer
    to_measure: tuple[ToMeasure, ...]  # the greatest saving first
    offers: tuple[Offer, ...] = ()  # most for the money first

    @property
    def answer(self) -> Option | None:
        """The cheapest that suffices with 90 % certainty; None: nothing does."""
        first = next(iter(self.options), None)
        return first if first is not None and tier(first) == 0 else None


def make_plan(
    asked: Question,
    candidates: Sequence[Candidate],
    offers: Sequence[Offer] = (),
    step: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The options for what is asked, in order. `step` is told what is being done."""
    found: list[Option] = []
    for one in candidates:  # one after the other, so that progress can be shown
        step(one.title)
        list(Maker([one], asked.forecast, terms_of(asked)).options())
    maker = Maker(candidates, asked.forecast, terms_of(asked))
    step("violations")
    for place, option in enumerate(ranked(maker.options())):
        counted = place < VIOLATIONS_OF and tier(option) == 0
        found.append(maker.with_violations(option) if counted else option)
    step("what would change the answer")
    changes = _changes(asked, candidates, found)
    loads = asked.forecast.loads
    demand = Demand(
        sized_rate=_sized(asked.forecast, asked.keys.violations),
        peak_rate=loads[0].rate,
        mean_rate=sum(load.rate * load.hours for load in loads) / sum(one.hours for one in loads),
        growth_per_month=asked.forecast.growth_per_month,
        months=asked.forecast.months,
        requests=asked.forecast.requests,
        output_tokens=asked.output_tokens,
    )
    return Plan(
        name=asked.keys.name,
        model=asked.spec.name,
        weight_format=asked.weight_format(is_gpu=False),
        gpu_format=asked.weight_format(is_gpu=True),
        lengths=asked.lengths,
        slo=asked.slo,
        violations=asked.keys.violations,
        spares=asked.keys.spares,
        dollars_per_kwh=asked.keys.dollars_per_kwh,
        demand=demand,
        options=tuple(found),
        changes=tuple(changes),
        to_measure=tuple(_to_measure(found, candidates)),
        own_machines=tuple(_own_machines(candidates)),
        offers=tuple(sorted(offers, key=lambda one: -one.gb_per_second_per_dollar_hour)),
    )


def _own_machines(candidates: Sequence[Candidate]) -> Iterator[str]:
    """What is to be said first of the machines that the asker has."""
    own = [one for one in candidates if one.owned or one.kind != "predicted"]
    if not own:
        yield "No machine of yours is in this plan: --run, --machine."
    for one in own:
        if one.server is None:
            yield f"{one.title} takes no part: {one.reason}."
        elif one.reason:
            yield f"{one.title}: {one.reason}."


def terms_of(asked: Question, slo: Slo | None = None) -> Terms:
    """What options have to meet; under another SLO where one is given."""
    return Terms(
        slo=slo or asked.slo,
        violations=asked.keys.violations,
        spares=asked.keys.spares,
        dollars_per_kwh=asked.keys.dollars_per_kwh,
        output_tokens=asked.output_tokens,
    )


def tier(option: Option) -> int:
    """0: suffices with 90 % certainty at a known price; 1: but by an order of magnitude; 2: at no
    known price; 3: does not suffice.
    """
    if not option.suffices:
        return 3
    if option.cost is None:
        return 2
    return 1 if option.is_order_of_magnitude else 0


def ranked(options: Iterable[Option]) -> list[Option]:
    """The cheapest that suffices with 90 % certainty first."""

    def order(one: Option) -> tuple[int, float, tuple[str, str, str, int], str]:
        cost = one.cost
        return tier(one), math.inf if cost is None else cost, one.key, one.by or ""

    return sorted(options, key=order)


def _sized(forecast: Forecast, violations: float) -> float:
    return sized_rate(forecast.at(forecast.busiest_month), violations)


def best(candidates: Sequence[Candidate], forecast: Forecast, terms: Terms) -> Option | None:
    """The cheapest that suffices with 90 % certainty; its figures at that place only."""
    made = ranked(Maker(candidates, forecast, terms, ("certain",)).options())
    return made[0] if made and tier(made[0]) == 0 else None


def _told(option: Option | None) -> Answer:
    if option is None:
        return Answer()
    return Answer(
        kind=option.kind,
        machine=option.machine,
        base=option.base or None,
        devices_per_replica=option.devices_per_replica,
        replicas=option.replicas.certain,
        dollars_per_month=option.dollars_per_month.certain,
    )


def _changes(
    asked: Question, candidates: Sequence[Candidate], found: Sequence[Option]
) -> Iterator[Change]:
    terms = terms_of(asked)
    for up in (False, True):
        change = _by_rate(candidates, asked.forecast, terms, up)
        if change is not None:
            yield change
    yield from _by_price(candidates, found)
    for factor in OTHER_SLOS if asked.slo.ttft_seconds or asked.slo.tpot_seconds else ():
        other = best(candidates, asked.forecast, terms_of(asked, asked.slo.tighter(1 / factor)))
        yield Change(what="slo", value=factor, direction="at", answer=_told(other))


def _by_rate(
    candidates: Sequence[Candidate], forecast: Forecast, terms: Terms, up: bool
) -> Change | None:
    """The nearest rate on one side at which another machine is the answer."""

    def answer(times: float) -> Option | None:
        return best(candidates, forecast.scaled(times), terms)

    def name(option: Option | None) -> tuple[str, str, int] | None:
        if option is None:
            return None
        return option.machine, option.base, option.devices_per_replica

    if _sized(forecast, terms.violations) == 0:
        return None  # every hour with traffic is excused
    here = name(answer(1.0))
    near, far = 1.0, 2.0 if up else 0.5
    while name(answer(far)) == here:
        near, far = far, far * far / near
        if max(far, 1 / far) > MOST_TIMES:
            return None
    while max(far / near, near / far) > PRECISION:
        middle = math.sqrt(near * far)
        near, far = (middle, far) if name(answer(middle)) == here else (near, middle)
    return Change(
        what="rate",
        value=far * _sized(forecast, terms.violations),
        direction="above" if up else "below",
        answer=_told(answer(far)),
    )


def _by_price(candidates: Sequence[Candidate], found: Sequence[Option]) -> Iterator[Change]:
    """How cheap the next machines would have to be; rent is in proportion to the price."""
    if not found or tier(found[0]) != 0:
        return
    first = found[0]
    seen = {first.machine}
    limit = first.dollars_per_month.certain or 0.0
    prices = {(one.name, one.devices): one.dollars_per_hour for one in candidates}
    for one in found[1:]:
        price = prices.get((one.machine, one.devices_per_replica))
        cost = one.dollars_per_month.certain
        is_rent = one.by is not None and one.kind != "mixed" and tier(one) == 0
        if not is_rent or one.machine in seen or price is None or not cost:
            continue
        if limit < LEAST_FALL * cost:
            continue
        seen.add(one.machine)
        yield Change(
            what="price",
            value=price.estimate * limit / cost,
            direction="below",
            machine=one.machine,
            answer=_told(one),
        )
        if len(seen) > 2:
            return


def _to_measure(found: Sequence[Option], candidates: Sequence[Candidate]) -> list[ToMeasure]:
    """Machines, not measured, that would be the answer or cheaper if they are as fast as the fast
    end of their band; the greatest saving first.
    """
    machines = {one.name: one for one in candidates}
    sure = found[0].cost if found and tier(found[0]) == 0 else None
    saves: dict[str, ToMeasure] = {}
    for one in found:
        fast = one.dollars_per_month_if_fast
        if one.machine_kind == "measured" or fast is None:
            continue
        if one.kind == "mixed":  # its base may be what is faster; each counts by itself
            continue
        saved = None if sure is None else sure - fast
        if saved is not None and saved <= 0.01 * (sure or 0.0):
            continue
        known = saves.get(one.machine)
        if known is None or (saved or 0.0) > (known.saves_dollars_per_month or 0.0):
            saves[one.machine] = ToMeasure(
                machine=one.machine,
                machine_kind=one.machine_kind,
                is_cpu=machines[one.machine].is_cpu,
                is_owned=machines[one.machine].owned > 0,
                saves_dollars_per_month=saved,
            )
    order = sorted(saves.values(), key=lambda one: -(one.saves_dollars_per_month or 0.0))
    return order[:MOST_TO_MEASURE]
