"""Records of one level -> columns, times of a request, throughput, and the judgement."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from crossover.loadtests.levels.level_columns import Level, failure_of
from crossover.loadtests.levels.percentiles import distribution
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.capacity.slo import Slo
from tests.loadtests.levels.made import failed, level, request, steady_level

SLO = Slo("test", ttft_seconds=2.0, tpot_seconds=0.1, target=0.9)


def one(record: RequestRecord) -> Level:
    return level([record])


def test_latencies_count_from_the_due_time() -> None:
    late = one(request(due=10.0, send_delay=0.3, ttft=0.5))
    assert late.ttft == pytest.approx([0.5])
    assert late.e2e == pytest.approx([0.5 + 9 * 0.05])
    assert late.send_delay == pytest.approx([0.3])
    assert late.itl == pytest.approx([0.05] * 9)


@pytest.mark.parametrize(
    ("record", "tpot"),
    [
        # 64 tokens in chunks of 4, a chunk every 0.2 s: 0.05 s a token exactly. Dividing by 63
        # would give 4.8 % less.
        (request(tokens=64, chunk=4, gap=0.2), 0.05),
        # Not told how much the first chunk held: the mean chunk.
        (request(tokens=64, chunk=4, gap=0.2, first_chunk_tokens=None), 0.05),
        (request(tokens=3), 0.05),
        # A chunk holds a token at least.
        (request(tokens=10, output_tokens=2, first_chunk_tokens=None), 9 * 0.05),
        # Without a token count, or with one that cannot be, chunks stand for tokens.
        (request(tokens=64, chunk=4, gap=0.2, output_tokens=None), 0.2),
        (request(tokens=10, gap=0.2, output_tokens=0), 0.2),
        (request(tokens=10, gap=0.2, output_tokens=-5), 0.2),
        (request(tokens=10, gap=0.2, output_tokens=0, first_chunk_tokens=None), 0.2),
        (request(tokens=4, chunk=4), math.nan),
        (request(tokens=1), math.nan),
        (request(tokens=10, first_chunk_tokens=10), 0.05),  # as if all came in the first
        (failed(), math.inf),
    ],
)
def test_tpot_leaves_the_first_chunk_out(record: RequestRecord, tpot: float) -> None:
    assert one(record).tpot == pytest.approx([tpot], nan_ok=True)


@pytest.mark.parametrize(
    ("record", "is_good"),
    [
        (request(), True),
        (request(ttft=2.0), True),
        (request(ttft=2.01), False),
        (request(gap=0.101), False),
        (failed(), False),
        (request(error="stream_error"), False),
        (request(ended_seconds=None), False),
        (request(tokens=8, chunk=8, gap=9.0), True),  # nothing to wait for between tokens
        (request(gap=0.09, output_tokens=None), True),
        (request(gap=0.2, tokens=64, chunk=4, output_tokens=None), False),  # 0.05, nobody says so
        (request(gap=0.2, output_tokens=0), False),
    ],
)
def test_good_is_no_error_and_both_limits(record: RequestRecord, is_good: bool) -> None:
    assert SLO.met_by(one(record)).tolist() == [is_good]
    assert Slo("batch").met_by(one(record))[0] == (failure_of(record) is None)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (request(), None),
        (failed(kind="refused"), "refused"),
        (request(status=399), None),
        (request(status=400), "http_400"),
        (request(status=500, ended_seconds=None), "http_500"),
        (request(ended_seconds=None), "unfinished"),
        (
            RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0, ended_seconds=1.0),
            "no_content",
        ),
    ],
)
def test_every_request_has_one_outcome(record: RequestRecord, why: str | None) -> None:
    assert failure_of(record) == why


def test_times_that_are_not_there_are_missing() -> None:
    never = one(RequestRecord(cell="c", level="l", index=0, scheduled_seconds=1.0))
    assert np.isnan(never.send_delay).all()
    assert never.ttft.tolist() == never.e2e.tolist() == [math.inf] and len(never.itl) == 0


def test_a_level_in_numbers() -> None:
    records = [request(i, due=0.5 * i) for i in range(120)]
    records += [failed(120, 60.0), request(121, 60.5, ttft=3.0)]
    random.Random(1).shuffle(records)
    found = level(records, 51.0, rate=2.0, warmup=10.0)
    judged = found.judge(SLO)
    assert (judged.due, judged.failed, judged.good) == (102, 1, 100)
    assert judged.share == pytest.approx(100 / 102) and judged.low < 100 / 102 < judged.high
    assert found.failures == {"timeout": 1} and found.backends == {"fake/cpu": 101}
    assert found.offered_rate == pytest.approx(2.0)
    ttft = distribution(found.ttft[found.counted])
    assert ttft.p50 == pytest.approx(0.5)
    assert found.mean(found.prompt_tokens) == 100 and found.is_whole
    assert not level(records[1:], 51.0, due=122).is_whole, "a line of it is broken"


def test_requests_that_miss_together_lower_the_effective_sample_size() -> None:
    """25 of 25 good prove 90 %, of requests that share nothing."""
    single_streams = level([request(i, 2.0 * i) for i in range(25)], 50.0, concurrency=1)
    assert (
        single_streams.judge(SLO).verdict == "meets" and single_streams.judge(SLO).effective == 25
    )
    two = level([request(i, 1.0 * (i // 2)) for i in range(25)], 50.0, concurrency=2)
    assert two.judge(SLO).verdict == "unresolved"
    spread, clumped = (
        steady_level(2.0, 120.0, 12, clumped=clumped).judge(SLO) for clumped in (False, True)
    )
    assert spread.share == clumped.share and spread.verdict == "meets"
    assert clumped.effective < spread.effective / 5 and clumped.verdict == "unresolved"
    assert steady_level(2.0, 120.0, 100).judge(SLO).verdict == "misses"


def test_a_level_whose_queue_grows_misses_the_slo() -> None:
    growing = [request(i, 0.5 * i, ttft=0.1 + 0.007 * i) for i in range(240)]
    judged = level(growing, 120.0, rate=2.0).judge(SLO)
    assert judged.good == judged.due and judged.low >= 0.9
    assert judged.steady is False and judged.verdict == "unresolved"


def test_throughput_counts_chunks_where_they_arrived() -> None:
    # Ten tokens from 9.5 s to 10.4 s: the window that ends at 10 s sees the first five.
    record = request(due=9.0, ttft=0.5, gap=0.1)
    assert level([record], 10.0).output_tokens_per_second == pytest.approx(5 / 10)
    # ... and a request due before the window counts for throughput, not for latency.
    later = level([record], 10.0, warmup=10.0)
    assert later.judge(SLO).due == 0 and later.judge(SLO).share is None
    assert later.output_tokens_per_second == pytest.approx(5 / 10)
    # 12 tokens in chunks at 1, 2 and 3 s; one that was cut off has chunks as others have.
    even = request(0, 0.5, tokens=12, chunk=4, gap=1.0)
    unsaid: dict[str, Any] = {"output_tokens": None, "first_chunk_tokens": None}
    cut = request(2, 0.5, tokens=12, chunk=4, gap=1.0, error="cut_off", **unsaid)
    for records, rate in (
        ([even, failed(3)], 4 / 2),
        ([even, cut], 8 / 2),
        ([failed(3)], 0.0),
        ([request(**unsaid)], None),  # nobody counted
    ):
        assert level(records, 2.0).output_tokens_per_second == (rate and pytest.approx(rate))


def test_requests_in_flight_are_averaged_over_the_window() -> None:
    # In [10, 20): 2 s of the first, 3 of the second, 8 of the third; none of the others.
    ends = ((5.0, 12.0), (17.0, 30.0), (12.0, None), (1.0, 9.0), (25.0, 26.0))
    records = [request(i, due, ended_seconds=end) for i, (due, end) in enumerate(ends)]
    assert level(records).mean_in_flight(10.0, 20.0) == pytest.approx(1.3)


def test_an_empty_level_is_no_error() -> None:
    empty = level([], 5.0, rate=1.0)
    judged = empty.judge(SLO)
    assert (judged.due, judged.share, judged.verdict) == (0, None, "unresolved")
    assert len(empty.itl) == 0 and empty.output_tokens_per_second == 0.0
