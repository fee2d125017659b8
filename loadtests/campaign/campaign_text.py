"""Prints a run, finished or not."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from crossover.loadtests.campaign.campaign_file import Campaign
from crossover.loadtests.campaign.cell_runner import estimate_of
from crossover.loadtests.campaign.level_runner import level_text
from crossover.loadtests.campaign.progress import console_of
from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of, keep_units
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.run_folder import read_records
from crossover.models import formatting
from crossover.models.errors import printable
from crossover.models.tables import Column, table_of, terminal_table
from crossover.serving.workload.request_lengths import lengths_in_words


def show_run(
    folder: Path,
    console: Console | None = None,
    *,
    levels: bool = True,
    rate_units: formatting.RateUnits | None = None,
) -> None:
    """Print the table of results, and with `levels` all measurements. Raises BadRunFolder.

    For an unfinished cell it shows the result of its levels so far. `rate_units`: of the log that
    this ends; None: all rates of a device are written in the unit of the log, if it is recorded, or
    else in the one that suits them.
    """
    console = console or console_of()
    run = read_records(folder)
    campaign, cells = campaign_of(run.manifest)
    measured = levels_of(run)
    is_complete = run.events and isinstance(run.events[-1], journal.RunFinished)
    bursts = sum(level.has_chosen_requests for level in measured)
    console.print(
        f"run {run.manifest.run_id}: {'complete' if is_complete else 'not complete'}, "
        f"{len(measured) - bursts} levels, {bursts} bursts, "
        f"{len(journal.of_kind(run.events, journal.Interrupted))} interruptions, "
        f"{len(journal.of_kind(run.events, journal.LevelAbandoned))} levels abandoned"
    )
    for what in run.damage():
        console.print(f"left out: {what}", style="yellow")
    records = [CellRecord(run.events, campaign, cell, measured) for cell in cells]
    capacities = {record.key: _capacity_of(record) for record in records}
    keep_units(rate_units or formatting.RateUnits(), records, capacities)
    if levels:
        for record in records:
            _show_cell(record, capacities[record.key], console)
    console.print(f"\n{_requirements(campaign)}", style="bold")
    table = table_of(
        records,
        Column("model", "text", lambda record: record.key),
        Column("single request (TTFT, TPOT)", "text", _single_stream_medians, missing="-"),
        Column(
            "confirmed",
            "text",
            lambda record: _confirmed_words(capacities[record.key], record.unit_rate),
            missing="-",
        ),
        Column(
            "estimated capacity",
            "text",
            lambda record: _estimated_words(capacities[record.key], record.unit_rate),
            missing="-",
        ),
        Column("grade", "text", lambda record: _grade_words(record, capacities[record.key])),
    )
    console.print(terminal_table(table))
    for record in records:
        if capacities[record.key] is None and (reason := _skip_reason(record)):
            # Too long for the table: it says how to install an engine.
            console.print(printable(f"{record.key} was skipped: {reason}"))
    to_confirm = [
        capacity
        for record in records
        if record.is_confirmable and (capacity := capacities[record.key]) is not None
    ]
    if to_confirm:
        # Without a step-time model there is no estimate.
        are_estimated = all(capacity.estimated_rate for capacity in to_confirm)
        seconds = sum(capacity.confirm_seconds or 0.0 for capacity in to_confirm)
        console.print(
            f"To confirm {'the estimates' if are_estimated else 'a rate'}, which takes about "
            f"{formatting.duration(seconds)}: crossover campaign resume {folder} --confirm"
        )


def _requirements(campaign: Campaign) -> str:
    """Return the SLO and the lengths of requests in words."""
    slo = campaign.slo
    limits = [f"{name.upper()} {formatting.limit(limit)}" for name, limit in slo.limits.items()]
    return (
        f"SLO {slo.name}: {', '.join(limits) or 'no limits'} for {100 * slo.target:.4g} % of "
        f"requests; {lengths_in_words(campaign.workload)}"
    )


def _capacity_of(record: CellRecord) -> journal.Capacity | None:
    """Return the final capacity of a cell, or else that of its levels so far; None: neither."""
    if isinstance(record.ended, journal.CellFinished):
        return record.ended.capacity
    return estimate_of(record) if record.counted_levels else None


def _skip_reason(record: CellRecord) -> str:
    """Return why a cell was skipped; "": it was not."""
    return record.ended.reason if isinstance(record.ended, journal.CellSkipped) else ""


def _confirmed_words(capacity: journal.Capacity | None, unit_rate: float | None) -> str | None:
    if capacity is not None and capacity.state == "misses_slo_unloaded":
        return capacity_text.state_words(capacity)
    if capacity is None or not capacity.is_confirmed:
        return None
    return formatting.rate(capacity.confirmed_rate, rounded="down", like=unit_rate)


def _estimated_words(capacity: journal.Capacity | None, unit_rate: float | None) -> str | None:
    """Return the estimated capacity; where it is "none", with the reason."""
    if capacity is None:
        return None
    estimate = capacity_text.estimate_words(capacity, unit_rate)
    if estimate != capacity_text.NO_CAPACITY or capacity.is_confirmed or not capacity.reason:
        return estimate
    return f"{estimate}: {capacity.reason}"


def _grade_words(record: CellRecord, capacity: journal.Capacity | None) -> str:
    if capacity is None:
        return "skipped" if _skip_reason(record) else "not measured"
    if capacity.state == "misses_slo_unloaded":
        return "confirmed" if capacity.starts > 1 else ""
    if capacity.is_confirmed:
        return "confirmed"
    return "estimated" if capacity.method == "step_times" else capacity.reason


def _single_stream_medians(record: CellRecord) -> str | None:
    """Return median TTFT and TPOT of the last single-stream level that counts."""
    levels = [level for level in record.counted_levels if level.is_single_stream and level.counts]
    if not levels:
        return None
    ttft = levels[-1].quantile(levels[-1].ttft, 0.5)
    tpot = levels[-1].quantile(levels[-1].tpot, 0.5)
    return f"TTFT {formatting.seconds(ttft)}, TPOT {formatting.seconds(tpot)}"


def _show_cell(record: CellRecord, capacity: journal.Capacity | None, console: Console) -> None:
    """Print all levels of a cell, and its capacity with everything that explains it."""
    unit_rate = record.unit_rate
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
            capacity_text.check_words(capacity),
            capacity_text.speed_words(capacity),
            capacity_text.users_words(capacity),
            capacity_text.reuse_words(capacity, unit_rate),
            capacity.advice,
        )
        for text in filter(None, details):
            console.print(f"  {text}", style="dim")
