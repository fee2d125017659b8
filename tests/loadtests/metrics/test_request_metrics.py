"""Times of one request, and when it is good."""

import pytest

from loadtests.metrics.request_metrics import (
    e2e_seconds,
    failure_kind,
    first_chunk_tokens,
    is_good,
    itl_seconds,
    judged_tpot_seconds,
    outcome,
    send_lag_seconds,
    tpot_seconds,
    ttft_seconds,
)
from loadtests.metrics.slo import Slo
from loadtests.records.schema import RequestRecord
from tests.tools.records import failed, request

SLO = Slo("test", 2.0, 0.1, target=0.9)


def test_latencies_count_from_the_due_time():
    late = request(due=10.0, lag=0.3, ttft=0.5)
    assert ttft_seconds(late) == pytest.approx(0.5)
    assert e2e_seconds(late) == pytest.approx(0.5 + 9 * 0.05)
    assert send_lag_seconds(late) == pytest.approx(0.3)
    assert itl_seconds(late) == pytest.approx([0.05] * 9)


def test_tpot_leaves_the_first_chunk_out():
    # 64 tokens in chunks of 4, a chunk every 0.2 s: 0.05 s a token exactly. Dividing by 63 would
    # give 4.8 % less.
    assert tpot_seconds(request(tokens=64, chunk=4, gap=0.2)) == pytest.approx(0.05)
    # Not told how much the first chunk held: the mean chunk.
    assert tpot_seconds(
        request(tokens=64, chunk=4, gap=0.2, first_chunk_tokens=None)
    ) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "record", [request(tokens=4, chunk=4), request(output_tokens=None), failed(), request(tokens=1)]
)
def test_tpot_is_missing_where_it_is_not_defined(record):
    assert tpot_seconds(record) is None


def test_good_is_no_error_and_both_limits():
    assert is_good(request(), SLO)
    assert not is_good(request(ttft=2.01), SLO)
    assert not is_good(request(gap=0.101), SLO)
    assert not is_good(failed(), SLO)
    assert not is_good(request(error="stream_error"), SLO)
    assert not is_good(request(ended_seconds=None), SLO)
    assert is_good(request(ttft=50, gap=5), Slo("batch", None, None))
    assert not is_good(failed(), Slo("batch", None, None))
    assert is_good(
        request(tokens=8, chunk=8), SLO
    )  # all in one chunk: nothing to wait for between tokens


def test_without_a_token_count_chunks_stand_for_tokens():
    assert is_good(request(gap=0.09, output_tokens=None), SLO)
    assert not is_good(
        request(gap=0.2, tokens=64, chunk=4, output_tokens=None), SLO
    )  # 0.05 s a token, but nobody says so


@pytest.mark.parametrize(
    ("record", "kind", "what"),
    [
        (request(), "ok", None),
        (failed(kind="refused"), "failed", "refused"),
        (request(status=500), "failed", "http_500"),
        (request(ended_seconds=None), "unfinished", "unfinished"),
        (
            RequestRecord(
                cell="c", level="l", index=0, due_seconds=0.0, ended_seconds=1.0, status=200
            ),
            "failed",
            "no_content",
        ),
    ],
)
def test_every_request_has_one_outcome(record, kind, what):
    assert (outcome(record), failure_kind(record)) == (kind, what)


def test_an_http_error_starts_at_400():
    assert outcome(request(status=399)) == "ok" and outcome(request(status=400)) == "failed"
    assert failure_kind(request(status=400)) == "http_400"
    assert outcome(request(status=None)) == "ok"
    empty = RequestRecord(cell="c", level="l", index=0, due_seconds=0.0, ended_seconds=1.0)
    assert failure_kind(empty) == "no_content"
    open_with_error = request(status=500, ended_seconds=None)
    assert failure_kind(open_with_error) == "http_500"


def test_times_that_are_not_there_are_missing():
    never_sent = RequestRecord(cell="c", level="l", index=0, due_seconds=1.0)
    for times in (ttft_seconds, e2e_seconds, send_lag_seconds, tpot_seconds, first_chunk_tokens):
        assert times(never_sent) is None
    assert itl_seconds(never_sent) == []
    assert e2e_seconds(request(error="cut_off")) is None
    assert tpot_seconds(request(last_content_seconds=None)) is None


@pytest.mark.parametrize(
    ("tokens", "chunk", "said", "first"),
    [(64, 4, 7, 7), (64, 4, None, 4), (10, 4, None, 3), (1, 1, None, 1)],
)
def test_the_first_chunk_holds_what_was_said_or_the_mean(tokens, chunk, said, first):
    record = request(tokens=tokens, chunk=chunk, first_chunk_tokens=said)
    assert first_chunk_tokens(record) == first


def test_a_chunk_holds_a_token_at_least():
    many_chunks = request(tokens=10, output_tokens=2, first_chunk_tokens=None)
    assert first_chunk_tokens(many_chunks) == 1
    assert tpot_seconds(many_chunks) == pytest.approx(9 * 0.05 / 1)
    all_in_the_first = request(tokens=10, first_chunk_tokens=10)
    assert tpot_seconds(all_in_the_first) is None and is_good(all_in_the_first, SLO)


def test_a_pace_without_a_token_count_is_that_of_chunks():
    assert judged_tpot_seconds(request(tokens=2, gap=0.2, output_tokens=None)) == pytest.approx(0.2)
    assert judged_tpot_seconds(request(tokens=1, output_tokens=None)) is None
    counted = request(tokens=64, chunk=4, gap=0.2)
    assert judged_tpot_seconds(counted) == pytest.approx(0.05)


def test_a_request_at_its_limits_is_good():
    assert is_good(request(ttft=2.0), SLO)
    assert is_good(request(tokens=2, ttft=0.5, gap=0.125), Slo("exact", 0.5, 0.125))
    assert is_good(request(gap=5), Slo("first", 2.0, None))
    assert not is_good(request(ttft=3), Slo("first", 2.0, None))


def test_three_chunks_have_a_pace_and_an_uncounted_one_no_first_chunk():
    assert tpot_seconds(request(tokens=3)) == pytest.approx(0.05)
    assert first_chunk_tokens(request(output_tokens=None, first_chunk_tokens=None)) is None
    assert is_good(failed(), SLO) is False and is_good(request(ttft=2.01), SLO) is False
