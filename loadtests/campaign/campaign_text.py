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
from crossover.serving.workload.request_lengths import lengths_in_words


def show_run(folder: Path, console: Console | None = None, *, levels: bool = True) -> None:
    """Print the table of results, and with `levels` all measurements. Raises BadRunFolder.

    For an unfinished cell it shows the result of its levels so far.
    """
    console = console or console_of()
    run = read_records(folder)
    campaign, cells = campaign_of(run.manifest)
    measured = levels_of(run)
    is_complete = run.events and isinstance(run.events[-1], journal.RunFinished)
    bursts = sum(level.is_burst for level in measured)
    console.print(
        f"run {run.manifest.run_id}: {'complete' if is_complete else 'not complete'}, "
        f"{len(measured) - bursts} levels, {bursts} bursts, "
        f"{len(journal.of_kind(run.events, journal.Interrupted))} interruptions, "
        f"{len(journal.of_kind(run.events, journal.LevelAbandoned))} levels abandoned"
    )
    for what in run.damage():
        console.print(f"left out: {what}", style="yellow")
    table = Table(
        "model",
        "single request (TTFT, TPOT)",
        "confirmed",
        "estimated capacity",
        "grade",
        box=None,
        pad_edge=False,
    )
    confirm_seconds = 0.0
    skipped: list[str] = []  # too long for the table: how to install an engine
    records = [CellRecord(run.events, campaign, cell, measured) for cell in cells]
    capacities = [_capacity_of(record) for record in records]
    unit_rate = capacity_text.common_rate(capacities)
    for record, capacity in zip(records, capacities, strict=True):
        if levels:
            _show_cell(record, capacity, unit_rate, console)
        if capacity is None:
            reason = getattr(record.ended, "reason", "")
            columns = ["-", "-", "skipped" if reason else "not measured"]
            if reason:
                skipped.append(printable(f"{record.key} was skipped: {reason}"))
        else:
            columns = _capacity_columns(capacity, unit_rate)
            if not capacity.is_confirmed:
                confirm_seconds += capacity.confirm_seconds or 0.0
        table.add_row(record.key, _single_stream_medians(record), *columns)
    console.print(f"\n{_requirements(campaign)}", style="bold")
    console.print(table)
    for line in skipped:
        console.print(line)
    if confirm_seconds:
        console.print(
            f"To confirm the estimates, which takes about {formatting.duration(confirm_seconds)}: "
            f"crossover campaign resume {folder} --confirm"
        )


def _requirements(campaign: Campaign) -> str:
    """Return the SLO and the lengths of requests in words."""
    slo = campaign.slo
    limits = [
        f"{name.upper()} {formatting.limit(value)}"
        for name, key in LIMITS.items()
        if (value := getattr(slo, key)) is not None
    ]
    return (
        f"SLO {slo.name}: {', '.join(limits) or 'no limits'} for {100 * slo.target:.4g} % of "
        f"requests; {lengths_in_words(campaign.workload)}"
    )


def _capacity_of(record: CellRecord) -> journal.Capacity | None:
    """Return the final capacity of a cell, or else that of its levels so far; None: neither."""
    if isinstance(record.ended, journal.CellFinished):
        return record.ended.capacity
    return capacity_of(record) if record.counted_levels else None


def _capacity_columns(capacity: journal.Capacity, unit_rate: float | None) -> list[str]:
    """Return confirmed rate, estimated capacity and grade, for the table."""
    estimate = capacity_text.limit(capacity, unit_rate)
    if capacity.state == "misses_slo_unloaded":
        grade = "confirmed" if capacity.starts > 1 else ""
        return [capacity_text.state_words(capacity), estimate, grade]
    if capacity.is_confirmed:
        confirmed = formatting.rate(capacity.confirmed_rate, rounded="down", like=unit_rate)
        return [confirmed, estimate, "confirmed"]
    if capacity.method != "step_times":
        return ["-", estimate, capacity.reason]
    why = f": {capacity.reason}" if capacity.reason and not capacity.estimated_rate else ""
    return ["-", estimate + why, "estimated"]


def _single_stream_medians(record: CellRecord) -> str:
    """Return median TTFT and TPOT of the last single-stream level that counts."""
    levels = [level for level in record.counted_levels if level.is_single_stream and level.counts]
    if not levels:
        return "-"
    ttft = levels[-1].quantile(levels[-1].ttft, 0.5)
    tpot = levels[-1].quantile(levels[-1].tpot, 0.5)
    return f"TTFT {formatting.seconds(ttft)}, TPOT {formatting.seconds(tpot)}"


def _show_cell(
    record: CellRecord,
    capacity: journal.Capacity | None,
    unit_rate: float | None,
    console: Console,
) -> None:
    """Print all levels of a cell, and its capacity with everything that explains it."""
    console.print(f"\n{record.key}", style="bold")
    if record.choice is not None:
        console.print(f"fastest engine: {record.choice.reason}", style="dim")
    for level in record.levels:
        if not level.is_burst:
            console.print(f"  {level_text(level, record.campaign.slo, unit_rate)}")
    if capacity is not None:
        console.print(capacity_text.capacity_in_words(capacity, unit_rate))
        details = (
            capacity.reason,
            capacity_text.speed_words(capacity),
            capacity_text.users_words(capacity),
            capacity_text.reuse_words(capacity),
            capacity.advice,
        )
        for text in filter(None, details):
            console.print(f"  {text}", style="dim")
