"""Bodies: how large one may be, how much work it may make, and how many there may be at once."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from serving.http.limits import Limits
from serving.http.wire.decoding import check_values, check_work
from serving.http.wire.errors import ApiError
from tests.serving.cli.test_serve import server
from tests.serving.fakes import FakeSupervisor, app_on, ask, chat, complete, served, wait_until
from tests.serving.http.test_app_streams import connected, post, read_until

WORK = Limits().body_work
ORDINARY: dict[str, Any] = {
    "a batch of ids": {"prompt": [[1000] * 2048] * 128},
    "a long chat": {"messages": [{"role": "user", "content": "a, {b}"}] * 4096},
    "a long chat of parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "[]"}]}] * 4096
    },
    "a text of JSON": {"prompt": json.dumps([[{"a": "b\\"}] * 9] * 30_000)},
    "a text that looks like its end": {"prompt": '\\", [{' * 100_000},
}
HOSTILE = {
    "lists": b'{"prompt":[' + b"[]," * 100_000 + b"[]]}",
    "objects": b'{"messages":[' + b"{}," * 100_000 + b"{}]}",
    "strings": b'{"stop":[' + b'"",' * 200_000 + b'""]}',
    "strings that end in a backslash": b'{"stop":[' + b'"\\\\",' * 200_000 + b'""]}',
    "keys": b'{"metadata":{' + b",".join(b'"%d":"1"' % i for i in range(100_000)) + b"}}",
    "numbers": b'{"prompt":[' + b"1," * 400_000 + b"1]}",
    "one key again and again": b'{"prompt":"x",' + b'"n":1,' * 100_000 + b'"n":1}',
    "lists in a schema": b'{"prompt":"x","response_format":{"type":"json_schema","json_schema":'
    b'{"name":"x","schema":{"enum":[' + b"[]," * 100_000 + b"[]]}}}}",
}


@pytest.mark.parametrize("what", ORDINARY)
def test_what_people_send_is_little_work(what: str) -> None:
    check_work(json.dumps(ORDINARY[what]).encode(), WORK)


@pytest.mark.parametrize("what", HOSTILE)
def test_many_small_values_are_refused_before_they_are_decoded(port: int, what: str) -> None:
    answer = ask(port, "POST", "/v1/completions", HOSTILE[what])
    assert (answer.status, answer.error["code"]) == (400, "too_many_values")
    with pytest.raises(ApiError):
        check_work(HOSTILE[what], WORK)


NUMBERS = [1.2345678901234567e-300] * 100_000
LISTS = '{"a":[' + "[]," * 400_000 + "[]]}"
TOLD: dict[str, dict[str, Any]] = {
    "numbers for the template": {"chat_template_kwargs": {"x": NUMBERS}},
    "numbers in a tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": NUMBERS}}}]
    },
    "lists in a call": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": LISTS}}
                ],
            }
        ]
    },
}


@pytest.mark.parametrize("what", TOLD)
def test_many_values_for_a_template_are_refused_before_they_are_written_out(
    port: int, what: str
) -> None:
    """150,000 numbers took 0.25 s of the interpreter in one call: their length was taken so."""
    answer = chat(port, **{"tool_choice": "none"} | TOLD[what])
    assert (answer.status, answer.error["code"]) == (400, "too_many_values"), answer.body


def test_the_tools_and_calls_of_a_long_chat_are_little_work() -> None:
    value = {"type": "string", "description": "What is to be done, in a few words."}
    tool = {"type": "object", "properties": {f"key{n}": value for n in range(10)}}
    call = {
        "path": "a.py",
        "text": 'def f(x: list[int]) -> dict: return {"a": [x, "\\\\"]}\n' * 200,
    }
    texts = [json.dumps([tool] * 200), *[json.dumps(call)] * 100]
    check_values([text.encode() for text in texts], Limits().json_work)


def test_a_body_has_room_for_the_contexts_of_all_slots(supervisor: FakeSupervisor) -> None:
    assert Limits().body_for(2048 * 16) == (64 << 10) + (1 << 20)
    assert Limits().body_for(131_072 * 16) == 4 << 20
    with served(app_on(supervisor, limits=Limits())) as port:  # 4 slots of 256 tokens
        answer = complete(port, prompt="x" * (97 << 10))
        assert answer.status == 413 and "98304 are allowed" in answer.error["message"]
        assert complete(port, prompt=["x" * 200] * 4).status == 200


def test_all_bodies_together_have_a_bound_and_small_ones_always_have_room(
    supervisor: FakeSupervisor,
) -> None:
    limits = Limits(body_bytes=1 << 20, bodies_bytes=1 << 20)
    app = app_on(supervisor, limits=limits)
    piece = b'"' + b"x" * (300 << 10)
    with served(app) as port, contextlib.ExitStack() as crowd:

        def withheld() -> socket.socket:
            """A body of which the last bytes do not come."""
            head = post(length=len(piece) + 1000)
            return crowd.enter_context(connected(port, head + piece))

        for number in range(1, 5):
            withheld()
            wait_until(lambda number=number: app.bodies.bytes > number * (230 << 10))  # type: ignore[misc]
        assert b"503" in read_until(withheld(), b"\r\n\r\n")
        answer = complete(port, prompt="x" * (200 << 10))
        assert (answer.status, answer.error["code"]) == (503, "too_many_bytes")
        assert answer.headers["retry-after"] == "1"
        assert complete(port).status == 200
        crowd.close()
        wait_until(lambda: app.bodies.bytes == 0)
        answer = complete(port, prompt="x" * (200 << 10))
        assert answer.error["code"] == "context_length_exceeded"


def test_more_tokens_than_the_context_has_are_not_made_text_of(port: int) -> None:
    assert ask(port, "POST", "/detokenize", {"tokens": [65] * 256}).json == {"prompt": "A" * 256}
    answer = ask(port, "POST", "/detokenize", {"tokens": [65] * 257})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_limits_of_the_command_line(tmp_path: Path) -> None:
    limits = ("--max-body", "2KiB", "--max-sequences", "3", "--deadline", "0.2")
    with server(tmp_path, *limits, "--option", "step_seconds=0.02") as one:
        port = int(one.wait_ready()["url"].rsplit(":", 1)[1])
        assert complete(port, prompt="x" * 2048).status == 413
        answer = complete(port, n=4)
        assert answer.status == 400 and "3 sequences" in answer.error["message"]
        assert complete(port, n=3, max_tokens=1).status == 200
        assert complete(port, max_tokens=1000, ignore_eos=True).status == 504
