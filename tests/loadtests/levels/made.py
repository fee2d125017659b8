"""Records, samples and levels as tests need them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import (
    Disturbance,
    LevelFinished,
    LevelStarted,
)
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.resource_sample import ResourceSample


def request(
    index: int = 0,
    due: float = 0.0,
    *,
    send_delay: float = 0.0,
    ttft: float = 0.5,
    gap: float = 0.05,
    tokens: int = 10,
    chunk: int = 1,
    **changes: Any,
) -> RequestRecord:
    """A request that went well: `tokens` in chunks of `chunk`, every `gap` seconds."""
    stamps = [due + ttft + gap * k for k in range(-(-tokens // chunk))]
    record = RequestRecord(
        cell="c",
        level="l",
        index=index,
        scheduled_seconds=due,
        sent_seconds=due + send_delay,
        first_content_seconds=stamps[0],
        last_content_seconds=stamps[-1],
        ended_seconds=stamps[-1],
        content_seconds=stamps,
        prompt_tokens=100,
        output_tokens=tokens,
        first_chunk_tokens=chunk,
        status=200,
        backend="fake/cpu",
    )
    return msgspec.structs.replace(record, **changes)


def failed(index: int = 0, due: float = 0.0, kind: str = "timeout") -> RequestRecord:
    return RequestRecord(
        cell="c",
        level="l",
        index=index,
        scheduled_seconds=due,
        sent_seconds=due,
        ended_seconds=due + 1,
        error=kind,
    )


def sample(at: float, **fields: Any) -> ResourceSample:
    return ResourceSample(cell="c", unix_seconds=at, **fields)


def level(
    records: Iterable[RequestRecord],
    seconds: float = 60.0,
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    warmup: float = 0.0,
    start: int | None = 1,
    name: str = "l",
    **finished: Any,
) -> Level:
    """A finished level of these records, its window `seconds` after the warm-up."""
    records = list(records)
    begun = LevelStarted(
        cell="c",
        level=name,
        plan=LevelPlan(
            rate=rate, concurrency=concurrency, warmup_seconds=warmup, window_seconds=seconds
        ),
        start=start,
    )
    end = LevelFinished(cell="c", level=name, due=len(records), window_seconds=seconds)
    return Level.of(records, begun, msgspec.structs.replace(end, **finished))


def steady_level(
    rate: float,
    seconds: float = 120.0,
    bad: int = 0,
    *,
    clumped: bool = False,
    **changes: Any,
) -> Level:
    """An open-loop level without a trend, of which `bad` requests are too late, evenly or in a row
    in its middle.
    """
    due = np.arange(0.0, seconds, 1 / rate)
    late = np.zeros(len(due), dtype=bool)
    if clumped:
        late[(len(due) - bad) // 2 : (len(due) + bad) // 2] = True
    else:
        late[np.linspace(0, len(due) - 1, bad + 2)[1:-1].astype(int)] = True
    records = [
        request(i, float(at), ttft=5.0 if is_late else 0.3)
        for i, (at, is_late) in enumerate(zip(due, late, strict=True))
    ]
    return level(records, seconds, rate=rate, name=f"{rate}-{bad}-{seconds}", **changes)


def single_streams(
    count: int = 20, bad: int = 0, *, start: int | None = 1, name: str = "alone"
) -> Level:
    """Requests one at a time, the first `bad` too late."""
    records = [request(i, 6.0 * i, ttft=5.0 if i < bad else 0.3) for i in range(count)]
    return level(records, 6.0 * count, concurrency=1, start=start, name=name)


def taken(share: float, *, counts: bool = False) -> Disturbance:
    """A level of which other processes took so much."""
    return Disturbance(share=share, who="`hog`", is_disturbed=share > 0.03, counts=counts)


def waits_md_c(
    due: npt.NDArray[np.float64], servers: int, service_seconds: float
) -> npt.NDArray[np.float64]:
    """Waiting times of a D/c queue from empty, first come first served: each server takes every
    c-th (Kiefer-Wolfowitz)."""
    free = np.full(servers, -1.0)
    waits = np.empty(len(due))
    for i, at in enumerate(due):
        begin = max(at, free[i % servers])
        waits[i] = begin - at
        free[i % servers] = begin + service_seconds
    return waits
