"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from loadtests.errors import LoadError
from models import formatting
from serving.cli.command_of_options import command_of
from serving.option_help import option

if TYPE_CHECKING:
    from loadtests.comparison.compare_runs import Comparison


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover compare`."""

    first: Annotated[
        Path, option("", "A run folder, or a folder of runs.", metavar="A", is_argument=True)
    ]
    second: Annotated[
        Path, option("", "The same, of what is compared with it.", metavar="B", is_argument=True)
    ]
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
    """Say where the runs of one folder are faster or slower than those of another.

    At least three runs a side, begun in turns; with fewer the differences are shown and the verdict
    is "not known". Compared are TTFT, TPOT, E2E and the output at loads that both sides measured,
    and the limit. Runs that differ in a fact (machine, workload, settings) are refused with both
    values, unless --allow names it.

    \b
    crossover compare old-version/ new-version/
    crossover compare --fail-on slower A B
    """
    from loadtests.comparison.compare_runs import compare, read_arm

    arms = read_arm(options.first), read_arm(options.second)
    found = compare(*arms, allow=options.allow or ())
    show_comparison(found, Console(width=None if sys.stdout.isatty() else 200))
    if options.fail_on is not None and found.verdict == "not known":
        raise LoadError(f"--fail-on slower: not known: {found.reason}")
    if options.fail_on is not None and found.verdict in ("slower", "different"):
        raise typer.Exit(1)


comparison = typer.Typer(add_completion=False)
comparison.command("compare")(command_of(CompareOptions, _compare))


def show_comparison(found: Comparison, console: Console) -> None:
    """Print in what two arms of runs differ."""
    words = f"{found.verdict}: {found.reason}" if found.reason else found.verdict
    console.print(f"second against first: {words}", style="bold", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    columns = "cell,load,metric,runs,first,second,difference,95 % interval,verdict"
    table = Table(*columns.split(","), box=None, pad_edge=False)
    for row in found.rows:
        interval = "-"
        if row.low is not None and row.high is not None:
            interval = f"{row.low - 1:+.1%} to {row.high - 1:+.1%}"
        table.add_row(
            *(row.cell, row.load or "-", row.metric, f"{row.runs[0]}+{row.runs[1]}"),
            *(_value(row.metric, row.first), _value(row.metric, row.second)),
            *(f"{row.ratio - 1:+.1%}", interval, row.verdict),
        )
    console.print(table)


def _value(metric: str, value: float) -> str:
    if metric == "limit":
        return formatting.rate(value, 3)
    return f"{value:.3g}/s" if metric == "output tokens/s" else formatting.seconds(value, 3)
