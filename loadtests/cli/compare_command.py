"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from crossover.loadtests.errors import LoadError
from crossover.models import formatting
from crossover.serving.cli.command_of_options import command_of

if TYPE_CHECKING:
    from crossover.loadtests.comparison.compare_runs import Comparison


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover compare`."""

    first: Path
    second: Path
    allow: list[str] | None = None
    fail_on: Literal["slower"] | None = None


def _compare(options: CompareOptions) -> None:
    """Tell where the runs of one folder are faster or slower than those of another.

    Each side needs at least three runs, started alternately; with fewer, the differences are shown
    and the verdict is "not known". Compared are TTFT, TPOT, E2E and output tokens/s at loads that
    both sides measured, and the capacity. Runs that differ in a fact (machine, workload, settings)
    are refused with both values, unless --allow names it.

    \b
    crossover compare old-version/ new-version/
    crossover compare --fail-on slower A B
    """
    from crossover.loadtests.comparison.compare_runs import compare, read_arm

    first, second = read_arm(options.first), read_arm(options.second)
    result = compare(first, second, allow=options.allow or ())
    show_comparison(result, Console(width=None if sys.stdout.isatty() else 200))
    if options.fail_on is not None and result.verdict == "not known":
        raise LoadError(f"--fail-on slower: It is not known whether B is slower: {result.reason}")
    if options.fail_on is not None and result.verdict in ("slower", "different"):
        raise typer.Exit(1)


comparison = typer.Typer(add_completion=False)
comparison.command("compare")(command_of(CompareOptions, _compare))


def show_comparison(result: Comparison, console: Console) -> None:
    """Print the differences between two sets of runs."""
    words = f"{result.verdict}: {result.reason}" if result.reason else result.verdict
    console.print(f"second against first: {words}", style="bold", markup=False)
    for note in result.notes:
        console.print(note, style="dim", markup=False)
    table = Table(
        "cell",
        "load",
        "metric",
        "runs",
        "first",
        "second",
        "difference",
        "95 % interval",
        "verdict",
        box=None,
        pad_edge=False,
    )
    for row in result.rows:
        interval = "-"
        if row.low is not None and row.high is not None:
            interval = f"{row.low - 1:+.1%} to {row.high - 1:+.1%}"
        first_runs, second_runs = row.runs
        table.add_row(
            row.cell,
            row.load or "-",
            row.metric,
            f"{first_runs}+{second_runs}",
            _value(row.metric, row.first),
            _value(row.metric, row.second),
            f"{row.ratio - 1:+.1%}",
            interval,
            row.verdict,
        )
    console.print(table)


def _value(metric: str, value: float) -> str:
    """Return a metric's value with its unit."""
    if metric == "limit":
        return formatting.rate(value, 3)
    return f"{value:.3g}/s" if metric == "output tokens/s" else formatting.seconds(value, 3)
