"""`crossover plan`: which machines serve a forecast, at what cost, and with which certainty.

crossover plan --example > plan.toml
crossover plan plan.toml --run runs/ID
crossover plan --model 8b --rate 0.5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from crossover.models import formatting
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.tables import Column, Table, lines_of, table_of
from crossover.reports.errors import ReportError
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.toml_files import read_toml

if TYPE_CHECKING:
    from crossover.reports.devices.device_catalog import Device
    from crossover.reports.plan.plan_costs import CostPlan

TEXT_COLUMNS = 110
CHART_PIXELS = 640
RATE_KEYS = ("peak_rate", "mean_rate", "users", "requests_per_user")


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover plan`."""

    file: Path | None = None
    model: str | None = None
    rate: float | None = None
    slo: str | None = None
    gpu_format: str | None = None
    device: list[str] | None = None
    run: list[Path] | None = None
    price: float | None = None
    api_price: str | None = None
    machine: list[Path] | None = None
    machines: list[Path] | None = None
    chart: Path | None = None
    as_json: bool = False
    devices: bool = False
    example: bool = False


def _plan(options: PlanOptions) -> None:
    """Rank the options to serve a forecast by cost: this CPU, more CPUs, GPUs, or combinations.

    crossover plan --example > plan.toml; crossover plan plan.toml --run runs/ID
    """
    # Imported here, so that --help is quick.
    from crossover.loadtests.campaign.progress import Progress
    from crossover.reports.plan.plan_costs import make_plan
    from crossover.reports.plan.plan_file import EXAMPLE
    from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
    from crossover.reports.render.plan_text import as_json, as_text

    if options.example:
        typer.echo(EXAMPLE, nl=False)
        return
    if options.devices:
        from crossover.reports.devices.device_catalog import user_file

        typer.echo(f"Devices (add your own in {user_file()})")
        typer.echo("\n".join(lines_of(_devices())))
        return
    console = Console()
    width = console.width if console.is_terminal else TEXT_COLUMNS
    folder = options.file.parent if options.file is not None else Path()
    with Progress() as progress, progress.kept_alive():
        progress.tick("reading runs and files")
        question = question_of_tables(_tables(options), folder)
        candidates = candidates_of(
            question, lambda name, done: progress.tick(f"simulating {name}", done)
        )
        progress.tick("finding the rates at which the choice changes")
        cost_plan = make_plan(question, candidates)
    if options.chart is not None:
        _write_chart(options.chart, cost_plan)
    typer.echo(as_json(cost_plan) if options.as_json else as_text(cost_plan, width))


plan = command_of(PlanOptions, _plan)


def _tables(options: PlanOptions) -> dict[str, Any]:
    """Return the tables of the plan file, in which options replace keys and add machines.

    Raises ReportError for options that contradict each other, and BadPlan for a broken file.
    """
    from crossover.reports.plan.plan_file import BadPlan

    tables = read_toml(options.file, BadPlan)[0] if options.file is not None else {}
    if options.file is None and (options.model is None or options.rate is None):
        raise ReportError(
            "Give a plan file, or --model and --rate. `crossover plan --example` prints a file."
        )
    model = options.model
    if model is not None and Path(model).exists() and find_ladder_model(model) is None:
        model = str(Path(model).absolute())
    replacements = {
        "model": model,
        "slo": None if options.slo is None else _slo_keys(options.slo),
        "gpu_format": options.gpu_format,
        "devices": options.device or None,
    }
    tables |= {name: value for name, value in replacements.items() if value is not None}
    if options.rate is not None:
        forecast = tables.get("forecast", {})
        other_keys = {name: forecast[name] for name in forecast if name not in RATE_KEYS}
        tables["forecast"] = {**other_keys, "peak_rate": options.rate}
    machines = own_tables(options.run or [], options.price, options.machine or [])
    machines += measured_tables(options.machines or [])
    if options.api_price is not None:
        tables["api"] = _api_keys(options.api_price)
    if machines:
        tables["machines"] = [*tables.get("machines", []), *machines]
    return tables


def _slo_keys(text: str) -> str | dict[str, Any]:
    """Return the key `slo` for a preset or for limits such as `ttft=2,tpot=0.1`. Raises
    LoadError."""
    from crossover.loadtests.load_generator.load_options import parse_slo_option
    from crossover.serving.capacity.slo import SLO_PRESETS

    slo = parse_slo_option(text)
    if text in SLO_PRESETS:
        return text
    limits = {f"{name}_seconds": limit for name, limit in slo.limits.items()}
    return limits | {"target": slo.target}


def own_tables(
    runs: Sequence[Path], price: float | None, files: Sequence[Path]
) -> list[dict[str, Any]]:
    """Return the [[machines]] of --run, --price and --machine. Raises ReportError for a wrong
    price."""
    if price is not None and not runs:
        raise ReportError(f"--price {price:g} needs --run: it is the $/h of the machine of --run.")
    if price is not None and not 0 <= price < math.inf:
        raise ReportError(f"--price {price:g} must be 0 or more: the $/h of the machine of --run.")
    price_keys: dict[str, Any] = {}
    if price is not None:
        price_keys = {"is_paid": not price}
        if price:
            price_keys["dollars_per_hour"] = price
    # Paths on the command line are relative to the current folder, those in the file to its folder.
    tables = [{"run": str(path.absolute()), **price_keys} for path in runs]
    return [*tables, *({"file": str(path.absolute())} for path in files)]


def measured_tables(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the [[machines]] of --machines: to rent, at the prices in their files. Raises
    ReportError."""
    from crossover.reports.devices.calibrated_machines import read_machines

    files = dict.fromkeys(str(machine.path.absolute()) for machine in read_machines(paths))
    return [{"file": file, "owned": 0} for file in files]


def _api_keys(prices: str) -> dict[str, float]:
    """Return the keys of [api] for `0.15/0.60` or `0.15/0.075/0.60`. Raises ReportError."""
    names = {2: ("input", "output"), 3: ("input", "cached_input", "output")}
    parts = prices.split("/")
    try:
        return dict(zip(names[len(parts)], map(float, parts), strict=True))
    except (KeyError, ValueError):
        raise ReportError(
            f"--api-price {prices!r} must be IN/OUT or IN/CACHED/OUT, in dollars per million "
            "tokens, such as 0.15/0.60"
        ) from None


def _write_chart(path: Path, cost_plan: CostPlan) -> None:
    """Write the chart of the costs, in the format of the path's suffix. Raises ReportError."""
    # Imported here, since altair takes 0.5 s.
    from crossover.reports.chart_style import png, svg
    from crossover.reports.render.plan_chart import cost_chart
    from crossover.reports.render.plan_page import plan_page

    makers: dict[str, Callable[[], str | bytes]] = {
        ".png": lambda: png(cost_chart(cost_plan), CHART_PIXELS),
        ".svg": lambda: svg(cost_chart(cost_plan), CHART_PIXELS),
        ".html": lambda: plan_page(cost_plan),
    }
    if path.suffix not in makers:
        raise ReportError(f"--chart must end in .png, .svg or .html, got {str(path)!r}")
    content = makers[path.suffix]()
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as problem:
        raise ReportError(f"{path} cannot be written: {problem.strerror}") from problem


def _devices() -> Table:
    """Return the table of all known devices, with the hourly price of one and the price's date."""
    from crossover.reports.devices.device_catalog import devices

    def price_words(device: Device) -> str:
        if device.dollars_per_hour is None:
            return ""
        return f"{device.price_basis or device.price_source}, {device.price_date}"

    def with_unit(value: float | None, unit: str) -> str:
        return "" if value is None else f"{value:g} {unit}"

    return table_of(
        devices(),
        Column("device", "text", lambda device: device.name),
        Column("kind", "text", lambda device: device.kind),
        Column("memory", "number", lambda device: with_unit(device.memory_gib, "GiB")),
        Column(
            "memory bandwidth",
            "number",
            lambda device: f"{formatting.significant(device.bandwidth_gb_per_second)} GB/s",
        ),
        Column("16-bit peak", "number", lambda device: with_unit(device.tflops.fp16, "TFLOP/s")),
        Column("power", "number", lambda device: with_unit(device.watts, "W")),
        Column("price", "$/h", lambda device: device.dollars_per_hour, missing="no list price"),
        Column("price of", "text", price_words),
    )
