"""The verb `campaign`: init, run, resume, show.

Options in, lines and an exit status out. A verb imports what it needs when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossover.loadtests.errors import BadCampaign

if TYPE_CHECKING:
    from crossover.loadtests.campaign.campaign_file import Plan
    from crossover.loadtests.campaign.progress import Progress

TEMPLATE = Path(__file__).parents[1] / "campaign.toml"
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Allow the commands, the code (module:Class) and the variables with keys that the "
        "campaign names. Without --trust such a campaign is refused, and the error lists them.",
    ),
]
Folder = Annotated[Path, typer.Argument(help="Folder of the run.")]

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


WHAT = (
    "A campaign file (TOML), or models: ladder models, GGUF files, folders or hub ids. "
    "Default: up to four ladder models around this machine's capacity, in 8 minutes."
)


@campaign.command("run")
def run_campaign(
    what: Annotated[
        list[str] | None, typer.Argument(help=WHAT, metavar="[FILE | MODEL...]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for run folders.")] = Path("runs"),
    trust: Trust = False,
) -> None:
    """Measure every configuration (a model on an engine) into a new run folder below --out.

    For each one: start the server, measure single streams and two bursts, estimate the capacity
    from the step times, and confirm a rate below it.
    Models given instead of a file are measured with the demo's settings (loadtests/demo.toml).
    `crossover campaign resume FOLDER` continues a run that was killed; nothing is measured twice.

    \b
    crossover campaign run campaign.toml
    crossover campaign run ./Llama-3.2-1B-Instruct-Q4_K_M.gguf 1b
    """
    from crossover.loadtests.campaign.campaign_file import check_trust
    from crossover.loadtests.campaign.campaign_runner import run
    from crossover.loadtests.campaign.progress import Progress

    plan = _plan_of(what or [])
    if not trust:
        check_trust(plan.campaign)
    with Progress() as progress:
        folder = run(plan, out, progress)
    _print_results(folder, progress)


def _plan_of(what: list[str]) -> Plan:
    """Return the campaign of a file, or of models. Raises BadCampaign."""
    from crossover.loadtests.campaign.campaign_file import DEMO, campaign_of_models, read_campaign

    if not what:
        return read_campaign(DEMO)
    if not any(argument.lower().endswith(".toml") for argument in what):
        return campaign_of_models(what)
    if len(what) > 1:
        raise BadCampaign(
            f"Give one campaign file or models, not {' and '.join(what)}. A campaign file lists "
            "several models under `models`."
        )
    return read_campaign(Path(what[0]))


CONFIRM = "Also confirm a rate of configurations with only an estimate, however long it takes."


@campaign.command("resume")
def resume_campaign(
    folder: Folder,
    confirm: Annotated[bool, typer.Option("--confirm", help=CONFIRM)] = False,
    trust: Trust = False,
) -> None:
    """Continue a run that was stopped or killed.

    Finished levels are kept; the level that was running is measured again.
    """
    from crossover.loadtests.campaign.campaign_runner import resume
    from crossover.loadtests.campaign.progress import Progress

    with Progress() as progress:
        resume(folder, progress, confirm=confirm, trust=trust)
    _print_results(folder, progress)


def _print_results(folder: Path, progress: Progress) -> None:
    """Print the table of results, and how to get the report."""
    from crossover.loadtests.campaign.campaign_text import show_run

    show_run(folder, levels=False, rate_units=progress.rate_units)
    typer.echo(f"To write the report: crossover report {folder}")


@campaign.command("show")
def show(folder: Folder) -> None:
    """Show configurations, load levels, verdicts and capacities of a run, finished or not."""
    from crossover.loadtests.campaign.campaign_text import show_run

    show_run(folder)
