"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import typer
from rich.console import Console

from crossover.loadtests.errors import LoadError
from crossover.models import formatting
from crossover.models.tables import Column, table_of, terminal_table
from crossover.serving.cli.command_of_options import command_of

if TYPE_CHECKING:
    from crossover.loadtests.comparison.compare_runs import ComparedMetric, Comparison


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover compare`."""

    first: Path
    second: Path
    allow: list[str] | None = None
    fail_on: Literal["slower"] | None = None


def _compare(options: CompareOptions) -> None:
    """Tell where the runs of one folder are faster or slower than those of another.

    Each side needs at least three runs, started alternately; with fewer, the differences are shown
    and the verdict is "not known". It compares the capacity, and TTFT, TPOT, E2E and output
    tokens/s at loads that both sides measured. Runs that differ in a fact (machine, workload,
    settings) are refused with both values, unless --allow names it.

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
    table = table_of(
        result.rows,
        Column("cell", "text", lambda row: row.cell),
        Column("load", "text", lambda row: row.load or "-"),
        Column("metric", "text", lambda row: row.metric),
        Column("runs", "text", lambda row: f"{row.runs[0]}+{row.runs[1]}"),
        Column("first", "number", lambda row: _value(row, row.first)),
        Column("second", "number", lambda row: _value(row, row.second)),
        Column("difference", "number", lambda row: f"{row.ratio - 1:+.1%}"),
        Column("95 % interval", "text", _interval_words, missing="-"),
        Column("verdict", "text", lambda row: row.verdict),
    )
    console.print(terminal_table(table))


def _interval_words(row: ComparedMetric) -> str | None:
    if row.low is None or row.high is None:
        return None
    return f"{row.low - 1:+.1%} to {row.high - 1:+.1%}"


def _value(row: ComparedMetric, value: float) -> str:
    """Return one of the two values of a row with its unit, which is the same for both rates."""
    if row.metric == "estimated capacity":
        return formatting.rate(value, 3, like=formatting.common_unit_rate([row.first, row.second]))
    return f"{value:.3g}/s" if row.metric == "output tokens/s" else formatting.seconds(value, 3)
