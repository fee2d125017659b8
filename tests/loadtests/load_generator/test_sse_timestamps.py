"""One request against a server that knows the truth: every stamp, count and failure."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover.loadtests.errors import TargetUnusable
from crossover.loadtests.load_generator.http_connection import clock, connect, fetch, get_bytes
from crossover.loadtests.load_generator.openai_endpoint import (
    pool_for,
    probe_endpoint,
    request_bytes,
)
from crossover.loadtests.load_generator.sse_timestamps import Answer, stream
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.request_record import RequestRecord

Start = Callable[..., str]
STAMP_SECONDS = 0.002  # loopback, a wake-up, and a machine that others use too


def _ask(
    url: str, tokens: int = 8, timeout_seconds: float = 10.0, api: Any = "completions", **truth: Any
) -> tuple[RequestRecord, Any, float]:
    """One request; returns its record, the server's own account of it, and the origin of the
    record's times.
    """
    target = Target(url=url, api=api, extra_body={"truth": truth})
    with pool_for(target) as pool:
        origin = clock()
        wire = request_bytes(pool, target, FACTS, "one two three", tokens)
        request = RequestRecord(
            cell="c", level="l", index=3, scheduled_seconds=0.0, requested_output_tokens=tokens
        )
        record = stream(pool, wire, request, origin=origin, timeout_seconds=timeout_seconds)
        log = json.loads(fetch(pool, get_bytes(pool, "/truth"))[2])
    return record, log.get(record.request_id), origin


FACTS: Any = None


@pytest.fixture(autouse=True, scope="module")
def _facts(truth_server: Start) -> None:
    global FACTS
    FACTS = probe_endpoint(Target(url=truth_server()))


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("chunk_tokens", [1, 4])
def test_stamps_are_those_of_the_server(truth_server: Start, api: str, chunk_tokens: int) -> None:
    """Of three answers one at least: a busy machine may wake this process late."""
    url = truth_server()
    medians: list[float] = []
    while len(medians) < 3 and min(medians, default=1.0) >= STAMP_SECONDS:
        record, truth, origin = _ask(url, 16, api=api, chunk_tokens=chunk_tokens)
        assert record.error is None and record.finish_reason == "length" and record.status == 200
        assert (record.output_tokens, record.prompt_tokens, record.first_chunk_tokens) == (
            16,
            3,
            chunk_tokens,
        )
        written = [moment - origin for moment in truth["chunks"]]
        assert len(record.content_seconds) == len(written) == 16 / chunk_tokens
        late = [seen - sent for seen, sent in zip(record.content_seconds, written, strict=True)]
        assert min(late) >= -1e-5, "a chunk was seen before it was written"
        medians.append(statistics.median(late))
    assert min(medians) < STAMP_SECONDS
    assert (
        record.first_content_seconds == record.content_seconds[0]
        and record.last_content_seconds == record.content_seconds[-1]
    )
    assert record.sent_seconds is not None and record.sent_seconds <= truth["arrived"] - origin


SSE = (
    b": comment\n\n"
    + b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
    + b"".join(
        b'data: {"choices":[{"text":"w%d "}],"usage":{"completion_tokens":%d}}\n\n' % (i, i + 1)
        for i in range(6)
    )
    + 'data: {"choices":[{"delta":{"content":"é"},"finish_reason":"stop"}]}\r\n\r\n'.encode()
    + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\ndata: [DONE]'
)


@given(cuts=st.lists(st.integers(0, len(SSE)), max_size=40), end=st.integers(0, len(SSE)))
@settings(max_examples=300, deadline=None)
def test_any_cut_of_the_bytes_into_pieces_reads_as_the_whole(cuts: list[int], end: int) -> None:
    """Also of a stream that ends at any byte: the same chunks, counts and error."""

    def read(*pieces: bytes) -> tuple[Any, ...]:
        answer = Answer()
        answer.head(200, [])
        for piece in pieces:
            answer.body(piece, 1.0)
        answer.ended()
        usage = answer.usage and msgspec.to_builtins(answer.usage)
        return len(answer.contents), usage, answer.finish_reason, answer.error, answer.is_done

    for whole in (SSE, SSE[:end]):
        places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
        pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
        assert read(*pieces) == read(whole)
    assert read(SSE)[0] == 7 and read(SSE)[3] is None


@pytest.mark.parametrize("first", ["reasoning_content", "reasoning", "content"])
def test_reasoning_is_content(first: str) -> None:
    answer = Answer()
    answer.head(200, [])
    events = [
        {"choices": [{"delta": {first: "hm"}}]},
        {"choices": [{"delta": {"content": "Four"}, "finish_reason": "stop"}]},
    ]
    for moment, event in enumerate(events, 1):
        answer.body(b"data: " + json.dumps(event).encode() + b"\n\n", float(moment))
    assert answer.contents == [1.0, 2.0]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_its_server_gave_up_is_cut_off(reason: str) -> None:
    answer = Answer()
    answer.head(200, [])
    event = {"choices": [{"text": "one", "finish_reason": reason}]}
    answer.body(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n", 1.0)
    answer.ended()
    assert answer.error == "cut_off" and answer.contents == [1.0]


@pytest.mark.parametrize(
    ("fail", "error", "status", "contents"),
    [
        ("status:429", "refused", 429, 0),
        ("status:500", "http_500", 500, 0),
        ("status:503", "http_503", 503, 0),
        ("cut", "cut_off", 200, 4),
        ("error", "stream_error", 200, 4),
        ("garbage", "stream_error", 200, 4),
        ("no_content", "empty", 200, 0),
        ("slam", "connection", None, 0),
    ],
)
def test_each_failure_has_its_name(
    truth_server: Start, fail: str, error: str, status: int | None, contents: int
) -> None:
    record, _, _ = _ask(truth_server(), 8, fail=fail)
    assert (record.error, record.status, len(record.content_seconds)) == (error, status, contents)
    assert record.error_message
    assert (record.first_content_seconds is None) == (contents == 0)
    assert record.index == 3 and record.ended_seconds is not None


def test_a_request_that_hangs_is_a_timeout(truth_server: Start) -> None:
    record, _, _ = _ask(truth_server(), timeout_seconds=0.2, fail="hang")
    assert (
        record.error == "timeout"
        and record.ended_seconds is not None
        and 0.2 <= record.ended_seconds < 1.0
    )
    assert record.first_content_seconds is None


def test_a_finish_reason_without_done_is_cut_off_only_when_both_miss(truth_server: Start) -> None:
    assert _ask(truth_server(), done=False)[0].error == "cut_off"


def test_the_probe_finds_what_there_is(truth_server: Start) -> None:
    facts = probe_endpoint(Target(url=truth_server()))
    assert facts.model == "true-model" and facts.notes == []
    assert facts.usage and facts.continuous_usage and facts.ignore_eos
    assert (facts.word_tokens, facts.fixed_tokens) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "lost", "note"),
    [
        ({"refuse": ["continuous_usage_stats"]}, {"continuous_usage"}, "counts as one token"),
        ({"refuse": ["ignore_eos"]}, {"ignore_eos"}, "ignore_eos is not supported"),
        (
            {"refuse": ["stream_options"]},
            {"usage", "continuous_usage"},
            "prompts have no token counts",
        ),
        ({"usage": False}, {"usage", "continuous_usage"}, "streams have no token counts"),
    ],
)
def test_the_probe_leaves_out_what_is_refused(
    truth_server: Start, settings: dict[str, Any], lost: set[str], note: str | None
) -> None:
    url = truth_server(**settings)
    facts = probe_endpoint(Target(url=url))
    assert all(not getattr(facts, name) for name in lost)
    assert note is None or any(note in line for line in facts.notes)
    with connect(url) as pool:
        wire = request_bytes(pool, Target(url=url), facts, "words", 4)
        record = stream(
            pool,
            wire,
            RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0),
            origin=clock(),
            timeout_seconds=5,
        )
    assert record.error is None, "what the probe allows must be accepted"
    assert (record.output_tokens is None) == ("usage" in lost)


def test_a_failed_probe_gives_the_reason(
    truth_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TargetUnusable, match="cannot be reached"):
        probe_endpoint(Target(url="http://127.0.0.1:9"))
    with pytest.raises(TargetUnusable, match="api_key_env"):
        probe_endpoint(Target(url=truth_server(key="secret")))
    with pytest.raises(TargetUnusable, match="'NO_SUCH_KEY'.*not set"):
        probe_endpoint(Target(url=truth_server(), api_key_env="NO_SUCH_KEY"))
    monkeypatch.setenv("A_KEY", "secret")
    assert (
        probe_endpoint(Target(url=truth_server(key="secret"), api_key_env="A_KEY")).model
        == "true-model"
    )
