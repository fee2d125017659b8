"""The self-test's table, printed."""

from __future__ import annotations

from rich.table import Table

from loadtests.selftest.selftest import Report
from loadtests.terminal.level import wide_console
from models import formatting


def show_selftest(report: Report) -> None:
    """Print the table of a self-test: what, truth, measured, error, limit, verdict."""
    console = wide_console()
    table = Table(
        "what", "truth", "measured", "error", "limit", "verdict", box=None, pad_edge=False
    )
    for row in report.rows:
        verdict = "[green]pass[/green]" if row.passed else "[bold red]FAIL[/bold red]"
        limit = ("" if row.truth is not None else "at most ") + proof_value(row.limit, row.unit)
        what = row.what + (f" ({row.note})" if row.note else "")
        table.add_row(
            what,
            proof_value(row.truth, row.unit),
            proof_value(row.measured, row.unit),
            proof_value(row.error, row.unit),
            limit,
            verdict,
        )
    console.print(table)
    failed = sum(not row.passed for row in report.rows)
    host = report.host
    passed = len(report.rows) - failed
    seconds = formatting.duration(report.seconds)
    console.print(f"{passed} of {len(report.rows)} pass, in {seconds}")
    shares = [
        f"{share:.1%} {words}"
        for share, words in (
            (host.steal, "stolen by the hypervisor"),
            (host.others, "used by other programs"),
        )
        if share is not None
    ]
    if shares:
        console.print(f"of the machine's CPU time, {' and '.join(shares)} meanwhile")
    if failed and host.is_busy:
        console.print(
            "the machine was busy with other things: a time that fails may be its doing; "
            "repeat on a quiet machine",
            style="bold",
        )


def proof_value(value: float | None, unit: str) -> str:
    """A value of the self-test's table."""
    if value is None:
        return "-"
    if unit == "seconds":
        sign = "-" if value < 0 else ""
        return sign + formatting.seconds(abs(value), 3) if value else "0 ms"
    if unit == "count":
        return f"{value:.0f}"
    return f"{value:.3g}" + (" /s" if unit == "requests/s" else "")
