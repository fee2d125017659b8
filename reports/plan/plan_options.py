"""The options that serve a forecast: machines, the terms they are paid for, and their cost.

    options = ordered_options(question, candidates, forecast)
    choice_of(options)          # the cheapest that meets the SLO with 90 % confidence, or None

An option is one of your machines as it is, further machines of one kind, or both: the further
machines then take the load above the low end of yours. The busiest hour decides how many machines
there are. Machines are paid for by their terms:

    by the hour   a price for each hour that needs the machine
    spot          likewise, cheaper; the machine can be taken away, so the option is never sure
    reserved      a price for every hour of the month
    bought        price less residual value, spread evenly over the years of use; hosting; energy

Machines that you have cost their energy, or their rent for the whole month.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from crossover.models import formatting
from crossover.reports.devices.device_capacity import CapacityGrade, Certainty, DeviceCapacity
from crossover.reports.devices.device_step_times import NOT_CALIBRATED
from crossover.reports.plan.load_forecast import HOURS_A_MONTH, Forecast, Load
from crossover.reports.plan.plan_file import Question
from crossover.serving.capacity.binding_limit import BindingLimit

MANY_MACHINES = 10**9  # stands for any number of them
COUNT_ROUNDING = 1e-9  # of a machine: 2.0000000001 machines are 2
CERTAINTY_ORDER: tuple[Certainty, ...] = ("yes", "perhaps", "no")
GRADE_ORDER: tuple[CapacityGrade, ...] = ("confirmed", "estimated", "predicted")
OptionKind = Literal["as it is", "more of it", "rented", "it and rented"]
Terms = Literal["by the hour", "reserved", "spot", "bought"]
SPOT_NOTE = "can be taken away"


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """What buying one machine costs."""

    dollars: float
    years: float  # of use
    residual_share: float = 0.0  # of the price, which the machine is worth after these years
    hosting_dollars_per_month: float | None = None  # None: not known, and not counted

    @property
    def dollars_per_month(self) -> float:
        """The loss of value, spread evenly over the years of use, and hosting; without energy."""
        lost_value = self.dollars * (1 - self.residual_share)
        return lost_value / (12 * self.years) + (self.hosting_dollars_per_month or 0.0)


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
    reserved_dollars_per_hour: float | None = None
    spot_dollars_per_hour: float | None = None
    purchase: Purchase | None = None  # None: it cannot be bought
    idle_watts: float | None = None  # None: not known, so the energy of idle hours is not counted
    # In a plan for several models: what the machine serves of each of them by itself, with as many
    # devices as that takes.
    unshared: tuple[DeviceCapacity, ...] = ()

    def with_one_model(self, index: int, *, owned: int) -> Candidate:
        """Return so many of these machines with one of several models, at the same prices for each
        device."""
        capacity = self.unshared[index]
        ratio = capacity.devices / self.devices

        def times(value: float | None) -> float | None:
            return None if value is None else value * ratio

        purchase = self.purchase
        if purchase is not None:
            purchase = msgspec.structs.replace(
                purchase,
                dollars=purchase.dollars * ratio,
                hosting_dollars_per_month=times(purchase.hosting_dollars_per_month),
            )
        return msgspec.structs.replace(
            self,
            owned=owned,
            devices=capacity.devices,
            low=capacity.low,
            rate=capacity.rate,
            high=capacity.high,
            grade=capacity.grade,
            reason=capacity.reason,
            notes=capacity.notes,
            dollars_per_hour=times(self.dollars_per_hour),
            reserved_dollars_per_hour=times(self.reserved_dollars_per_hour),
            spot_dollars_per_hour=times(self.spot_dollars_per_hour),
            watts=times(self.watts),
            idle_watts=times(self.idle_watts),
            purchase=purchase,
            models=(),
            unshared=(),
        )

    @property
    def all_terms(self) -> tuple[Terms, ...]:
        """The terms on which further machines like this one are to be had. "by the hour" is one of
        them if no price of any terms is known."""
        prices: dict[Terms, object] = {
            "by the hour": self.dollars_per_hour,
            "reserved": self.reserved_dollars_per_hour,
            "spot": self.spot_dollars_per_hour,
            "bought": self.purchase,
        }
        known = tuple(terms for terms, price in prices.items() if price is not None)
        return known or ("by the hour",)

    def dollars_for(self, terms: Terms, counts: Sequence[tuple[int, float]]) -> float | None:
        """Return what machines cost a month on these terms, without energy; None: no price is
        known. `counts`: how many machines are needed for how many hours of the month."""
        most = max(count for count, _ in counts)
        if not most:
            return 0.0
        if terms == "bought":
            return None if self.purchase is None else most * self.purchase.dollars_per_month
        if terms == "reserved":
            price, machine_hours = self.reserved_dollars_per_hour, most * HOURS_A_MONTH
        else:
            price = self.spot_dollars_per_hour if terms == "spot" else self.dollars_per_hour
            machine_hours = sum(count * hours for count, hours in counts)
        return None if price is None else price * machine_hours

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

    def kwh_per_month(
        self, loads: Sequence[Load], max_machines: float = math.inf, standing: int = 0
    ) -> float | None:
        """Return the energy that serving takes: power under load for the share of time at work.

        `max_machines`: how many machines can be at work at the same time. `standing`: how many are
        on all month, and take `idle_watts`, if it is known, while they do not work. None: the power
        or the capacity is not known.
        """
        if self.parts:
            return self._kwh_of_parts(loads)
        capacity = self.rate or self.high
        if self.watts is None or not capacity:
            return None
        machine_hours = sum(min(max_machines, load.rate / capacity) * load.hours for load in loads)
        idle_hours = max(0.0, standing * HOURS_A_MONTH - machine_hours)
        return (self.watts * machine_hours + (self.idle_watts or 0.0) * idle_hours) / 1000

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


OptionKey = tuple[OptionKind, Terms | None, str, str]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the plan. Dollars and kWh are of a month."""

    kind: OptionKind
    terms: Terms | None = None  # of the machines that are not yours; None: there are none
    machine: str
    # The machine that takes the load above the low end of `machine`; "": none.
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
    # The share of the month in which the further machines of the busiest hour are needed.
    needed_share: float | None = None
    label: str = ""  # Candidate.label of the machine that you have

    @property
    def is_sure(self) -> bool:
        """Whether the option meets the SLO with 90 % confidence and its cost is known."""
        return self.certainty == "yes" and self.dollars is not None

    @property
    def key(self) -> OptionKey:
        """What identifies the option, whatever the number of machines."""
        return self.kind, self.terms, self.machine, self.machine_above

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
        on_terms = "" if self.terms == "by the hour" else f", {self.terms}"
        match self.kind:
            case "as it is":
                return f"{machine} as it is"
            case "more of it":
                return f"more of {machine}{on_terms}"
            case "it and rented":
                return f"{machine} + {self.machine_above} above it{on_terms}"
        return f"{self.machine}{on_terms}"


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

    return sorted(options_of(question, candidates, forecast), key=rank)


def options_of(
    question: Question, candidates: Sequence[Candidate], forecast: Forecast
) -> Iterator[Option]:
    """Yield all options under a forecast, unordered."""
    own_machines = [candidate for candidate in candidates if candidate.owned]
    further_machines = [candidate for candidate in candidates if not candidate.owned]
    for machine in own_machines:
        as_it_is = _as_it_is(question, machine, forecast)
        yield as_it_is
        if as_it_is.certainty != "yes" and not machine.parts:
            for terms in machine.all_terms:
                yield _with_further(question, "more of it", terms, machine, machine, forecast)
    for machine in further_machines:
        for terms in machine.all_terms:
            yield _with_further(question, "rented", terms, None, machine, forecast)
    for own in own_machines:
        if own.low and own.certainty_at(forecast.peak_rate, own.owned) != "yes":
            for machine in further_machines:
                for terms in machine.all_terms if machine.low else ():
                    yield _with_further(question, "it and rented", terms, own, machine, forecast)


def dollars_of(
    question: Question, candidates: Sequence[Candidate], key: OptionKey, forecast: Forecast
) -> float | None:
    """Return what an option costs a month under a forecast. While your machine suffices, options
    with further machines cost what it costs.

    None: the option does not serve the forecast with 90 % confidence, or a price or the power of a
    machine is not known.
    """
    kind, _, machine, machine_above = key
    involved = [one for one in candidates if one.name in (machine, machine_above)]
    options = {option.key: option for option in options_of(question, involved, forecast)}
    option = options.get(key)
    if option is None and kind in ("more of it", "it and rented"):
        option = options.get(("as it is", None, machine, ""))
    return option.dollars if option and option.is_sure and not option.energy_unknown else None


def _as_it_is(question: Question, machine: Candidate, forecast: Forecast) -> Option:
    """Return the option to serve with the machines that you have and no others."""
    kwh = machine.kwh_per_month(forecast.loads, machine.owned, standing=machine.owned)
    count = max(0, machine.owned - question.keys.spares)
    served_rate = formatting.rate((machine.low or 0.0) * count, like=forecast.peak_rate)
    energy_dollars = (kwh or 0.0) * question.dollars_per_kwh if machine.is_paid else 0.0
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


def _with_further(
    question: Question,
    kind: OptionKind,
    terms: Terms,
    own: Candidate | None,
    further: Candidate,
    forecast: Forecast,
) -> Option:
    """Return the option to rent or buy machines.

    Your `own` machines serve up to their low end and the `further` ones the load above it; without
    own machines (None) the further ones serve everything. For the kind "more of it", `further` is
    `own`: machines like yours are rented or bought.
    """
    owned = 0 if own is None else own.owned
    own_rate = 0.0 if own is None else (own.low or 0.0) * owned
    own_loads = [load.up_to(own_rate) for load in forecast.loads]
    further_loads = [load.above(own_rate) for load in forecast.loads]
    spares = question.keys.spares

    def further_count(rate: float, machine_rate: float | None) -> int | None:
        """How many machines of `machine_rate` requests/s each serve `rate`, spares included; None:
        no number of them suffices."""
        if not machine_rate:
            return None
        if kind == "more of it":  # machines that you have may be the spares
            needed = math.ceil((rate + own_rate) / machine_rate - COUNT_ROUNDING)
            return max(0, needed + spares - owned)
        count = math.ceil(rate / machine_rate - COUNT_ROUNDING)
        if own is None and rate > 0:  # above own machines, so little may be a rounding error
            count = max(1, count)
        return count + spares if count else 0

    def counts_with(machine_rate: float | None) -> list[tuple[int, float]] | None:
        """How many further machines are needed for how many hours of the month; None: no number of
        them suffices."""
        counts: list[tuple[int, float]] = []
        for load in further_loads:
            count = further_count(load.rate, machine_rate)
            if count is None:
                return None
            counts.append((count, load.hours))
        return counts

    busiest_further_rate = further_loads[0].rate
    sure_count = further_count(busiest_further_rate, further.low)
    count = sure_count
    if sure_count is None:
        count = further_count(busiest_further_rate, further.high)
    counts = counts_with(further.low or further.high)
    counts_at_best = counts_with(further.high) if further.low else None
    sure_dollars = None if counts is None else further.dollars_for(terms, counts)
    min_dollars = None if counts_at_best is None else further.dollars_for(terms, counts_at_best)

    own_kwh = 0.0 if own is None else own.kwh_per_month(own_loads, owned, standing=owned)
    is_bought = terms == "bought"
    standing = (count or 0) if is_bought else 0
    further_kwh = further.kwh_per_month(further_loads, standing=standing)
    own_rent = 0.0 if own is None else own.rent_per_month
    pays_own_energy = own is not None and own.is_paid
    paid_kwh = (own_kwh if pays_own_energy else 0.0, further_kwh if is_bought else 0.0)
    energy_dollars = sum(kwh or 0.0 for kwh in paid_kwh) * question.dollars_per_kwh

    def total_dollars(dollars: float | None) -> float | None:
        if dollars is None or own_rent is None:
            return None
        return dollars + energy_dollars + own_rent

    certainty: Certainty = "yes"
    if sure_count is None:
        certainty = further.certainty_at(1.0, MANY_MACHINES)
    note = further.reason
    if certainty == "yes" and terms == "spot" and count:
        certainty = "perhaps"
        note = SPOT_NOTE
    if kind == "more of it" and sure_dollars is None and count is not None:
        note = "its dollars_per_hour is unknown"
    return Option(
        kind=kind,
        terms=terms,
        machine=further.name if own is None else own.name,
        machine_above=further.name if kind == "it and rented" else "",
        certainty=certainty,
        machines=None if count is None else count + owned,
        dollars=total_dollars(sure_dollars),
        dollars_low=total_dollars(min_dollars),
        kwh=None if own_kwh is None or further_kwh is None else further_kwh + own_kwh,
        energy_unknown=count is not None and None in paid_kwh,
        grade=further.grade,
        note=note,
        notes=further.notes,
        needed_share=_needed_share(counts) if counts else None,
        label="" if own is None else own.label,
    )


def _needed_share(counts: Sequence[tuple[int, float]]) -> float | None:
    """Return in which share of the month the machines of the busiest hour are needed, on
    average."""
    most = max(count for count, _ in counts)
    needed_hours = sum(count * hours for count, hours in counts)
    return needed_hours / (most * HOURS_A_MONTH) if most else None


def choice_of(options: Sequence[Option]) -> Option | None:
    """Return the first of the ordered options, if it meets the SLO with 90 % confidence."""
    return options[0] if options and options[0].is_sure else None
