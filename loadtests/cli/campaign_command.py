"""The verb `campaign`: init, run, resume, show.

Options in, lines and an exit status out. A verb imports what it needs when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TEMPLATE = Path(__file__).parents[1] / "campaign.toml"
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Allow what the campaign names: commands, module:Class, the variable of a key. The "
        "file may be a stranger's: without --trust it is refused, and says what it would use.",
    ),
]
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
    typer.echo(TEMPLATE.read_text(), nl=False)


DEFAULT = "The campaign file (TOML). Default: that of `make demo`, four models in 8 min."


@campaign.command("run")
def run_campaign(
    file: Annotated[Path | None, typer.Argument(help=DEFAULT)] = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    trust: Trust = False,
) -> None:
    """Measure every cell of a campaign (a model on an engine) into one folder below --out.

    For each cell: start the server, measure single streams and two bursts, estimate the limit from
    the step times, and confirm a rate below it.
    A run that was killed goes on by `crossover campaign resume FOLDER`; nothing is measured twice.
    """
    from loadtests.campaign.campaign_file import DEMO, check_trust, read_campaign
    from loadtests.campaign.campaign_runner import run
    from loadtests.campaign.progress import Progress

    plan = read_campaign(file or DEMO)
    if not trust:
        check_trust(plan)
    with Progress() as progress:
        folder = run(plan, out, progress)
    _answer(folder)


CONFIRM = "Confirm also what was only estimated, however long that takes."


@campaign.command("resume")
def resume_campaign(
    folder: Folder,
    confirm: Annotated[bool, typer.Option("--confirm", help=CONFIRM)] = False,
    trust: Trust = False,
) -> None:
    """Go on with a run that was stopped or killed.

    Finished levels are kept; the one that was running is measured again.
    """
    from loadtests.campaign.campaign_runner import resume
    from loadtests.campaign.progress import Progress

    with Progress() as progress:
        resume(folder, progress, confirm=confirm, trust=trust)
    _answer(folder)


def _answer(folder: Path) -> None:
    from loadtests.campaign.campaign_text import show_run

    show_run(folder, levels=False)
    typer.echo(f"The report: crossover report {folder}")


@campaign.command("show")
def show(folder: Folder) -> None:
    """Cells, levels, verdicts and capacities of a run, finished or not."""
    from loadtests.campaign.campaign_text import show_run

    show_run(folder)
