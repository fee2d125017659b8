"""Where a run stands, read from its folder alone: what was to be measured, which levels count, what was predicted, what it took so far.

The runner keeps nothing in its memory that it would miss after a kill: it asks here, before each level, what there is. So do the verbs
that show a run and that measure its levels once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtests.calibrate import Prediction
from loadtests.campaign import Campaign, Cell, Plan
from loadtests.errors import BadRunFolder
from loadtests.levels import LevelFinished, judge
from loadtests.records import Event, RequestRecord, RunManifest
from loadtests.search import Level
from loadtests.slo import Promise
from loadtests.store import LevelStarted, completed_levels, read_events, read_manifest, read_requests, read_samples, started_levels


def campaign_of(manifest: RunManifest) -> tuple[Campaign, list[Cell]]:
    """The campaign of a run as it was read when it started. Raises BadRunFolder."""
    try:
        return msgspec.convert(manifest.campaign, Campaign), msgspec.convert(manifest.cells, list[Cell])
    except msgspec.ValidationError as problem:
        raise BadRunFolder(f"the manifest of run {manifest.run_id} holds a campaign of another make: {problem}") from problem


def repeat_of(folder: Path) -> Plan:
    """The levels of a run that is there, as a plan to measure them again: the same cells, rates, seconds and seeds, and no search.

    What two such runs differ in is what the machine does by itself: `crossover compare --noise`. Raises BadRunFolder.
    """
    manifest = read_manifest(folder)
    campaign, cells = campaign_of(manifest)
    events = read_events(folder).records
    finished, started = completed_levels(events), started_levels(events)
    levels: dict[str, list[tuple[float, float]]] = {cell.key: [] for cell in cells}
    for name, event in finished.items():
        said = msgspec.convert(started[name].detail, LevelStarted)
        if said.rate_per_second is not None and event.cell in levels:
            levels[event.cell].append((said.rate_per_second, said.window_seconds))
    done = [cell for cell in cells if any(event.cell == cell.key for event in finished.values())]
    if not done:
        raise BadRunFolder(f"{folder} has no finished level to repeat")
    again = msgspec.structs.replace(
        campaign, repeats=manifest.run_id, budget_seconds=None,
        cell_levels={cell.key: tuple(levels[cell.key]) for cell in done},
    )  # fmt: skip
    return Plan(again, done, manifest.campaign_text)


def prediction_on_record(events: Sequence[Event], key: str) -> Prediction | None:
    """What a cell's calibration predicted; None where there was none."""
    made = next((event for event in events if event.kind == "calibrated" and event.cell == key), None)
    return None if made is None else msgspec.convert(made.detail, Prediction)


def levels_on_record(folder: Path, key: str, campaign: Campaign, promise: Promise) -> list[Level]:
    """What the search for one promise knows of a cell from the finished levels on disk, in the order they were measured."""
    events = [event for event in read_events(folder).records if event.cell == key]
    finished, started = completed_levels(events), started_levels(events)
    if not finished:
        return []
    requests, samples = read_requests(folder).records, read_samples(folder).records
    levels: list[Level] = []
    for name, event in finished.items():
        detail = msgspec.convert(event.detail, LevelFinished)
        _, level = judge(
            [record for record in requests if record.level == name],
            [sample for sample in samples if sample.level == name],
            msgspec.convert(started[name].detail, LevelStarted),
            detail.window_seconds,
            promise,
        )
        levels.append(level)
    return levels


def lone_requests(folder: Path, key: str) -> list[RequestRecord]:
    """The requests of a cell's lone levels: one at a time, on an idle server."""
    started = started_levels(read_events(folder).records)
    lone = {name for name, event in started.items() if event.cell == key and event.detail.get("purpose") == "lone"}
    return [record for record in read_requests(folder).records if record.level in lone]


def open_level_of(events: Sequence[Event]) -> Event | None:
    """The level that was begun and neither finished nor abandoned."""
    closed = {event.level for event in events if event.kind in ("level_finished", "level_abandoned")}
    return next((event for event in reversed(events) if event.kind == "level_started" and event.level not in closed), None)


def spent_seconds(events: Sequence[Event], key: str) -> float:
    """What measuring a cell has taken so far, abandoned levels and calibration included."""
    ended = (event for event in events if event.cell == key and event.kind in ("level_finished", "level_abandoned", "calibrated"))
    return sum(float(event.detail.get("spent_seconds", 0.0)) for event in ended)
