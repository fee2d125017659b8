"""The command line: one verb per line of a table, imported when it is used.

crossover doctor
crossover serve smollm2-135m
crossover campaign run campaign.toml
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

VERSION = "0.1.0"
LISTING = "crossover_listing"  # attribute of a click context whose group prints its help page

# verb -> (package.module:object, the line that --help shows)
VERBS: dict[str, tuple[str, str]] = {
    "doctor": (
        "serving.cli.serve:doctor",
        "What this machine is, which backends work on it, and why the others do not.",
    ),
    "models": (
        "serving.cli.plan:app",
        "The ladder of models: list them, make weights, plan the memory that they take.",
    ),
    "serve": (
        "serving.cli.serve:serve",
        "Serve models over an OpenAI-compatible HTTP endpoint.",
    ),
    "load": ("loadtests.cli:load", "Send one level of load to a URL and say what came back."),
    "campaign": (
        "loadtests.cli:campaign",
        "Find the rate that each model sustains: init, run, resume, repeat, show.",
    ),
    "compare": (
        "loadtests.compare_cli:comparison",
        "Say where runs are faster or slower than others, by more than runs differ by themselves.",
    ),
    "selftest": (
        "loadtests.cli:selftest",
        "Check the accuracy of the load generator on this machine.",
    ),
    "calibrate": (
        "loadtests.calibrate.cli:app",
        "Measure this machine in a minute, into a file that plans and reports take as a device.",
    ),
    "hardware": (
        "reports.planning.hardware_cli:app",
        "The devices of plans and reports, with datasheets and prices: list, add, update.",
    ),
    "plan": (
        "reports.plan.cli:plan",
        "Rank CPUs, GPUs and both by what they cost to serve a forecast of requests.",
    ),
    "share": (
        "reports.reference.cli:share",
        "Make an archive of a run without names, to give away; what it holds is shown first.",
    ),
    "report": ("reports.cli:report", "Turn runs into one HTML page, Markdown and CSV."),
}


class _Verbs(TyperGroup):
    """Imports only the verb that is asked for; the group's help page is written from the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        target, help_line = VERBS[name]
        if ctx.resilient_parsing or getattr(ctx, LISTING, False):
            return TyperCommand(name, help=help_line)
        module_name, _, attribute = target.partition(":")
        found = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command(name=name)(found)
            found = app
        command = typer.main.get_command(found)
        command.name = name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        setattr(ctx, LISTING, True)
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    help="Crossover measures the request rate at which this CPU no longer meets a latency target "
    "for LLM inference, names the GPU that would take over, and serves models on either.",
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and end."),
) -> None:
    if version:
        typer.echo(f"crossover {VERSION}")
        raise typer.Exit


def main() -> None:
    """Run the console command. An error raised on purpose is one sentence and exit status 2."""
    from models.errors import CrossoverError, printable

    try:
        app()
    except CrossoverError as problem:
        typer.echo(f"crossover: {printable(str(problem))}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
