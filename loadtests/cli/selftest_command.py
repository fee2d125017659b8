"""The verb `selftest`: the accuracy of the load generator. Options in, a table out."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from loadtests.errors import LoadError

if TYPE_CHECKING:
    from loadtests.selftest.selftest import Report


def selftest(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every check as JSON, in place of the table.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="Only this part: times, counts, arrivals, lateness or worlds."
        ),
    ] = None,
) -> None:
    """Check the accuracy of the load generator on this machine against servers of known truth.

    A table in about a minute; exit status 1 when something fails.
    """
    from loadtests.campaign.progress import Progress
    from loadtests.selftest.selftest import PARTS, run_selftest

    unknown = [name for name in only or () if name not in PARTS]
    if unknown:
        raise LoadError(f"--only {unknown[0]!r} is not one of {', '.join(PARTS)}")
    with Progress() as progress:
        report = run_selftest(progress, only)
    if as_json:
        rows = [msgspec.to_builtins(row) | {"error": row.error} for row in report.rows]
        whole = {"passed": report.passed, "seconds": round(report.seconds, 1), "rows": rows}
        typer.echo(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
    else:
        show_selftest(report)
    if not report.passed:
        raise typer.Exit(1)


def show_selftest(report: Report) -> None:
    """Print a line a world with the check that came nearest to its bound, and all that failed."""
    from rich.console import Console
    from rich.table import Table

    from models import formatting

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("", "", "checks", "nearest to its bound", "true", "measured", "allowed", box=None)
    for world, group in groupby(report.rows, key=lambda row: row.world):
        rows = sorted(group, key=lambda row: (row.passed, -row.used))
        passed = sum(row.passed for row in rows)
        for position, row in enumerate(rows[: max(1, len(rows) - passed)]):
            mark = "[green]✓[/green]" if row.passed else "[bold red]✗[/bold red]"
            limit = proof_value(row.limit, row.unit)
            allowed = f"± {limit}" if row.limit else "equal"
            if row.truth is None:
                allowed = f"at most {limit}"
            measured = proof_value(row.measured, row.unit) + (f" ({row.note})" if row.note else "")
            heads = ("", "") if position else (world, f"{passed} of {len(rows)}")
            truth = proof_value(row.truth, row.unit)
            table.add_row(mark, *heads, row.what, truth, measured, allowed)
    console.print(table)
    failed = sum(not row.passed for row in report.rows)
    seconds = formatting.duration(report.seconds)
    console.print(f"{len(report.rows) - failed} of {len(report.rows)} checks pass, in {seconds}")
    if failed:
        console.print(
            "other work on the machine makes times late: repeat on a quiet one", style="bold"
        )


def proof_value(value: float | None, unit: str) -> str:
    """A value of the self-test's table."""
    from models import formatting

    if value is None:
        return "-"
    if unit == "seconds":
        sign = "-" if value < 0 else ""
        return sign + formatting.seconds(abs(value), 3) if value else "0 ms"
    if unit == "count":
        return f"{value:.0f}"
    return f"{value:.3g}" + ("/s" if unit == "requests/s" else "")
