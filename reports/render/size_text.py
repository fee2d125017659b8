"""The sizing table as text, Markdown, CSV, JSON and a page (`crossover size --format`)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console

from crossover.models import formatting
from crossover.models.tables import Column, Table, table_of, terminal_table
from crossover.reports.answers.headline import slo_words
from crossover.reports.devices.device_capacity import CONVERSATION_SD
from crossover.reports.plan.sizing import SizeRow, Sizing
from crossover.reports.plan.tasks import task_named
from crossover.reports.render.json_and_csv import as_csv as csv_of
from crossover.reports.render.markdown import row_of, without_markup

NO_ANSWER = "-"


def as_json(sizing: Sizing) -> str:
    """Return all numbers as JSON."""
    return msgspec.json.format(msgspec.json.encode(sizing), indent=1).decode()


def as_csv(sizing: Sizing) -> str:
    """Return a line for each model on each machine; a missing value is an empty cell."""
    records = [
        {
            "task": sizing.task,
            "users": sizing.users,
            "model": row.model,
            "machine": row.machine,
            "users_per_machine": row.users_per_machine,
            "users_per_machine_low": row.users_per_machine_low,
            "users_per_machine_high": row.users_per_machine_high,
            "machines": row.machines,
            "dollars_per_month": row.dollars,
            "energy_unknown": row.energy_unknown,
            "kwh_per_month": row.kwh,
            "basis": row.grade,
            "reason": row.reason or None,
            "is_choice": row.is_choice,
        }
        for row in sizing.rows
    ]
    return csv_of(records).decode()


def as_text(sizing: Sizing, columns: int = 100) -> str:
    """Return sentences and a table for a terminal."""
    console = Console(width=columns, no_color=True, highlight=False, markup=False)
    with console.capture() as output:
        console.print(heading(sizing))
        for sentence in _choices(sizing):
            console.print(sentence)
        console.print()
        console.print(terminal_table(_table(sizing)))
        console.print()
        for sentence in _explanations(sizing):
            console.print(sentence)
    return output.get().rstrip()


def as_markdown(sizing: Sizing) -> str:
    """Return the table as Markdown, with the sentences around it."""
    table = _table(sizing)
    rules = ["---:" if index in table.numeric else "---" for index in range(len(table.columns))]
    lines = [f"## {heading(sizing)}", ""]
    lines += [f"- {sentence}" for sentence in _choices(sizing)]
    lines += ["", row_of(table.columns), row_of(rules), *map(row_of, table.rows), ""]
    lines += list(_explanations(sizing))
    return "\n".join(map(without_markup, lines))


def as_page(sizing: Sizing) -> str:
    """Return one HTML file, which needs no network."""
    # Imported here, since it takes 1 s.
    from crossover.reports.render.html_page import render_template

    return render_template(
        "size.html",
        heading=heading(sizing),
        choices=list(_choices(sizing)),
        table=_table(sizing),
        explanations=list(_explanations(sizing)),
    )


def heading(sizing: Sizing) -> str:
    """Return `50 users who chat`, `1 user who chats`."""
    task = task_named(sizing.task)
    if sizing.users == 1:
        return f"1 user who {task.one_does}"
    return f"{sizing.users:,} users who {task.does}"


def _choices(sizing: Sizing) -> Iterator[str]:
    """Yield the cheapest machines for each model, as one sentence."""
    for model in sizing.models:
        choice = sizing.choice_of(model)
        if choice is None:
            yield (
                f"{model}: no machine of this table with a known price meets the SLO with 90 % "
                "confidence."
            )
        else:
            machines = choice.machine
            if choice.machines != 1:
                group = f"({machines})" if " x " in machines else machines
                machines = f"{choice.machines} x {group}"
            yield f"{model}: {machines}, {_cost(choice)} a month, {choice.grade}."


def _table(sizing: Sizing) -> Table:
    """Return a row for each model on each machine; a star marks the cheapest of a model."""
    return table_of(
        sizing.rows,
        Column("model", "text", lambda row: f"{'*' if row.is_choice else ' '} {row.model}"),
        Column("machine", "text", lambda row: row.machine),
        Column("users per machine", "number", _users_per_machine),
        Column("machines", "count", lambda row: row.machines, missing=NO_ANSWER),
        Column("$/month", "number", _cost),
        Column("basis", "text", lambda row: row.reason or row.grade),
    )


def _users_per_machine(row: SizeRow) -> str:
    if row.users_per_machine is None:
        return NO_ANSWER
    return formatting.with_interval(
        row.users_per_machine, row.users_per_machine_low, row.users_per_machine_high
    )


def _cost(row: SizeRow) -> str:
    """Return `$588`, `$0 + energy`, `price unknown` or `-`."""
    if row.dollars is None:
        return NO_ANSWER if row.machines is None else "price unknown"
    return formatting.dollars(row.dollars) + (" + energy" if row.energy_unknown else "")


def _spares_words(sizing: Sizing) -> str:
    return "" if not sizing.spares else f", and {sizing.spares} that may fail"


def _hours_words(sizing: Sizing) -> str:
    """Return the hours for which rented machines are paid."""
    if sizing.day == "flat" and sizing.weekend == 1.0:
        return "day and night"
    weekend = f", weekends {formatting.significant(sizing.weekend)} times as busy"
    return (
        f"in the hours that need them (the users are those of the busiest hour; day: {sizing.day}"
        f"{'' if sizing.weekend == 1.0 else weekend})"
    )


def _explanations(sizing: Sizing) -> Iterator[str]:
    """Yield what the numbers rest on."""
    think = formatting.seconds(sizing.think_seconds)
    yield (
        f"Users: people at work at the same time. Each waits for an answer, thinks for {think} on "
        "average, then asks again."
    )
    yield f"Requests: {sizing.lengths}. {task_named(sizing.task).source}"
    yield f"SLO: {slo_words(sizing.slo)}."
    yield (
        "Users per machine: in brackets the ends of the interval. In nine of ten cases a machine "
        "carries more users than the low end, and in nine of ten fewer than the high end. "
        f"Machines: as many as the low end needs{_spares_words(sizing)}. Cost: rented "
        f"{_hours_words(sizing)} at list prices; for machines that are paid for, their energy "
        "while they serve."
    )
    if task_named(sizing.task).workload.has_sessions:
        yield (
            "Draw: a few hundred conversations are simulated. With another draw of them, the users "
            f"of a machine differ by {formatting.share(CONVERSATION_SD)} (standard deviation), "
            "which the intervals do not include."
        )
    yield (
        "Basis: confirmed, a load level at this rate ran on it; estimated, simulated from times "
        "measured on it; predicted, from datasheets or from other models measured on it. Weights: "
        f"{' or '.join(sizing.cpu_formats)} on CPUs, {sizing.gpu_format} on GPUs that were not "
        "measured."
    )
    if any(row.grade in ("estimated", "confirmed") for row in sizing.rows):
        yield (
            "Engines: measured machines have the engine that was measured; GPUs that were not "
            "measured are assumed to run a server like vLLM, which can be faster."
        )
    machines_by_note: dict[str, list[str]] = {}
    for row in sizing.rows:
        for note in row.notes:
            machines = machines_by_note.setdefault(note, [])
            if row.machine not in machines:
                machines.append(row.machine)
    for note, machines in machines_by_note.items():
        yield f"{', '.join(machines)}: {note}."
    if sizing.price_date:
        yield f"List prices of {sizing.price_date} or later."
