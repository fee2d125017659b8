"""A comparison of two arms of runs, printed."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from loadtests.comparison.compare import Comparison, Row
from loadtests.comparison.machines import Machines
from loadtests.comparison.run_values import CAPACITY, GOOD, TOKENS
from models import formatting

COLUMNS = (
    *("cell", "load", "metric", "runs", "first", "second", "difference", "95 % interval"),
    *("detectable", "verdict"),
)


def show_comparison(found: Comparison, console: Console) -> None:
    """Print in what two arms of runs differ."""
    for word, arm in (("first", found.first), ("second", found.second)):
        console.print(f"{word}: {', '.join(arm)}", style="dim", markup=False)
    console.print(f"second against first: {verdict_in_words(found)}", style="bold", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    for line in found.capacities:
        console.print(line, markup=False)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(
            row.cell,
            load_of(row),
            row.metric,
            f"{row.runs[0]}+{row.runs[1]}",
            *_difference_cells(row),
            f"{row.verdict} ({row.reason})" if row.reason else row.verdict,
        )
    console.print(table)
    if found.machines is not None:
        show_machines(found.machines, console)


def show_machines(found: Machines, console: Console) -> None:
    """Print what two machines do, by what they have."""
    for name, mine, theirs in found.differ:
        console.print(f"the machines differ in {name}: {mine} and {theirs}", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    table = Table("cell", "quantity", "per", "first", "second", "ratio", box=None, pad_edge=False)
    for row in found.rows:
        values = (f"{row.first:.4g}", f"{row.second:.4g}", f"{row.ratio:.3g}")
        table.add_row(row.cell, row.quantity, row.per, *values)
    console.print(table)


def verdict_in_words(found: Comparison) -> str:
    """The verdict, with what it would have shown where it shows nothing."""
    if found.verdict == "not known":
        return f"not known: {found.reason}"
    reach = [
        row.difference.detectable
        for row in found.rows
        if row.difference is not None and row.difference.detectable is not None
    ]
    span = f"{min(reach):.1%}" if len(reach) == 1 else f"{min(reach):.1%} to {max(reach):.1%}"
    return f"{found.verdict} ({len(reach)} metrics; differences of {span} would have been found)"


def load_of(row: Row) -> str:
    """The load of a row, for people."""
    if row.metric == CAPACITY:
        return "-"
    load = row.load or -1.0  # below 0: users
    return formatting.load(load if load > 0 else None, round(-load), 3)


def _difference_cells(row: Row) -> list[str]:
    found = row.difference
    if found is None:
        return ["-"] * 5
    cells = [_value(row.metric, found.first), _value(row.metric, found.second)]
    cells.append(f"{found.ratio - 1:+.1%}")
    if found.low is None or found.high is None or found.detectable is None:
        return [*cells, "-", "-"]
    return [*cells, f"{found.low - 1:+.1%} to {found.high - 1:+.1%}", f"{found.detectable:.1%}"]


def _value(metric: str, value: float) -> str:
    if metric == CAPACITY:
        return formatting.rate(value, 3)
    if metric == GOOD:
        return f"{value:.1%}"
    return f"{value:.3g}/s" if metric == TOKENS else formatting.seconds(value, 3, "-")
