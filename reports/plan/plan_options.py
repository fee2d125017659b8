"""The ways to serve a forecast, what they cost, and the one that is chosen.

    plan = make_plan(asked, candidates)
    plan.choice                 # the cheapest that surely suffices; None: none does

**The rule: the cheapest whose low end (90 %, one-sided) holds the peak.** As many machines as hold
the busiest hour; what is rented by the hour is rented in the hours that need it; what is owned
costs its energy. Costs are staircases: where the choice changes is looked for on them, not between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from reports.devices.device_capacity import Answer, DeviceCapacity
from reports.devices.device_step_times import NOT_CALIBRATED
from reports.plan.load_forecast import Forecast
from reports.plan.plan_file import Question

MOST_ROWS = 6
MOST_TIMES = 64.0  # the forecast, up to which a change of the choice is looked for; and down
STEP = 1.02  # between two rates that are looked at
STAIRS, STAIRS_REACH = 120, 4.0  # points of the chart to either side, and how many times the rate
Grade = Literal["confirmed", "estimated", "predicted"]
OptionKind = Literal["as it is", "more of it", "rented", "it and rented"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and what one of it holds; `capacity.low` is surely held."""

    capacity: DeviceCapacity
    known_by: Grade
    owned: int = 0
    dollars_per_hour: float | None = None  # of one (of all devices that share a step)
    watts: float | None = None
    price_date: str = ""

    @property
    def name(self) -> str:
        return self.capacity.name

    @property
    def is_unknown(self) -> bool:
        """A CPU that nobody measured."""
        return self.capacity.reason == NOT_CALIBRATED

    def answer(self, rate: float, count: int) -> Answer:
        """Whether `count` of it hold a rate."""
        if (self.capacity.low or 0.0) * count >= rate:
            return "yes"
        may = self.is_unknown or (self.capacity.high or 0.0) * count >= rate
        return "perhaps" if may else "no"

    def needed(self, rate: float, at: float | None = None) -> int | None:
        """How many surely hold a rate; `at`: what one holds. None: no number of them."""
        holds = self.capacity.low if at is None else at
        return math.ceil(rate / holds - 1e-9) if holds else None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the plan. Dollars and kWh are of a month."""

    kind: OptionKind
    machine: str
    above: str = ""  # what is rented above it
    suffices: Answer
    machines: int | None  # in the busiest hour, spares included; None: no number suffices
    dollars: float | None  # with as many as surely suffice; None: a price is not known
    dollars_low: float | None = None  # if each holds its high end
    kwh: float | None = None  # None: no watts are known
    energy_unknown: bool = False  # it is owned, and its watts are not known
    known_by: Grade
    note: str = ""

    @property
    def is_sure(self) -> bool:
        return self.suffices == "yes" and self.dollars is not None

    @property
    def way(self) -> tuple[str, str, str]:
        """The same for the same way, with however many machines."""
        return self.kind, self.machine, self.above

    @property
    def title(self) -> str:
        """What its row is called."""
        match self.kind:
            case "as it is":
                return f"{self.machine} as it is"
            case "more of it":
                return f"more of {self.machine}"
            case "it and rented":
                return f"{self.machine} and {self.above} above it"
        return self.machine


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of the busiest hour above (or below) which another option is the choice."""

    rate: float
    is_above: bool
    option: Option | None  # None: nothing surely suffices there


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: at most six, what is chosen first; `options`: all."""

    kind: Literal["crossover-plan"] = "crossover-plan"
    version: int = 2
    name: str
    model: str
    weight_format: str
    gpu_format: str
    lengths: str
    slo: str  # its name
    ttft_seconds: float | None
    tpot_seconds: float | None
    target: float
    peak_rate: float  # requests/s of the busiest hour
    mean_rate: float
    spares: int
    options: tuple[Option, ...]
    changes: tuple[Change, ...]
    unknown: tuple[str, ...]  # what is not known, in words
    price_date: str = ""  # the oldest of the prices in it
    stairs: dict[str, list[tuple[float, float]]] = {}  # option -> (peak rate, $ a month)

    @property
    def choice(self) -> Option | None:
        return _choice(self.options)

    @property
    def rows(self) -> tuple[Option, ...]:
        """Yours first come with what is chosen; the cheapest others fill six rows."""
        mine = [one for one in self.options if one.kind in ("as it is", "more of it")][:2]
        rest = [one for one in self.options if one not in mine][: MOST_ROWS - len(mine)]
        return tuple(one for one in self.options if one in mine or one in rest)


def make_plan(asked: Question, candidates: Sequence[Candidate]) -> Plan:
    """The options for what is asked, in order: what surely suffices, then by cost."""
    found = ordered(asked, candidates, asked.forecast)
    return Plan(
        name=asked.keys.name,
        model=asked.spec.name,
        weight_format=asked.weight_format,
        gpu_format=asked.keys.gpu_format,
        lengths=asked.lengths,
        slo=asked.slo.name,
        ttft_seconds=asked.slo.ttft_seconds,
        tpot_seconds=asked.slo.tpot_seconds,
        target=asked.slo.target,
        peak_rate=asked.forecast.peak_rate,
        mean_rate=asked.forecast.mean_rate,
        spares=asked.keys.spares,
        options=tuple(found),
        changes=tuple(_changes(asked, candidates, _choice(found))),
        unknown=tuple(_unknown(candidates, found)),
        price_date=min((one.price_date for one in candidates if one.price_date), default=""),
        stairs=_stairs(asked, candidates, found[:4]),
    )


def ordered(asked: Question, candidates: Sequence[Candidate], forecast: Forecast) -> list[Option]:
    """All options under a forecast, the choice first."""
    rank = {"yes": 0, "perhaps": 1, "no": 2}
    known = {"confirmed": 0, "estimated": 1, "predicted": 2}
    return sorted(
        _options(asked, candidates, forecast),
        key=lambda one: (
            rank[one.suffices],
            one.dollars is None,
            one.dollars or 0.0,
            known[one.known_by],
        ),
    )


def _options(
    asked: Question, candidates: Sequence[Candidate], forecast: Forecast
) -> Iterator[Option]:
    own = [one for one in candidates if one.owned]
    others = [one for one in candidates if not one.owned]
    for machine in own:
        as_it_is = _as_it_is(asked, machine, forecast)
        yield as_it_is
        if as_it_is.suffices != "yes":
            yield _more_of_it(asked, machine, forecast)
    for machine in others:
        yield _rented(asked, machine, forecast)
    for base in own:
        if base.capacity.low and base.answer(forecast.peak_rate, base.owned) != "yes":
            for above in others:
                if above.capacity.low:
                    yield _mixed(asked, base, above, forecast)


def _energy(machine: Candidate, count: int, forecast: Forecast) -> float | None:
    """kWh a month: watts under load for the share of time that the work takes."""
    rate = machine.capacity.rate
    if machine.watts is None or not rate:
        return None
    hours = sum(load.hours * min(count, load.rate / rate) for load in forecast.loads)
    return machine.watts * hours / 1000


def _as_it_is(asked: Question, machine: Candidate, forecast: Forecast) -> Option:
    kwh = _energy(machine, machine.owned, forecast)
    return Option(
        kind="as it is",
        machine=machine.name,
        suffices=machine.answer(forecast.peak_rate, max(0, machine.owned - asked.keys.spares)),
        machines=machine.owned,
        dollars=(kwh or 0.0) * asked.keys.dollars_per_kwh,
        kwh=kwh,
        energy_unknown=kwh is None,
        known_by=machine.known_by,
        note=machine.capacity.reason,
    )


def _more_of_it(asked: Question, machine: Candidate, forecast: Forecast) -> Option:
    needed, spares = machine.needed(forecast.peak_rate), asked.keys.spares
    count = None if needed is None else needed + spares
    kwh = dollars = None
    note = machine.capacity.reason
    if count is not None:
        kwh = _energy(machine, count, forecast)
        note = "its dollars_per_hour is not known"
        if machine.dollars_per_hour is not None or count <= machine.owned:
            rented = sum(
                one.hours * max(0, (machine.needed(one.rate) or 0) + spares - machine.owned)
                for one in forecast.loads
            )
            dollars = rented * (machine.dollars_per_hour or 0.0)
            dollars += (kwh or 0.0) * asked.keys.dollars_per_kwh
            note = ""
    return Option(
        kind="more of it",
        machine=machine.name,
        suffices="yes" if count is not None else machine.answer(forecast.peak_rate, 10**6),
        machines=count,
        dollars=dollars,
        kwh=kwh,
        energy_unknown=count is not None and kwh is None,
        known_by=machine.known_by,
        note=note,
    )


def _rented(
    asked: Question, machine: Candidate, forecast: Forecast, base_rate: float = 0.0
) -> Option:
    """By the hour, in the hours that need it; above what `base_rate` carries."""
    spares, price = asked.keys.spares, machine.dollars_per_hour
    above = [(max(0.0, load.rate - base_rate), load.hours) for load in forecast.loads]

    def dollars(at: float | None) -> float | None:
        if price is None or not at:
            return None
        counts = [(machine.needed(rate, at) or 0, hours) for rate, hours in above]
        return price * sum(hours * (count + spares) for count, hours in counts if count)

    capacity, peak = machine.capacity, above[0][0]
    needed = machine.needed(peak)
    suffices: Answer = "yes" if needed is not None else "no"
    if needed is None and (capacity.high or machine.is_unknown):
        suffices, needed = "perhaps", machine.needed(peak, capacity.high)
    rate, kwh = capacity.rate or capacity.high, None
    if machine.watts is not None and rate:
        kwh = machine.watts * sum(load / rate * hours for load, hours in above) / 1000
    return Option(
        kind="rented",
        machine=machine.name,
        suffices=suffices,
        machines=None if needed is None else needed + spares,
        dollars=dollars(capacity.low or capacity.high),
        dollars_low=dollars(capacity.high) if capacity.low else None,
        kwh=kwh,
        known_by=machine.known_by,
        note=capacity.reason,
    )


def _mixed(asked: Question, base: Candidate, above: Candidate, forecast: Forecast) -> Option:
    """The machine that is there carries what it surely holds; the rest goes to rented ones."""
    rest = _rented(asked, above, forecast, (base.capacity.low or 0.0) * base.owned)
    kwh = _energy(base, base.owned, forecast)
    energy = (kwh or 0.0) * asked.keys.dollars_per_kwh
    return msgspec.structs.replace(
        rest,
        kind="it and rented",
        machine=base.name,
        above=above.name,
        machines=None if rest.machines is None else rest.machines + base.owned,
        dollars=None if rest.dollars is None else rest.dollars + energy,
        dollars_low=None if rest.dollars_low is None else rest.dollars_low + energy,
        kwh=None if kwh is None or rest.kwh is None else kwh + rest.kwh,
        energy_unknown=kwh is None,
    )


def _choice(found: Sequence[Option]) -> Option | None:
    return found[0] if found and found[0].is_sure else None


def _changes(
    asked: Question, candidates: Sequence[Candidate], now: Option | None
) -> Iterator[Change]:
    """The nearest rates, above and below, at which the choice is another one."""
    for is_above in (True, False):
        factor = 1.0
        while factor < MOST_TIMES:
            factor *= STEP
            times = factor if is_above else 1 / factor
            there = _choice(ordered(asked, candidates, asked.forecast.scaled(times)))
            if (there and there.way) != (now and now.way):
                yield Change(rate=asked.forecast.peak_rate * times, is_above=is_above, option=there)
                break


def _stairs(
    asked: Question, candidates: Sequence[Candidate], shown: Sequence[Option]
) -> dict[str, list[tuple[float, float]]]:
    """Dollars a month of the shown options against the rate of the busiest hour."""
    lines: dict[str, list[tuple[float, float]]] = {}
    ways = {one.way for one in shown}
    for step in range(-STAIRS, STAIRS + 1):
        forecast = asked.forecast.scaled(STAIRS_REACH ** (step / STAIRS))
        for one in _options(asked, candidates, forecast):
            if one.way in ways and one.is_sure and one.dollars is not None:
                lines.setdefault(one.title, []).append((forecast.peak_rate, one.dollars))
    return lines


def _unknown(candidates: Sequence[Candidate], found: Sequence[Option]) -> Iterator[str]:
    """What would make the plan surer, nearest first."""
    if not any(one.owned for one in candidates):
        yield "no machine of yours is in this plan: name one with --run or --machine"
    chosen = _choice(found)
    for one in candidates:
        if chosen is None or one.name in (chosen.machine, chosen.above):
            if one.known_by == "predicted":
                yield f"{one.name} is predicted, not measured"
            if one.owned and one.watts is None:
                yield f"the watts of {one.name} are not known, so its energy costs are left out"
    if unmeasured := [one.machine for one in found if one.note == NOT_CALIBRATED]:
        yield f"{unmeasured[0]} may suffice: `crossover calibrate` on it would tell"
