"""A plan in words: a table of at most six rows, three sentences, one chart; the rest is JSON.

print(as_text(plan, columns=100))
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from models import formatting
from models.formatting import model_title
from reports.plan.plan_options import Change, Option, Plan, title

SHOWN_SPREAD = 0.2  # of the cost; a smaller one is not shown


def as_json(plan: Plan) -> str:
    """All options, changes and stairs (docs/plan.md)."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def as_text(plan: Plan, columns: int = 100) -> str:
    """Sentences and table, for a terminal."""
    console = Console(width=columns, no_color=True, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEADS:
        table.add_column(name, justify="right" if name in HEADS[2:5] else "left")
    for option in plan.rows:
        table.add_row(*row(option, plan.choice))
    with console.capture() as said:
        console.print(choice_sentence(plan))
        console.print()
        console.print(table)
        console.print()
        for sentence in (change_sentence(plan), unknown_sentence(plan)):
            if sentence:
                console.print(sentence)
        console.print(fine_print(plan), style="dim")
    return said.get().rstrip()


HEADS = ("way", "suffices", "machines", "$ a month", "kWh a month", "known by")


def row(option: Option, choice: Option | None = None) -> tuple[str, ...]:
    """The cells of one row."""
    mark = "* " if choice is not None and option == choice else "  "
    suffices = option.suffices if not option.note else f"{option.suffices} ({option.note})"
    if option.note.startswith("perhaps"):
        suffices = option.note
    return (
        mark + title(option),
        suffices,
        "-" if option.machines is None else str(option.machines),
        cost(option),
        "-" if option.kwh is None else formatting.significant(option.kwh),
        option.known_by,
    )


def cost(option: Option, *, spread: bool = True) -> str:
    """`$96`, `$96 (48 if each holds its high end)`, `$0 + energy`, `not known`."""
    if option.dollars is None:
        return "not known"
    said = f"${option.dollars:,.0f}"
    low = option.dollars_low
    if (
        spread
        and low is not None
        and option.dollars > 0
        and low < option.dollars * (1 - SHOWN_SPREAD)
    ):
        said += f" (${low:,.0f} if each holds its high end)"
    return said + (" + energy" if option.energy_unknown else "")


def choice_sentence(plan: Plan) -> str:
    """The answer."""
    model = model_title(plan.model)
    peak = formatting.requests(plan.peak_rate)
    if plan.choice is None:
        return f"Nothing surely serves {model} at {peak} in the busiest hour."
    paid = f"{cost(plan.choice, spread=False)} a month"
    verb = "serves" if (plan.choice.machines or 1) == 1 else "serve"
    return f"{_do(plan.choice)} {verb} {model} at {peak} in the busiest hour: {paid}."


def _do(option: Option) -> str:
    count = option.machines or 1
    if option.kind == "as it is":
        return option.machine if count == 1 else f"{option.machine} x {count}"
    if option.kind == "more of it":
        return f"{count} x {option.machine}"
    if option.kind == "it and rented":
        return f"{option.machine}, with {option.above} rented in the hours above it,"
    return f"{option.machine}, rented by the hour," if count == 1 else f"{count} x {option.machine}"


def change_sentence(plan: Plan) -> str:
    """Where another way is the choice; "": nowhere near."""
    return " ".join(_change(one) for one in plan.changes)


def _change(change: Change) -> str:
    side = "Above" if change.is_above else "Below"
    rate = formatting.requests(change.rate)
    if change.option is None:
        return f"{side} {rate} nothing surely suffices."
    return (
        f"{side} {rate} it is {title(change.option)} ({cost(change.option, spread=False)} a month)."
    )


def unknown_sentence(plan: Plan) -> str:
    """What is not known; "": nothing that matters."""
    return f"Not known: {'; '.join(plan.unknown[:2])}." if plan.unknown else ""


def fine_print(plan: Plan) -> str:
    """What the numbers mean."""
    return " ".join(_fine_print(plan))


def _fine_print(plan: Plan) -> Iterator[str]:
    limits = [
        f"{name} {formatting.seconds(value)}"
        for name, value in (("TTFT", plan.ttft_seconds), ("TPOT", plan.tpot_seconds))
        if value is not None
    ]
    promise = " and ".join(limits) or "no limit"
    yield f"A good request: {promise}, for {formatting.share(plan.target)}; {plan.lengths}."
    yield "$ of what surely suffices (90 %), rented in the hours that need it."
    if plan.price_date:
        yield f"List prices of {plan.price_date} or later."
