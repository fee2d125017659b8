"""What must be true of every complete run, however it came about."""

from __future__ import annotations

from pathlib import Path

from loadtests.campaign.run_state import campaign_of
from loadtests.capacity.levels import judged
from loadtests.records.events import (
    LevelAbandoned,
    LevelFinished,
    LevelStarted,
    RunFinished,
    of_kind,
)
from loadtests.records.old_run_folder import read_events, read_records


def check_folder(folder: Path) -> None:
    """Each level began once, ended once, lost nothing, and its numbers follow from its records."""
    run = read_records(folder)
    slo = campaign_of(run.manifest)[0].slo
    assert len(of_kind(run.events, RunFinished)) == 1 and isinstance(run.events[-1], RunFinished)
    names = [event.level for event in of_kind(run.events, LevelStarted)]
    assert len(names) == len(set(names)), "no name is used twice"
    ended = [e.level for e in run.events if isinstance(e, LevelFinished | LevelAbandoned)]
    assert len(ended) == len(set(ended)) and set(ended) >= set(names)
    levels = run.levels()
    counted = [level for level in levels if not level.finished.is_set_aside]
    numbers = [level.name.rpartition(".")[0] for level in counted]
    assert len(numbers) == len(set(numbers)), "no level was measured twice"
    for level in levels:
        end = level.finished
        indices = {record.index for record in level.requests}
        assert len(level.requests) == end.due == len(indices), "nothing twice, nothing lost"
        summary, _ = judged(level, slo)
        found = (summary.counts.good, summary.counts.due, summary.verdict)
        assert found == (end.good, end.window_due, end.verdict), "numbers follow from the records"


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read_events(folder).records]
