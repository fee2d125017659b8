"""Streams as other servers write them, played as bytes on a socket.

What OpenAI's own client reads without an error is no failure, but for answers that were cut off,
which that client does not notice. Each row is read by the real client too.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any, NamedTuple

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover.loadtests.load_generator.http_connection import ResponseTooLarge, clock
from crossover.loadtests.load_generator.openai_endpoint import pool_for, request_bytes
from crossover.loadtests.load_generator.sse_timestamps import MAX_EVENT_BYTES, Answer, stream
from crossover.loadtests.load_generator.target import Target, TargetFacts
from crossover.loadtests.records.request_record import RequestRecord
from tests.loadtests.load_generator.scripted_endpoint import answered, scripted, sse

FACTS = TargetFacts("m", True, True, True)
A = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}'
B = b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
DONE = b"data: [DONE]"


def record_of(answer: bytes, timeout_seconds: float = 5.0) -> RequestRecord:
    """What the load generator says of an answer."""
    with scripted(lambda _: answer) as url:
        target = Target(url=url, api="chat")
        with pool_for(target) as pool:
            wire = request_bytes(pool, target, FACTS, "x", 8)
            request = RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0)
            return stream(pool, wire, request, origin=clock(), timeout_seconds=timeout_seconds)


CLIENT = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0, timeout=5.0)


def openai_reads(answer: bytes) -> bool:
    """Whether OpenAI's client reads an answer without an error."""
    messages: Any = [{"role": "user", "content": "x"}]
    with scripted(lambda _: answer) as url:
        client = CLIENT.with_options(base_url=f"{url}/v1")
        try:
            list(client.chat.completions.create(model="m", messages=messages, stream=True))
        except (openai.OpenAIError, ValueError):
            return False
        return True


def delta(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode()


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode()


CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THINKING = [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]


class Good(NamedTuple):
    """Events between A and the end, and how many of them are content."""

    name: str
    events: list[bytes]
    contents: int = 0
    is_openais: bool = True  # its client reads it too


GOOD = [
    Good("empty tool calls", [delta(content="a", tool_calls=[])], 1),
    Good("null tool calls", [delta(content="a", tool_calls=None)], 1),
    Good("a tool call", [delta(tool_calls=[CALL])], 1),
    Good("a part of its arguments", [delta(tool_calls=[{"function": {"arguments": "{"}}])], 1),
    Good("a tool call without anything", [delta(tool_calls=[{"index": 0, "function": {}}])]),
    Good("a function call of old", [delta(function_call={"name": "f", "arguments": ""})], 1),
    Good("a refusal", [delta(content=None, refusal="no")], 1),
    Good("sound", [delta(audio={"id": "x", "data": "UklGRg=="})], 1),
    Good("thinking in parts", [delta(content=THINKING)], 1),
    Good("parts without text", [delta(content=[{"type": "text", "text": ""}])]),
    Good("no parts", [delta(content=[])]),
    Good("reasoning", [delta(reasoning_content="a"), delta(reasoning="a")], 2),
    Good("details of reasoning", [delta(reasoning_details=[{"text": "a", "index": 0}])], 1),
    Good("a delta that is null", [chunk(choices=[{"index": 0, "delta": None}])]),
    Good("a choice that is null", [chunk(choices=[None])]),
    Good("choices that are null", [chunk(choices=None)]),
    Good("no choices", [chunk(choices=[]), chunk(id="x")]),
    Good("data that is empty", [b"data:", b"data: ", b"data"], is_openais=False),
    Good("data that is null", [b"data: null"]),
    Good("data that is no object", [b"data: []", b"data: 1", b'data: "a"']),
    Good("an empty error", [chunk(error="", choices=[{"delta": {"content": "a"}}])], 1),
    Good("an error of nothing", [chunk(error={}, choices=[{"delta": {"content": "a"}}])], 1),
    Good("no error", [chunk(error=None), chunk(error=False), chunk(error=[])]),
    Good("NaN beside it", [b'data: {"choices":[{"delta":{"content":"a"},"logprobs":NaN}]}'], 1),
    Good("half a character", [b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}'], 1),
    Good("a finish reason of none", [chunk(choices=[{"delta": {}, "finish_reason": ""}])]),
    Good("comments", [b": ping", b":"], is_openais=True),
    Good("a name and an id", [b"event: message\nid: 7\nretry: 100\n" + A], 1),
    Good("data in two lines", [b'data: {"choices":[{"delta":\ndata: {"content":"a"}}]}'], 1),
    Good("no space after the colon", [A.replace(b": {", b":{", 1)], 1),
    Good("a field of nobody's", [b"x-field: 1\n" + A, b"nothing"], 1),
    Good("a ping", [chunk(type="ping"), chunk(message="you are second in the queue")]),
    Good("messages in place of deltas", [chunk(choices=[{"message": {"content": "a"}}])], 1),
    Good("a text beside an empty delta", [chunk(choices=[{"text": "a", "delta": {}}])], 1),
    Good("reasoning by LiteLLM", [delta(thinking_blocks=[{"thinking": "a"}])], 1),
    Good("reasoning by Copilot", [delta(reasoning_text="a")], 1),
    Good("a picture", [delta(images=[{"image_url": {"url": "data:x"}}])], 1),
    Good(
        "parts of reasoning that hold none",
        [
            delta(reasoning_details=[{"text": "", "format": "unknown"}]),
            delta(reasoning_details=[{"format": "anthropic-claude-v1", "signature": "c2ln"}]),
        ],
    ),
    Good(
        "words and codes that are no failures",
        [
            chunk(code=0, message="success"),
            chunk(code="ok", message="fine"),
            chunk(status=200, message="ok"),
            chunk(status="queued", message="you are second in the queue"),
            chunk(success=True, message="it works"),
            chunk(base_resp={"status_code": 0, "status_msg": "success"}),
            chunk(detail=None, errors=[]),
            chunk(x_groq={"id": "x"}, choices=[]),
        ],
    ),
    Good("filters", [chunk(choices=[], prompt_filter_results=[{"prompt_index": 0}])]),
]


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=["lf", "crlf", "cr"])
def test_what_openais_client_reads_is_no_failure(case: Good, end: bytes) -> None:
    events = [event.replace(b"\n", end[: len(end) // 2]) for event in case.events]
    answer = sse(A, *events, B, STOP, DONE, end=end)
    record = record_of(answer)
    assert (record.error, record.error_message) == (None, None)
    assert len(record.content_seconds) == 2 + case.contents
    if end == b"\n\n":
        assert openai_reads(answer) is case.is_openais


COUNTS = {"prompt_tokens": 9, "completion_tokens": 8}


@pytest.mark.parametrize(
    "usage",
    [
        {"choices": [], "usage": COUNTS},
        {"choices": None, "usage": COUNTS},
        {"usage": COUNTS},
        {"choices": [], "usage": {"prompt_tokens": 9.0, "completion_tokens": "8"}},
        {"choices": [], "usage": {"input_tokens": 9, "output_tokens": 8}},
        {"choices": [], "x_groq": {"usage": COUNTS}},
        {"choices": [{"finish_reason": "stop", "usage": COUNTS}]},
        {
            "choices": [{"delta": {}, "finish_reason": "stop"}],
            "timings": {"prompt_n": 4, "cache_n": 5, "predicted_n": 8},
        },
        {
            "choices": [{"delta": {"content": ""}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 8, "prompt_tokens_details": None},
        },
    ],
    ids=str,
)
def test_usage_is_read_in_all_spellings(usage: dict[str, Any]) -> None:
    record = record_of(sse(A, chunk(usage=None, choices=[]), B, STOP, chunk(**usage), DONE))
    assert (record.error, record.prompt_tokens, record.output_tokens) == (None, 9, 8)
    assert len(record.content_seconds) == 2


NONE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize("last", [NONE, {}, None, {"prompt_tokens": None}, {"prompt_tokens": -1}])
def test_empty_usage_counts_do_not_replace_real_ones(last: dict[str, Any] | None) -> None:
    role = chunk(choices=[{"delta": {"role": "assistant", "content": ""}}], usage=NONE)
    counted = chunk(choices=[{"delta": {"content": "b"}}], usage=COUNTS)
    record = record_of(sse(role, A, counted, STOP, chunk(choices=[], usage=last), DONE))
    assert (record.error, record.prompt_tokens, record.output_tokens) == (None, 9, 8)
    none = record_of(sse(A, STOP, chunk(choices=[], usage=NONE), DONE))
    assert (none.error, none.prompt_tokens, none.output_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 5}}, 5),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {}}, None),
        ({"prompt_cache_hit_tokens": 5}, 5),
        ({"cache_read_input_tokens": 5.0}, 5),
    ],
)
def test_cached_tokens_are_read(usage: dict[str, Any], cached: int | None) -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 2} | usage
    record = record_of(sse(A, B, STOP, chunk(choices=[], usage=counts), DONE))
    assert (record.error, record.cached_tokens, record.prompt_tokens) == (None, cached, 9)


BODY = b"".join(event + b"\n\n" for event in (A, B, STOP))
HEAD_10 = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
HEAD_11 = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def encoded(encoding: str, body: bytes) -> bytes:
    """An answer that says that its body is compressed."""
    return (
        HEAD_11.replace(b"Connection", f"Content-Encoding: {encoding}\r\nConnection".encode())
        + body
    )


def gzip_of_pieces(*pieces: bytes) -> bytes:
    """A gzip body that was flushed after each piece, as a proxy does with events."""
    compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    flushed = [compressor.compress(one) + compressor.flush(zlib.Z_SYNC_FLUSH) for one in pieces]
    return b"".join(flushed) + compressor.flush()


@pytest.mark.parametrize(
    "answer",
    [
        HEAD_10 + BODY,
        HEAD_11 + BODY + DONE + b"\n\n",
        HEAD_11.replace(b"\r\n", b"\n") + BODY,
        b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" + sse(A, B, STOP, DONE),
        b"HTTP/1.1 100 Continue\r\n\r\n" + sse(A, B, STOP, DONE),
        sse(A, B, STOP, DONE).replace(b"200 OK", b"201 Created"),
        sse(b"\xef\xbb\xbf" + A, B, STOP),
        sse(A + b"\n\n" + B, STOP + b"\n\n" + DONE),
        answered(BODY[:-2], kind="text/event-stream"),
        answered(A + b"\n\n" + B + b"\n\n" + DONE, kind="text/event-stream"),
        encoded("gzip", gzip.compress(BODY, mtime=0)),
        encoded("GZIP", gzip_of_pieces(A + b"\n\n", B + b"\n\n", STOP + b"\n\n")),
        encoded("deflate", zlib.compress(BODY)),
        encoded("deflate", zlib.compress(BODY, wbits=-zlib.MAX_WBITS)),
    ],
    ids=range(14),
)
def test_an_answer_may_be_framed_in_any_way_that_http_has(answer: bytes) -> None:
    record = record_of(answer)
    assert (record.error, record.error_message) == (None, None)
    assert len(record.content_seconds) == 2
    assert openai_reads(answer)


def test_a_gzip_body_may_have_several_members_and_padding() -> None:
    """OpenAI's client reads only the first member."""
    members = gzip.compress(A + b"\n\n") + gzip.compress(B + b"\n\n" + STOP + b"\n\n")
    record = record_of(encoded("gzip", members + bytes(100)))
    assert record.error is None and len(record.content_seconds) == 2


def test_a_compressed_piece_without_text_parts_no_line_end() -> None:
    compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    lines = [b'data: {"choices":[{"index":0,"delta":\r', b'\ndata: {"content":"a"}}]}\r\n\r\n']
    first, second = (
        compressor.compress(line) + compressor.flush(zlib.Z_SYNC_FLUSH) for line in lines
    )
    answer = Answer()
    answer.head(200, [(b"content-encoding", b"gzip")])
    for piece in (first, second[:1], second[1:]):
        answer.body(piece, 1.0)
    assert answer.error is None and answer.contents == [1.0]


def test_a_small_body_that_inflates_to_gigabytes_is_not_kept() -> None:
    compressor = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    zeros = bytes(1 << 22)
    body = b"".join(compressor.compress(zeros) for _ in range(24)) + compressor.flush()
    answer = Answer()
    answer.head(200, [(b"content-encoding", b"gzip")])
    with pytest.raises(ResponseTooLarge):
        answer.body(body, 0.0)
    assert len(answer.pending) <= 2 * MAX_EVENT_BYTES


class Failed(NamedTuple):
    """An answer that failed, and what is said of it."""

    name: str
    answer: bytes
    error: str
    words: str
    is_openais: bool = False  # its client reads it without an error


def finish(reason: Any) -> bytes:
    return chunk(choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": reason}])


FIRE = "the disk is on fire"
FAILED = [
    Failed("empty reasons", sse(finish(""), finish(""), finish("")), "cut_off", "without", True),
    Failed("no reason", sse(A, B), "cut_off", "without a finish reason", True),
    Failed("a reason of others", sse(A, finish("paused")), "cut_off", "without", True),
    Failed("aborted", sse(A, finish("abort"), DONE), "cut_off", "finish_reason abort", True),
    Failed("an error's reason", sse(A, finish("error"), DONE), "cut_off", "reason error", True),
    Failed("closed in the middle", HEAD_11 + A + b"\n\n", "cut_off", "without", True),
    Failed("half an event", HEAD_11 + A + b'\n\ndata: {"cho', "cut_off", "without", True),
    Failed("an error", sse(chunk(error={"message": FIRE})), "stream_error", FIRE),
    Failed("a text", sse(A, chunk(error=FIRE, error_type="generation")), "stream_error", FIRE),
    Failed("beside choices", sse(chunk(error={"message": FIRE}, choices=[])), "stream_error", FIRE),
    Failed("then done", sse(A, chunk(error={"message": FIRE}), DONE), "stream_error", FIRE),
    Failed("of a code", sse(chunk(error={"code": 5, "detail": FIRE})), "stream_error", FIRE),
    Failed("in an error", sse(chunk(error={"error": {"message": FIRE}})), "stream_error", FIRE),
    Failed("a list", sse(chunk(error=[{"msg": FIRE}])), "stream_error", FIRE),
    Failed("named", sse(A, b"event: error\ndata: " + FIRE.encode()), "stream_error", FIRE),
    Failed(
        "named, JSON",
        sse(b'event: error\ndata: {"message":"' + FIRE.encode() + b'"}'),
        "stream_error",
        FIRE,
        True,
    ),
    Failed(
        "a field",
        sse(A, b'error: {"code":500,"message":"' + FIRE.encode() + b'"}'),
        "stream_error",
        FIRE,
        True,
    ),
    Failed(
        "vLLM's of old",
        sse(chunk(object="error", message=FIRE, code=400), DONE),
        "stream_error",
        FIRE,
        True,
    ),
    Failed("a code beside words", sse(chunk(code=500, details=FIRE)), "stream_error", FIRE, True),
    Failed(
        "in a choice",
        sse(
            A,
            chunk(
                choices=[
                    {
                        "delta": {"content": ""},
                        "finish_reason": "error",
                        "error": {"code": 502, "message": FIRE},
                    }
                ]
            ),
            DONE,
        ),
        "stream_error",
        FIRE,
        True,
    ),
    Failed(
        "no event",
        sse(A, b'{"error":{"message":"' + FIRE.encode() + b'"}}'),
        "stream_error",
        FIRE,
        True,
    ),
    Failed("no JSON", sse(A, b"data: " + FIRE.encode(), STOP, DONE), "stream_error", FIRE),
    Failed(
        "no stream",
        answered({"error": {"message": "quota is used up"}}),
        "stream_error",
        "quota is used up",
        True,
    ),
    Failed(
        "no stream, in lines",
        answered(json.dumps({"error": {"message": "quota is used up"}}, indent=2).encode()),
        "stream_error",
        "quota is used up",
        True,
    ),
    Failed(
        "one piece",
        answered({"choices": [{"message": {"content": "a"}}]}),
        "stream_error",
        "in one piece",
        True,
    ),
    Failed(
        "a page",
        answered(b"<html>quota is used up</html>", kind="text/html"),
        "cut_off",
        "quota is used up",
        True,
    ),
    Failed("refused", answered({"error": {"message": FIRE}}, 503), "http_503", FIRE),
    Failed("too many", answered({"detail": FIRE}, 429), "refused", FIRE),
    Failed("nothing", sse(STOP, DONE), "empty", "no content", True),
    *(
        Failed(
            f"done after {event}", sse(A, chunk(**event), DONE), "stream_error", FIRE, is_openais
        )
        for event, is_openais in [
            ({"detail": FIRE}, True),
            ({"detail": [{"loc": ["body"], "msg": FIRE}]}, True),
            ({"message": FIRE, "code": "500"}, True),
            ({"message": FIRE, "code": "internal_error"}, True),
            ({"message": FIRE, "code": 13}, True),
            ({"message": FIRE, "type": "server_error"}, True),
            ({"message": FIRE, "status": "error"}, True),
            ({"msg": FIRE, "code": 500}, True),
            ({"error_message": FIRE}, True),
            ({"error_code": 500, "error_msg": FIRE}, True),
            ({"errors": [{"message": FIRE}], "success": False}, True),
            ({"base_resp": {"status_code": 1008, "status_msg": FIRE}, "choices": None}, True),
            ({"title": FIRE, "status": 503}, True),
            ({"x_groq": {"id": "x", "error": FIRE}, "choices": [{"delta": {}}]}, True),
            ({"choices": [{"delta": {"content": "a"}, "error": {"message": FIRE}}]}, True),
            ({"error": True, "message": FIRE}, False),
            ({"error": 500, "message": FIRE}, False),
        ]
    ),
    *(
        Failed(f"reason {reason}", sse(A, finish(reason), DONE), "cut_off", words, True)
        for reason, words in [
            ("ERROR", "reason ERROR"),
            ("failed", "reason failed"),
            ("canceled", "reason canceled"),
            ("timeout", "reason timeout"),
            ("network_error", "reason network_error"),
            ({"type": "abort", "message": FIRE}, FIRE),
        ]
    ),
    Failed("Error", sse(A, b"event: Error\ndata: " + FIRE.encode()), "stream_error", FIRE),
    Failed(
        "a list of errors",
        sse(A, b'data: [{"error":{"code":429,"message":"' + FIRE.encode() + b'"}}]', DONE),
        "stream_error",
        FIRE,
        True,
    ),
    Failed("a detail", answered({"detail": FIRE}), "stream_error", FIRE, True),
    Failed("a list", answered([{"error": {"message": FIRE}}]), "stream_error", FIRE, True),
    Failed(
        "bytes that are no UTF-8",
        sse(A, b'data: {"error":{"message":"\xff' + FIRE.encode() + b'"}}', DONE),
        "stream_error",
        FIRE,
    ),
    Failed(
        "a text that is no UTF-8",
        sse(A, b'data: {"choices":[{"delta":{"content":"\xe2\x82"}}]}', STOP, DONE),
        "stream_error",
        "not JSON",
    ),
    Failed(
        "an event that was refused",
        answered(b'data: {"error":{"message":"' + FIRE.encode() + b'"}}\n\n', 503),
        "http_503",
        FIRE,
    ),
    Failed(
        "compressed",
        encoded("br", b"\x0b\x02\x80" + BODY),
        "stream_error",
        "compressed (br)",
    ),
    Failed("compressed, no gzip", encoded("gzip", BODY), "stream_error", "compressed and damaged"),
    Failed(
        "compressed, cut off",
        encoded("gzip", gzip.compress(BODY, mtime=0)[:30]),
        "cut_off",
        "without",
        True,
    ),
    Failed(
        "moved",
        b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:9/v2\r\nContent-Length: 0\r\n\r\n",
        "http_307",
        "redirected to http://127.0.0.1:9/v2",
    ),
]


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case.name)
def test_what_fails_fails_with_the_servers_words(case: Failed) -> None:
    record = record_of(case.answer)
    assert (record.error, case.words in (record.error_message or "")) == (case.error, True), record
    assert openai_reads(case.answer) is case.is_openais


@pytest.mark.parametrize(
    "reason", ["stop", "length", "tool_calls", "content_filter", "function_call", "STOP"]
)
def test_five_finish_reasons_end_an_answer(reason: str) -> None:
    later = chunk(choices=[{"index": 0, "delta": {}, "finish_reason": None}])
    record = record_of(sse(A, finish(reason), later))
    assert (record.error, record.finish_reason) == (None, reason)


def test_a_field_that_nobody_reads_fails_nothing() -> None:
    """One that the fast reader skips, and that Python's does not take."""
    stop = b'data: {"id":%s,"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
    for field in (b'"\xff"', b"9" * 5000):
        record = record_of(sse(A, stop % field, DONE))
        assert (record.error, record.finish_reason) == (None, "stop")


def test_what_follows_the_end_is_not_read() -> None:
    record = record_of(sse(A, STOP, DONE, B, chunk(error={"message": FIRE})))
    assert record.error is None and len(record.content_seconds) == 1


def test_a_connection_that_stays_open_after_the_end_costs_nothing() -> None:
    """Neither a body that ends with its connection, nor chunks without the last of them."""
    whole = sse(A, STOP, DONE)
    record = record_of(whole.removesuffix(b"0\r\n\r\n"), timeout_seconds=0.5)
    assert record.error is None and len(record.content_seconds) == 1


EVENTS = st.sampled_from(
    [event for case in GOOD for event in case.events]
    + [b'data: {"choices":[{"delta":{"content":"\xff"}}]}', b'data: {"id":"\xff","choices":[]}']
    + [b'data: {"id":"\xff","choices":[{"delta":{},"finish_reason":"stop"}]}']
    + [A, STOP, DONE, b"data: {", b"\xff\xfe", b"event: error", b"data: [[[", b"error: x", b"\r"]
    + [b"data: " + b"[" * 5000, b'data: {"choices":[{"delta":{"content":{"a":[1,{}]}}}]}']
)


@given(
    parts=st.lists(EVENTS | st.binary(max_size=40), max_size=8),
    ends=st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n", b"\r", b""]), min_size=8),
    cut=st.integers(0, 200),
)
@settings(max_examples=400, deadline=None)
def test_no_bytes_break_the_reader(parts: list[bytes], ends: list[bytes], cut: int) -> None:
    data = b"".join(part + end for part, end in zip(parts, ends, strict=False))
    answers = []
    for pieces in ([data], [data[:cut], data[cut:]], [data[i : i + 1] for i in range(len(data))]):
        answer = Answer()
        answer.head(200, [])
        for piece in filter(None, pieces):
            answer.body(piece, 1.0)
        answer.ended()
        (answer.error_message or "").encode()
        answers.append((len(answer.contents), answer.error, answer.finish_reason, answer.is_done))
    assert answers[0] == answers[1] == answers[2]
