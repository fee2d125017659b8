"""What is on record of a run: its campaign, its cells' levels and predictions, the time they took.

The runner asks here before each level, so that it goes on after a kill as if nothing had happened.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadtests.campaign.campaign_file import Campaign, Plan, RepeatedLevel
from loadtests.campaign.cells import Cell, plain
from loadtests.capacity.levels import Level, judged
from loadtests.capacity.search_config import SearchConfig
from loadtests.errors import BadRunFolder
from loadtests.metrics.slo import Slo
from loadtests.records.events import (
    Calibrated,
    CellFinished,
    CellReady,
    CellSkipped,
    CellStarted,
    EngineChosen,
    Event,
    LevelAbandoned,
    LevelFinished,
    LevelPurpose,
    LevelStarted,
    Waited,
    of_kind,
)
from loadtests.records.old_run_folder import LevelRecords, RunFolder, read_records
from loadtests.records.schema import RequestRecord, RunManifest
from loadtests.simulation.calibration import Prediction
from serving.placement.best_engine import BEST


@dataclass
class CellState:
    """One cell of a run that is open for writing."""

    run: RunFolder
    campaign: Campaign
    cell: Cell
    _judged: dict[tuple[str, Slo], Level] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.cell.key

    @property
    def is_done(self) -> bool:
        """Measured, or skipped."""
        ended = of_kind(self.run.events, CellFinished, self.key)
        return bool(ended or of_kind(self.run.events, CellSkipped, self.key))

    @property
    def blocks(self) -> int:
        """Server starts that the cell is measured on; 1 where there is no search or no server."""
        is_searched = self.cell.url is None and self.campaign.repeats is None
        search = self.campaign.search
        return search.starts if is_searched and not search.rates else 1

    def part(self, block: int) -> CellStarted | None:
        """What was said of its part of a block when that was begun; None before."""
        begun = of_kind(self.run.events, CellStarted, self.key)
        return next((one for one in begun if one.block == block), None)

    @property
    def starts(self) -> int:
        """Servers that were ready so far, the one that serves now included."""
        return len(of_kind(self.run.events, CellReady, self.key))

    @property
    def spent_seconds(self) -> float:
        """Of the budget: measuring, abandoned levels and calibration included.

        What the machine's other work cost is not: see `lost_seconds`.
        """
        return sum(
            event.spent_seconds or 0.0
            for event in self.run.events
            if event.cell == self.key
            and isinstance(event, LevelFinished | LevelAbandoned | Calibrated)
            and not (isinstance(event, LevelFinished) and event.is_set_aside)
        )

    @property
    def lost_seconds(self) -> float:
        """Of disturbed levels, and of waiting for a quiet machine."""
        waits = sum(event.spent_seconds for event in of_kind(self.run.events, Waited, self.key))
        levels = of_kind(self.run.events, LevelFinished, self.key)
        return waits + sum(event.spent_seconds for event in levels if event.is_set_aside)

    @property
    def prediction(self) -> Prediction | None:
        return prediction_on_record(self.run.events, self.key)

    @property
    def finished(self) -> list[LevelRecords]:
        """The finished levels, without those that were disturbed and are measured again."""
        return [
            level
            for level in self.run.levels
            if level.cell == self.key and not level.finished.is_set_aside
        ]

    @property
    def single_stream(self) -> list[RequestRecord]:
        """The requests of finished single-stream levels."""
        return [
            request
            for level in self.finished
            if level.started.purpose is LevelPurpose.SINGLE_STREAM
            for request in level.requests
        ]

    def levels(self, slo: Slo) -> list[Level]:
        """The finished levels in order, as the search for one SLO sees them: disturbed ones where
        they count."""
        seen = [(one, self._level(one, slo)) for one in self.finished]
        return [level for one, level in seen if level.is_valid or not one.finished.is_disturbed]

    def _level(self, one: LevelRecords, slo: Slo) -> Level:
        if (one.name, slo) not in self._judged:
            _, self._judged[one.name, slo] = judged(one, slo)
        return self._judged[one.name, slo]

    def next_level(self) -> tuple[int, int]:
        """The next level's number and how many attempts at it are on record."""
        number = len(self.finished) + 1
        tried = {
            event.level
            for event in self.run.events
            if event.cell == self.key
            and event.level is not None
            and event.level.startswith(f"{self.key}#{number}.")
        }
        return number, len(tried)


def campaign_of(manifest: RunManifest) -> tuple[Campaign, list[Cell]]:
    """The campaign of a run as it was read when it started. Raises BadRunFolder."""
    try:
        campaign = msgspec.convert(manifest.campaign, Campaign)
        cells = msgspec.convert(manifest.cells, list[Cell])
    except msgspec.ValidationError as problem:
        raise BadRunFolder(
            f"the manifest of run {manifest.run_id} holds a campaign of another version: {problem}"
        ) from problem
    for cell in cells:
        if cell.key != plain(cell.key):  # it names files
            raise BadRunFolder(f"the manifest of run {manifest.run_id} has a cell {cell.key!r}")
    return campaign, cells


def repeat_of(folder: Path, held_seconds: float | None = None) -> Plan:
    """A plan that measures the finished levels of a run again: same cells, rates, seconds, seeds.

    What two such runs differ in is the machine's noise. With `held_seconds`: the confirmed rate of
    each cell alone, for so long, with seeds of its own. Raises BadRunFolder.
    """
    run = read_records(folder)
    manifest = run.manifest
    campaign, cells = campaign_of(manifest)
    levels: dict[str, tuple[RepeatedLevel, ...]] = {}
    for ended in of_kind(run.events, CellFinished) if held_seconds is not None else ():
        if ended.cell is not None and ended.capacity is not None and ended.capacity.holds:
            levels[ended.cell] = (RepeatedLevel(ended.capacity.held, held_seconds or 0.0),)
    for level in run.levels() if held_seconds is None else ():
        if level.finished.is_set_aside:
            continue
        start = level.started
        one = RepeatedLevel(start.rate_per_second, start.window_seconds, start.seed)
        levels[level.cell] = (*levels.get(level.cell, ()), one)
    done = [with_engine(cell, run.events) for cell in cells if cell.key in levels]
    if not done:
        what = (
            "finished level to repeat" if held_seconds is None else "confirmed rate to hold again"
        )
        raise BadRunFolder(f"{folder} has no {what}")
    again = msgspec.structs.replace(
        campaign,
        repeats=manifest.run_id,
        budget_seconds=None,
        cell_levels={cell.key: levels[cell.key] for cell in done},
    )
    return Plan(again, done, manifest.campaign_text)


def with_engine(cell: Cell, events: Iterable[Event]) -> Cell:
    """The cell with the engine that was chosen for it; as it is where none was."""
    chosen = of_kind(events, EngineChosen, cell.key)
    if cell.backend != BEST or not chosen:
        return cell
    last = chosen[-1]
    return msgspec.structs.replace(cell, backend=last.backend, weight_format=last.weight_format)


def with_new_seeds(plan: Plan) -> Plan:
    """A repeat whose arrivals, lengths and prompts are drawn anew."""
    levels = {
        key: tuple(RepeatedLevel(one.rate, one.seconds) for one in own)
        for key, own in plan.campaign.cell_levels.items()
    }
    campaign = msgspec.structs.replace(plan.campaign, seed=secrets.randbits(31), cell_levels=levels)
    return Plan(campaign, plan.cells, plan.text)


def repeat_in_turns(
    folders: Sequence[Path],
    times: int,
    new_seeds: bool,
    measure: Callable[[Plan], Path],
    held_seconds: float | None = None,
) -> list[list[Path]]:
    """Each run and its repeats, measured A B A B: a drift of the machine is none between them.

    Raises BadRunFolder, before anything is measured.
    """
    plans = [repeat_of(folder, held_seconds) for folder in folders]
    new_seeds = new_seeds or held_seconds is not None
    arms = [[folder] for folder in folders]
    for _ in range(times):
        for arm, plan in zip(arms, plans, strict=True):
            arm.append(measure(with_new_seeds(plan) if new_seeds else plan))
    return arms


def prediction_on_record(events: Iterable[Event], key: str) -> Prediction | None:
    """What a cell's calibration predicted; None where there was none."""
    made = of_kind(events, Calibrated, key)
    return msgspec.convert(msgspec.to_builtins(made[0]), Prediction) if made else None


def open_level_of(events: Sequence[Event]) -> LevelStarted | None:
    """The level that was begun and neither finished nor abandoned."""
    closed = {e.level for e in events if isinstance(e, LevelFinished | LevelAbandoned)}
    still = [event for event in of_kind(events, LevelStarted) if event.level not in closed]
    return still[-1] if still else None


def aimed(config: SearchConfig, made: Prediction | None, slo: Slo) -> SearchConfig:
    """The search after a calibration: it begins at the predicted rate, and believes nothing."""
    predicted = made.rates.get(slo.name) if made is not None else None
    if predicted is None or not predicted.rate or config.rates or config.start_rate:
        return config
    return msgspec.structs.replace(config, start_rate=predicted.rate)
