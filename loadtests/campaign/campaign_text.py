"""A run, finished or not, and a campaign that has not begun, printed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from loadtests.analysis import capacity_text
from loadtests.analysis.level import levels_of
from loadtests.analysis.percentiles import distribution
from loadtests.campaign.campaign_file import Campaign, Plan
from loadtests.campaign.cell_runner import capacity_of
from loadtests.campaign.cell_selection import (
    budget_of,
    engine_values,
    filled,
    layout_of,
    shares,
    to_confirm,
    why_not,
    with_rungs,
)
from loadtests.campaign.level_runner import level_text
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellRecord, campaign_of
from loadtests.records.run_folder import read_records
from loadtests.records.run_journal import (
    Capacity,
    CellFinished,
    CellSkipped,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from loadtests.workload.request_lengths import in_words
from models import formatting
from models.errors import printable
from serving.hardware.cpu_topology import cores_text
from serving.hardware.machine_facts import hardware_facts


def console_of(width: int = 160) -> Console:
    """Standard output; where it is no terminal, as wide as the tables are."""
    return Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else width
    )


def show_run(folder: Path, console: Console | None = None, *, levels: bool = True) -> None:
    """Print the answer's table, and with `levels` all that was measured. Raises BadRunFolder.

    Of a cell that is not done it says what its levels so far tell.
    """
    console = console or console_of()
    run = read_records(folder)
    campaign, cells = campaign_of(run.manifest)
    measured = levels_of(run)
    is_complete = run.events and isinstance(run.events[-1], RunFinished)
    console.print(
        f"run {run.manifest.run_id}: {'complete' if is_complete else 'not complete'}, "
        f"{len(measured)} levels, {len(of_kind(run.events, Interrupted))} interruptions, "
        f"{len(of_kind(run.events, LevelAbandoned))} levels abandoned"
    )
    for what in run.damage():
        console.print(f"left out: {what}", style="yellow")
    table = Table("model", "one at a time", "holds", "limit", "grade", box=None, pad_edge=False)
    confirming = 0.0
    for cell in cells:
        state = CellRecord(run.events, campaign, cell, measured)
        if isinstance(state.ended, CellFinished):
            found: Capacity | None = state.ended.capacity
        else:
            found = capacity_of(state) if state.counted else None
        if levels:
            _show_cell(state, found, console)
        if isinstance(state.ended, CellSkipped) or found is None:
            reason = getattr(state.ended, "reason", "")
            told = ["-", "-", printable(f"skipped: {reason}") if reason else "not measured"]
        else:
            told = _capacity_cells(found)
            confirming += 0.0 if found.holds else found.confirm_seconds or 0.0
        table.add_row(cell.key, _alone(state), *told)
    console.print(f"\n{_asked(campaign)}", style="bold")
    console.print(table)
    if confirming:
        console.print(
            f"Confirming what is estimated would take about {formatting.duration(confirming)}: "
            f"crossover campaign resume {folder} --confirm"
        )


def _asked(campaign: Campaign) -> str:
    """The SLO, and the lengths under which it is to be kept."""
    slo = campaign.slo
    limits = [("TTFT", slo.ttft_seconds), ("TPOT", slo.tpot_seconds)]
    told = [f"{name} {formatting.limit(value)}" for name, value in limits if value is not None]
    return (
        f"SLO {slo.name}: {', '.join(told) or 'no limits'} for {100 * slo.target:.4g} % of "
        f"requests; {in_words(campaign.workload)}"
    )


def _capacity_cells(found: Capacity) -> list[str]:
    """holds, limit, grade."""
    if found.state == "not_even_alone":
        return [capacity_text.state_words(found), "-", "confirmed" if found.starts > 1 else ""]
    limit = capacity_text.limit_words(found).removeprefix("limit ")
    if found.holds:
        return [formatting.rate(found.held, rounded="down"), limit, "confirmed"]
    return ["-", limit, "estimated" if found.method == "law" and found.limit else found.reason]


def _alone(state: CellRecord) -> str:
    """Median TTFT and TPOT of the last single-stream requests that count."""
    alone = [one for one in state.counted if one.is_single_stream and one.counts]
    if not alone:
        return "-"
    columns = (alone[-1].ttft, alone[-1].tpot)
    ttft, tpot = (distribution(one[alone[-1].counted]).median_or_mean for one in columns)
    return f"TTFT {formatting.seconds(ttft)}, TPOT {formatting.seconds(tpot)}"


def _show_cell(state: CellRecord, found: Capacity | None, console: Console) -> None:
    console.print(f"\n{state.key}", style="bold")
    if state.choice is not None:
        console.print(f"fastest engine: {state.choice.reason}", style="dim")
    for level in state.levels:
        if not level.started.is_burst:
            console.print(f"  {level_text(level, state.campaign.slo)}")
    if found is not None:
        console.print(capacity_text.in_words(found))
        for text in filter(None, (found.reason, capacity_text.speed_words(found))):
            console.print(f"  {text}", style="dim")


def show_plan(plan: Plan) -> None:
    """Print each cell of a campaign that has not begun: skipped and why, or its share of the
    budget and the command of an engine of others whole.
    """
    facts = hardware_facts()
    with Progress() as progress:
        plan = with_rungs(plan, facts, progress, may_measure=False)
    settings, cells = plan.campaign, plan.cells
    what = f"{len(cells)} cells" if cells else "rungs that some 20 s of measuring choose"
    typer.echo(f"{settings.name}: {what}\n  {_asked(settings)}")
    reasons = {cell.key: why_not(cell, settings, facts) for cell in cells}
    can = [cell for cell in cells if reasons[cell.key] is None]
    whole = budget_of(settings, len(can))
    seconds = shares(can, to_confirm(settings, cells), whole)
    for cell in cells:
        if (why := reasons[cell.key]) is not None:
            typer.echo(f"  {cell.key}: skipped, {why}")
            continue
        layout = layout_of(cell, settings)
        place = cell.url if layout is None else f"engine on cores {cores_text(layout.engine)}"
        typer.echo(f"  {cell.key}: at most {formatting.duration(seconds[cell.key])}, {place}")
        if (engine := settings.engine_of(cell)) is not None and layout is not None:
            values = engine_values(settings.server, layout, cell.model)
            command = shlex.join(filled(engine.command, values))
            typer.echo(f"    runs, only with --trust: {printable(command)}")
    typer.echo(
        f"at most {formatting.duration(whole)} of measuring, "
        "beside making and loading the models; nothing was started"
    )
