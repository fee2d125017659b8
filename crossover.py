"""The command line: one verb per line of a table; each verb lives in its package's cli.py and is imported when it is used.

crossover doctor
crossover serve smollm2-135m
crossover campaign run campaign.toml
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

VERSION = "0.1.0"

# verb -> (package.module:object, the line that --help shows)
VERBS: dict[str, tuple[str, str]] = {
    "doctor": ("serving.cli:doctor", "What this machine is, which backends work on it, and why the others do not."),
    "models": ("serving.plan_cli:app", "The ladder of models: list, make, plan."),
    "serve": ("serving.cli:serve", "Serve one model over an OpenAI-compatible HTTP endpoint."),
    "load": ("loadtests.cli:load", "Send one level of load to a URL and say what came back."),
    "campaign": ("loadtests.cli:campaign", "Measure a ladder of models: run, resume, repeat, show."),
    "compare": ("loadtests.cli:compare", "Say where a run is faster or slower than another, by more than chance and noise."),
    "selftest": ("loadtests.selftest_cli:selftest", "Check the load generator on this machine against a server that knows the truth."),
    "report": ("reports.cli:report", "Turn runs into one HTML page, Markdown and CSV."),
}


class _Verbs(TyperGroup):
    """Lists the table without importing anything; imports the one verb that was asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        target, help_line = VERBS[name]
        if ctx.resilient_parsing or _only_listing(ctx):
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


def _only_listing(ctx: Any) -> bool:
    """True while click formats the group's own help page and wants every command's short help."""
    return not any(argument in VERBS for argument in sys.argv[1:])


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    help="Crossover: where does this CPU stop being enough for LLM inference, and what GPU does it take instead? Measured, not guessed.",
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
    if version:
        typer.echo(f"crossover {VERSION}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console command: errors raised on purpose are one sentence, not a traceback."""
    from models.errors import ModelError

    try:
        app()
    except ModelError as problem:
        _fail(problem)
    except Exception as problem:
        if type(problem).__module__ in ("serving.errors", "loadtests.errors", "reports.errors"):
            _fail(problem)
        raise


def _fail(problem: Exception) -> None:
    typer.echo(f"crossover: {problem}", err=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
