"""The options that serve a forecast, what they cost, and the one that is chosen.

    plan = make_plan(asked, candidates)
    plan.choice                 # the cheapest that meets the SLO with 90 % confidence, or None

**The rule: the cheapest option whose low end (90 %, one-sided) serves the peak.** An option is the
machines that you have (`base`), as they are, or with others rented `above` their low end. There are
as many as the busiest hour needs; rented machines are rented in the hours that need them, owned
ones cost their energy. Costs are step functions, so changes of the choice are searched on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from crossover.models import formatting
from crossover.reports.devices.device_capacity import CapacityGrade, Certainty, DeviceCapacity
from crossover.reports.devices.device_step_times import NOT_CALIBRATED
from crossover.reports.plan.load_forecast import HOURS_A_MONTH, Forecast
from crossover.reports.plan.plan_file import Question
from crossover.serving.capacity.binding_limit import BindingLimit
from crossover.serving.capacity.slo import Slo

MAX_ROWS = 6
MAX_TIMES = 64.0  # the forecast, up to which a change of the choice is looked for; and down
STEP = 1.02  # between two rates that are looked at
STAIRS, STAIRS_REACH = 120, 4.0  # points of the chart to either side, and how many times the rate
RANKS = ("yes", "perhaps", "no", "confirmed", "estimated", "predicted")
OptionKind = Literal["as it is", "more of it", "rented", "it and rented"]


class Candidate(DeviceCapacity, frozen=True, kw_only=True):
    """A machine, or one of its devices, and what one of it serves; `low` is surely served."""

    owned: int = 0
    price_date: str = ""
    is_paid: bool = True  # those that are there cost energy alone; False: they are rented
    is_list_price: bool = False  # of its GPU, since nobody said what the machine costs
    gpu_name: str = ""  # of the GPU in it
    label: str = ""  # what its row is called, `your machine's GPU`; "": by the machine's name
    binding: BindingLimit | None = None  # what limits it; None: not known, or predicted
    # Of a machine whose devices serve together: each, in the order in which they take load.
    parts: tuple[Candidate, ...] = ()

    @property
    def rent(self) -> float | None:
        """Dollars a month of those that are there; None: their price is not known."""
        if self.is_paid:
            return 0.0
        price = self.dollars_per_hour
        return None if price is None else price * self.owned * HOURS_A_MONTH

    @property
    def is_unknown(self) -> bool:
        """A CPU that nobody measured."""
        return self.reason == NOT_CALIBRATED

    def answer(self, rate: float, count: int) -> Certainty:
        """Whether `count` of it hold a rate."""
        if (self.low or 0.0) * count >= rate:
            return "yes"
        return "perhaps" if self.is_unknown or (self.high or 0.0) * count >= rate else "no"

    def kwh(self, work: Sequence[tuple[float, float]], most: float = math.inf) -> float | None:
        """Of a month of (rate, hours), on `most` of it: watts for the share of time at work."""
        if self.parts:
            return self._kwh_of_parts(work)
        rate = self.rate or self.high
        if self.watts is None or not rate:
            return None
        return self.watts * sum(min(most, one / rate) * hours for one, hours in work) / 1000

    def _kwh_of_parts(self, work: Sequence[tuple[float, float]]) -> float | None:
        """Each part takes what it surely serves; the last one the rest."""
        total, left = 0.0, list(work)
        for part in self.parts:
            most = math.inf if part is self.parts[-1] else (part.low or 0.0) * self.owned
            kwh = part.kwh([(min(rate, most), hours) for rate, hours in left])
            if kwh is None:
                return None
            total += kwh
            left = [(max(0.0, rate - most), hours) for rate, hours in left]
        return total


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the plan. Dollars and kWh are of a month."""

    kind: OptionKind
    machine: str
    above: str = ""  # what is rented above it
    suffices: Certainty
    machines: int | None  # in the busiest hour, spares included; None: no number suffices
    dollars: float | None  # with as many as surely suffice; None: a price is not known
    dollars_low: float | None = None  # if each that is rented holds its high end
    kwh: float | None = None  # None: no watts are known
    energy_unknown: bool = False  # some of it is owned, and its watts are not known
    known_by: CapacityGrade
    note: str = ""
    label: str = ""  # of the machine that is there, as of Candidate

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
        if self.label and self.kind == "as it is":
            return self.label
        is_base = self.kind == "it and rented"
        label = self.label.removesuffix(" alone")
        return self.called(label if label and is_base else self.machine)

    def called(self, machine: str) -> str:
        """Its row with another name of the machine: `your machine as it is`."""
        match self.kind:
            case "as it is":
                return f"{machine} as it is"
            case "more of it":
                return f"more of {machine}"
            case "it and rented":
                return f"{machine} + {self.above} above it"
        return self.machine


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of the busiest hour above (or below) which another option is the choice."""

    rate: float
    is_above: bool
    option: Option | None  # None: nothing surely suffices there


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: at most six, what is chosen first; `options`: all."""

    kind: Literal["crossover-plan"] = "crossover-plan"
    version: int = 3
    name: str
    model: str
    weight_format: str
    gpu_format: str
    lengths: str
    slo: Slo
    peak_rate: float  # requests/s of the busiest hour
    mean_rate: float
    spares: int
    options: tuple[Option, ...]
    changes: tuple[Change, ...]
    unknown: tuple[str, ...]  # what is not known, in words
    binding: dict[str, BindingLimit] = {}  # what limits each of your machines, by its name
    price_date: str = ""  # the oldest of the prices in it
    stairs: dict[str, list[tuple[float, float]]] = {}  # option -> (peak rate, $ a month)

    @property
    def choice(self) -> Option | None:
        return _choice(self.options)

    @property
    def rows(self) -> tuple[Option, ...]:
        return _rows(self.options)


def make_plan(asked: Question, candidates: Sequence[Candidate]) -> Plan:
    """The options for what is asked, in order: what surely suffices, then by cost."""
    found = ordered(asked, candidates, asked.forecast)
    return Plan(
        name=asked.keys.name,
        model=asked.spec.name,
        weight_format=asked.weight_format,
        gpu_format=asked.keys.gpu_format,
        lengths=asked.lengths,
        slo=asked.slo,
        peak_rate=asked.forecast.peak_rate,
        mean_rate=asked.forecast.mean_rate,
        spares=asked.keys.spares,
        options=tuple(found),
        changes=tuple(_changes(asked, candidates, _choice(found))),
        unknown=tuple(_unknown(candidates, found)),
        binding={one.name: one.binding for one in _devices(candidates) if one.binding is not None},
        price_date=min((one.price_date for one in candidates if one.price_date), default=""),
        stairs=_stairs(asked, candidates, _rows(found)[:4]),
    )


def _devices(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the machines, and the devices of those whose devices serve together."""
    for one in candidates:
        yield from one.parts or (one,)


def _rows(options: Sequence[Option]) -> tuple[Option, ...]:
    """Your machine (of one with two devices each, and both), more of it, it and one GPU above it;
    the cheapest GPUs fill six rows."""
    as_they_are = sum(one.kind == "as it is" for one in options)
    mine = [one for one in options if one.kind in ("as it is", "more of it")]
    mine = [one for one in mine if one.kind == "as it is" or one.label == ""][: max(2, as_they_are)]
    mine += [one for one in options if one.kind == "it and rented"][:1]
    rest = [one for one in options if one.kind == "rented"][: MAX_ROWS - len(mine)]
    return tuple(one for one in options if one in mine or one in rest)


def ordered(asked: Question, candidates: Sequence[Candidate], forecast: Forecast) -> list[Option]:
    """All options under a forecast, the choice first."""
    return sorted(
        _options(asked, candidates, forecast),
        key=lambda one: (
            RANKS.index(one.suffices),
            one.dollars is None,
            one.dollars or 0.0,
            RANKS.index(one.known_by),
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
        if as_it_is.suffices != "yes" and not machine.parts:
            yield _with_rented(asked, "more of it", machine, machine, forecast)
    for machine in others:
        yield _with_rented(asked, "rented", None, machine, forecast)
    for base in own:
        if base.low and base.answer(forecast.peak_rate, base.owned) != "yes":
            for above in others:
                if above.low:
                    yield _with_rented(asked, "it and rented", base, above, forecast)


def _as_it_is(asked: Question, machine: Candidate, forecast: Forecast) -> Option:
    kwh = machine.kwh([(one.rate, one.hours) for one in forecast.loads], machine.owned)
    count = max(0, machine.owned - asked.keys.spares)
    holds = formatting.rate((machine.low or 0.0) * count, like=forecast.peak_rate)
    energy = (kwh or 0.0) * asked.keys.dollars_per_kwh if machine.is_paid else 0.0
    return Option(
        kind="as it is",
        machine=machine.name,
        suffices=machine.answer(forecast.peak_rate, count),
        machines=machine.owned,
        dollars=None if machine.rent is None else machine.rent + energy,
        kwh=kwh,
        energy_unknown=kwh is None and machine.is_paid,
        known_by=machine.kind,
        note=machine.reason or (f"holds {holds}" if machine.low else ""),
        label=machine.label,
    )


def _with_rented(
    asked: Question,
    kind: OptionKind,
    base: Candidate | None,
    above: Candidate,
    forecast: Forecast,
) -> Option:
    """What is there carries what it surely holds; above that machines are rented by the hour."""
    owned, spares = (0 if base is None else base.owned), asked.keys.spares
    carried = 0.0 if base is None else (base.low or 0.0) * owned
    loads = [(max(0.0, one.rate - carried), one.hours) for one in forecast.loads]

    def count(rate: float, each: float | None) -> int | None:
        """How many are rented where one holds `each`; None: no number of them suffices."""
        if not each:
            return None
        if above is base:  # the spares are of its kind, and may be among those that are there
            return max(0, math.ceil((rate + carried) / each - 1e-9) + spares - owned)
        needed = math.ceil(rate / each - 1e-9)
        return needed + spares if needed else 0

    def dollars(each: float | None) -> float | None:
        counts = [(count(rate, each), hours) for rate, hours in loads]
        if any(one is None for one, _ in counts):
            return None
        if above.dollars_per_hour is None:
            return None if any(one for one, _ in counts) else 0.0
        return above.dollars_per_hour * sum((one or 0) * hours for one, hours in counts)

    sure = count(loads[0][0], above.low)
    needed = count(loads[0][0], above.high) if sure is None else sure
    own_kwh = None
    if base is not None:
        own_kwh = base.kwh([(min(one.rate, carried), one.hours) for one in forecast.loads], owned)
    rented_kwh, energy, rent = above.kwh(loads), 0.0, 0.0 if base is None else base.rent
    if base is not None and base.is_paid:
        energy = (own_kwh or 0.0) * asked.keys.dollars_per_kwh
    paid = dollars(above.low or above.high)
    least = dollars(above.high) if above.low else None
    total = None if rented_kwh is None else rented_kwh + (own_kwh or 0.0)
    note = above.reason
    if above is base and paid is None and needed is not None:
        note = "its dollars_per_hour is unknown"
    return Option(
        kind=kind,
        machine=above.name if base is None else base.name,
        above=above.name if kind == "it and rented" else "",
        suffices="yes" if sure is not None else above.answer(1.0, 10**9),
        machines=None if needed is None else needed + owned,
        dollars=None if paid is None or rent is None else paid + energy + rent,
        dollars_low=None if least is None or rent is None else least + energy + rent,
        kwh=None if base is not None and own_kwh is None else total,
        energy_unknown=(
            base is not None and base.is_paid and needed is not None and own_kwh is None
        ),
        known_by=above.kind,
        note=note,
        label="" if base is None else base.label,
    )


def _choice(found: Sequence[Option]) -> Option | None:
    return found[0] if found and found[0].is_sure else None


def _changes(
    asked: Question, candidates: Sequence[Candidate], now: Option | None
) -> Iterator[Change]:
    """The nearest rates, above and below, at which the choice is another one."""
    for is_above in (True, False):
        factor = 1.0
        while factor < MAX_TIMES:
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
        yield "the capacity of your own machine (give it with --run or --machine)"
    asked = [one for one in candidates if one.owned and not one.is_paid]
    if unpriced := [one for one in asked if one.is_list_price or one.dollars_per_hour is None]:
        yield _asked_price(unpriced[0])
    chosen = _choice(found)
    for one in candidates:
        if chosen is None or one.name in (chosen.machine, chosen.above):
            if one.kind == "predicted" and not one.is_unknown:
                yield f"whether {one.name} reaches its predicted capacity"
            missing = {"watts": one.watts, "dollars_per_hour": one.dollars_per_hour}
            if (
                one.owned
                and one.is_paid
                and (names := [name for name in missing if missing[name] is None])
            ):
                yield f"{' and '.join(names)} of {one.name}: keys of its [[machines]]"
    if unmeasured := [one.machine for one in found if one.note == NOT_CALIBRATED]:
        yield f"whether {unmeasured[0]} meets the SLO: run `crossover calibrate` on it"


def _asked_price(machine: Candidate) -> str:
    """What is not known of the price of a machine with a GPU, and how one says it."""
    how = "set --price, or dollars_per_hour and is_paid in its [[machines]]"
    if machine.dollars_per_hour is None:
        return f"the cost of your machine ({how})"
    price = formatting.dollars_per_hour(machine.dollars_per_hour)
    return (
        f"the cost of your machine: the list price of its {machine.gpu_name}, {price}, is assumed "
        f"({how})"
    )
