"""`crossover plan`: what serves a forecast, what it costs, and how sure that is.

crossover plan --example > plan.toml
crossover plan plan.toml
crossover plan plan.toml --rate 2 --device "NVIDIA L4" --json
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from reports.errors import ReportError
from reports.plan.example import example
from reports.plan.file import BadPlan, Question, question, read_plan
from reports.plan.output import as_json, as_text
from reports.plan.sources import planned
from serving.bounds import option
from serving.cli.parameters import command_of

TEXT_COLUMNS = 160
RATE = "Requests/s of the busiest hour, in place of the file's; without a file: day and night."
# What --rate takes the place of, in the file.
NO_RATES = dict.fromkeys(("mean_rate", "users", "requests_per_user", "trace"))


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover plan`."""

    file: Annotated[Path | None, option("", "The plan file, TOML.", is_argument=True)] = None
    model: Annotated[str | None, option("", "A rung of the ladder, e.g. 8b.")] = None
    rate: Annotated[float | None, option("", RATE)] = None
    slo: Annotated[
        str | None,
        option("", "A preset: chat, interactive, reading, ... Default: the file's or chat."),
    ] = None
    device: Annotated[
        list[str] | None,
        option("", "Consider this device for rent, not the list; may be repeated."),
    ] = None
    run: Annotated[
        list[Path] | None,
        option("", "A run folder of a machine of yours, or its archive; repeatable."),
    ] = None
    machine: Annotated[
        list[Path] | None, option("", "A file of `crossover calibrate`; may be repeated.")
    ] = None
    as_json: Annotated[bool, option("", "Print the plan as JSON (docs/plan.md).", "json")] = False
    example: Annotated[bool, option("", "Print a plan file with every key and its default.")] = (
        False
    )


def _plan(options: PlanOptions) -> None:
    """Rank the ways to serve a forecast by what they cost: CPUs, GPUs, and both.

    crossover plan --example > plan.toml; crossover plan plan.toml

    crossover plan --model 8b --rate 2 --slo chat --run runs/mine
    """
    if options.example:
        typer.echo(example(), nl=False)
        return
    asked = _asked(options)
    named = [
        *(("--run", one) for one in options.run or []),
        *(("--machine", one) for one in options.machine or []),
    ]
    first = len(asked.keys.machines) - len(named)
    with Console(stderr=True).status("simulating") as status:
        try:
            made = planned(asked, lambda what: status.update(f"simulating: {what}"))
        except BadPlan as problem:
            said = str(problem)
            for number, (option, path) in enumerate(named, first):
                said = said.replace(f"`$.machines[{number}]`", f"`{option} {path}`")
            raise BadPlan(said) from problem
    typer.echo(as_json(made) if options.as_json else as_text(made, _columns()))


plan = command_of(PlanOptions, _plan)


def _asked(options: PlanOptions) -> Question:
    """The plan file with the options in the place of its keys."""
    given = {"model": options.model, "slo": options.slo, "devices": options.device or None}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    named = [("run", one) for one in options.run or []]
    named += [("file", one) for one in options.machine or []]
    changes["machines"] = [{kind: str(path.resolve())} for kind, path in named]
    if options.rate is not None:
        if not 0 < options.rate < math.inf:
            raise ReportError(f"--rate must be above 0 requests/s, got {options.rate}")
        changes["forecast"] = {**NO_RATES, "peak_rate": options.rate}
    if options.file is not None:
        return read_plan(options.file, changes)
    if options.model is None or options.rate is None:
        raise ReportError(
            "give a plan file, or --model and --rate; `crossover plan --example` prints a file"
        )
    return question(changes)


def _columns() -> int:
    console = Console()
    return console.width if console.is_terminal else TEXT_COLUMNS
