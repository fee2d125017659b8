"""A manifest and records as a run folder has them, for tests of it."""

from __future__ import annotations

from crossover.loadtests.records.journal_events import (
    FORMAT_VERSION,
    LevelFinished,
    LevelStarted,
)
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.run_folder import RunManifest

MANIFEST_RECORD = RunManifest(
    format_version=FORMAT_VERSION,
    run_id="r",
    created="2026-01-01T00:00:00Z",
    crossover_version="0",
    command=["x"],
    campaign={},
    campaign_text="",
    cells=[],
    server_facts={},
    client_facts={},
    versions={},
)


def record(level: str, index: int) -> RequestRecord:
    return RequestRecord(
        cell="c",
        level=level,
        index=index,
        scheduled_seconds=float(index),
        content_seconds=[0.5, 0.75],
    )


def started(level: str) -> LevelStarted:
    return LevelStarted(
        unix_seconds=1.0,
        cell="c",
        level=level,
        plan=LevelPlan(rate=2.0, warmup_seconds=1.0, window_seconds=10.0),
        started_unix_seconds=1.0,
    )


def finished(level: str, due: int = 2) -> LevelFinished:
    return LevelFinished(cell="c", level=level, due=due, window_seconds=10.0)
