"""The self-test must fail a client that is wrong: each wrong way of measuring that we know of is
caught by its row.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from loadtests.records.request_record import RequestRecord
from loadtests.records.run_journal import Capacity
from loadtests.selftest.selftest_checks import (
    arrival_rows,
    capacity_rows,
    failure_rows,
    times_rows,
)
from loadtests.workload.arrivals import Poisson, due_times


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
    return {row.what for row in rows if not row.passed}


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
    assert failed(failure_rows("w", right, log)) == set()
    assert failed(failure_rows("w", [*right[:-1], cut], log)) == {"cut off", "whole"}


def test_arrivals_that_are_not_poisson_are_caught() -> None:
    good = due_times(Poisson(), 300.0, 6.0, 1)
    assert failed(arrival_rows("w", good, 300.0)) == set(), "the seed that the self-test uses"
    four = np.sort(np.concatenate([good[::4]] * 4))  # four processes that share one seed
    clumps = four + 1e-5 * np.arange(len(four))
    assert "index of dispersion" in failed(arrival_rows("w", clumps, 300.0))
    even = np.arange(0, 6, 1 / 300.0)
    assert {"distance from Poisson", "index of dispersion"} <= failed(
        arrival_rows("w", even, 300.0)
    )
    late = np.sort(good + np.where(np.arange(len(good)) % 2, 0.003, 0.0))
    assert failed(arrival_rows("w", late, 300.0)), "every second one leaves 3 ms late"


@pytest.mark.parametrize(
    ("low", "limit", "high", "held", "wrong"),
    [
        (5.5, 6.0, 7.0, 4.8, set()),
        (5.5, 6.89, 7.0, 4.8, set()),
        (5.5, 6.91, 7.5, 4.8, {"limit"}),  # 15 % off, however wide the interval
        (3.0, 5.09, 9.0, 4.8, {"limit"}),
        (6.1, 6.5, 7.0, 4.8, {"limit"}),  # near, and too sure of it
        (5.5, 6.0, 7.0, 6.4, {"confirmed"}),  # more than there is
        (5.5, 6.0, 7.0, None, {"confirmed"}),
        (None, None, None, None, {"limit", "confirmed"}),
    ],
)
def test_a_capacity_may_be_off_by_15_percent_and_no_more_is_confirmed_than_there_is(
    low: float | None, limit: float | None, high: float | None, held: float | None, wrong: set[str]
) -> None:
    found = Capacity(
        state="holds", low=low, limit=limit, high=high, held=held, reason="too few levels"
    )
    rows = capacity_rows("world", found, 6.0)
    assert failed(rows) == wrong
    assert rows[0].note == (
        "too few levels" if low is None else f"interval {low:.3g} to {high:.3g}"
    )
    if limit == 6.91:
        assert not failed(capacity_rows("world", found, 6.0, 5.0, 6.5)), "of two speeds"
