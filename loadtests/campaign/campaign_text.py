"""A run, finished or not, and a campaign that has not begun, printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from loadtests.analysis import capacity_text
from loadtests.analysis.level import Level, levels_of
from loadtests.analysis.slo import Slo
from loadtests.campaign.campaign_file import Campaign, Cell, Plan
from loadtests.campaign.cell_selection import engine_values, layout_of, shares, to_confirm, why_not
from loadtests.campaign.external_servers import command_of
from loadtests.campaign.level_runner import level_row
from loadtests.campaign.model_size_selection import with_rungs
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import campaign_of
from loadtests.host.cpu_pinning import Layout
from loadtests.records.run_folder import RunRecords, read_records
from loadtests.records.run_journal import (
    Capacity,
    CellFinished,
    CellSkipped,
    EngineChosen,
    Interrupted,
    LevelAbandoned,
    LevelPurpose,
    RunFinished,
    of_kind,
)
from loadtests.workload.request_lengths import in_words
from models import formatting
from models.cache import Wish, cache_dir, synthetic_path
from models.errors import printable
from models.ladder import is_rung, rung
from serving.hardware.cpu_topology import cores_text
from serving.hardware.machine_facts import HardwareFacts, allowed_cores, hardware_facts

ANSWER = ("model", "one at a time", "holds", "limit", "grade")
LEVELS = ("load", "due", "good", "TTFT", "TPOT", "tokens/s", "verdict", "warnings")


def console_of() -> Console:
    """Standard output; where it is no terminal, as wide as the tables are."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def show_run(folder: Path, console: Console | None = None, *, levels: bool = True) -> None:
    """Print the answer's table, and with `levels` all that was measured. Raises BadRunFolder."""
    console = console or console_of()
    run = read_records(folder)
    campaign, cells = campaign_of(run.manifest)
    finished = levels_of(run)
    state = "complete" if of_kind(run.events, RunFinished) else "not complete"
    console.print(
        f"run {run.manifest.run_id}: {state}, {len(finished)} levels, "
        f"{len(of_kind(run.events, Interrupted))} interruptions, "
        f"{len(of_kind(run.events, LevelAbandoned))} levels abandoned"
    )
    for what in run.damage():
        console.print(f"left out: {what}", style="yellow", markup=False)
    if levels:
        for cell in cells:
            _show_cell(cell, campaign, run, [one for one in finished if one.cell == cell.key])
    console.print()
    _show_answer(folder, campaign, cells, run, finished, console)


def _show_answer(
    folder: Path,
    campaign: Campaign,
    cells: Sequence[Cell],
    run: RunRecords,
    finished: Sequence[Level],
    console: Console,
) -> None:
    """A row a cell and SLO; below it, what confirming would take."""
    names = [slo.name for slo in campaign.all_slos]
    workload = in_words(campaign.workload)
    for slo in campaign.all_slos:
        console.print(
            f"SLO {slo.name}: {limits_text(slo)} for {100 * slo.target:.4g} % of requests"
            + (f"; {workload}" if not campaign.workloads else ""),
            style="bold",
            markup=False,
        )
    table = Table(*ANSWER, *(["SLO"] if len(names) > 1 else []), box=None, pad_edge=False)
    confirming = 0.0
    for cell in cells:
        skipped = of_kind(run.events, CellSkipped, cell.key)
        ended = of_kind(run.events, CellFinished, cell.key)
        own = [one for one in finished if one.cell == cell.key]
        if not ended:
            words = f"skipped: {skipped[-1].reason}" if skipped else "not measured"
            table.add_row(cell.key, _alone(own), "-", "-", printable(words))
            continue
        for name, one in ended[-1].capacities.items():
            row = [cell.key, _alone(own), *_capacity_cells(one)]
            table.add_row(*row, *([name] if len(names) > 1 else []))
            if not one.holds:
                confirming += one.confirm_seconds or 0.0
    console.print(table)
    if confirming:
        console.print(
            f"Confirming what is estimated would take about {formatting.duration(confirming)}: "
            f"crossover campaign resume {folder} --confirm",
            markup=False,
        )


def _capacity_cells(found: Capacity) -> list[str]:
    """holds, limit, grade."""
    if found.state == "not_even_alone":
        return [capacity_text.state_words(found), "-", "confirmed" if found.starts > 1 else ""]
    held = formatting.rate(found.held, rounded="down") if found.holds else "-"
    limit = capacity_text.limit_words(found).removeprefix("limit ")
    if found.holds:
        return [held, limit, "confirmed"]
    return [held, limit, "estimated" if found.method == "law" and found.limit else found.reason]


def _alone(levels: Sequence[Level]) -> str:
    """TTFT and TPOT of single-stream requests."""
    alone = [one for one in levels if one.is_single_stream]
    if not alone:
        return "-"
    ttft, tpot = alone[-1].mean(alone[-1].ttft), alone[-1].mean(alone[-1].tpot)
    return f"TTFT {formatting.seconds(ttft)}, TPOT {formatting.seconds(tpot)}"


def _show_cell(cell: Cell, campaign: Campaign, run: RunRecords, levels: list[Level]) -> None:
    console = console_of()
    console.print(f"\n{cell.key}", style="bold", markup=False)
    for choice in of_kind(run.events, EngineChosen, cell.key):
        console.print(f"fastest engine: {choice.reason}", style="dim", markup=False)
    table = Table(*LEVELS, box=None, pad_edge=False)
    for level in levels:
        if level.started.purpose is not LevelPurpose.CALIBRATION:
            table.add_row(*level_row(level, campaign.slo))
    if table.row_count:
        console.print(table)
    for ended in of_kind(run.events, CellFinished, cell.key)[-1:]:
        for name, one in ended.capacities.items():
            of = f"{name}: " if len(ended.capacities) > 1 else ""
            console.print(f"{of}{capacity_text.in_words(one)}", markup=False)
            more = [one.reason, capacity_text.speed_words(one)]
            for text in filter(None, more):
                console.print(f"  {text}", style="dim", markup=False)


def limits_text(slo: Slo) -> str:
    """`TTFT 2 s, TPOT 200 ms`."""
    limits = [("TTFT", slo.ttft_seconds), ("TPOT", slo.tpot_seconds)]
    told = [f"{name} {formatting.limit(value)}" for name, value in limits if value is not None]
    return ", ".join(told) or "no limits"


# A campaign that has not begun.


def show_plan(plan: Plan) -> None:
    """Print each cell: skipped and why, or its share of the budget, cores and weights."""
    facts = hardware_facts()
    with Progress() as progress:
        plan = with_rungs(plan, facts, progress, may_measure=False)
    settings, cells = plan.campaign, plan.cells
    what = "rungs that some 20 s of measuring choose" if plan.is_auto else f"{len(cells)} cells"
    typer.echo(f"{settings.name}: {what}")
    for slo in settings.all_slos:
        share = f"{100 * slo.target:.4g} % of requests"
        typer.echo(f"  SLO {slo.name}: {limits_text(slo)} for {share}")
    workloads = settings.workloads or {"workload": settings.workload}
    for name, workload in workloads.items():
        typer.echo(f"  {name}: {in_words(workload)}")
    can = [cell for cell in cells if why_not(cell, settings, facts) is None]
    each = settings.search.budget_seconds
    whole = settings.budget_seconds or each * len(can)
    seconds = shares(settings, can, to_confirm(settings, cells), whole)
    for cell in cells:
        _show_planned(cell, settings, facts, seconds.get(cell.key, 0.0))
    typer.echo(
        f"at most {formatting.duration(whole)} of measuring, "
        "beside making and loading the models; nothing was started"
    )


def _show_planned(cell: Cell, settings: Campaign, facts: HardwareFacts, seconds: float) -> None:
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
    for line in layout.shared if layout is not None else ():
        typer.echo(f"    note: {line}")


def _show_commands(cell: Cell, settings: Campaign, layout: Layout) -> None:
    """Whole: what would be run, and what it would see."""
    engine = settings.engines[cell.engine]
    model = engine.names.get(cell.model, cell.model)
    if engine.weights != "none" and cell.model not in engine.names and is_rung(cell.model):
        wish = Wish(engine.weights, cell.weight_format, cache_dir(settings.server.cache))
        model = str(synthetic_path(rung(cell.model).spec, wish))
    values = engine_values(cell, settings.server, layout, model)
    typer.echo(f"    runs, only with --allow-commands: {printable(command_of(engine, values))}")
    if engine.variables:
        typer.echo(f"    it sees of this shell: {', '.join(engine.variables)}")
