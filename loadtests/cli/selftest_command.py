"""The verb `selftest`: the accuracy of the load generator. Options in, a table out."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from loadtests.errors import LoadError


def selftest(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="Only this part: times, counts, arrivals, lateness or capacity."
        ),
    ] = None,
) -> None:
    """Check the accuracy of the load generator on this machine against a server of known timing.

    A table in two to three minutes; exit status 1 when something fails.
    """
    from loadtests.campaign.progress import Progress
    from loadtests.selftest.selftest import PARTS, run_selftest
    from loadtests.terminal.selftest import show_selftest

    unknown = [name for name in only or () if name not in PARTS]
    if unknown:
        raise LoadError(f"--only {unknown[0]!r} is not one of {', '.join(PARTS)}")
    with Progress() as progress:
        report = run_selftest(progress, only)
    if as_json:
        rows = [msgspec.to_builtins(row) | {"error": row.error} for row in report.rows]
        whole = {
            "passed": report.passed,
            "seconds": round(report.seconds, 1),
            "host": msgspec.to_builtins(report.host),
            "rows": rows,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
    else:
        show_selftest(report)
    if not report.passed:
        raise typer.Exit(1)
