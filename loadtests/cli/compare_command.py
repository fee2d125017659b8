"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from loadtests.errors import LoadError
from models import formatting
from serving.bounds import option
from serving.cli.parameters import command_of

if TYPE_CHECKING:
    from loadtests.comparison.compare_runs import Comparison


COLUMNS = "cell,load,metric,runs,first,second,difference,95 % interval,verdict"


class TwoArms(TyperCommand):
    """`A1 A2 -- B1 B2`: what stands behind `--` are runs of the second arm."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args = args[:at] + [f"--second={path}" for path in args[at + 1 :]]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover compare`."""

    runs: Annotated[
        list[Path],
        option(
            "",
            "Run folders, or folders of runs: the first arm, `--`, the second arm. "
            "Two alone are one arm each.",
            metavar="A... -- B...",
            is_argument=True,
        ),
    ]
    second: Annotated[
        list[Path] | None, option("", "A run of the second arm, as behind `--`.", metavar="B")
    ] = None
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
    crossover compare --fail-on slower A1 A2 A3 -- B1 B2 B3    # begun in turns: A1 B1 A2 B2 A3 B3
    crossover compare old-version/ new-version/                # folders of runs
    """
    from loadtests.comparison.compare_runs import compare, read_arm

    first, second = options.runs, options.second
    if not second:
        if len(first) != 2:
            raise LoadError(
                f"{len(first)} runs and no `--`: write the first arm, `--`, the second arm: "
                "crossover compare A1 A2 A3 -- B1 B2 B3"
            )
        first, second = first[:1], first[1:]
    found = compare(read_arm(first), read_arm(second), allow=options.allow or ())
    show_comparison(found, Console(width=None if sys.stdout.isatty() else 200))
    if options.fail_on is not None and found.verdict == "not known":
        raise LoadError(f"--fail-on slower: not known: {found.reason}")
    if options.fail_on is not None and found.verdict in ("slower", "different"):
        raise typer.Exit(1)


comparison = typer.Typer(add_completion=False)
comparison.command("compare", cls=TwoArms)(command_of(CompareOptions, _compare))


def show_comparison(found: Comparison, console: Console) -> None:
    """Print in what two arms of runs differ."""
    words = f"{found.verdict}: {found.reason}" if found.reason else found.verdict
    console.print(f"second against first: {words}", style="bold", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    table = Table(*COLUMNS.split(","), box=None, pad_edge=False)
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
