"""A comparison of two runs, printed."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from loadtests.comparison.compare import Comparison, Row
from models import formatting

COLUMNS = (
    *("cell", "load", "metric", "first", "second", "difference", "95 % interval", "noise"),
    "verdict",
)


def show_comparison(found: Comparison, console: Console) -> None:
    """Print what two runs differ in."""
    console.print(
        f"{found.second} against {found.first}: {found.verdict}", style="bold", markup=False
    )
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(
            row.cell,
            comparison_load(row.load),
            row.metric,
            *_difference_cells(row),
            f"{row.verdict} ({row.reason})" if row.reason else row.verdict,
        )
    console.print(table)
    if any(row.noise_pairs == 0 for row in found.rows):
        console.print(
            "noise marked ~ is assumed: repeat a run (crossover campaign repeat) and name it with "
            "--noise to measure it",
            style="dim",
        )


def comparison_load(load: float | None) -> str:
    if load is None:
        return "alone"
    return formatting.rate(load, 3) if load > 0 else f"{-load:.0f} users"


def _difference_cells(row: Row) -> list[str]:
    noise = f"{'~' if row.noise_pairs == 0 else ''}{row.noise:.1%}"
    if row.difference is None:
        return ["-", "-", "-", "-", noise]
    d = row.difference
    values = [
        formatting.rate(value, 3) if row.metric == "capacity" else formatting.seconds(value, 3, "-")
        for value in (d.first, d.second)
    ]
    return [*values, f"{d.ratio - 1:+.1%}", f"{d.low - 1:+.1%} to {d.high - 1:+.1%}", noise]
