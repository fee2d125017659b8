"""The options that serve a forecast, their costs, and the choice among them.

    plan = make_plan(question, candidates)
    plan.choice                 # the cheapest that meets the SLO with 90 % confidence, or None

**The rule: choose the cheapest option whose low end (90 %, one-sided) serves the peak.** An option
is one of your machines as it is, rented machines, or both: the rented machines then take the load
above the low end of yours. The busiest hour decides how many machines there are. Rented machines
are paid for in the hours that need them, and owned machines cost their energy. Costs are step
functions of the rate, so the rates at which the choice changes are found by search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from crossover.models import formatting
from crossover.reports.devices.device_capacity import CapacityGrade, Certainty, DeviceCapacity
from crossover.reports.devices.device_catalog import find_device
from crossover.reports.devices.device_step_times import NOT_CALIBRATED
from crossover.reports.devices.load_seconds import predicted_load_seconds
from crossover.reports.plan.cold_start import Bridge, ColdStart, cold_start
from crossover.reports.plan.load_forecast import HOURS_A_MONTH, Forecast, Load
from crossover.reports.plan.plan_file import Question
from crossover.serving.capacity.binding_limit import BindingLimit
from crossover.serving.capacity.slo import Slo

MAX_ROWS = 6
MAX_CURVES = 4
MANY_MACHINES = 10**9  # stands for any number of them
COUNT_ROUNDING = 1e-9  # of a machine: 2.0000000001 machines are 2
# A change of the choice is searched from the forecast's rate up to 64 times that rate, and down to
# 1/64 of it, in steps of 2 %.
MAX_FACTOR = 64.0
FACTOR_STEP = 1.02
# A cost curve has 120 points on either side of the forecast's rate, up to 4 times and down to 1/4.
CURVE_POINTS = 120
CURVE_FACTOR = 4.0
CERTAINTY_ORDER: tuple[Certainty, ...] = ("yes", "perhaps", "no")
GRADE_ORDER: tuple[CapacityGrade, ...] = ("confirmed", "estimated", "predicted")
OptionKind = Literal["as it is", "more of it", "rented", "it and rented"]


class Candidate(DeviceCapacity, frozen=True, kw_only=True):
    """A machine, or one device of a machine, with the capacity of one of it (requests/s)."""

    owned: int = 0  # how many of these machines you have
    price_date: str = ""
    is_paid: bool = True  # owned machines cost only their energy; False: they are rented
    is_list_price: bool = False  # the price is that of its GPU, since none was given
    gpu_name: str = ""  # the machine's GPU; "": it has none
    label: str = ""  # title of its row, such as `your GPU`; "": the machine's name
    binding: BindingLimit | None = None  # None: not known, or the capacity is predicted
    load_seconds: float | None = None  # measured: how long it takes to load the model
    # Devices of one machine that serve together: the first serves up to its low end, the next takes
    # the load above it. (): the candidate is one device, or serves as a whole.
    parts: tuple[Candidate, ...] = ()

    @property
    def rent_per_month(self) -> float | None:
        """Rent of the machines that you have, in dollars a month; None: no price is known."""
        if self.is_paid:
            return 0.0
        price = self.dollars_per_hour
        return None if price is None else price * self.owned * HOURS_A_MONTH

    @property
    def is_uncalibrated(self) -> bool:
        """Whether this is a CPU that was never measured, so that its capacity is unknown."""
        return self.reason == NOT_CALIBRATED

    def certainty_at(self, rate: float, count: int) -> Certainty:
        """Return with which certainty `count` of these machines serve `rate` requests/s."""
        if (self.low or 0.0) * count >= rate:
            return "yes"
        if self.is_uncalibrated or (self.high or 0.0) * count >= rate:
            return "perhaps"
        return "no"

    def kwh_per_month(self, loads: Sequence[Load], max_machines: float = math.inf) -> float | None:
        """Return the energy that serving takes: power under load for the share of time at work.

        `max_machines`: how many machines can be at work at the same time. None: the power or the
        capacity is not known.
        """
        if self.parts:
            return self._kwh_of_parts(loads)
        capacity = self.rate or self.high
        if self.watts is None or not capacity:
            return None
        machine_hours = sum(min(max_machines, load.rate / capacity) * load.hours for load in loads)
        return self.watts * machine_hours / 1000

    def _kwh_of_parts(self, loads: Sequence[Load]) -> float | None:
        """Return the energy of devices that serve together: each takes the load up to its low end,
        and the last one takes what is left."""
        total_kwh = 0.0
        remaining_loads = list(loads)
        for part in self.parts:
            max_rate = math.inf if part is self.parts[-1] else (part.low or 0.0) * self.owned
            kwh = part.kwh_per_month([load.up_to(max_rate) for load in remaining_loads])
            if kwh is None:
                return None
            total_kwh += kwh
            remaining_loads = [load.above(max_rate) for load in remaining_loads]
        return total_kwh


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the plan. Dollars and kWh are of a month."""

    kind: OptionKind
    machine: str
    # The machine that is rented for the load above the low end of `machine`; "": none.
    machine_above: str = msgspec.field(name="above", default="")
    certainty: Certainty = msgspec.field(name="suffices")  # that it meets the SLO
    machines: int | None  # in the busiest hour, spares included; None: no number suffices
    dollars: float | None  # for enough machines with 90 % confidence; None: a price is unknown
    dollars_low: float | None = None  # if each rented machine reaches the high end of its interval
    kwh: float | None = None  # None: the power of a machine is not known
    energy_unknown: bool = False  # `dollars` lacks the energy of owned machines of unknown power
    grade: CapacityGrade = msgspec.field(name="known_by")  # of its capacity
    note: str = ""
    # What a reader must know of the prediction of the rented machine, as phrases.
    notes: tuple[str, ...] = ()
    label: str = ""  # Candidate.label of the machine that you have

    @property
    def is_sure(self) -> bool:
        """Whether the option meets the SLO with 90 % confidence and its cost is known."""
        return self.certainty == "yes" and self.dollars is not None

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the option, whatever the number of machines."""
        return self.kind, self.machine, self.machine_above

    @property
    def title(self) -> str:
        """The title of the option's row."""
        if self.label and self.kind == "as it is":
            return self.label
        if self.label and self.kind == "it and rented":
            return self.title_with(self.label.removesuffix(" alone"))
        return self.title_with(self.machine)

    def title_with(self, machine: str) -> str:
        """Return the title with another name for the machine: `your machine as it is`."""
        match self.kind:
            case "as it is":
                return f"{machine} as it is"
            case "more of it":
                return f"more of {machine}"
            case "it and rented":
                return f"{machine} + {self.machine_above} above it"
        return self.machine


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of the busiest hour above (or below) which the plan chooses another option."""

    rate: float  # requests/s
    is_above: bool
    option: Option | None  # None: no option meets the SLO there with 90 % confidence


class CurvePoint(NamedTuple):
    """What an option costs at a rate."""

    peak_rate: float  # requests/s of the busiest hour
    dollars: float  # a month


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a plan file. `options` are all options, `rows` the six or fewer to show; both
    begin with the choice."""

    kind: Literal["crossover-plan"] = "crossover-plan"
    version: int = 4
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
    cold_starts: tuple[ColdStart, ...] = ()  # of the machines to show, if the plan file asks for it
    # Title of an option -> its cost curve.
    cost_curves: dict[str, list[CurvePoint]] = {}

    @property
    def choice(self) -> Option | None:
        """The cheapest option that meets the SLO with 90 % confidence; None: there is none."""
        return _choice(self.options)

    @property
    def rows(self) -> tuple[Option, ...]:
        """The options to show, the choice first."""
        return _rows(self.options)


def make_plan(question: Question, candidates: Sequence[Candidate]) -> Plan:
    """Return the plan. Its options are ordered by certainty, then by cost."""
    options = ordered_options(question, candidates, question.forecast)
    return Plan(
        name=question.keys.name,
        model=question.spec.name,
        weight_format=question.weight_format,
        gpu_format=question.gpu_format,
        lengths=question.lengths,
        slo=question.slo,
        peak_rate=question.forecast.peak_rate,
        mean_rate=question.forecast.mean_rate,
        spares=question.keys.spares,
        options=tuple(options),
        changes=tuple(_changes(question, candidates, _choice(options))),
        unknown=tuple(_unknown(candidates, options)),
        binding={
            device.name: device.binding
            for device in _devices(candidates)
            if device.binding is not None
        },
        price_date=min(
            (candidate.price_date for candidate in candidates if candidate.price_date), default=""
        ),
        cold_starts=tuple(_cold_starts(question, candidates, _rows(options))),
        cost_curves=_cost_curves(question, candidates, _rows(options)[:MAX_CURVES]),
    )


def _devices(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the machines; a machine whose devices serve together is replaced by its devices."""
    for candidate in candidates:
        yield from candidate.parts or (candidate,)


def _rows(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options to show, in their order: your machines as they are (for a machine with a
    CPU and a GPU each device, and both together), more of them, and the cheapest option with rented
    machines above yours. The cheapest rented machines fill the other rows, up to MAX_ROWS.
    """
    as_it_is = [option for option in options if option.kind == "as it is"]
    # More of an option with a label is not shown: it is only one device of your machine.
    own_rows = [
        option
        for option in options
        if option.kind == "as it is" or (option.kind == "more of it" and option.label == "")
    ]
    # Your machines have two rows together, or one each if these are more.
    own_rows = own_rows[: max(2, len(as_it_is))]
    own_and_rented_rows = [option for option in options if option.kind == "it and rented"][:1]
    free_rows = MAX_ROWS - len(own_rows) - len(own_and_rented_rows)
    rented_rows = [option for option in options if option.kind == "rented"][:free_rows]
    shown = [*own_rows, *own_and_rented_rows, *rented_rows]
    return tuple(option for option in options if option in shown)


def ordered_options(
    question: Question, candidates: Sequence[Candidate], forecast: Forecast
) -> list[Option]:
    """Return all options under a forecast, the choice first."""

    def rank(option: Option) -> tuple[int, bool, float, int]:
        """By certainty, then by cost (a known one before an unknown one), then by grade."""
        return (
            CERTAINTY_ORDER.index(option.certainty),
            option.dollars is None,
            option.dollars or 0.0,
            GRADE_ORDER.index(option.grade),
        )

    return sorted(_options(question, candidates, forecast), key=rank)


def _options(
    question: Question, candidates: Sequence[Candidate], forecast: Forecast
) -> Iterator[Option]:
    """Yield all options under a forecast, unordered."""
    own_machines = [candidate for candidate in candidates if candidate.owned]
    rentable_machines = [candidate for candidate in candidates if not candidate.owned]
    for machine in own_machines:
        as_it_is = _as_it_is(question, machine, forecast)
        yield as_it_is
        if as_it_is.certainty != "yes" and not machine.parts:
            yield _with_rented(question, "more of it", machine, machine, forecast)
    for machine in rentable_machines:
        yield _with_rented(question, "rented", None, machine, forecast)
    for own in own_machines:
        if own.low and own.certainty_at(forecast.peak_rate, own.owned) != "yes":
            for rented in rentable_machines:
                if rented.low:
                    yield _with_rented(question, "it and rented", own, rented, forecast)


def _as_it_is(question: Question, machine: Candidate, forecast: Forecast) -> Option:
    """Return the option to serve with the machines that you have and no others."""
    kwh = machine.kwh_per_month(forecast.loads, machine.owned)
    count = max(0, machine.owned - question.keys.spares)
    served_rate = formatting.rate((machine.low or 0.0) * count, like=forecast.peak_rate)
    energy_dollars = (kwh or 0.0) * question.keys.dollars_per_kwh if machine.is_paid else 0.0
    rent_dollars = machine.rent_per_month
    return Option(
        kind="as it is",
        machine=machine.name,
        certainty=machine.certainty_at(forecast.peak_rate, count),
        machines=machine.owned,
        dollars=None if rent_dollars is None else rent_dollars + energy_dollars,
        kwh=kwh,
        energy_unknown=kwh is None and machine.is_paid,
        grade=machine.grade,
        note=machine.reason or (f"serves {served_rate}" if machine.low else ""),
        notes=machine.notes,
        label=machine.label,
    )


def _with_rented(
    question: Question,
    kind: OptionKind,
    own: Candidate | None,
    rented: Candidate,
    forecast: Forecast,
) -> Option:
    """Return the option to rent machines by the hour.

    Your `own` machines serve up to their low end and the rented ones the load above it; without own
    machines (None) the rented ones serve everything. For the kind "more of it", `rented` is `own`:
    machines like yours are rented.
    """
    owned = 0 if own is None else own.owned
    own_rate = 0.0 if own is None else (own.low or 0.0) * owned
    own_loads = [load.up_to(own_rate) for load in forecast.loads]
    rented_loads = [load.above(own_rate) for load in forecast.loads]
    spares = question.keys.spares

    def rented_count(rate: float, machine_rate: float | None) -> int | None:
        """How many machines of `machine_rate` requests/s each are rented to serve `rate`, spares
        included; None: no number of them suffices."""
        if not machine_rate:
            return None
        if kind == "more of it":  # machines that you have may be the spares
            needed = math.ceil((rate + own_rate) / machine_rate - COUNT_ROUNDING)
            return max(0, needed + spares - owned)
        count = math.ceil(rate / machine_rate - COUNT_ROUNDING)
        return count + spares if count else 0

    def rent_per_month(machine_rate: float | None) -> float | None:
        """Rent in dollars; None: no number of machines suffices, or their price is not known."""
        machine_hours = 0.0
        for load in rented_loads:
            count = rented_count(load.rate, machine_rate)
            if count is None:
                return None
            machine_hours += count * load.hours
        if rented.dollars_per_hour is None:
            return None if machine_hours else 0.0
        return rented.dollars_per_hour * machine_hours

    busiest_rented_rate = rented_loads[0].rate
    sure_count = rented_count(busiest_rented_rate, rented.low)
    count = sure_count
    if sure_count is None:
        count = rented_count(busiest_rented_rate, rented.high)
    sure_rent = rent_per_month(rented.low or rented.high)
    min_rent = rent_per_month(rented.high) if rented.low else None

    own_kwh = 0.0 if own is None else own.kwh_per_month(own_loads, owned)
    rented_kwh = rented.kwh_per_month(rented_loads)
    own_rent = 0.0 if own is None else own.rent_per_month
    pays_own_energy = own is not None and own.is_paid
    energy_dollars = (own_kwh or 0.0) * question.keys.dollars_per_kwh if pays_own_energy else 0.0

    def total_dollars(rent: float | None) -> float | None:
        if rent is None or own_rent is None:
            return None
        return rent + energy_dollars + own_rent

    note = rented.reason
    if kind == "more of it" and sure_rent is None and count is not None:
        note = "its dollars_per_hour is unknown"
    return Option(
        kind=kind,
        machine=rented.name if own is None else own.name,
        machine_above=rented.name if kind == "it and rented" else "",
        certainty="yes" if sure_count is not None else rented.certainty_at(1.0, MANY_MACHINES),
        machines=None if count is None else count + owned,
        dollars=total_dollars(sure_rent),
        dollars_low=total_dollars(min_rent),
        kwh=None if own_kwh is None or rented_kwh is None else rented_kwh + own_kwh,
        energy_unknown=pays_own_energy and count is not None and own_kwh is None,
        grade=rented.grade,
        note=note,
        notes=rented.notes,
        label="" if own is None else own.label,
    )


def _choice(options: Sequence[Option]) -> Option | None:
    """Return the first of the ordered options, if it meets the SLO with 90 % confidence."""
    return options[0] if options and options[0].is_sure else None


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
            other = _choice(ordered_options(question, candidates, forecast.scaled(factor)))
            if _key(other) != _key(choice):
                yield Change(rate=forecast.peak_rate * factor, is_above=is_above, option=other)
                break


def _key(option: Option | None) -> tuple[str, str, str] | None:
    return None if option is None else option.key


def _cost_curves(
    question: Question, candidates: Sequence[Candidate], shown: Sequence[Option]
) -> dict[str, list[CurvePoint]]:
    """Return the curve of each shown option, by its title."""
    curves: dict[str, list[CurvePoint]] = {}
    shown_keys = {option.key for option in shown}
    for point in range(-CURVE_POINTS, CURVE_POINTS + 1):
        forecast = question.forecast.scaled(CURVE_FACTOR ** (point / CURVE_POINTS))
        for option in _options(question, candidates, forecast):
            if option.key in shown_keys and option.is_sure and option.dollars is not None:
                point_on_curve = CurvePoint(forecast.peak_rate, option.dollars)
                curves.setdefault(option.title, []).append(point_on_curve)
    return curves


def _cold_starts(
    question: Question, candidates: Sequence[Candidate], rows: Sequence[Option]
) -> Iterator[ColdStart]:
    """Yield what stopping does for each machine that is shown and whose time to load is known.
    While a rented machine starts, the one of yours that serves the highest rate is the bridge."""
    keys = question.keys.cold_start
    if keys is None:
        return
    bridges = [
        Bridge(candidate.name, candidate.low * candidate.owned)
        for candidate in candidates
        if candidate.owned and candidate.low
    ]
    bridge = max(bridges, key=lambda one: one.rate, default=None)
    by_name = {candidate.name: candidate for candidate in candidates}
    shown_names = [row.machine for row in rows if row.kind in ("rented", "as it is")]
    for candidate in (by_name[name] for name in dict.fromkeys(shown_names)):
        load_seconds = candidate.load_seconds
        if load_seconds is None:
            load_seconds = _predicted_load_seconds(question, candidate)
        machine_rate = candidate.low or candidate.high
        if load_seconds is None or not machine_rate:
            continue
        is_rented = not candidate.owned
        yield cold_start(
            candidate.name,
            load_seconds=load_seconds,
            is_measured=candidate.load_seconds is not None,
            machine_seconds=keys.machine_seconds if is_rented else 0.0,
            idle_seconds=keys.idle_minutes * 60,
            loads=question.forecast.loads,
            arrivals=question.keys.forecast.arrivals,
            machine_rate=machine_rate,
            dollars_per_hour=candidate.dollars_per_hour if is_rented else None,
            bridge=bridge if is_rented else None,
        )


def _predicted_load_seconds(question: Question, candidate: Candidate) -> float | None:
    """Return the predicted seconds to load the model on a rented device; None: not known."""
    device = find_device(candidate.device)
    if device is None or candidate.owned or question.keys.cold_start is None:
        return None
    return predicted_load_seconds(
        device,
        question.spec,
        question.gpu_format,
        candidate.devices,
        question.keys.cold_start.disk_gb_per_second,
    )


def _unknown(candidates: Sequence[Candidate], options: Sequence[Option]) -> Iterator[str]:
    """Yield the facts that would make the plan more certain, the easiest to find out first."""
    if not any(candidate.owned for candidate in candidates):
        yield "the capacity of your own machine (give it with --run or --machine)"
    for candidate in candidates:
        has_given_price = candidate.dollars_per_hour is not None and not candidate.is_list_price
        if candidate.owned and not candidate.is_paid and not has_given_price:
            yield _unknown_price(candidate)
            break
    choice = _choice(options)
    for candidate in candidates:
        if choice is None or candidate.name in (choice.machine, choice.machine_above):
            if candidate.grade == "predicted" and not candidate.is_uncalibrated:
                yield f"whether {candidate.name} reaches its predicted capacity"
            values = {"watts": candidate.watts, "dollars_per_hour": candidate.dollars_per_hour}
            missing_keys = [key for key, value in values.items() if value is None]
            if candidate.owned and candidate.is_paid and missing_keys:
                yield f"{' and '.join(missing_keys)} of {candidate.name}: keys of its [[machines]]"
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
