"""A run, finished or not, printed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtests.campaign.run_state import campaign_of, prediction_on_record
from loadtests.capacity.levels import judged
from loadtests.capacity.words import in_words
from loadtests.records.events import (
    CellFinished,
    CellSkipped,
    EngineChosen,
    Event,
    Interrupted,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from loadtests.records.old_run_folder import read_records
from loadtests.simulation.prediction_words import predicted_beside
from loadtests.terminal.level import level_row, wide_console
from models import formatting

COLUMNS = (
    *("load", "due", "good", "TTFT p50", "TPOT p50", "tokens/s", "in flight", "verdict"),
    "warnings",
)


def show_run(folder: Path, console: Console | None = None) -> None:
    """Print cells, levels, verdicts and capacities of a run. Raises BadRunFolder."""
    console = console or wide_console()
    run = read_records(folder)
    manifest, events, requests = run.manifest, run.events, run.requests
    campaign, cells = campaign_of(manifest)
    finished = run.levels()
    state = "complete" if of_kind(events, RunFinished) else "not complete"
    interruptions = len(of_kind(events, Interrupted))
    abandoned = len(of_kind(events, LevelAbandoned))
    console.print(
        f"run {manifest.run_id}: {state}, {len(finished)} levels, {len(requests)} requests, "
        f"{interruptions} interruptions"
    )
    if abandoned:
        console.print(
            f"{abandoned} levels were begun and abandoned; their requests are on record and "
            "count for nothing"
        )
    for what in run.damage():
        console.print(f"left out: {what}", style="yellow", markup=False)
    for cell in cells:
        console.print(f"\n{cell.key}: {cell_state(cell.key, events)}", style="bold", markup=False)
        for choice in of_kind(events, EngineChosen, cell.key):
            console.print(f"best engine: {choice.reason}", style="dim", markup=False)
        table = Table(*COLUMNS, box=None, pad_edge=False)
        for level in finished:
            if level.cell == cell.key:
                start, end = level.started, level.finished
                summary, _ = judged(level, campaign.slo)
                load = formatting.load(start.rate_per_second, start.concurrency, 3)
                table.add_row(*level_row(load, summary, end.cut_short is not None))
        if table.row_count:
            console.print(table)
        if (line := prediction_in_words(cell.key, campaign.slo.name, events)) is not None:
            console.print(line, style="dim", markup=False)


def cell_state(key: str, events: list[Event]) -> str:
    """What became of a cell, for people."""
    own = [event for event in events if event.cell == key]
    for event in reversed(own):
        if isinstance(event, CellSkipped):
            return f"skipped: {event.reason}"
        if isinstance(event, CellFinished):
            if len(event.capacities) > 1:
                found = [f"{name}: {in_words(one)}" for name, one in event.capacities.items()]
                return "; ".join(found)
            return in_words(event.capacity) if event.capacity is not None else "one level"
    return "not finished" if own else "not begun"


def prediction_in_words(key: str, slo: str, events: list[Event]) -> str | None:
    """What calibration predicted and how far off it was; None where there was no prediction."""
    made = prediction_on_record(events, key)
    if made is None:
        return None
    if made.law is None:
        return f"no prediction: {made.reason}"
    predicted = made.rates.get(slo)
    fitted = (
        f" (law fitted on {len(made.observations)} steps, median error {made.law.error:.0%})"
        if made.law.error is not None
        else ""
    )
    if predicted is None:
        return f"no prediction for the SLO {slo}{fitted}"
    ended = of_kind(events, CellFinished, key)
    found = ended[-1].capacities.get(slo) if ended else None
    return f"{predicted_beside(predicted, found)}{fitted}"
