"""A plan as text: the choice as a sentence, a table of at most six options, and the rates at which
the choice changes.

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
from crossover.reports.plan.plan_costs import Option, Plan
from crossover.reports.render.cold_start_text import cold_start_sentences, cold_start_table
from crossover.serving.capacity.binding_limit import sentence_of

MIN_SHOWN_SPREAD = 0.2  # the cost at best is shown if it is lower by more than this share


def as_json(plan: Plan) -> str:
    """Return the plan as JSON: all options, changes and cost curves (docs/plan.md)."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def as_text(plan: Plan, columns: int = 100) -> str:
    """Return sentences and a table for a terminal."""
    console = Console(width=columns, no_color=True, highlight=False, markup=False)
    with console.capture() as output:
        console.print(choice_sentence(plan))
        console.print()
        console.print(terminal_table(_options(plan)))
        console.print()
        if plan.cold_starts:
            console.print(terminal_table(cold_start_table(plan.cold_starts)))
            for sentence in cold_start_sentences(plan.cold_starts):
                console.print(sentence)
            console.print()
        sentences = [*_bindings(plan), *_changes(plan), *_unknown(plan)]
        sentences += [*_notes(plan), "", *_explanations(plan)]
        for sentence in sentences:
            console.print(sentence)
    return output.get().rstrip()


def _title(plan: Plan, option: Option) -> str:
    """Return the title of an option: `your machine as it is`, by name if you have several."""
    your_machines = {other.machine for other in plan.options if other.kind != "rented"}
    if len(your_machines) > 1 or option.label:
        return option.title
    return option.title_with("your machine")


def _options(plan: Plan) -> Table:
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
    cost = f"${option.dollars:,.0f}"
    low = option.dollars_low
    if with_spread and low is not None and low < option.dollars * (1 - MIN_SHOWN_SPREAD):
        cost += f" (${low:,.0f} at best)"
    return cost + (" + energy" if option.energy_unknown else "")


def choice_sentence(plan: Plan) -> str:
    """Return the answer as one sentence."""
    load = f"{plan.model} at {formatting.requests(plan.peak_rate)} in the busiest hour"
    choice = plan.choice
    if choice is None and any(option.certainty == "yes" for option in plan.options):
        return f"No option that meets the SLO for {load} has a known price. Add it to [prices]."
    if choice is None:
        return f"No option meets the SLO for {load} with 90 % confidence."
    count = choice.machines or 1
    rented_machines = choice.machine if count == 1 else f"{count} x {choice.machine}"
    your_machine = f"Your machine ({choice.machine})"
    if choice.label:
        your_machine = f"{choice.label[:1].upper()}{choice.label[1:]} ({choice.machine})"
    subjects = {
        "as it is": your_machine if choice.label else f"{your_machine} as it is",
        "more of it": f"{count} machines like yours ({choice.machine})",
        "it and rented": f"{your_machine}, with {max(1, count - 1)} x {choice.machine_above} "
        "rented in the hours that exceed its capacity,",
        "rented": f"{rented_machines}, rented by the hour,",
    }
    verb = "serve" if choice.kind != "it and rented" and count > 1 else "serves"
    cost = f"{_cost(choice, with_spread=False)} a month, {choice.grade}"
    return f"{subjects[choice.kind]} {verb} {load}: {cost}."


def _changes(plan: Plan) -> Iterator[str]:
    """Yield the nearest rates at which another option is the choice."""
    for change in plan.changes:
        rate = formatting.of_requests(formatting.rate(change.rate, like=plan.peak_rate))
        side = f"{'Above' if change.is_above else 'Below'} {rate}"
        if change.option is None:
            yield f"{side}, no option meets the SLO with 90 % confidence."
        else:
            cost = _cost(change.option, with_spread=False)
            yield f"{side}, the choice is {_title(plan, change.option)} ({cost} a month)."


def _bindings(plan: Plan) -> Iterator[str]:
    """Yield the binding limit of each of your machines."""
    for machine, binding in plan.binding.items():
        yield f"{machine}: {sentence_of(binding)}"


def _unknown(plan: Plan) -> Iterator[str]:
    """Yield the first two facts that would make the plan more certain, as one sentence."""
    if plan.unknown:
        yield f"Unknown: {'; '.join(plan.unknown[:2])}."


def _notes(plan: Plan) -> Iterator[str]:
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


def _explanations(plan: Plan) -> Iterator[str]:
    """Yield what the words and numbers of the table mean."""
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
    yield (
        "Machines: in the busiest hour. Cost: for enough machines with 90 % confidence, rented in "
        f"the hours that need them{at_best}. Energy: while they compute."
    )
    if plan.price_date:
        yield f"List prices of {plan.price_date} or later."
