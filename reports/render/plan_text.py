"""A plan as text: the choice as a sentence, a table of options, and the rates at which the choice
changes.

print(as_text(plan, columns=100))
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console

from crossover.models import formatting
from crossover.models.tables import Column, Table, table_of, terminal_table
from crossover.reports.answers.headline import slo_words
from crossover.reports.devices.device_step_times import NOT_CALIBRATED
from crossover.reports.plan.break_even import BreakEven
from crossover.reports.plan.buy_or_rent import BuyOrRent
from crossover.reports.plan.later_months import MAX_MONTHS, Milestone
from crossover.reports.plan.plan_costs import CostPlan
from crossover.reports.plan.plan_options import Option
from crossover.reports.render.cold_start_text import cold_start_sentences, cold_start_table
from crossover.reports.render.mix_text import (
    alternatives_sentences,
    alternatives_table,
    mix_sentences,
    mix_table,
    model_sentences,
)
from crossover.serving.capacity.binding_limit import sentence_of

MIN_SHOWN_SPREAD = 0.2  # the cost at best is shown if it is lower by more than this share


def as_json(plan: CostPlan) -> str:
    """Return the plan as JSON: all options, changes and cost curves (docs/plan.md)."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def as_text(plan: CostPlan, columns: int = 100) -> str:
    """Return sentences and a table for a terminal."""
    console = Console(width=columns, no_color=True, highlight=False, markup=False)
    with console.capture() as output:
        console.print(choice_sentence(plan))
        console.print()
        for table, texts in (
            (options_table(plan), ()),
            (comparison_table(plan), ()),
            (
                cold_start_table(plan.cold_starts),
                cold_start_sentences(plan.cold_starts, plan.peak_rate),
            ),
            (mix_table(plan.mixes_to_show, plan.peak_rate), mix_sentences(plan)),
            (
                alternatives_table(plan.mix_alternatives),
                alternatives_sentences(plan.mix_alternatives),
            ),
        ):
            if table is not None and table.rows:
                console.print(terminal_table(table), *texts, sep="\n")
                console.print()
        for sentence in [*sentences(plan), "", *explanations(plan)]:
            console.print(sentence)
    return output.get().rstrip()


def sentences(plan: CostPlan) -> Iterator[str]:
    """Yield what a reader should know beside the tables, the most important first."""
    yield from _api(plan)
    yield from _purchase(plan)
    yield from _growth(plan)
    yield from _bindings(plan)
    yield from _changes(plan)
    yield from _unknown(plan)
    yield from _notes(plan)


def comparison_table(plan: CostPlan) -> Table | None:
    """Return a row for each option, and one for the API: from which rate on it costs less than the
    API, and what it costs over the years of the plan; None: the plan has neither."""
    evens = {even.option: even for even in plan.break_evens}
    columns: list[Column[Option | None]] = [
        Column("option", "text", lambda option: "  " + (_title(plan, option) if option else "API"))
    ]
    if plan.api is not None:
        columns += [
            Column(
                "less than the API from",
                "text",
                lambda option: _break_even_words(plan, evens.get(option.title)) if option else "",
                missing="-",
            ),
            Column(
                "busy then",
                "share",
                lambda option: _utilization(evens.get(option.title)) if option else None,
                missing="",
            ),
        ]
    if plan.years is not None:
        columns.append(
            Column(
                f"{plan.years:g} years",
                "number",
                lambda option: _total_words(plan.totals.get(option.title if option else "API")),
                missing="-",
            )
        )
    if len(columns) == 1:
        return None
    rows: list[Option | None] = [*plan.rows, *([None] if plan.api is not None else [])]
    return table_of(rows, *columns)


def _a_day(plan: CostPlan, peak_rate: float) -> str:
    """Return a rate of the busiest hour as the requests of a mean day: 64,000."""
    return formatting.significant(plan.requests_a_day(peak_rate), 2, whole=False)


def _break_even_words(plan: CostPlan, even: BreakEven | None) -> str | None:
    """Return the rates at which an option costs less than the API: `64,000 a day (41,000–90,000)`;
    None: its cost is not known."""
    if even is None:
        return None
    if even.rate is None:
        return "never" if even.low is None else f"never, or {_a_day(plan, even.low)} a day"
    start, end = even.ranges[0][0], even.ranges[-1][1]
    until = "" if end is None else f" to {_a_day(plan, end)}"
    if start == 0.0:
        return "the first request" + (f"{until} a day" if until else "")
    words = f"{_a_day(plan, start)}{until} a day"
    low = _a_day(plan, start if even.low is None else even.low)
    high = "never" if even.high is None else _a_day(plan, even.high)
    return words if low == high else f"{words} ({low}–{high})"


def _utilization(even: BreakEven | None) -> float | None:
    return None if even is None else even.utilization


def _total_words(dollars: float | None) -> str | None:
    return None if dollars is None else formatting.dollars(dollars)


def _api(plan: CostPlan) -> Iterator[str]:
    """Yield what the API costs, and where it costs less again than an option at a lower rate."""
    api = plan.api
    if api is None:
        return
    cached = "" if api.cached_input is None else f"{_price(api.cached_input)} cached, "
    prices = f"{_price(api.input)} in, {cached}{_price(api.output)} out per million tokens"
    dollars = api.dollars_per_month(plan.mean_rate)
    beside = ""
    if plan.choice is not None and plan.choice.dollars is not None:
        difference = dollars - plan.choice.dollars
        side = "more" if difference > 0 else "less"
        beside = f", {formatting.dollars(abs(difference))} {side} than the choice"
    yield (
        f"The API ({prices}) costs {formatting.dollars(dollars)} a month for this load{beside}: "
        f"${api.dollars_per_request * 1000:.2g} for 1,000 requests. Nobody measured whether it "
        "meets the SLO."
    )
    titles = {option.title: _title(plan, option) for option in plan.rows}
    for even in plan.break_evens:
        if len(even.ranges) > 1:
            (_, end), *_, (again, _) = even.ranges
            assert end is not None
            yield (
                f"{titles[even.option]}: from {_a_day(plan, end)} requests a day on, where a "
                "further machine is needed, the API can cost less again, up to "
                f"{_a_day(plan, again)}."
            )


def _price(dollars: float) -> str:
    """Return a price per million tokens: $0.60, $0.075."""
    return f"${dollars:.2f}" if round(dollars, 2) == dollars else f"${dollars:g}"


def _purchase(plan: CostPlan) -> Iterator[str]:
    """Yield whether buying or renting costs less, and the assumption on which that depends most."""
    answer = plan.purchase
    if answer is None:
        return
    dollars = {answer.bought: answer.bought_dollars, answer.rented: answer.rented_dollars}
    cheap, dear = sorted(dollars, key=lambda title: dollars[title])
    verb, other = ("Buying", "renting") if answer.is_buying_cheaper else ("Renting", "buying")
    terms = {option.title: option.terms for option in plan.options}
    names = {
        title: f"{title}, by the hour" if terms[title] == "by the hour" else title
        for title in dollars
    }
    yield (
        f"{verb} costs less than {other}: {formatting.dollars(dollars[cheap])} a month "
        f"({names[cheap]}), not {formatting.dollars(dollars[dear])} ({names[dear]}). "
        f"{_assumption_words(answer, other)}"
    )


def _assumption_words(answer: BuyOrRent, other: str) -> str:
    """Return what reverses the answer, as a sentence."""
    value, threshold = answer.value, answer.threshold
    if answer.assumption is None or value is None or threshold is None:
        return "No single assumption reverses this, even if it is wrong by a factor of 10."
    side = "less than" if threshold < value else "more than"

    def words(number: float) -> str:
        match answer.assumption:
            case "hours" | "residual_share":
                return formatting.share(number, 2)
            case "years":
                return f"{formatting.significant(number)} years"
            case "dollars_per_kwh":
                return f"${number:.2g}/kWh"
        return f"{formatting.dollars(number)} a month"

    conditions = {
        "hours": f"the machines are needed in {side} {words(threshold)} of the hours",
        "years": f"the machines are used for {side} {words(threshold)}",
        "residual_share": f"the machines are worth {side} {words(threshold)} of their price then",
        "dollars_per_kwh": f"energy costs {side} {words(threshold)}",
        "hosting": f"hosting costs {side} {words(threshold)}",
    }
    condition = conditions[answer.assumption]
    return (
        f"This depends most on one assumption: {other} costs less if {condition} (here "
        f"{words(value)})."
    )


def _growth(plan: CostPlan) -> Iterator[str]:
    """Yield in which months a growing load needs more."""
    growth = plan.growth
    if growth is None:
        return
    for number, milestone in enumerate(growth.milestones):
        clause = _milestone_clause(plan, milestone)
        if number:
            yield f"{clause[:1].upper()}{clause[1:]}."
        else:
            yield f"At {growth.percent_per_month:g} % more requests a month, {clause}."


def _milestone_clause(plan: CostPlan, milestone: Milestone) -> str:
    """Return what a milestone is, as a clause."""
    month, machine, option = milestone.month, milestone.machine, milestone.option
    rate = formatting.of_requests(formatting.rate(milestone.rate, like=plan.peak_rate))
    if milestone.kind == "further machine":
        if month is None or option is None:
            return f"no further machine is needed within {MAX_MONTHS} months"
        cost = f"{option.machines} machines, {_cost(option, with_spread=False)} a month"
        title = _title(plan, option)
        return f"a further machine is needed in month {month}, at {rate}: {title} ({cost})"
    if milestone.kind == "no choice":
        return (
            f"no option of a known price meets the SLO with 90 % confidence from month {month} on, "
            f"at {rate}"
        )
    if machine in {option.machine for option in plan.options if option.kind == "as it is"}:
        machine = your_machine(plan, machine)
    if month is None:
        return f"{machine} is enough for {MAX_MONTHS} months and more"
    if month == 0:
        return f"{machine} is not enough today"
    best = milestone.month_at_best
    at_best = "" if best is None or best <= month else f" (at best from month {best} on)"
    return f"{machine} is no longer enough from month {month} on, at {rate}{at_best}"


def _title(plan: CostPlan, option: Option) -> str:
    """Return the title of an option: `your machine as it is`, by name if you have several."""
    return option.title if option.label else option.title_with(your_machine(plan, option.machine))


def your_machine(plan: CostPlan, name: str) -> str:
    """Return the name of one of your machines: "your machine" if you have no other."""
    your_machines = {option.machine for option in plan.options if option.kind != "rented"}
    return name if len(your_machines) > 1 else "your machine"


def options_table(plan: CostPlan) -> Table:
    """Return a row for each option; a star marks the choice."""
    return table_of(
        plan.rows,
        Column(
            "option",
            "text",
            lambda option: f"{'*' if option == plan.choice else ' '} {_title(plan, option)}",
        ),
        Column("meets the SLO", "text", _certainty_words),
        Column("machines", "count", lambda option: option.machines, missing="-"),
        Column("$/month", "number", _cost),
        Column("kWh/month", "number", lambda option: option.kwh, missing="-"),
        Column(
            "basis",
            "text",
            lambda option: "not known" if option.note == NOT_CALIBRATED else option.grade,
        ),
    )


def _certainty_words(option: Option) -> str:
    """Return whether an option meets the SLO, and why not."""
    if option.note == NOT_CALIBRATED:
        return NOT_CALIBRATED
    if option.note and option.certainty != "yes":
        return f"{option.certainty} ({option.note})"
    return option.certainty


def _cost(option: Option, *, with_spread: bool = True) -> str:
    """Return `$96`, `$96 ($48 at best)`, `$0 + energy`, `price unknown` or `-`."""
    if option.dollars is None:
        return "-" if option.machines is None else "price unknown"
    cost = formatting.dollars(option.dollars)
    low = option.dollars_low
    if with_spread and low is not None and low < option.dollars * (1 - MIN_SHOWN_SPREAD):
        cost += f" ({formatting.dollars(low)} at best)"
    return cost + (" + energy" if option.energy_unknown else "")


def choice_sentence(plan: CostPlan) -> str:
    """Return the answer as one sentence."""
    load = f"{plan.model} at {formatting.requests(plan.peak_rate)} in the busiest hour"
    choice = plan.choice
    if choice is None and any(option.certainty == "yes" for option in plan.options):
        return f"No option that meets the SLO for {load} has a known price. Add it to [prices]."
    if choice is None:
        return f"No option meets the SLO for {load} with 90 % confidence."
    count = choice.machines or 1
    rented_machines = choice.machine if count == 1 else f"{count} x {choice.machine}"
    owned = next(
        (
            option.machines or 1
            for option in plan.options
            if option.kind == "as it is" and option.machine == choice.machine
        ),
        0,
    )
    your_machine = f"Your machine ({choice.machine})"
    if owned > 1:
        your_machine = f"Your {owned} machines ({choice.machine})"
    if choice.label:
        your_machine = f"{choice.label[:1].upper()}{choice.label[1:]} ({choice.machine})"
    how = {
        "by the hour": "rented by the hour",
        "reserved": "reserved for all hours",
        "spot": "rented on the spot market",
        "bought": "bought",
        None: "",
    }[choice.terms]
    its = "their" if owned > 1 else "its"
    above_how = f"{how} for the load above {its} capacity"
    if choice.terms == "by the hour":
        above_how = f"rented in the hours that exceed {its} capacity"
    subjects = {
        "as it is": your_machine
        if choice.label
        else f"{your_machine} as {'it is' if owned == 1 else 'they are'}",
        "more of it": f"{count} machines like yours ({choice.machine}), {how},",
        "it and rented": f"{your_machine}, with {max(1, count - owned)} x {choice.machine_above} "
        f"{above_how},",
        "rented": f"{rented_machines}, {how},",
    }
    is_plural = owned > 1 if choice.kind == "it and rented" else count > 1
    verb = "serve" if is_plural else "serves"
    cost = f"{_cost(choice, with_spread=False)} a month, {choice.grade}"
    return f"{subjects[choice.kind]} {verb} {load}: {cost}."


def _changes(plan: CostPlan) -> Iterator[str]:
    """Yield the nearest rates at which another option is the choice."""
    for change in plan.changes:
        rate = formatting.of_requests(formatting.rate(change.rate, like=plan.peak_rate))
        side = f"{'Above' if change.is_above else 'Below'} {rate}"
        if change.option is None:
            yield f"{side}, no option meets the SLO with 90 % confidence."
        else:
            cost = _cost(change.option, with_spread=False)
            yield f"{side}, the choice is {_title(plan, change.option)} ({cost} a month)."


def _bindings(plan: CostPlan) -> Iterator[str]:
    """Yield the binding limit of each of your machines."""
    for machine, binding in plan.binding.items():
        yield f"{machine}: {sentence_of(binding)}"


def _unknown(plan: CostPlan) -> Iterator[str]:
    """Yield the first two facts that would make the plan more certain, as one sentence."""
    if plan.unknown:
        yield f"Unknown: {'; '.join(plan.unknown[:2])}."


def _notes(plan: CostPlan) -> Iterator[str]:
    """Yield what a reader must know of predicted machines, each phrase once with its machines."""
    machines_by_note: dict[str, list[str]] = {}
    for option in plan.rows:
        for note in option.notes:
            machine = option.machine_above or option.machine
            machines = machines_by_note.setdefault(note, [])
            if machine not in machines:
                machines.append(machine)
    for note, machines in machines_by_note.items():
        yield f"{', '.join(machines)}: {note}."


def explanations(plan: CostPlan) -> Iterator[str]:
    """Yield what the words and numbers of the table mean."""
    if plan.models:
        yield from model_sentences(plan)
    else:
        formats = f"{plan.weight_format} on CPUs, {plan.gpu_format} on GPUs that were not measured"
        yield f"SLO: {slo_words(plan.slo)}. Lengths: {plan.lengths}. Weights: {formats}."
    yield (
        "Meets the SLO: yes, with at least 90 % confidence; perhaps, with 10 to 90 %. Basis: "
        "confirmed, a load level at this rate ran on it; estimated, simulated from times measured "
        "on it; predicted, from datasheets."
    )
    at_best = ""
    if any("at best" in _cost(option) for option in plan.rows):
        at_best = "; at best: if each rented machine reaches the high end of its interval"
    idle = ""
    if any(option.terms == "bought" or option.kind == "as it is" for option in plan.rows):
        idle = "; machines that you own or buy also while idle, if their idle_watts are given"
    yield (
        "Machines: in the busiest hour. Cost: for enough machines with 90 % confidence, rented in "
        f"the hours that need them{at_best}. Energy: while they compute{idle}."
    )
    yield from _cost_explanations(plan)
    if plan.price_date:
        yield f"List prices of {plan.price_date} or later."


def _cost_explanations(plan: CostPlan) -> Iterator[str]:
    """Yield what the costs of an API and of machines that are reserved, bought or yours contain."""
    api = plan.api
    if api is not None:
        even_words = [_break_even_words(plan, even) or "" for even in plan.break_evens]
        interval = ""
        if any("–" in words for words in even_words):
            interval = ", with the interval from the high end of the capacity to its low end"
        end = ""
        if any(" to " in words for words in even_words):
            end = ' After "to": the rate above which it costs more again or is no longer enough.'
        yield (
            f"Less than the API from: requests on a mean day{interval}.{end} Busy then: the share "
            "of the time that the machines work at that rate."
        )
    if api is not None and api.cached_tokens:
        tokens = f"{api.cached_tokens:.0f} of the {api.prompt_tokens:.0f} prompt tokens"
        price = "cached input" if api.cached_input is not None else "input: none is cached"
        yield f"API: on average {tokens} were sent before, and cost the price of {price}."
    terms = {option.terms for option in plan.rows}
    if "reserved" in terms:
        yield "Reserved: for all hours of the month."
    if "bought" in terms and plan.years is not None:
        residual = ""
        if plan.residual_share:
            residual = f", less {formatting.share(plan.residual_share, 2)} residual value"
        yield (
            f"Bought: the price{residual}, spread over {plan.years:g} years, with hosting and "
            f"energy at ${plan.dollars_per_kwh:g}/kWh{_pue_words(plan)}."
        )
    elif plan.pue > 1:
        yield f"Energy of your machines: ${plan.dollars_per_kwh:g}/kWh{_pue_words(plan)}."
    if plan.not_counted:
        yield f"Not counted: {'; '.join(plan.not_counted)}."


def _pue_words(plan: CostPlan) -> str:
    return f" times {plan.pue:g} (PUE)" if plan.pue > 1 else ""
