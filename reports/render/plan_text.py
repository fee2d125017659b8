"""A plan as text: a sentence, a table of at most six rows, and what would change the choice.

print(as_text(plan, columns=100))
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from crossover.models import formatting
from crossover.reports.answers.headline import slo_words
from crossover.reports.devices.device_step_times import NOT_CALIBRATED
from crossover.reports.plan.plan_costs import Option, Plan
from crossover.serving.capacity.binding_limit import sentence_of

SHOWN_SPREAD = 0.2  # of the cost; a smaller spread is not shown
HEADS = ("option", "meets the SLO", "machines", "$/month", "kWh/month", "basis")


def as_json(plan: Plan) -> str:
    """Return the plan as JSON: all options, changes and cost curves (docs/plan.md)."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def as_text(plan: Plan, columns: int = 100) -> str:
    """Return sentences and a table for a terminal."""
    console = Console(width=columns, no_color=True, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEADS:
        table.add_column(name, justify="right" if name in HEADS[2:5] else "left")
    for option in plan.rows:
        table.add_row(*_row(plan, option))
    with console.capture() as said:
        console.print(choice_sentence(plan))
        console.print()
        console.print(table)
        console.print()
        for sentence in (
            *_bindings(plan),
            *_changes(plan),
            *_unknown(plan),
            "",
            *_fine_print(plan),
        ):
            console.print(sentence)
    return said.get().rstrip()


def _title(plan: Plan, option: Option) -> str:
    """Return the title of an option: `your machine as it is`, by name if you have several."""
    yours = {one.machine for one in plan.options if one.kind != "rented"}
    return option.title if len(yours) > 1 or option.label else option.called("your machine")


def _row(plan: Plan, option: Option) -> tuple[str, ...]:
    suffices = str(option.suffices)
    if option.note and suffices != "yes":
        suffices += f" ({option.note})"
    return (
        f"{'*' if option == plan.choice else ' '} {_title(plan, option)}",
        NOT_CALIBRATED if option.note == NOT_CALIBRATED else suffices,
        "-" if option.machines is None else str(option.machines),
        _cost(option),
        "-" if option.kwh is None else formatting.significant(option.kwh),
        "not known" if option.note == NOT_CALIBRATED else option.known_by,
    )


def _cost(option: Option, *, with_spread: bool = True) -> str:
    """Return `$96`, `$96 ($48 at best)`, `$0 + energy`, `price unknown` or `-`."""
    if option.dollars is None:
        return "-" if option.machines is None else "price unknown"
    cost = f"${option.dollars:,.0f}"
    low = option.dollars_low
    if with_spread and low is not None and low < option.dollars * (1 - SHOWN_SPREAD):
        cost += f" (${low:,.0f} at best)"
    return cost + (" + energy" if option.energy_unknown else "")


def choice_sentence(plan: Plan) -> str:
    """Return the answer as one sentence."""
    load = f"{plan.model} at {formatting.requests(plan.peak_rate)} in the busiest hour"
    chosen = plan.choice
    if chosen is None and any(option.suffices == "yes" for option in plan.options):
        return f"No option that meets the SLO for {load} has a known price. Add it to [prices]."
    if chosen is None:
        return f"No option meets the SLO for {load} with 90 % confidence."
    count = chosen.machines or 1
    many = chosen.machine if count == 1 else f"{count} x {chosen.machine}"
    labelled = f"{chosen.label[:1].upper()}{chosen.label[1:]} ({chosen.machine})"
    yours = labelled if chosen.label else f"Your machine ({chosen.machine})"
    ways = {
        "as it is": yours if chosen.label else f"{yours} as it is",
        "more of it": f"{count} machines like yours ({chosen.machine})",
        "it and rented": f"{yours}, with {count - 1 or 1} x {chosen.above} "
        "rented in the hours that exceed its capacity,",
        "rented": f"{many}, rented by the hour,",
    }
    verb = "serve" if chosen.kind != "it and rented" and count > 1 else "serves"
    paid = f"{_cost(chosen, with_spread=False)} a month, {chosen.known_by}"
    return f"{ways[chosen.kind]} {verb} {load}: {paid}."


def _changes(plan: Plan) -> Iterator[str]:
    """Yield the nearest rates at which another option is the choice."""
    for change in plan.changes:
        rate = formatting.of_requests(formatting.rate(change.rate, like=plan.peak_rate))
        side = f"{'Above' if change.is_above else 'Below'} {rate}"
        if change.option is None:
            yield f"{side}, no option meets the SLO with 90 % confidence."
        else:
            paid = _cost(change.option, with_spread=False)
            yield f"{side}, the choice is {_title(plan, change.option)} ({paid} a month)."


def _bindings(plan: Plan) -> Iterator[str]:
    """What limits each machine that is there."""
    for machine, binding in plan.binding.items():
        yield f"{machine}: {sentence_of(binding)}"


def _unknown(plan: Plan) -> Iterator[str]:
    if plan.unknown:
        yield f"Unknown: {'; '.join(plan.unknown[:2])}."


def _fine_print(plan: Plan) -> Iterator[str]:
    """Yield what the words and numbers of the table mean."""
    yield f"SLO: {slo_words(plan.slo)}. Lengths: {plan.lengths}."
    yield (
        "Meets the SLO: yes, with at least 90 % confidence; perhaps, with 10 to 90 %. Basis: "
        "confirmed, a load level at this rate ran on it; estimated, simulated from times measured "
        "on it; predicted, from datasheets."
    )
    best = "; at best: if each rented machine reaches the high end of its interval"
    has_best = any("at best" in _cost(option) for option in plan.rows)
    yield (
        "Machines: in the busiest hour. Cost: for enough machines with 90 % confidence, rented in "
        f"the hours that need them{best if has_best else ''}. Energy: while they compute."
    )
    if plan.price_date:
        yield f"List prices of {plan.price_date} or later."
