"""The command line: one verb per line of a table, imported when it is used.

crossover doctor
crossover serve smollm2-135m
crossover campaign run campaign.toml
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from crossover import VERSION

LISTING = "crossover_listing"  # attribute of a click context whose group prints its help page

# verb -> (package.module:object, the line that --help shows for it)
VERBS: dict[str, tuple[str, str]] = {
    "doctor": (
        "crossover.serving.cli.doctor_command:doctor",
        "Show this machine, which backends work on it, and why the others do not.",
    ),
    "models": (
        "crossover.serving.cli.models_command:app",
        "List the model ladder (135M to 70B), make weights, and plan the memory of a model.",
    ),
    "serve": (
        "crossover.serving.cli.serve_command:serve",
        "Serve models over an OpenAI-compatible HTTP endpoint.",
    ),
    "quick": (
        "crossover.reports.cli.quick_command:quick",
        "Estimate in 90 seconds how many requests per second and users a running server can serve.",
    ),
    "load": (
        "crossover.loadtests.cli.load_command:load",
        "Send load at one rate to an endpoint and report TTFT, TPOT and SLO attainment.",
    ),
    "campaign": (
        "crossover.loadtests.cli.campaign_command:campaign",
        "Find the highest rate at which each model meets the SLO: init, run, resume, show.",
    ),
    "compare": (
        "crossover.loadtests.cli.compare_command:comparison",
        "Tell whether runs differ in speed by more than repeated runs of one version do.",
    ),
    "selftest": (
        "crossover.loadtests.cli.selftest_command:selftest",
        "Check the accuracy of the load generator on this machine.",
    ),
    "calibrate": (
        "crossover.loadtests.cli.calibrate_command:app",
        "Measure this machine in a few minutes and write a file for `plan`.",
    ),
    "plan": (
        "crossover.reports.cli.plan_command:plan",
        "Rank CPUs, GPUs and combinations by the cost of serving a forecast of requests.",
    ),
    "size": (
        "crossover.reports.cli.size_command:size",
        "Count the users that each machine serves with each model, and the machines for a team.",
    ),
    "atlas": (
        "crossover.reports.cli.atlas_command:atlas",
        "Compare what measured machines serve, by the price of their tokens, on one page.",
    ),
    "report": (
        "crossover.reports.cli.report_command:report",
        "Turn a run into one HTML page, Markdown, CSV or JSON.",
    ),
}


def _in_paragraphs(text: str) -> str:
    """Join each paragraph into one line, which the terminal wraps; keep those that begin with
    \\b."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        paragraph if "\b" in paragraph else " ".join(paragraph.split()) for paragraph in paragraphs
    )


class _Verbs(TyperGroup):
    """Imports a verb only when it is used; the group's help page is written from the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        target, help_line = VERBS[name]
        if ctx.resilient_parsing or getattr(ctx, LISTING, False):
            return TyperCommand(name, help=help_line)
        module_name, _, attribute = target.partition(":")
        app = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(app, typer.Typer):
            function, app = app, typer.Typer(add_completion=False)
            app.command(name=name)(function)
        command = typer.main.get_command(app)
        command.name = name
        for shown_command in (command, *getattr(command, "commands", {}).values()):
            shown_command.help = _in_paragraphs(shown_command.help or "")
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        setattr(ctx, LISTING, True)
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    help="Crossover finds the highest request rate at which this CPU meets a latency target (SLO) "
    "for LLM inference, predicts which GPU would take over, and serves models on either.",
    epilog="Start with crossover doctor, then crossover serve 135m and crossover load. "
    "To find the capacity, use crossover campaign run, then crossover report.",
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"crossover {VERSION}")
        raise typer.Exit


def main() -> None:
    """Run the console command. An error raised on purpose is printed and gives exit status 2."""
    from crossover.models.errors import CrossoverError, as_sentence, printable

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or file in another encoding shows "?" for a character that it lacks.
            stream.reconfigure(errors="replace")
    try:
        app()
    except CrossoverError as problem:
        typer.echo(f"crossover: {printable(as_sentence(str(problem)))}", err=True)
        raise SystemExit(2) from None
