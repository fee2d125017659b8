"""The verb `selftest`: the accuracy of the load generator. A table out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from loadtests.selftest.selftest_checks import Row


def selftest() -> None:
    """Check the accuracy of the load generator on this machine against servers of known truth.

    A table in half a minute; exit status 1 when something fails.
    """
    from loadtests.campaign.progress import Progress
    from loadtests.selftest.selftest import run_selftest

    with Progress() as progress:
        rows = run_selftest(progress)
    show_selftest(rows)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def show_selftest(rows: Sequence[Row]) -> None:
    """Print a line a check."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("", "", "", "true", "measured", "allowed", box=None)
    for row in rows:
        mark = "[green]✓[/green]" if row.passed else "[bold red]✗[/bold red]"
        truth, measured, limit = (
            _in_unit(value, row.unit) for value in (row.truth, row.measured, row.limit)
        )
        allowed = f"± {limit}" if row.limit else "equal"
        if row.truth is None:
            allowed = f"at most {limit}"
        measured += f" ({row.note})" if row.note else ""
        table.add_row(mark, row.world, row.what, truth, measured, allowed)
    console.print(table)
    passed = sum(row.passed for row in rows)
    console.print(f"{passed} of {len(rows)} checks pass")
    if passed < len(rows):
        console.print("other work on the machine makes times late: repeat on a quiet one")


def _in_unit(value: float | None, unit: str) -> str:
    from models import formatting

    if value is None:
        return "-"
    if unit == "seconds":
        return formatting.seconds(value, 3)
    if unit == "count":
        return f"{value:.0f}"
    return f"{value:.3g}" + ("/s" if unit == "requests/s" else "")
