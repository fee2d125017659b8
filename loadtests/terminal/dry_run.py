"""What a campaign would measure, on what and for how long, printed."""

from __future__ import annotations

import typer

from loadtests.campaign.campaign_file import Campaign, Plan
from loadtests.campaign.cell_planning import (
    engine_values,
    layout_of,
    least_part_seconds,
    shares,
    why_not,
)
from loadtests.campaign.cells import Cell
from loadtests.campaign.progress import Progress
from loadtests.campaign.rungs import with_rungs
from loadtests.engines.command import Engine, commands_of
from loadtests.host.processes import Layout
from loadtests.metrics.slo import Slo
from loadtests.workload.requests import in_words
from models import formatting
from models.cache import Wish, cache_dir, synthetic_path
from models.errors import printable
from models.formats import weight_bytes
from models.ladder import is_rung, rung
from serving.backends.backend_table import weights_of
from serving.hardware.cpu_topology import cores_text
from serving.hardware.machine_facts import HardwareFacts, allowed_cores, hardware_facts


def show_plan(plan: Plan) -> None:
    """Print each cell: skipped and why, or its share of the budget, cores and weights."""
    facts = hardware_facts()
    with Progress() as progress:
        plan = with_rungs(plan, facts, progress, may_measure=False)
    settings = plan.campaign
    slo = settings.slo
    cells = f"{len(plan.cells)} cell{'s' if len(plan.cells) > 1 else ''}"
    if plan.is_auto:
        cells = "rungs that some 20 s of measuring choose"
    typer.echo(
        f"{settings.name}: {cells}; "
        f"SLO {slo.name} ({_limits(slo)}) for {100 * slo.target:.4g} % of requests"
    )
    workloads = settings.workloads or {"workload": settings.workload}
    for name, workload in workloads.items():
        typer.echo(f"  {name}: {in_words(workload)}")
    names = [one.name for one in settings.all_slos]
    if len(names) > 1:
        typer.echo(f"  every level is judged by {len(names)} SLOs: {', '.join(names)}")
    each = settings.search.budget_seconds
    can = [cell for cell in plan.cells if why_not(cell, settings, facts) is None]
    seconds = {cell.key: each for cell in can}
    whole = each * len(can)
    if settings.budget_seconds is not None:
        whole = settings.budget_seconds
        least = least_part_seconds(settings) * settings.search.starts
        seconds = shares(dict.fromkeys(can, 1), whole, least) if can else {}
    for cell in plan.cells:
        _show_cell(cell, settings, facts, seconds.get(cell.key, 0.0))
    typer.echo(
        f"at most {formatting.duration(whole)} of measuring, "
        "beside making and loading the models; nothing was started"
    )


def _limits(slo: Slo) -> str:
    limits = []
    if slo.ttft_seconds is not None:
        limits.append(f"TTFT {slo.ttft_seconds:g} s")
    if slo.tpot_seconds is not None:
        limits.append(f"TPOT {slo.tpot_seconds * 1000:g} ms")
    return ", ".join(limits) or "no limits"


def _show_cell(cell: Cell, settings: Campaign, facts: HardwareFacts, seconds: float) -> None:
    why = why_not(cell, settings, facts)
    if why is not None:
        typer.echo(f"  {cell.key}: skipped, {why.reason}")
        return
    layout = layout_of(cell, allowed_cores(), settings.load.workers)
    place = cell.url
    if layout is not None:
        place = (
            f"cores: engine {cores_text(layout.engine)}, HTTP {cores_text(layout.api)}, "
            f"load generator {cores_text(layout.client)}"
        )
    typer.echo(f"  {cell.key}: at most {formatting.duration(seconds)}; {place}")
    if cell.engine:
        assert layout is not None
        _show_commands(cell, settings, layout)
    elif cell.url is None:
        typer.echo(f"    weights: {_weights(cell, settings.server.cache)}")
    for line in layout.shared if layout is not None else ():
        typer.echo(f"    note: {line}")


def _show_commands(cell: Cell, settings: Campaign, layout: Layout) -> None:
    """Whole: what would be run, and what it would see."""
    engine = settings.engines[cell.engine]
    values = engine_values(cell, settings.server, layout, _given(cell, engine, settings))
    for line in commands_of(engine, values):
        typer.echo(f"    runs, only with --allow-commands: {printable(line)}")
    if engine.variables:
        typer.echo(f"    it sees of this shell: {', '.join(engine.variables)}")


def _given(cell: Cell, engine: Engine, settings: Campaign) -> str:
    """What {model} is, as far as is known before weights are made or downloaded."""
    if engine.weights == "none" or cell.model in engine.names:
        return engine.names.get(cell.model, cell.model)
    if not is_rung(cell.model):
        return cell.model
    wish = Wish(engine.weights, cell.weight_format, cache_dir(settings.server.cache))
    return str(synthetic_path(rung(cell.model).spec, wish))


def _weights(cell: Cell, cache: str | None) -> str:
    """Whether they are there, and how much must be made first."""
    if not is_rung(cell.model):
        return "a file or folder of one's own, or the hub's"
    if cell.is_best:
        return "of the best engine, which is chosen when the cell starts"
    spec = rung(cell.model).spec
    kind, weight_format = weights_of(cell.backend, cell.weight_format or None)
    if kind == "none":
        return f"none: the backend is a {cell.backend}"
    size = formatting.size(weight_bytes(spec, weight_format))
    there = synthetic_path(spec, Wish(kind, weight_format, cache_dir(cache))).exists()
    return f"{size} in the cache" if there else f"{size} have to be made first"
