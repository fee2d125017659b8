"""What must be true of every complete run, however it came about."""

from __future__ import annotations

from pathlib import Path

from loadtests.analysis.level import levels_of
from loadtests.campaign.run_state import campaign_of, is_set_aside
from loadtests.records.run_folder import read_records
from loadtests.records.run_journal import (
    LevelAbandoned,
    LevelFinished,
    LevelStarted,
    RunFinished,
    of_kind,
)


def check_folder(folder: Path) -> None:
    """Each level began once, ended once, lost nothing, and its numbers follow from its records."""
    run = read_records(folder)
    slo = campaign_of(run.manifest)[0].slo
    assert isinstance(run.events[-1], RunFinished)
    names = [event.level for event in of_kind(run.events, LevelStarted)]
    assert len(names) == len(set(names)), "no name is used twice"
    ended = [e.level for e in run.events if isinstance(e, LevelFinished | LevelAbandoned)]
    assert len(ended) == len(set(ended)) and set(ended) >= set(names)
    levels = levels_of(run)
    counted = [one for one in levels if one.finished and not is_set_aside(one.finished)]
    numbers = [level.name.rpartition(".")[0] for level in counted]
    assert len(numbers) == len(set(numbers)), "no level was measured twice"
    for level in levels:
        end = level.finished
        assert end is not None and level.is_whole, "nothing twice, nothing lost"
        found = level.judge(slo)
        assert (found.good, found.due, found.verdict) == (end.good, end.window_due, end.verdict)


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read_records(folder).events]
