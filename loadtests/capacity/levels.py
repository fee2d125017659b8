"""A finished level as the search sees it, and what several of them say together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtests.metrics.distribution import mean_of
from loadtests.metrics.level import summarise, with_facts
from loadtests.metrics.level_summary import Summary, Window
from loadtests.metrics.slo import Slo
from loadtests.records.events import LevelStarted
from loadtests.records.old_run_folder import LevelRecords
from loadtests.records.schema import (
    Disturbance,
    RequestRecord,
    ResourceSample,
    WorkerFacts,
)
from loadtests.workload.arrivals import process_of


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One finished level. `runs` shows how far neighbouring requests share their fate.

    Where it is missing, a queue of a few servers is assumed.
    """

    rate: float | None  # asked, requests/s; None: single-stream
    due: int
    good: int
    good_soon: int | None = None  # as Summary.good_soon: what counts where it is to confirm
    grows_soon: bool = False  # as Summary.grows_soon
    duration_seconds: float
    warmup_seconds: float = 0.0  # of load before the window
    runs: tuple[int, ...] = ()  # lengths of runs of good, bad, good, ... in order of due time
    mean_e2e_seconds: float | None = None
    is_valid: bool = True  # False: on record, not counted
    is_steady: bool | None = None  # None: too few requests to tell
    is_whole: bool = True  # False: cut short once it was decided
    start: int | None = None  # which start of the server it ran on; None: not on record


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a level ended: fields of LevelFinished."""

    window_seconds: float
    cut_short: str | None = None
    disturbance: Disturbance | None = None
    workers: Sequence[WorkerFacts] = ()


def judged(level: LevelRecords, slo: Slo) -> tuple[Summary, Level]:
    """A level on record."""
    end = level.finished
    ending = Ending(
        window_seconds=end.window_seconds,
        cut_short=end.cut_short,
        disturbance=end.disturbance,
        workers=end.workers,
    )
    return judge(level.requests, level.samples, level.started, slo, ending)


def judge(
    records: Sequence[RequestRecord],
    samples: Sequence[ResourceSample],
    started: LevelStarted,
    slo: Slo,
    ending: Ending,
) -> tuple[Summary, Level]:
    """The summary of a level and its search result, the same from memory and from disk."""
    seconds = max(ending.window_seconds, 1e-9)
    window = Window(started.warmup_seconds, started.warmup_seconds + seconds)
    summary = summarise(
        records,
        samples,
        window,
        slo,
        rate=started.rate_per_second,
        started_unix_seconds=started.started_unix_seconds,
        arrivals=process_of(started.arrivals),
    )
    summary = with_facts(summary, ending.disturbance, ending.workers, slo)
    return summary, level_of(summary, ending.cut_short is None, started.start)


def holds_disturbed(
    records: Sequence[RequestRecord],
    samples: Sequence[ResourceSample],
    started: LevelStarted,
    slos: Sequence[Slo],
    ending: Ending,
) -> bool:
    """Whether a level was disturbed, and counts under one of the SLOs all the same."""
    found = ending.disturbance
    if found is None or not found.is_disturbed or found.counts:
        return False
    return any(judge(records, samples, started, slo, ending)[1].is_valid for slo in slos)


def level_of(summary: Summary, is_whole: bool = True, start: int | None = None) -> Level:
    """A level without an asked rate is a single-stream one."""
    return Level(
        rate=summary.asked_rate,
        due=summary.counts.due,
        good=summary.counts.good,
        good_soon=summary.good_soon,
        grows_soon=summary.grows_soon,
        duration_seconds=summary.window.seconds,
        warmup_seconds=summary.window.start_seconds,
        runs=summary.counts.runs,
        mean_e2e_seconds=summary.latencies.e2e.mean,
        is_valid=summary.is_valid,
        is_steady=summary.is_steady,
        is_whole=is_whole,
        start=start,
    )


def hidden_overload(level: Level, slo: Slo) -> float:
    """The greatest share of the arrivals beyond saturation that the level does not show.

    At (1 + e) times saturation TTFT grows by e / (1 + e) seconds per second from the level's begin,
    and requests are good until it is at the limit. That the level was called steady is no evidence
    against it: beside the wandering of a queue whose limit is long, such a trend is not seen.
    """
    seconds = level.warmup_seconds + level.duration_seconds
    return min(1.0, (slo.ttft_seconds or 0.0) / seconds)


def single_stream_seconds(levels: Sequence[Level]) -> float | None:
    """Mean E2E of single-stream requests; None where none ended."""
    alone = [level for level in levels if level.rate is None and level.is_valid]
    return mean_of(level.mean_e2e_seconds or None for level in alone)


def pooled(levels: Sequence[Level]) -> list[tuple[float, int, int]]:
    """(rate, good, due) of valid levels, ascending; shares made non-increasing by pooling (PAVA).

    Not scipy's isotonic_regression: that pools equal neighbours too, and requests of lower rates
    would count as evidence for the highest.
    """
    merged: dict[float, list[int]] = {}
    for level in levels:
        if level.rate is not None and level.is_valid and level.due:
            counts = merged.setdefault(level.rate, [0, 0])
            counts[0] += level.good
            counts[1] += level.due
    blocks: list[tuple[list[float], int, int]] = []  # rates, good, due
    for rate in sorted(merged):
        rates, good, due = [rate], *merged[rate]
        while blocks and blocks[-1][1] * due < good * blocks[-1][2]:
            before = blocks.pop()
            rates, good, due = before[0] + rates, before[1] + good, before[2] + due
        blocks.append((rates, good, due))
    return [(rate, good, due) for rates, good, due in blocks for rate in rates]
