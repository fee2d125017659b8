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

    from crossover.models.tables import Column, table_of, terminal_table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = table_of(
        rows,
        Column("", "text", lambda row: "✓" if row.passed else "✗"),
        Column("", "text", lambda row: row.world),
        Column("", "text", lambda row: row.what),
        Column("true", "text", _truth_words, missing="-"),
        Column("measured", "text", _measured_words),
        Column("allowed", "text", _allowed_words),
    )
    console.print(terminal_table(table))
    passed = sum(row.passed for row in rows)
    console.print(f"{passed} of {len(rows)} checks pass")
    if passed < len(rows):
        console.print("Other work on the machine delays requests. Repeat this on an idle machine.")


def _truth_words(row: Check) -> str | None:
    return None if row.truth is None else f"{row.truth:.4g}"


def _measured_words(row: Check) -> str:
    measured = "-" if row.measured is None else f"{row.measured:.4g}"
    return f"{measured} ({row.note})" if row.note else measured


def _allowed_words(row: Check) -> str:
    if row.truth is None:
        return f"at most {row.limit:.3g}"
    return f"± {row.limit:.3g}" if row.limit else "equal"
