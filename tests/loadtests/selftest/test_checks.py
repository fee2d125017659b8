"""The self-test must fail a client that is wrong: each wrong way of measuring that we know of is
caught by its row.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from loadtests.records.events import Capacity, CapacityStatus
from loadtests.records.schema import RequestRecord
from loadtests.selftest.checks import (
    arrival_rows,
    capacity_of_slots,
    capacity_row,
    failure_rows,
    quantile,
    times_rows,
)
from loadtests.workload.arrivals import Poisson, due_times

CAPACITY = {"status": CapacityStatus.CONFIRMED, "held": 1.0}


def world(
    chunk: int, n: int = 200, stall: float = 0.0
) -> tuple[list[RequestRecord], dict[str, Any]]:
    """A client that is right: stamps 0.2 ms after the server wrote."""
    records, log = [], {}
    for i in range(n):
        arrived = 100.0 + 0.02 * i
        steps = [
            0.05 + 0.008 * chunk * k + (stall if k >= 5 and i % 3 == 0 else 0.0)
            for k in range(48 // chunk)
        ]
        log[f"r{i}"] = {
            "arrived": arrived,
            "chunks": [arrived + s for s in steps],
            "status": 200,
            "whole": True,
            "first_tokens": chunk,
            "tokens": 48,
        }
        stamps = [0.02 * i + s + 0.0002 for s in steps]
        records.append(
            RequestRecord(
                cell="c",
                level="l",
                index=i,
                due_seconds=0.02 * i,
                sent_seconds=0.02 * i,
                first_content_seconds=stamps[0],
                last_content_seconds=stamps[-1],
                ended_seconds=stamps[-1],
                content_seconds=stamps,
                first_chunk_tokens=chunk,
                output_tokens=48,
                status=200,
                request_id=f"r{i}",
            )
        )
    return records, log


def failed(rows: list[Any]) -> set[str]:
    return {row.what.partition(": ")[2] for row in rows if not row.passed}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("stall", [0.0, 2.0])
def test_a_right_client_passes(chunk: int, stall: float) -> None:
    assert failed(times_rows("w", *world(chunk, stall=stall))) == set()


def test_dividing_by_tokens_minus_one_is_caught() -> None:
    records, log = world(4)
    wrong = [msgspec.structs.replace(record, first_chunk_tokens=1) for record in records]
    assert {"TPOT p50", "TPOT p95", "TPOT p99"} <= failed(times_rows("w", wrong, log))


def test_a_clock_that_starts_late_is_caught() -> None:
    records, log = world(1)
    late = [
        msgspec.structs.replace(record, due_seconds=record.due_seconds + 0.005)
        for record in records
    ]
    assert {"TTFT p50", "TTFT p95", "TTFT p99"} <= failed(times_rows("w", late, log))


def test_chunks_read_in_blocks_are_caught() -> None:
    records, log = world(1, stall=2.0)
    blocks = []
    for record in records:
        stamps = [record.content_seconds[min(47, k // 16 * 16 + 15)] for k in range(48)]
        blocks.append(
            msgspec.structs.replace(
                record,
                content_seconds=stamps,
                first_content_seconds=stamps[0],
                last_content_seconds=stamps[-1],
            )
        )
    assert {"TTFT p50", "TPOT p50", "longest gap"} <= failed(times_rows("w", blocks, log))


def test_a_dropped_stall_and_a_dropped_request_are_caught() -> None:
    records, log = world(1, stall=2.0)
    assert "answers" in failed(times_rows("w", records[:-1], log))
    quiet = [r for r in records if r.index % 3]
    assert "answers" in failed(times_rows("w", quiet, log))
    heard = {r.request_id: log[r.request_id or ""] for r in quiet}
    assert failed(times_rows("w", quiet, heard)) == set(), "these it has, and they are right"
    smooth = [
        msgspec.structs.replace(
            record,
            content_seconds=[s - 2.0 if k >= 5 else s for k, s in enumerate(stamps)],
            last_content_seconds=stamps[-1] - 2.0,
        )
        for record in records
        if (stamps := record.content_seconds) and record.index % 3 == 0
    ]
    stalled = {r.request_id: log[r.request_id or ""] for r in smooth}
    found = failed(times_rows("w", smooth, stalled))
    assert {"stalls seen", "longest gap"} <= found and "answers" not in found


def test_failures_are_counted_by_kind() -> None:
    log = {str(i): {"status": 429 if i < 3 else 200, "whole": i != 5} for i in range(8)}
    base = RequestRecord(
        cell="c",
        level="l",
        index=0,
        due_seconds=0.0,
        ended_seconds=1.0,
        first_content_seconds=0.5,
        status=200,
    )
    refused = msgspec.structs.replace(base, status=429, error="refused")
    cut = msgspec.structs.replace(base, error="cut_off")
    right = [refused] * 3 + [cut] + [base] * 4
    assert failed(failure_rows(right, log)) == set()
    assert failed(failure_rows([*right[:-1], cut], log)) == {"cut off", "whole"}


def test_arrivals_that_are_not_poisson_are_caught() -> None:
    good = due_times(Poisson(), 150.0, 12.0, 1)
    assert failed(arrival_rows("w", good, 150.0, 12.0)) == set(), "the seed that the self-test uses"
    four = np.sort(np.concatenate([good[::4]] * 4))  # four workers that share one seed
    assert "index of dispersion" in failed(
        arrival_rows("w", four + 1e-5 * np.arange(len(four)), 150.0, 12.0)
    )
    even = np.arange(0, 12, 1 / 150.0)
    assert {"CV of gaps", "index of dispersion"} <= failed(arrival_rows("w", even, 150.0, 12.0))


def test_quantiles_are_by_nearest_rank() -> None:
    assert quantile([], 0.5) is None
    assert [quantile(list(range(1, 101)), share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]


@pytest.mark.parametrize(
    ("low", "middle", "high", "passed"),
    [
        (5.5, 6.0, 7.0, True),
        (5.5, 6.89, 7.0, True),
        (5.5, 6.91, 7.5, False),  # 15 % off, however wide the interval
        (3.0, 5.09, 9.0, False),
        (6.1, 6.5, 7.0, False),  # near, and too sure of it
    ],
)
def test_a_capacity_may_be_off_by_15_percent(
    low: float, middle: float, high: float, passed: bool
) -> None:
    found = msgspec.convert(
        {"low": low, "estimate": middle, "high": high, "reason": ""} | CAPACITY, Capacity
    )
    row = capacity_row("capacity", 6.0, found)
    assert (row.passed, row.limit) == (passed, pytest.approx(0.9))
    assert row.note == f"interval {low:.3g} to {high:.3g}"
    unknown = msgspec.structs.replace(found, estimate=None, high=None, reason="too few levels")
    row = capacity_row("capacity", 6.0, unknown)
    assert (row.passed, row.measured, row.note) == (False, None, "too few levels")


def test_the_capacity_of_slots_is_that_of_queueing_theory() -> None:
    """M/D/1: an answer comes without a wait where the server is idle, which it is 1 - rho of the
    time.
    """
    rate = capacity_of_slots(1, 1.0, 0.0, 0.6)
    assert rate == pytest.approx(0.4, rel=0.02), (
        "60 % do not wait at all where the server is busy 40 % of the time"
    )
