"""Prints a run, finished or not."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from crossover.loadtests.campaign.campaign_file import Campaign
from crossover.loadtests.campaign.cell_runner import capacity_of
from crossover.loadtests.campaign.level_runner import level_text
from crossover.loadtests.campaign.progress import console_of
from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.run_folder import read_records
from crossover.models import formatting
from crossover.models.errors import printable
from crossover.serving.capacity.slo import LIMITS
from crossover.serving.workload.request_lengths import in_words


def show_run(folder: Path, console: Console | None = None, *, levels: bool = True) -> None:
    """Print the table of results, and with `levels` all measurements. Raises BadRunFolder.

    For an unfinished cell it shows the result of its levels so far.
    """
    console = console or console_of()
    run = read_records(folder)
    campaign, cells = campaign_of(run.manifest)
    measured = levels_of(run)
    is_complete = run.events and isinstance(run.events[-1], journal.RunFinished)
    bursts = sum(level.started.is_burst for level in measured)
    console.print(
        f"run {run.manifest.run_id}: {'complete' if is_complete else 'not complete'}, "
        f"{len(measured) - bursts} levels, {bursts} bursts, "
        f"{len(journal.of_kind(run.events, journal.Interrupted))} interruptions, "
        f"{len(journal.of_kind(run.events, journal.LevelAbandoned))} levels abandoned"
    )
    for what in run.damage():
        console.print(f"left out: {what}", style="yellow")
    table = Table(
        *("model", "single request (TTFT, TPOT)", "confirmed", "estimated capacity", "grade"),
        box=None,
        pad_edge=False,
    )
    confirming = 0.0
    states = [CellRecord(run.events, campaign, cell, measured) for cell in cells]
    capacities = [_capacity_of(state) for state in states]
    like = capacity_text.common_rate(capacities)
    for state, found in zip(states, capacities, strict=True):
        if levels:
            _show_cell(state, found, like, console)
        if found is None:
            reason = getattr(state.ended, "reason", "")
            told = ["-", "-", printable(f"skipped: {reason}") if reason else "not measured"]
        else:
            told = _capacity_cells(found, like)
            confirming += 0.0 if found.is_confirmed else found.confirm_seconds or 0.0
        table.add_row(state.key, _alone(state), *told)
    console.print(f"\n{_asked(campaign)}", style="bold")
    console.print(table)
    if confirming:
        console.print(
            f"To confirm the estimates, which takes about {formatting.duration(confirming)}: "
            f"crossover campaign resume {folder} --confirm"
        )


def _asked(campaign: Campaign) -> str:
    """Return the SLO and the lengths of requests in words."""
    slo = campaign.slo
    limits = [
        f"{name.upper()} {formatting.limit(value)}"
        for name, key in LIMITS.items()
        if (value := getattr(slo, key)) is not None
    ]
    return (
        f"SLO {slo.name}: {', '.join(limits) or 'no limits'} for {100 * slo.target:.4g} % of "
        f"requests; {in_words(campaign.workload)}"
    )


def _capacity_of(state: CellRecord) -> journal.Capacity | None:
    """Return the final capacity of a cell, or else that of its levels so far; None: neither."""
    if isinstance(state.ended, journal.CellFinished):
        return state.ended.capacity
    return capacity_of(state) if state.counted else None


def _capacity_cells(found: journal.Capacity, like: float | None) -> list[str]:
    """Return confirmed rate, estimated capacity and grade."""
    limit = capacity_text.limit(found, like)
    if found.state == "misses_slo_unloaded":
        return [capacity_text.state_words(found), limit, "confirmed" if found.starts > 1 else ""]
    if found.is_confirmed:
        return [
            formatting.rate(found.confirmed_rate, rounded="down", like=like),
            limit,
            "confirmed",
        ]
    if found.method != "step_times":
        return ["-", limit, found.reason]
    why = f": {found.reason}" if found.reason and not found.estimated_rate else ""
    return ["-", limit + why, "estimated"]


def _alone(state: CellRecord) -> str:
    """Return median TTFT and TPOT of the last single-stream requests that count."""
    alone = [one for one in state.counted if one.is_single_stream and one.counts]
    if not alone:
        return "-"
    ttft, tpot = (alone[-1].quantile(one, 0.5) for one in (alone[-1].ttft, alone[-1].tpot))
    return f"TTFT {formatting.seconds(ttft)}, TPOT {formatting.seconds(tpot)}"


def _show_cell(
    state: CellRecord, found: journal.Capacity | None, like: float | None, console: Console
) -> None:
    console.print(f"\n{state.key}", style="bold")
    if state.choice is not None:
        console.print(f"fastest engine: {state.choice.reason}", style="dim")
    for level in state.levels:
        if not level.started.is_burst:
            console.print(f"  {level_text(level, state.campaign.slo, like)}")
    if found is not None:
        console.print(capacity_text.in_words(found, like))
        said = (
            found.reason,
            capacity_text.speed_words(found),
            capacity_text.users_words(found),
            capacity_text.reuse_words(found),
            found.advice,
        )
        for text in filter(None, said):
            console.print(f"  {text}", style="dim")
