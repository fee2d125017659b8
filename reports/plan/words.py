"""A plan in words: the sentence for whoever pays, the table, what would change it, what to measure.

sentence(plan)     # "Rent 1 NVIDIA L4 all month: ..."
notes(plan)        # plain sentences, most important first
table(plan)        # columns and rows of text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from models import formatting
from models.formatting import model_title
from reports.plan.costs import Range
from reports.plan.options import Option
from reports.plan.ranking import Answer, Change, Plan, ToMeasure, tier
from reports.sentences import slo_words

UNKNOWN = "not known"
ENERGY_UNKNOWN = "its energy is not known (give `watts`)"
COLUMNS = (
    *("option", "known by", "holds, each", "$ a month", "$ a 1M output tokens", "kWh a month"),
    *("J an output token", "suffices"),
)
KINDS = (
    "Intervals are 90 %, of speed and price together; $ a month is the cost of what suffices "
    "with 90 % certainty. kWh is between the power for the time of the work at full load and "
    "for all hours, an estimate by rated power where nothing was measured. A machine that "
    "needs minutes to start is to be rented that much earlier."
)


def sentence(plan: Plan) -> str:
    """The first line: what to do, for how much, and how sure that is."""
    first = plan.answer
    if first is None:
        return f"Nothing that was looked at is sure to suffice: {_demand(plan)}.{_closest(plan)}"
    cost = f"{_money_with_interval(first.dollars_per_month)} a month"
    if first.dollars_per_month.certain is None:
        cost = ENERGY_UNKNOWN
    if first.without_energy_of:
        cost += f" without the energy of {formatting.listing(list(first.without_energy_of))}"
    kept = " with one machine down" if plan.spares == 1 else ""
    if plan.spares > 1:
        kept = f" with {plan.spares} machines down"
    action = _action(first)
    return (
        f"{action[:1].upper()}{action[1:]}, {cost}: the cheapest that serves "
        f"{_demand(plan)} with 90 % certainty{kept}."
    )


def _demand(plan: Plan) -> str:
    """`Llama-3.1-8B Q4_0 at 0.50 requests/s in the busiest hour (chat lengths; ...)`."""
    demand = plan.demand
    rate = f"{formatting.requests(demand.peak_rate)} in the busiest hour"
    if demand.months > 1 and demand.growth_per_month:
        last = formatting.requests(
            demand.peak_rate * (1 + demand.growth_per_month) ** (demand.months - 1)
        )
        rate += f", {last} in month {demand.months}"
    model = f"{model_title(plan.model)} {plan.weight_format}"
    if plan.gpu_format != plan.weight_format:
        model += f" ({plan.gpu_format} on GPUs)"
    return f"{model} at {rate} ({plan.lengths}; {slo_words(plan.slo)})"


def _closest(plan: Plan) -> str:
    """What might suffice, where nothing surely does."""
    vague = next((one for one in plan.options if tier(one) == 1), None)
    if vague is None:
        return ""
    cost = _money(vague.dollars_per_month.certain)
    return f" {title(vague)} for {cost} might, by a prediction to a factor of 3: calibrate it."


def _action(option: Option) -> str:
    """What to do, as the start of a sentence."""
    count = option.replicas.certain or 0
    devices = f"{count * option.devices_per_replica:.0f} x {option.machine}"
    match option.kind:
        case "as it is":
            return f"{option.machine} as it is suffices"
        case "more of these" if option.by is None:
            return f"Buy up to {devices} in all"
        case "mixed":
            return f"Keep {option.base} for the base and rent up to {devices} in the hours above it"
        case _ if option.by == "hour":
            return f"Rent up to {devices}, each in the hours that need it"
        case _:
            return f"Rent {devices} all month"


def title(option: Option) -> str:
    """An option in a table: `2 x NVIDIA L4, by the hour`."""
    count = option.replicas.certain if option.suffices else option.replicas.estimate
    machine = option.machine
    if option.devices_per_replica > 1:
        machine = f"({option.devices_per_replica} x {machine} together)"
    if count is None:
        return machine
    many = machine if count == 1 else f"{count:.0f} x {machine}"
    match option.kind:
        case "as it is":
            return f"{many}, as it is"
        case "mixed":
            base = f"{option.base_replicas} x {option.base}"
            return f"{option.base if option.base_replicas == 1 else base}, and up to {many} above"
        case _ if option.by == "hour":
            return f"up to {many}, by the hour"
        case _ if option.by == "month":
            return f"{many}, all month"
        case _:
            return f"{many}, bought"


def table(plan: Plan, most: int | None = None) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows of the options that have figures; `most`: only so many.

    Of a machine that can be rented in several ways, the cheapest.
    """
    shown: dict[tuple[str, str, str], Option] = {}
    for one in plan.options:
        if one.replicas.estimate is not None:
            shown.setdefault((one.kind, one.machine, one.base), one)
    return COLUMNS, [_row(one) for one in list(shown.values())[:most]]


def refused(plan: Plan) -> list[tuple[str, str]]:
    """Machines without figures, and why; each reason once."""
    found: dict[tuple[str, str], None] = {}
    for one in plan.options:
        if one.replicas.estimate is None:
            found.setdefault((one.machine, one.reason))
    return list(found)


def _row(one: Option) -> list[str]:
    known = f"{one.machine_kind} to a factor of 3" if one.is_order_of_magnitude else ""
    without = " + energy" if one.without_energy_of else ""
    return [
        title(one),
        known or one.machine_kind,
        formatting.rate_with_interval(
            one.capacity.estimate or None, one.capacity.low or None, one.capacity.high or None
        )
        if one.capacity.estimate
        else "at no rate",
        _money_with_interval(one.dollars_per_month) + without,
        _money_with_interval(one.dollars_per_million_tokens) + without,
        _with_interval(one.kwh_per_month),
        _with_interval(one.joules_per_token),
        suffices_words(one),
    ]


def suffices_words(one: Option) -> str:
    """`yes`, or why not; with the requests that miss the SLO where they were simulated."""
    if not one.suffices:
        months = f"; to month {one.months_held}" if one.months_held else ""
        return f"no: {one.reason}{months}"
    if one.is_order_of_magnitude:
        return "perhaps: not calibrated"
    if not one.bad_share:
        return "yes"
    hours = f", {one.bad_hours_per_month:.0f} h" if one.bad_hours_per_month else ""
    return f"yes; {formatting.share(one.bad_share, 2)} miss{hours}"


def notes(plan: Plan) -> list[str]:
    """What the table does not say: own machines, changes, measurements, rented CPUs, errors."""
    return [
        *plan.own_machines,
        *_own(plan),
        *_without_energy(plan),
        *map(_changed, plan.changes),
        *_measures(plan),
        *_offers(plan),
        KINDS,
    ]


def _own(plan: Plan) -> Iterator[str]:
    first = plan.answer
    for one in plan.options:
        if one.kind == "as it is" and one is not first and one.reason:
            until = f" It suffices to month {one.months_held}." if one.months_held else ""
            name = f"{one.machine[:1].upper()}{one.machine[1:]}"
            yield f"{name} alone does not suffice: it {one.reason}.{until}"


def _without_energy(plan: Plan) -> Iterator[str]:
    names = dict.fromkeys(name for one in plan.options for name in one.without_energy_of)
    if names:
        yield (
            f"Energy of {formatting.listing(list(names))} is in no cost, where `+ energy` stands: "
            "give its `watts`."
        )


def _changed(change: Change) -> str:
    match change.what:
        case "rate":
            where = f"{change.direction.capitalize()} {formatting.requests(change.value)}"
            return f"{where} in the busiest hour, {_answer(change.answer)}."
        case "price":
            return (
                f"{change.machine} would be as cheap at ${formatting.significant(change.value)} "
                "an hour."
            )
        case _:
            limits = "twice as long" if change.value > 1 else "half as long"
            return f"With limits {limits}, {_answer(change.answer)}."


def _answer(found: Answer) -> str:
    if found.machine is None:
        return "nothing that was looked at is sure to suffice"
    cost = f"{_money(found.dollars_per_month)} a month"
    if found.kind == "as it is":
        if found.dollars_per_month is None:
            return f"{found.machine} as it is suffices; {ENERGY_UNKNOWN}"
        return f"{found.machine} as it is suffices ({cost})"
    if found.kind == "mixed":
        return f"{found.base} with {found.machine} above it is the cheapest ({cost})"
    devices = (found.replicas or 0) * found.devices_per_replica
    return f"{devices:.0f} x {found.machine} is the cheapest ({cost})"


def _measures(plan: Plan) -> Iterator[str]:
    for one in plan.to_measure:
        saved = one.saves_dollars_per_month
        gain = "could make it suffice" if saved is None else f"could save {_money(saved)} a month"
        yield f"To be surer: {_how(one)} {gain}."


def _how(one: ToMeasure) -> str:
    if one.is_owned:
        return f"`crossover campaign run` on {one.machine}"
    if one.machine_kind == "predicted" and one.is_cpu:
        return f"`crossover calibrate` on {one.machine} (a minute)"
    if one.machine_kind == "predicted":
        return f"a campaign against an hour of {one.machine} (`[target]`)"
    return f"`crossover campaign run` on {one.machine}"


def _offers(plan: Plan) -> Iterator[str]:
    """Whether a rented CPU could win by its bandwidth."""
    cpu = next((one for one in plan.offers if one.is_cpu), None)
    other = next((one for one in plan.offers if not one.is_cpu), None)
    if cpu is None or other is None:
        return
    ours, theirs = (one.gb_per_second_per_dollar_hour for one in (cpu, other))
    if theirs > ours:
        yield (
            f"A rented CPU does not win by bandwidth: a dollar an hour rents {ours:.0f} GB/s of "
            f"{cpu.machine}, the most among CPUs, and {theirs:.0f} GB/s of {other.machine}. It "
            "wins where it is there and idle, or where one slow stream is enough."
        )
    else:
        yield (
            f"By bandwidth a rented CPU wins here: a dollar an hour rents {ours:.0f} GB/s of "
            f"{cpu.machine}, and {theirs:.0f} GB/s of {other.machine}."
        )


# ---------------------------------------------------------------- numbers


def _money(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"${formatting.significant(value, 3 if value >= 1 else 2)}"


def _money_with_interval(found: Range) -> str:
    """What surely suffices costs, and the interval of what it takes."""
    value = found.certain if found.certain is not None else found.estimate
    if value is None:
        return UNKNOWN
    if found.low is None or (found.low == found.high == value):
        return _money(value)
    high = "more" if found.high is None else _money(found.high)
    return f"{_money(value)} ({_money(found.low)}–{high.removeprefix('$')})"


def _with_interval(found: Range) -> str:
    if found.certain is None and found.estimate is None:
        return UNKNOWN
    value = found.certain if found.certain is not None else found.estimate
    ends = formatting.interval(found.low or None, found.high or None)
    return f"{formatting.significant(value or 0.0)} ({ends})"
