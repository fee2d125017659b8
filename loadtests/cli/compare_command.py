"""The verb `compare`. Options in, lines and an exit status out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Meta
from typer.core import TyperCommand

from loadtests.errors import LoadError
from serving.bounds import option
from serving.cli.parameters import command_of


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
    machines: Annotated[
        bool,
        option(
            "",
            "The arms ran on different machines: what each does for a core, a GB/s, a dollar "
            "and a watt. Model, workload and SLO must be the same.",
        ),
    ] = False
    dollars: Annotated[
        list[float] | None,
        option(
            *("", "With --machines: the price of each, first and second.", "dollars-per-hour"),
            metavar="PRICE",
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
    output at loads that both arms measured, and the capacity. Runs that differ in a fact (machine,
    workload, settings) are refused with both values, unless --allow names it.

    \b
    crossover campaign repeat runs/A runs/B --times 2    # in turns: A B A B
    crossover compare --fail-on slower A1 A2 A3 -- B1 B2 B3    # folders: `repeat` prints them
    crossover compare old-version/ new-version/          # folders of runs
    crossover compare --machines here/ there/ --dollars-per-hour 0.10 --dollars-per-hour 0.36
    """
    from loadtests.comparison import compare as comparing
    from loadtests.comparison.machines import Prices
    from loadtests.comparison.run_values import read_arm
    from loadtests.terminal.comparison import show_comparison
    from loadtests.terminal.level import wide_console

    first, second = _arms(options)
    found = comparing.compare(
        read_arm(first),
        read_arm(second),
        allow=options.allow or (),
        least=options.least,
        machines=Prices(*(options.dollars or ())) if options.machines else None,
    )
    if options.as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show_comparison(found, wide_console())
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
    dollars = options.dollars
    if dollars and (not options.machines or len(dollars) != 2 or min(dollars) <= 0):
        raise LoadError(
            f"--dollars-per-hour is given twice, above 0 and with --machines, got {dollars}"
        )
    if options.second:
        return options.runs, options.second
    if len(options.runs) != 2:
        raise LoadError(
            f"{len(options.runs)} runs and no `--`: write the first arm, `--`, the second arm: "
            "crossover compare A1 A2 A3 -- B1 B2 B3"
        )
    return options.runs[:1], options.runs[1:]
