"""The verb `campaign`: init, run, resume, repeat, show.

Options in, lines and an exit status out. A verb imports what it needs when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Beside = Annotated[
    bool,
    typer.Option(
        "--beside-others", help="Measure although another campaign measures on this machine."
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Allow an environment variable, or a backend by module:Class, that the campaign "
        "names; any other is refused, since the file may be a stranger's. Repeatable.",
    ),
]
Commands = Annotated[
    bool,
    typer.Option(
        "--allow-commands",
        help=r"Allow the commands of \[\[engines]]. The file may be a stranger's: "
        "`campaign run FILE --dry-run` shows them first.",
    ),
]
Out = Annotated[Path, typer.Option(help="The folder in which run folders are made.")]
Folder = Annotated[Path, typer.Argument(help="The run's folder.")]

campaign = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Find the highest request rate at which each model meets the SLO. "
    "A run can be killed at any moment and resumed.",
)


@campaign.command("init")
def init_campaign() -> None:
    """Print a campaign file to edit: every key with a value and a comment.

    crossover campaign init > mine.toml
    """
    from loadtests.campaign.campaign_template import campaign_template

    typer.echo(campaign_template(), nl=False)


@campaign.command("run")
def run_campaign(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The campaign file (TOML). Default: that of `make demo`, four models in 8 min."
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
    trust: Trust = None,
    allow_commands: Commands = False,
    beside_others: Beside = False,
) -> None:
    """Measure every cell of a campaign (a model on an engine) into one folder below --out.

    For each cell: start the server, measure single streams and two bursts, estimate the limit from
    the step times, and confirm a rate below it.
    A run that was killed goes on by `crossover campaign resume FOLDER`; nothing is measured twice.
    """
    from loadtests.campaign.campaign_file import DEMO, check_trust, read_campaign

    plan = read_campaign(file or DEMO, budget_seconds=budget)
    check_trust(plan, trust or (), allow_commands=allow_commands or dry_run)
    if dry_run:
        from loadtests.campaign.campaign_text import show_plan

        show_plan(plan)
        return
    from loadtests.campaign.campaign_runner import run
    from loadtests.campaign.progress import Progress

    with Progress() as progress:
        folder = run(plan, out, progress, beside_others=beside_others)
    _answer(folder)


@campaign.command("resume")
def resume_campaign(
    folder: Folder,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm", help="Confirm also what was only estimated, however long that takes."
        ),
    ] = False,
    trust: Trust = None,
    allow_commands: Commands = False,
    beside_others: Beside = False,
) -> None:
    """Go on with a run that was stopped or killed.

    Finished levels are kept; the one that was running is measured again.
    """
    from loadtests.campaign.campaign_runner import resume
    from loadtests.campaign.progress import Progress

    with Progress() as progress:
        resume(
            folder,
            progress,
            confirm=confirm,
            trusted=trust or (),
            allow_commands=allow_commands,
            beside_others=beside_others,
        )
    _answer(folder)


def _answer(folder: Path) -> None:
    from loadtests.campaign.campaign_text import show_run

    show_run(folder, levels=False)
    typer.echo(f"The report: crossover report {folder}")


@campaign.command("repeat")
def repeat_campaign(
    folders: Annotated[
        list[Path], typer.Argument(help="The runs whose levels are measured again, in turns.")
    ],
    times: Annotated[int, typer.Option(min=1, help="How many times each is measured.")] = 1,
    out: Out = Path("runs"),
    trust: Trust = None,
    allow_commands: Commands = False,
    beside_others: Beside = False,
) -> None:
    """Measure the levels of runs again in new folders: same cells, rates, durations and seeds.

    Such runs differ by the machine alone. Several are measured in turns (A B A B), so that a drift
    of the machine meets all alike.
    """
    from loadtests.campaign.campaign_file import Plan, check_trust
    from loadtests.campaign.campaign_runner import run
    from loadtests.campaign.progress import Progress
    from loadtests.campaign.run_state import repeat_in_turns

    def measure(plan: Plan) -> Path:
        check_trust(plan, trust or (), allow_commands=allow_commands)
        return run(plan, out, progress, beside_others=beside_others)

    with Progress() as progress:
        arms = repeat_in_turns(folders, times, measure)
    for arm in arms:
        show(arm[-1])
    first, *others = [" ".join(str(folder) for folder in arm) for arm in arms]
    for other in others:
        typer.echo(f"\nTo compare: crossover compare {first} -- {other}")
    if not others:
        typer.echo(f"\n{len(arms[0])} runs to compare others with: {first}")


@campaign.command("show")
def show(folder: Folder) -> None:
    """Cells, levels, verdicts and capacities of a run, finished or not."""
    from loadtests.campaign.campaign_text import show_run

    show_run(folder)
