"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.table import Table

from loadtests.campaign.progress import console_of
from loadtests.errors import LoadError
from models import formatting
from serving.bounds import option
from serving.cli.parameters import command_of

if TYPE_CHECKING:
    from loadtests.comparison.compare_runs import Comparison, Row

COLUMNS = "cell,load,metric,runs,first,second,difference,95 % interval,detectable,verdict"


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover compare`."""

    first: Annotated[
        Path, option("", "The first arm: a run, or a folder of runs.", "", "A", is_argument=True)
    ]
    second: Annotated[Path, option("", "The second arm.", "", "B", is_argument=True)]
    allow: Annotated[
        list[str] | None,
        option(
            "",
            "A fact that may differ, e.g. format or cpu_model. May be given several times.",
            metavar="FACT",
        ),
    ] = None
    fail_on: Annotated[
        Literal["slower"] | None,
        option("", "End with status 1 where anything is slower, 2 where that is not known."),
    ] = None


def _compare(options: CompareOptions) -> None:
    """Say where runs are faster or slower than others, by a test whose unit is the run.

    At least three runs an arm (a side of the comparison), begun in turns; with fewer the
    differences are shown and the verdict is "not known". Compared are TTFT, TPOT, E2E and the
    output at loads that both arms measured, and the limit. Runs that differ in a fact (machine,
    workload, settings) are refused with both values, unless --allow names it.

    \b
    crossover compare --fail-on slower A B       # folders of runs begun in turns: A1 B1 A2 B2 A3 B3
    """
    from loadtests.comparison.compare_runs import compare, read_arm

    arms = read_arm([options.first]), read_arm([options.second])
    found = compare(*arms, allow=options.allow or ())
    show_comparison(found)
    if options.fail_on is not None and found.verdict == "not known":
        raise LoadError(f"--fail-on slower: not known: {found.reason}")
    if options.fail_on is not None and found.verdict in ("slower", "different"):
        raise typer.Exit(1)


comparison = typer.Typer(add_completion=False)
comparison.command("compare")(command_of(CompareOptions, _compare))


def show_comparison(found: Comparison) -> None:
    """Print in what two arms of runs differ."""
    console = console_of(200)
    words = f"{found.verdict}: {found.reason}" if found.reason else found.verdict
    reach = [row.detectable for row in found.rows if row.detectable is not None]
    if reach and not found.reason:
        span = f"{min(reach):.1%} to {max(reach):.1%}"
        words += f" ({len(reach)} metrics; differences of {span} would have been found)"
    console.print(f"second against first: {words}", style="bold")
    for note in found.notes:
        console.print(note, style="dim")
    table = Table(*COLUMNS.split(","), box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Row) -> list[str]:
    """A row of the table."""

    def value(of: float | None) -> str:
        if row.metric == "limit":
            return formatting.rate(of, 3)
        if row.metric == "output tokens/s" and of is not None:
            return f"{of:.3g}/s"
        return formatting.seconds(of, 3, "-")

    apart = interval = detectable = "-"
    if row.ratio is not None:
        apart = f"{row.ratio - 1:+.1%}"
    if row.low is not None and row.high is not None and row.detectable is not None:
        interval = f"{row.low - 1:+.1%} to {row.high - 1:+.1%}"
        detectable = f"{row.detectable:.1%}"
    verdict = f"{row.verdict} ({row.reason})" if row.reason else row.verdict
    told = [row.cell, row.load or "-", row.metric, f"{row.runs[0]}+{row.runs[1]}"]
    return [*told, value(row.first), value(row.second), apart, interval, detectable, verdict]
