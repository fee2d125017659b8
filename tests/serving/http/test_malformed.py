"""Malformed requests: each is a clear 4xx that names its key, costs the others nothing, and leaves
nothing behind.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from crossover.serving.http.body_types import COMPLETION, decode
from tests.serving.fakes import Answer, FakeSupervisor, app_on, ask, scraped, served
from tests.serving.http.test_app_streams import connected, read_all

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURN = {"role": "user", "content": "hi"}
DEEP = b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": ' + b"[" * 99_999
LARGE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x" * 65_537}}}
CALL = {"function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL] * 18_000}
MANY = b'{"n": 2, "prompt": [' + b"[1]," * 349_000 + b"[1]]}"
WIDE = {"type": "function", "function": {"name": "f", "parameters": {"enum": [[]] * 250_000}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [TURN], **fields}


def text(**fields: Any) -> tuple[str, Any]:
    return TEXT, {"prompt": "x", **fields}


# (path and body, status, `param` or `code` of the error)
REQUESTS: list[tuple[tuple[str, Any], int, str]] = [
    # bodies and JSON
    ((TEXT, b""), 400, "invalid_json"),
    ((TEXT, b"{"), 400, "invalid_json"),
    ((TEXT, b'{"prompt": "\xff"}'), 400, "invalid_json"),
    ((TEXT, b'{"prompt": "\\ud800"}'), 400, "invalid_json"),
    ((TEXT, b'{"prompt": "x", "temperature": NaN}'), 400, "invalid_json"),
    ((TEXT, b'{"prompt": "x", "temperature": 1e999}'), 400, "temperature"),
    ((TEXT, b"[]"), 400, "the body"),
    ((TEXT, b"[" * 500_000), 400, "the body"),
    ((TEXT, DEEP), 400, "response_format"),
    ((TEXT, b'{"x": ' + b"[" * 99_999), 400, "x"),
    ((TEXT, b'{"prompt": "' + b"x" * (4 << 20) + b'"}'), 413, "body_too_large"),
    # keys and values
    (text(temprature=1), 400, "temprature"),
    ((TEXT, {}), 400, "prompt"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages=[TURN] * 20_000), 400, "messages"),
    (chat(messages=[CALLS, TURN]), 400, "messages"),
    (chat(tools=[WIDE], tool_choice="required"), 400, "tools"),
    (chat(messages=[{**TURN, "images": ["x"]}]), 400, "messages[0].images"),
    (chat(messages=[{**TURN, "prefix": True}]), 400, "messages[0].prefix"),
    (chat(messages=[{"role": "critic", "content": "x"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": [IMAGE]}]), 400, "messages[0].content[0].type"),
    (text(temperature=-0.1), 400, "temperature"),
    (text(top_p="0.5"), 400, "top_p"),
    (text(n=0), 400, "n"),
    (text(n=10**40), 400, "n"),
    (text(prompt=["x"] * 65, n=2), 400, "n"),
    (text(max_tokens=0), 400, "max_tokens"),
    (text(max_tokens=5, max_completion_tokens=6), 400, "max_completion_tokens"),
    (text(max_tokens=-2), 400, "max_tokens"),
    (text(min_tokens=99), 400, "min_tokens"),
    (text(logprobs=129), 400, "logprobs"),
    (text(stop=["x"] * 257), 400, "stop"),
    (text(stop=""), 400, "stop"),
    (text(echo=True), 400, "echo"),
    (chat(top_logprobs=5), 400, "top_logprobs"),
    (text(stop_token_ids=[300]), 400, "stop_token_ids"),
    (text(logit_bias={"one": 1}), 400, "logit_bias"),
    (text(logit_bias={"300": 1}), 400, "logit_bias"),
    (text(logit_bias={"-1": 1}), 400, "logit_bias"),
    (text(logit_bias={"299": 101}), 400, "logit_bias"),
    (text(deadline_seconds=0), 400, "deadline_seconds"),
    (text(stream_options={"include_usage": True}), 400, "stream_options"),
    (text(model="other"), 404, "model"),
    # prompts
    (text(prompt=[]), 400, "prompt"),
    (text(prompt=""), 400, "prompt"),
    (text(prompt=["a", ""]), 400, "prompt"),
    (text(prompt=[[1], []]), 400, "prompt"),
    (text(prompt=["a", 1]), 400, "prompt"),
    (text(prompt=[300]), 400, "prompt"),
    (text(prompt="x" * 1000), 400, "prompt"),
    (text(prompt="x" * 256), 400, "prompt"),
    (chat(messages=[{"role": "user", "content": "x" * 999}]), 400, "messages"),
    (text(prompt=["a"] * 129), 400, "prompt"),
    (("/detokenize", {"tokens": [1] * 1000}), 400, "tokens"),
    (("/detokenize", {"tokens": [300]}), 400, "tokens"),
    (("/tokenize", {}), 400, "prompt"),
    (("/tokenize", {"prompt": "a", "messages": [TURN]}), 400, "messages"),
    # schemas, grammars, tools, templates
    (text(grammar="x" * 65_537), 400, "grammar"),
    (text(response_format=LARGE), 400, "response_format"),
    (text(grammar="x", response_format={"type": "json_object"}), 400, "grammar"),
    (text(response_format={"type": "xml"}), 400, "response_format.type"),
    (
        text(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        *(400, "response_format.json_schema.schema"),
    ),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs.messages"),
    (chat(reasoning_effort=1), 400, "reasoning_effort"),
    (text(response_format={"type": "json_schema"}), 400, "response_format.json_schema"),
]
HEADERS: list[tuple[dict[str, str], int, str]] = [
    ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    ({"Content-Type": ""}, 415, "unsupported_media_type"),
    ({"Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor)) as port:
        ask(port, "GET", "/metrics")
        yield port


def is_refused(port: int, answer: Answer, status: int, names: str) -> None:
    """What every refusal is, and that the server is as it was."""
    error = answer.error
    assert answer.status == status, error
    assert names in (error["param"], error["code"]) or error["message"].startswith(names), error
    assert len(error["message"]) < 1000
    found = scraped(ask(port, "GET", "/metrics").body)
    assert found["http_requests_open",] == 1  # the scrape itself
    assert found["num_requests_running",] == 1


@pytest.mark.parametrize(("request_", "status", "names"), REQUESTS, ids=lambda v: str(v)[:60])
def test_a_malformed_body(port: int, request_: tuple[str, Any], status: int, names: str) -> None:
    path, body = request_
    is_refused(port, ask(port, "POST", path, body), status, names)


@pytest.mark.parametrize(("headers", "status", "names"), HEADERS)
def test_a_malformed_head(port: int, headers: dict[str, str], status: int, names: str) -> None:
    is_refused(port, ask(port, "POST", TEXT, {"prompt": "x"}, headers), status, names)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / SMTP/9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost : x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_400(port: int, data: bytes) -> None:
    with connected(port, data) as client:
        assert read_all(client).startswith(b"HTTP/1.1 400 ")
    assert ask(port, "GET", "/health").status == 200


def test_a_body_of_many_small_values_is_read_without_a_walk_through_all_there_is(
    port: int,
) -> None:
    """A MiB of the JSON that takes longest to decode: the garbage collector rests meanwhile."""
    runs: list[str] = []
    gc.callbacks.append(lambda phase, _: runs.append(phase))
    try:
        decode(COMPLETION, MANY)
        assert not runs
    finally:
        gc.callbacks.pop()
    is_refused(port, ask(port, "POST", TEXT, MANY), 400, "n")
