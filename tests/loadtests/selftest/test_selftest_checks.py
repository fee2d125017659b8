"""The self-test must fail a client that is wrong: each wrong way of measuring that we know of is
caught by its row.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from crossover.loadtests.records.journal_events import Capacity
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.selftest.selftest import (
    arrival_row,
    capacity_rows,
    failure_rows,
    times_rows,
)
from crossover.serving.workload.arrivals import Poisson, due_times


def world(chunk: int, stall: float = 0.0) -> tuple[list[RequestRecord], dict[str, Any]]:
    """A client that is right: stamps 0.2 ms after the server wrote."""
    records, log = [], {}
    for i in range(200):
        steps = [
            0.05 + 0.008 * chunk * k + (stall if k >= 5 and i % 3 == 0 else 0.0)
            for k in range(48 // chunk)
        ]
        due = 0.02 * i
        chunks = [100.0 + due + step for step in steps]
        log[f"r{i}"] = {"arrived": 100.0 + due, "chunks": chunks, "status": 200, "whole": True}
        log[f"r{i}"] |= {"first_tokens": chunk, "tokens": 48}
        records.append(stamped(i, [due + step + 0.0002 for step in steps], chunk))
    return records, log


def stamped(index: int, stamps: list[float], chunk: int = 1) -> RequestRecord:
    return RequestRecord(
        cell="c",
        level="l",
        index=index,
        scheduled_seconds=0.02 * index,
        sent_seconds=0.02 * index,
        first_content_seconds=stamps[0],
        last_content_seconds=stamps[-1],
        ended_seconds=stamps[-1],
        content_seconds=stamps,
        first_chunk_tokens=chunk,
        output_tokens=48,
        status=200,
        request_id=f"r{index}",
    )


def failed(rows: list[Any]) -> set[str]:
    return {row.what for row in rows if not row.passed}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("stall", [0.0, 2.0])
def test_a_right_client_passes(chunk: int, stall: float) -> None:
    assert failed(times_rows("w", *world(chunk, stall))) == set()


def one_token_a_chunk(record: RequestRecord) -> RequestRecord:
    return msgspec.structs.replace(record, first_chunk_tokens=1)


def late_clock(record: RequestRecord) -> RequestRecord:
    return msgspec.structs.replace(record, scheduled_seconds=record.scheduled_seconds + 0.005)


def read_in_blocks(record: RequestRecord) -> RequestRecord:
    last = len(record.content_seconds) - 1
    blocks = [record.content_seconds[min(last, k // 16 * 16 + 15)] for k in range(last + 1)]
    return stamped(record.index, blocks)


def without_stalls(record: RequestRecord) -> RequestRecord:
    stall = 2.0 if record.index % 3 == 0 else 0.0
    stamps = record.content_seconds
    return stamped(record.index, [s - stall if k >= 5 else s for k, s in enumerate(stamps)])


@pytest.mark.parametrize(
    ("chunk", "wrong", "caught"),
    [
        (4, one_token_a_chunk, {"TPOT p50, s", "TPOT p95, s", "TPOT p99, s"}),
        (1, late_clock, {"TTFT p50, s", "TTFT p95, s", "TTFT p99, s"}),
        (1, read_in_blocks, {"TTFT p50, s", "TPOT p50, s", "longest gap, s"}),
        (1, without_stalls, {"E2E p95, s", "longest gap, s"}),
    ],
)
def test_a_wrong_client_is_caught(chunk: int, wrong: Any, caught: set[str]) -> None:
    records, log = world(chunk, stall=2.0)
    assert caught <= failed(times_rows("w", [wrong(record) for record in records], log))


def test_a_dropped_request_and_a_wrong_failure_are_caught() -> None:
    records, log = world(1)
    assert "answers" in failed(times_rows("w", records[:-1], log))
    log["r0"]["status"], log["r1"]["whole"] = 429, False
    refused = msgspec.structs.replace(records[0], status=429, error="refused")
    cut = msgspec.structs.replace(records[1], error="cut_off")
    assert failed(failure_rows("w", [refused, cut, *records[2:]], log)) == set()
    assert failed(failure_rows("w", [refused, *records[1:]], log)) == {"cut off", "whole"}


def test_arrivals_that_are_not_poisson_are_caught() -> None:
    good = due_times(Poisson(), 300.0, 6.0, 1)
    assert arrival_row("w", good, 300.0).passed, "the seed that the self-test uses"
    clumps = np.sort(np.concatenate([good[::4]] * 4))  # four processes that share one seed
    assert not arrival_row("w", clumps, 300.0).passed
    assert not arrival_row("w", np.arange(0, 6, 1 / 300.0), 300.0).passed


@pytest.mark.parametrize(
    ("low", "limit", "high", "confirmed", "wrong"),
    [
        (5.5, 6.89, 7.0, 4.8, set()),
        (5.5, 6.91, 7.5, 4.8, {"capacity, requests/s"}),  # 15 % off, however wide the interval
        (6.1, 6.5, 7.0, 4.8, {"capacity, requests/s"}),  # near, and too sure of it
        (5.5, 6.0, 7.0, 6.4, {"confirmed, requests/s"}),  # more than there is
        (None, None, None, None, {"capacity, requests/s", "confirmed, requests/s"}),
    ],
)
def test_a_capacity_may_be_off_by_15_percent_and_no_more_is_confirmed_than_there_is(
    low: float | None,
    limit: float | None,
    high: float | None,
    confirmed: float | None,
    wrong: set[str],
) -> None:
    found = Capacity(
        state="confirmed",
        low=low,
        estimated_rate=limit,
        high=high,
        confirmed_rate=confirmed,
        reason="too few levels",
    )
    rows = capacity_rows("world", found, 6.0, 6.0, 6.0)
    assert failed(rows) == wrong
    assert low is not None or rows[0].note == "wrong: too few levels"


@pytest.mark.parametrize(
    ("low", "limit", "high", "confirmed", "wrong"),
    [
        (6.5, 7.4, 8.0, 7.3, set()),  # the server was measured while it was fast
        (7.1, 8.1, 8.5, 7.4, {"capacity, requests/s", "confirmed, requests/s"}),
    ],
)
def test_a_server_of_two_speeds_may_be_seen_at_its_fast_one(
    low: float, limit: float, high: float, confirmed: float, wrong: set[str]
) -> None:
    found = Capacity(
        state="confirmed", low=low, estimated_rate=limit, high=high, confirmed_rate=confirmed
    )
    assert failed(capacity_rows("world", found, 6.0, 7.0, 5.0)) == wrong
