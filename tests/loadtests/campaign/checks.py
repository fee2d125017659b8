"""What must be true of every complete run, however it came about."""

from __future__ import annotations

from pathlib import Path

from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records.journal_events import (
    LevelAbandoned,
    LevelFinished,
    LevelStarted,
    RunFinished,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records


def check_folder(folder: Path) -> None:
    """Each level began once, ended once and lost nothing."""
    run = read_records(folder)
    assert isinstance(run.events[-1], RunFinished)
    names = [event.level for event in of_kind(run.events, LevelStarted)]
    assert len(names) == len(set(names)), "no name is used twice"
    ended = [e.level for e in run.events if isinstance(e, LevelFinished | LevelAbandoned)]
    assert len(ended) == len(set(ended)) and set(ended) >= set(names)
    levels = levels_of(run)
    # A burst is sent again where other processes took much of the first one.
    counted = [level for level in levels if not level.is_set_aside and not level.is_burst]
    numbers = [level.name.rpartition(".")[0] for level in counted]
    assert len(numbers) == len(set(numbers)), "no level was measured twice"
    assert all(level.is_whole for level in levels), "nothing twice, nothing lost"


def kinds(folder: Path) -> list[str]:
    return [str(event.__struct_config__.tag) for event in read_records(folder).events]
