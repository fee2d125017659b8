"""An endpoint may answer with anything: each request still ends in a record, within its timeout,
and the load generator's memory and CPU time stay small.

Each answer is read by a process of its own, which reports what reading it cost.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from crossover.loadtests.load_generator.completion_chunk import (
    MAX_DEPTH,
    is_error,
    shows,
    text_of,
    words_of,
)
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.sse_timestamps import Answer
from crossover.loadtests.load_generator.target import Target, TargetFacts
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.load_generator.scripted_endpoint import answered, scripted, sse

MAX_CPU_SECONDS = 1.0
MAX_MIB = 40  # above the memory of an ordinary answer
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
ZIPPED = b"Content-Encoding: gzip\r\n"
CONTENT = b'data: {"choices":[{"text":"a"}]}\n\n'
MIB = 1 << 20
NESTED = b'{"error":' + b"[" * 900 + b'"x"' + b"]" * 900 + b"}"

# Reads one answer in a process of its own. Prints the record, CPU seconds, and growth in MiB.
READER = """
import json, resource, sys, time
from crossover.loadtests.load_generator.http_connection import clock, connect, post_bytes
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.records.request_record import RequestRecord

def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

unsent = RequestRecord(
    cell="c", level="l", index=0, scheduled_seconds=0.0, requested_output_tokens=64
)
with connect(sys.argv[1]) as pool:
    wire = post_bytes(pool, "/v1/completions", {"prompt": "x"})
    mib, cpu = memory(), time.process_time()
    record = stream(pool, wire, unsent, clock(), timeout_seconds=20.0)
    cost = time.process_time() - cpu, memory() - mib
print(json.dumps([record.error, record.error_message, len(record.content_seconds), *cost]))
"""


class Cost(NamedTuple):
    error: str | None
    message: str | None
    contents: int
    cpu_seconds: float
    mib: float


def read_in_child(answer: bytes) -> Cost:
    """The record of a request with this answer, and what reading it cost."""
    with scripted(lambda _: answer) as url:
        child = subprocess.run(
            [sys.executable, "-c", READER, url], capture_output=True, check=True, timeout=60
        )
    return Cost(*json.loads(child.stdout))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# What makes each answer, since all of them have 250 MB, and words of the record's error.
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "header lines": (lambda: HEAD + b"a:b\r\n" * (32 * MIB // 5), "more than 200 headers"),
    "one long header": (lambda: HEAD + b"X: " + b"a" * (32 * MIB), "bytes of them"),
    "trailers": (
        lambda: CHUNKED + b"\r\n" + chunk(CONTENT) + b"0\r\n" + b"a:b\r\n" * MIB,
        "200 headers",
    ),
    "interim answers": (
        lambda: b"HTTP/1.1 100 Continue\r\n\r\n" * (32 * MIB // 25),
        "bytes of them",
    ),
    "short lines without a blank line": (
        lambda: HEAD + b"\r\n" + b"a\n" * (16 * MIB),
        "an event has more",
    ),
    "an endless line": (
        lambda: HEAD + b"\r\ndata: " + b"a" * (32 * MIB),
        "an event has more",
    ),
    "endless events": (
        lambda: HEAD + b"\r\n" + CONTENT * 400_000,
        "more than 1256 events",
    ),
    "endless events, a chunk each": (
        lambda: CHUNKED + b"\r\n" + chunk(CONTENT) * 400_000,
        "more than 1256 events",
    ),
    "endless empty events": (
        lambda: HEAD + b"\r\n" + b"data:{}\n\n" * (2 * MIB),
        "1256 events",
    ),
    "inflated blank events": (
        lambda: HEAD + ZIPPED + b"\r\n" + gzip.compress(b"\n\n" * (32 * MIB)),
        "1256 events",
    ),
    "inflated empty events": (
        lambda: HEAD + ZIPPED + b"\r\n" + gzip.compress(b"data:{}\n\n" * (8 * MIB)),
        "1256 events",
    ),
    "an inflated line": (
        lambda: HEAD + ZIPPED + b"\r\n" + gzip.compress(bytes(128 * MIB)),
        "an event has more",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_costs_little_whatever_it_holds(name: str) -> None:
    answer, words = HOSTILE[name]
    cost = read_in_child(answer())
    assert cost.error in ("connection", "cut_off", "stream_error") and words in (cost.message or "")
    assert cost.cpu_seconds < MAX_CPU_SECONDS and cost.mib < MAX_MIB, cost


def test_a_long_answer_in_a_compressed_stream_is_read_to_its_end() -> None:
    """The limits leave room: 250 tokens of four characters, each character an event of 1 KiB."""
    event = b'data: {"choices":[{"text":"a"}],"padding":"' + b"p" * 900 + b'"}\n\n'
    body = gzip.compress(event * 1000 + b"data: [DONE]\n\n")
    cost = read_in_child(HEAD + ZIPPED + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert cost.error is None and cost.contents == 1000


@pytest.mark.parametrize("depth", [MAX_DEPTH - 2, 300, 900, 50_000])
def test_values_are_searched_to_a_fixed_depth(depth: int) -> None:
    expected = "x" if depth < MAX_DEPTH else "..."
    for key in (None, "text", "message", "base_resp"):
        value: Any = "x"
        for _ in range(depth):
            value = [value] if key is None else {key: value}
        assert shows(value) == (depth < MAX_DEPTH)
        if key in (None, "text"):
            assert text_of(value) == ("x" if depth < MAX_DEPTH else "")
        if key in (None, "message"):
            assert words_of(value) == expected
        words_of(value)
        assert not is_error({"base_resp": value, "code": 0})


@pytest.fixture
def hostile_load() -> Iterator[LoadPlan]:
    """A level of requests to an endpoint that answers every second one with a nested error."""
    answers = [answered(NESTED, 500), sse(CONTENT.strip(), b"data: [DONE]"), sse(NESTED)]
    count = iter(range(1_000_000))
    with scripted(lambda _: answers[next(count) % 3]) as url:
        yield LoadPlan(
            target=Target(url=url, timeout_seconds=5.0),
            plan=LevelPlan(rate=30.0, window_seconds=1.0, seed=1),
            workload=Workload(prompt_tokens=4, output_tokens=4),
            facts=TargetFacts("m", True, False, True),
            drain_seconds=5.0,
        )


def test_every_request_ends_in_a_record(hostile_load: LoadPlan) -> None:
    from crossover.loadtests.load_generator.dispatcher import Dispatcher
    from crossover.loadtests.load_generator.http_connection import clock
    from crossover.loadtests.records.request_record import RequestRecord

    records: list[RequestRecord] = []
    account = Dispatcher(hostile_load, records.append).run(clock())
    assert account.due == account.recorded == len(records) > 9
    assert {record.error for record in records} == {None, "http_500", "stream_error"}


def test_a_nested_body_of_an_error_is_an_error_of_its_request() -> None:
    answer = Answer()
    answer.head(500, [])
    answer.body(NESTED, 0.0)
    answer.ended()
    assert answer.error == "http_500"
