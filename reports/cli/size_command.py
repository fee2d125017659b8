"""`crossover size`: how many users each machine serves with each model, and what a team needs.

crossover size --users 50 --task chat --models 1b,8b
crossover size --users 20 --task rag --models 1b --run runs/ID --format page > offer.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from msgspec import Meta
from rich.console import Console

from crossover.reports.cli.plan_command import (
    TEXT_COLUMNS,
    measured_tables,
    own_tables,
)
from crossover.reports.errors import ReportError
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import Count


class SizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover size`."""

    users: Count
    task: str = "chat"
    models: str
    slo: str | None = None
    run: list[Path] | None = None
    price: float | None = None
    machine: list[Path] | None = None
    machines: list[Path] | None = None
    device: list[str] | None = None
    gpu_format: str = "bf16"
    day: Literal["flat", "people", "office", "night"] = "flat"
    weekend: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    spares: Annotated[int, Meta(ge=0)] = 0
    format: Literal["text", "markdown", "csv", "json", "page"] = "text"


def _size(options: SizeOptions) -> None:
    """Print how many users each machine serves with each model, how many machines a number of
    users needs, and what they cost a month.

    \b
    crossover size --users 50 --task chat --models 1b,8b
    crossover size --users 20 --task rag --models 1b --run runs/ID
    crossover size --users 50 --models 8b --day office --weekend 0.2 --spares 1
    crossover size --users 50 --models 8b --format page > offer.html
    """
    # Imported here, so that --help is quick.
    from crossover.loadtests.campaign.progress import Progress
    from crossover.loadtests.load_generator.load_options import parse_slo_option
    from crossover.reports.plan.sizing import DEFAULT_DEVICES, size
    from crossover.reports.plan.tasks import task_named
    from crossover.reports.render import size_text

    models = [name.strip() for name in options.models.split(",") if name.strip()]
    if not models:
        raise ReportError(
            "--models names no model. Give names of `crossover models list`, such as 1b,8b."
        )
    slo = None if options.slo is None else parse_slo_option(options.slo)
    machines = own_tables(options.run or [], options.price, options.machine or [])
    machines += measured_tables(options.machines or [])
    with Progress() as progress, progress.kept_alive():
        sizing = size(
            task_named(options.task),
            options.users,
            list(dict.fromkeys(models)),
            machines,
            options.device or DEFAULT_DEVICES,
            slo=slo,
            gpu_format=options.gpu_format,
            day=options.day,
            weekend=options.weekend,
            spares=options.spares,
            report_progress=lambda name, done: progress.tick(f"simulating {name}", done),
        )
    match options.format:
        case "markdown":
            text = size_text.as_markdown(sizing)
        case "csv":
            text = size_text.as_csv(sizing).rstrip("\n")
        case "json":
            text = size_text.as_json(sizing)
        case "page":
            text = size_text.as_page(sizing)
        case "text":
            console = Console()
            width = console.width if console.is_terminal else TEXT_COLUMNS
            text = size_text.as_text(sizing, width)
    typer.echo(text)


size = command_of(SizeOptions, _size)
