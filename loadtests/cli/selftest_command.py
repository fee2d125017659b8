"""The verb `selftest`: the accuracy of the load generator. A table out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from loadtests.campaign.progress import Progress, console_of
from models import formatting

if TYPE_CHECKING:
    from loadtests.selftest.selftest_checks import Row


def selftest() -> None:
    """Check the accuracy of the load generator on this machine against servers of known truth.

    A table in about a minute; exit status 1 when something fails.
    """
    from loadtests.selftest.selftest import run_selftest

    with Progress() as progress:
        rows = run_selftest(progress)
    show_selftest(rows)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def show_selftest(rows: Sequence[Row]) -> None:
    """Print a line a check."""
    console = console_of(120)
    table = Table("", "", "", "true", "measured", "allowed", box=None)
    for row in rows:
        mark = Text("✓", style="green") if row.passed else Text("✗", style="bold red")
        limit = proof_value(row.limit, row.unit)
        allowed = f"± {limit}" if row.limit else "equal"
        measured = proof_value(row.measured, row.unit) + (f" ({row.note})" if row.note else "")
        truth = proof_value(row.truth, row.unit)
        allowed = f"at most {limit}" if row.truth is None else allowed
        table.add_row(mark, row.world, row.what, truth, measured, allowed)
    console.print(table)
    passed = sum(row.passed for row in rows)
    console.print(f"{passed} of {len(rows)} checks pass")
    if passed < len(rows):
        console.print(
            "other work on the machine makes times late: repeat on a quiet one", style="bold"
        )


def proof_value(value: float | None, unit: str) -> str:
    """A value of the self-test's table."""
    if value is None:
        return "-"
    if unit == "seconds":
        return formatting.seconds(value, 3) if value else "0 ms"
    return f"{value:.3g}" + ("/s" if unit == "requests/s" else "")
