"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Meta
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from loadtests.errors import LoadError
from models import formatting
from serving.bounds import option
from serving.cli.parameters import command_of

if TYPE_CHECKING:
    from loadtests.comparison.compare_runs import Comparison, Row


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
    least: Annotated[
        Annotated[float, Meta(ge=0)],
        option(
            "",
            "Differences below this share are no difference.",
            metavar="<float range> [x>=0.0]",
        ),
    ] = 0.01
    as_json: Annotated[bool, option("", "Print the comparison as JSON.", "json")] = False
    fail_on: Annotated[
        str | None,
        option(
            "",
            "End with status 1 where anything is slower, or differs at all; with status 2 "
            "where that is not known.",
            metavar="slower|different",
        ),
    ] = None


def _compare(options: CompareOptions) -> None:
    """Say where runs are faster or slower than others, by a test whose unit is the run.

    At least three runs an arm, begun in turns; with fewer the differences are shown and the
    verdict is "not known". Compared are TTFT, TPOT and E2E, the share of good requests and the
    output at loads that both arms measured, and the limit. Runs that differ in a fact (machine,
    workload, settings) are refused with both values, unless --allow names it.

    \b
    crossover campaign repeat runs/A runs/B --times 2    # in turns: A B A B
    crossover compare --fail-on slower A1 A2 A3 -- B1 B2 B3    # folders: `repeat` prints them
    crossover compare old-version/ new-version/          # folders of runs
    """
    from loadtests.comparison.compare_runs import compare
    from loadtests.comparison.run_metrics import read_arm

    first, second = _arms(options)
    found = compare(
        read_arm(first), read_arm(second), allow=options.allow or (), least=options.least
    )
    if options.as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show_comparison(found, Console(width=None if sys.stdout.isatty() else 200))
    if options.fail_on is None:
        return
    if found.verdict == "not known":
        raise LoadError(f"--fail-on {options.fail_on}: not known: {found.reason}")
    bad = {"slower": ("slower", "different"), "different": ("slower", "faster", "different")}
    if found.verdict in bad[options.fail_on]:
        raise typer.Exit(1)


comparison = typer.Typer(add_completion=False)
comparison.command("compare", cls=TwoArms)(command_of(CompareOptions, _compare))


def _arms(options: CompareOptions) -> tuple[list[Path], list[Path]]:
    """The runs of both arms. Raises LoadError for options that cannot be."""
    if options.fail_on not in (None, "slower", "different"):
        raise LoadError(f"--fail-on must be slower or different, got {options.fail_on!r}")
    if options.second:
        return options.runs, options.second
    if len(options.runs) != 2:
        raise LoadError(
            f"{len(options.runs)} runs and no `--`: write the first arm, `--`, the second arm: "
            "crossover compare A1 A2 A3 -- B1 B2 B3"
        )
    return options.runs[:1], options.runs[1:]


COLUMNS = (
    *("cell", "load", "metric", "runs", "first", "second", "difference", "95 % interval"),
    *("detectable", "verdict"),
)


def show_comparison(found: Comparison, console: Console) -> None:
    """Print in what two arms of runs differ."""
    from loadtests.comparison.run_metrics import LIMIT

    for word, arm in (("first", found.first), ("second", found.second)):
        console.print(f"{word}: {', '.join(arm)}", style="dim", markup=False)
    console.print(f"second against first: {verdict_in_words(found)}", style="bold", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(
            row.cell,
            "-" if row.metric == LIMIT else _load(row),
            row.metric,
            f"{row.runs[0]}+{row.runs[1]}",
            *_difference_cells(row),
            f"{row.verdict} ({row.reason})" if row.reason else row.verdict,
        )
    console.print(table)


def verdict_in_words(found: Comparison) -> str:
    """The verdict, with what it would have shown where it shows nothing."""
    if found.verdict == "not known":
        return f"not known: {found.reason}"
    reach = [
        row.difference.detectable
        for row in found.rows
        if row.difference is not None and row.difference.detectable is not None
    ]
    span = f"{min(reach):.1%}" if len(reach) == 1 else f"{min(reach):.1%} to {max(reach):.1%}"
    return f"{found.verdict} ({len(reach)} metrics; differences of {span} would have been found)"


def _load(row: Row) -> str:
    if row.load is not None and row.load < 0:
        return formatting.load(None, round(-row.load))
    return formatting.load(row.load, digits=3)


def _difference_cells(row: Row) -> list[str]:
    found = row.difference
    if found is None:
        return ["-"] * 5
    cells = [_value(row.metric, found.first), _value(row.metric, found.second)]
    cells.append(f"{found.ratio - 1:+.1%}")
    if found.low is None or found.high is None or found.detectable is None:
        return [*cells, "-", "-"]
    return [*cells, f"{found.low - 1:+.1%} to {found.high - 1:+.1%}", f"{found.detectable:.1%}"]


def _value(metric: str, value: float) -> str:
    from loadtests.comparison.run_metrics import GOOD, LIMIT, TOKENS

    if metric == LIMIT:
        return formatting.rate(value, 3)
    if metric == GOOD:
        return f"{value:.1%}"
    return f"{value:.3g}/s" if metric == TOKENS else formatting.seconds(value, 3, "-")
