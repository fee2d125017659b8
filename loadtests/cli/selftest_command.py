"""The verb `selftest`: a table of the load generator's accuracy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from crossover.loadtests.selftest.selftest import Check


def selftest() -> None:
    """Check the accuracy of the load generator on this machine against servers of known timing.

    Prints a table after a minute; the exit status is 1 if a check fails.
    """
    from crossover.loadtests.campaign.progress import Progress
    from crossover.loadtests.selftest.selftest import run_selftest

    with Progress() as progress:
        rows = run_selftest(progress)
    show_selftest(rows)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def show_selftest(rows: Sequence[Check]) -> None:
    """Print a line for each check."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("", "", "", "true", "measured", "allowed", box=None)
    for row in rows:
        mark = "[green]✓[/green]" if row.passed else "[bold red]✗[/bold red]"
        allowed = f"± {row.limit:.3g}" if row.limit else "equal"
        allowed = f"at most {row.limit:.3g}" if row.truth is None else allowed
        truth, measured = (
            "-" if value is None else f"{value:.4g}" for value in (row.truth, row.measured)
        )
        measured += f" ({row.note})" if row.note else ""
        table.add_row(mark, row.world, row.what, truth, measured, allowed)
    console.print(table)
    passed = sum(row.passed for row in rows)
    console.print(f"{passed} of {len(rows)} checks pass")
    if passed < len(rows):
        console.print("Other work on the machine delays requests. Repeat this on an idle machine.")
