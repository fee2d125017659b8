"""The verbs `campaign init | run | resume | repeat | show`, `load`, `compare` and `selftest`.

Options in, lines and an exit status out. A verb imports what it needs when it is called.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer

from loadtests.errors import LoadError
from loadtests.generator.launcher import spare as started_early
from loadtests.generator.options import CommandOptions

Beside = Annotated[
    bool,
    typer.Option(
        "--beside-others", help="Measure although another campaign measures on this machine."
    ),
]
Out = Annotated[Path, typer.Option(help="Where run folders go.")]
Folder = Annotated[Path, typer.Argument(help="The run's folder.")]

campaign = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure a ladder of models: the highest load at which each meets the SLO. "
    "A run can be killed at any moment and resumed.",
    epilog="A campaign file:  name = 'mine'  models = ['135m', '1b']  budget_seconds = 600  "
    "\\[slo] preset = 'chat'.  crossover campaign init prints one with every key, its default and "
    "a comment.",
)


@campaign.command("run")
def run_campaign(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The campaign file (TOML). Default: the demo campaign, four rungs in ten minutes."
        ),
    ] = None,
    out: Out = Path("runs"),
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be measured, on what and for how long; start nothing."
        ),
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds of measuring for all cells together, in place of the file's."),
    ] = None,
    beside_others: Beside = False,
) -> None:
    """Measure every cell of a campaign, and write all of it into one folder below --out.

    For each cell: start the server, measure single-stream requests, calibrate and predict the
    capacity, then search for the highest rate that meets the SLO.
    A run that was killed goes on by `crossover campaign resume FOLDER`; nothing is measured twice.
    """
    from loadtests.campaign.campaign_file import DEMO, read_campaign

    plan = read_campaign(file or DEMO, budget_seconds=budget)
    if dry_run:
        from loadtests.terminal.dry_run import show_plan

        show_plan(plan)
        return
    from loadtests.campaign.progress import Progress
    from loadtests.campaign.runner import run

    with Progress() as progress:
        folder = run(plan, out, progress, beside_others=beside_others)
    show(folder)
    typer.echo(f"\nThe report: crossover report {folder}")


@campaign.command("resume")
def resume_campaign(folder: Folder, beside_others: Beside = False) -> None:
    """Go on with a run that was stopped or killed.

    Finished levels are kept; the one that was running is measured again.
    """
    from loadtests.campaign.progress import Progress
    from loadtests.campaign.runner import resume

    with Progress() as progress:
        resume(folder, progress, beside_others=beside_others)
    show(folder)
    typer.echo(f"\nThe report: crossover report {folder}")


@campaign.command("init")
def init_campaign() -> None:
    """Print a campaign file with every key, its default and a comment.

    crossover campaign init > mine.toml
    """
    from loadtests.campaign.template import campaign_template

    typer.echo(campaign_template(), nl=False)


@campaign.command("repeat")
def repeat_campaign(
    folder: Annotated[Path, typer.Argument(help="The run whose levels are measured again.")],
    out: Out = Path("runs"),
    beside_others: Beside = False,
) -> None:
    """Measure the levels of a run again in a new folder: same cells, rates, durations and seeds.

    Two such runs differ by the machine's noise: crossover compare A B --noise A_AGAIN.
    """
    from loadtests.campaign.progress import Progress
    from loadtests.campaign.run_state import repeat_of
    from loadtests.campaign.runner import run

    with Progress() as progress:
        again = run(repeat_of(folder), out, progress, beside_others=beside_others)
    show(again)
    typer.echo(f"\nTo compare: crossover compare {folder} {again}")


@campaign.command("show")
def show(folder: Folder) -> None:
    """Cells, levels, verdicts and capacities of a run, finished or not."""
    from loadtests.terminal.run import show_run

    show_run(folder)


def load(
    url: Annotated[
        str, typer.Argument(help="An OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000")
    ],
    **given: Any,
) -> None:
    """Send one level of load to a URL and say what came back: TTFT, TPOT, goodput, SLO verdict.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    """
    options = CommandOptions(**given)
    if (options.rate is None) == (options.concurrency is None):
        raise LoadError("give either --rate (open loop) or --concurrency (closed loop)")
    with started_early(options.concurrency or 1) as spare:
        from loadtests.campaign.campaign_file import slo_of
        from loadtests.campaign.campaign_keys import SloSpec
        from loadtests.campaign.progress import Progress
        from loadtests.campaign.single_level import single_level
        from loadtests.generator.option_values import plan_of_command
        from loadtests.terminal.level import show_level, wide_console

        slo = slo_of(SloSpec(preset=options.slo, target=options.target))
        with Progress() as progress:
            plan = plan_of_command(url, options)
            summary, folder = single_level(plan, slo, options.out, progress, spare)
    console = wide_console()
    show_level(summary, console)
    if folder is not None:
        console.print(f"records: {folder}")


def _parameters(options: type[msgspec.Struct]) -> list[inspect.Parameter]:
    """Command-line options from a struct's fields: names, types, defaults and help."""
    hints = get_type_hints(options, include_extras=True)
    found = []
    for field in msgspec.structs.fields(options):
        kind, meta = get_args(hints[field.name])
        shown = typer.Option(help=meta.description, min=meta.ge, metavar=METAVARS.get(field.name))
        annotation = Annotated[kind, shown]  # type: ignore[valid-type]
        keyword = inspect.Parameter.KEYWORD_ONLY
        found.append(
            inspect.Parameter(field.name, keyword, default=field.default, annotation=annotation)
        )
    return found


METAVARS = {"api_key_env": "NAME", "extra_body": "JSON"}
load.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        next(iter(inspect.signature(load, eval_str=True).parameters.values())),
        *_parameters(CommandOptions),
    ]
)


def compare(
    first: Annotated[Path, typer.Argument(help="The run that is compared with.")],
    second: Annotated[Path, typer.Argument(help="The run that is judged.")],
    noise: Annotated[
        list[Path] | None,
        typer.Option(
            help="A repeat of FIRST: the machine's own noise. May be given several times."
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACT",
            help="A fact that may differ, e.g. format or cpu_model. May be given several times.",
        ),
    ] = None,
    floor: Annotated[
        float,
        typer.Option(
            min=0.0, help="Differences below this share are noise, where no repeat says better."
        ),
    ] = 0.03,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="slower|different",
            help="End with status 1 where anything is slower, or differs at all.",
        ),
    ] = None,
) -> None:
    """Say where a run is faster or slower than another, by a test and beyond the machine's noise.

    Compared are medians and p95 of TTFT, TPOT and E2E at loads that both measured, and the
    capacity. Runs that differ in a fact (machine, workload, settings) are refused with both
    values, unless --allow names it.

    \b
    crossover campaign repeat runs/A                     # the machine's own noise
    crossover compare runs/A runs/B --noise runs/A-again --fail-on slower
    """
    from loadtests.comparison import compare as comparing
    from loadtests.terminal.comparison import show_comparison
    from loadtests.terminal.level import wide_console

    if fail_on not in (None, "slower", "different"):
        raise LoadError(f"--fail-on must be slower or different, got {fail_on!r}")
    repeats = [comparing.read(folder) for folder in noise or ()]
    found = comparing.compare(
        comparing.read(first), comparing.read(second), noise=repeats, allow=allow or (), floor=floor
    )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show_comparison(found, wide_console())
    bad = {"slower": ("slower", "different"), "different": ("slower", "faster", "different")}
    if fail_on is not None and found.verdict in bad[fail_on]:
        raise typer.Exit(1)


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

    A table in under two minutes; exit status 1 when something fails.
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
