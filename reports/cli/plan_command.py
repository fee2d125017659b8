"""`crossover plan`: which machines serve a forecast, at what cost, and how sure that is.

crossover plan --example > plan.toml
crossover plan plan.toml --run runs/ID
crossover plan --model 8b --rate 0.5
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from crossover.models import formatting
from crossover.models.model_ladder import is_ladder_model
from crossover.reports.devices.device_catalog import devices, user_file
from crossover.reports.errors import ReportError
from crossover.reports.plan.plan_costs import make_plan
from crossover.reports.plan.plan_file import EXAMPLE, BadPlan
from crossover.reports.plan.plan_machines import asked_of, candidates_of
from crossover.reports.render.plan_text import as_json, as_text
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import option
from crossover.serving.toml_files import read_toml

TEXT_COLUMNS = 110
PRESETS = ", ".join(SLO_PRESETS)
RATES = ("peak_rate", "mean_rate", "users", "requests_per_user")


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover plan`."""

    file: Annotated[Path | None, option("", "Plan file (TOML).", is_argument=True)] = None
    model: Annotated[
        str | None, option("", "Model: a ladder model (8b), a GGUF file, a folder or a hub id.")
    ] = None
    rate: Annotated[
        float | None,
        option("", "Requests/s in the busiest hour. Default: the rate of the plan file."),
    ] = None
    slo: Annotated[
        str | None,
        option("", f"SLO preset: {PRESETS}. Default: that of the run, else chat."),
    ] = None
    device: Annotated[
        list[str] | None,
        option("", "Device to consider for rent, instead of the default list. Repeatable."),
    ] = None
    run: Annotated[list[Path] | None, option("", "Run of one of your machines. Repeatable.")] = None
    price: Annotated[
        float | None,
        option(
            "",
            "Price of the machine of --run in $/h, rented all month. 0 means that it is paid for "
            "and costs only its energy. Default: 0, but for a machine with a GPU its list price.",
        ),
    ] = None
    machine: Annotated[
        list[Path] | None, option("", "File written by `crossover calibrate`. Repeatable.")
    ] = None
    chart: Annotated[
        Path | None, option("", "Chart of the costs to write: .png, .svg or .html.")
    ] = None
    as_json: Annotated[bool, option("", "Print the plan as JSON (docs/plan.md).", "json")] = False
    devices: Annotated[bool, option("", "List all known devices and exit.")] = False
    example: Annotated[bool, option("", "Print an example plan file and exit.")] = False


def _plan(options: PlanOptions) -> None:
    """Rank the options to serve a forecast by cost: this CPU, more CPUs, GPUs, or combinations.

    crossover plan --example > plan.toml; crossover plan plan.toml --run runs/ID
    """
    if options.example:
        typer.echo(EXAMPLE, nl=False)
        return
    console = Console()
    width = console.width if console.is_terminal else TEXT_COLUMNS
    if options.devices:
        Console(width=max(width, 190)).print(_devices())
        return
    folder = options.file.parent if options.file is not None else Path()
    with Console(stderr=True).status("simulating") as status:
        asked = asked_of(_tables(options, folder), folder)
        candidates = candidates_of(asked, lambda what: status.update(f"simulating: {what}"))
        status.update("what would change the choice")
        made = make_plan(asked, candidates)
    if options.chart is not None:
        _write_chart(options.chart, made)
    typer.echo(as_json(made) if options.as_json else as_text(made, width))


plan = command_of(PlanOptions, _plan)


def _tables(options: PlanOptions, folder: Path) -> dict[str, Any]:
    """The plan file with the options in the place of its keys."""
    tables = read_toml(options.file, BadPlan)[0] if options.file is not None else {}
    if options.file is None and (options.model is None or options.rate is None):
        raise ReportError(
            "Give a plan file, or --model and --rate. `crossover plan --example` prints a file."
        )
    model = options.model
    if model is not None and Path(model).exists() and not is_ladder_model(model):
        model = str(Path(model).absolute())
    given = {"model": model, "slo": options.slo, "devices": options.device or None}
    tables |= {name: value for name, value in given.items() if value is not None}
    if options.rate is not None:
        kept = {k: v for k, v in tables.get("forecast", {}).items() if k not in RATES}
        tables["forecast"] = {**kept, "peak_rate": options.rate}
    if options.price is not None and (not options.run or not 0 <= options.price < math.inf):
        raise ReportError(
            f"--price {options.price:g} must be 0 or more: the $/h of the machine of --run."
        )
    named = [("run", one) for one in options.run or []]
    named += [("file", one) for one in options.machine or []]
    cost: dict[str, Any] = {}
    if options.price is not None:
        cost = {"is_paid": not options.price}
        if options.price:
            cost["dollars_per_hour"] = options.price
    # paths of the command line are relative to where it is typed, those of the file to its folder
    machines = [
        {kind: str(path.absolute()), **(cost if kind == "run" else {})} for kind, path in named
    ]
    if machines:
        tables["machines"] = [*tables.get("machines", []), *machines]
    return tables


def _write_chart(path: Path, made: Any) -> None:
    from crossover.reports.render.plan_chart import staircase  # altair takes half a second

    if path.suffix not in (".png", ".svg", ".html"):
        raise ReportError(f"--chart must end in .png, .svg or .html, got {str(path)!r}")
    try:
        staircase(made).save(str(path))
    except OSError as problem:
        raise ReportError(f"{path} cannot be written: {problem.strerror}") from problem


def _devices() -> Table:
    """What is known of each device; a price is of one for an hour, on that date."""
    title = f"Devices (add your own in {user_file()})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    numbers = ("memory", "memory bandwidth", "16-bit peak", "power", "price")
    for name in ("device", "kind", *numbers, "price of"):
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for one in devices():
        tflops, price = one.tflops.fp16, one.dollars_per_hour
        table.add_row(
            one.name,
            one.kind,
            "" if one.memory_gib is None else f"{one.memory_gib:g} GiB",
            f"{formatting.significant(one.bandwidth_gb_per_second)} GB/s",
            "" if tflops is None else f"{tflops:g} TFLOP/s",
            "" if one.watts is None else f"{one.watts:g} W",
            formatting.dollars_per_hour(price),
            "" if price is None else f"{one.price_basis or one.price_source}, {one.price_date}",
        )
    return table
