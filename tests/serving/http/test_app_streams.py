"""Streams and connections on the wire: when the head leaves, what a failure looks like, who goes
away, who is slow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from crossover.serving.http import http_server
from tests.serving.fakes import FakeSupervisor, app_on, ask, served, wait_until


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor(by_hand=True)


@pytest.fixture
def port(supervisor: FakeSupervisor) -> Iterator[int]:
    with served(app_on(supervisor)) as port:
        yield port


@contextmanager
def connected(port: int, *data: bytes, buffer_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as client:
        if buffer_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.settimeout(5)
        client.connect(("127.0.0.1", port))
        for part in data:
            client.sendall(part)
        yield client


def post(path: str = "/v1/completions", *, length: int | None = None, **fields: object) -> bytes:
    body = json.dumps({"prompt": "hi", "max_tokens": 200, "ignore_eos": True, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def read_all(client: socket.socket) -> bytes:
    found = b""
    while data := client.recv(65536):
        found += data
    return found


def read_until(client: socket.socket, mark: bytes, times: int = 1) -> bytes:
    found = b""
    while found.count(mark) < times:
        data = client.recv(65536)
        assert data, f"closed before {mark!r}: {found!r}"
        found += data
    return found


# --- a stream's course


def test_the_head_leaves_with_the_first_delta_and_each_delta_at_once(
    port: int, supervisor: FakeSupervisor
) -> None:
    with connected(port, post(stream=True)) as client:
        wait_until(lambda: bool(supervisor.submitted))
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(5)
        supervisor.push_soon(1, "one")
        assert b'"text":"one"' in read_until(client, b"one")
        supervisor.push_soon(1, "two")
        read_until(client, b"two")
        supervisor.push_soon(1, "", "stop")
        assert b"[DONE]" in read_until(client, b"0\r\n\r\n")


def test_withheld_text_makes_no_event(port: int, supervisor: FakeSupervisor) -> None:
    with connected(port, post(stream=True, stream_options={"include_usage": True})) as client:
        supervisor.push_soon(1, "")
        assert b"200 OK" in read_until(client, b"\r\n\r\n")
        supervisor.push_soon(1, "", "length", tokens=3)
        found = read_until(client, b"[DONE]")
    events = [json.loads(line[6:]) for line in found.split(b"\n") if line.startswith(b"data: {")]
    assert [event["choices"] and event["choices"][0]["text"] for event in events] == ["", []]
    assert events[-1]["usage"]["completion_tokens"] == 4  # tokens whose text was held back count


def test_a_backend_that_changes_before_the_first_delta_is_the_one_in_the_head(
    port: int, supervisor: FakeSupervisor
) -> None:
    with connected(port, post(stream=True)) as client:
        wait_until(lambda: bool(supervisor.submitted))
        supervisor.config = type(supervisor.config)("other", "", "m", device="gpu")
        supervisor.push_soon(1, "x", "stop")
        assert b"x-crossover-backend: other/gpu\r\n" in read_until(client, b"[DONE]")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_failure_before_the_first_byte_is_an_answer_with_a_status(
    port: int, supervisor: FakeSupervisor, streamed: bool
) -> None:
    with connected(port, post(stream=streamed)) as client:
        wait_until(lambda: bool(supervisor.submitted))
        supervisor.push_soon(1, "", "error", 0, error="the engine died")
        head, _, body = read_until(client, b"}}").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after" in head
    assert json.loads(body)["error"]["code"] == "engine_failed"
    assert json.loads(body)["error"]["message"] == "the engine died."


def test_a_failure_inside_a_stream_is_an_error_event_and_no_done(
    port: int, supervisor: FakeSupervisor
) -> None:
    with connected(port, post(stream=True, n=2)) as client:
        supervisor.push_soon(1, "good")
        supervisor.push_soon(2, "morning")
        read_until(client, b"morning")
        supervisor.state = "restarting"
        supervisor.push_soon(1, "", "error", 0, error="the engine died")
        found = read_until(client, b"0\r\n\r\n")
    assert b"[DONE]" not in found
    last = [line for line in found.split(b"\n") if line.startswith(b"data: ")][-1]
    error = json.loads(last[6:])["error"]
    assert (error["message"], error["code"]) == ("the engine died.", "engine_failed")
    wait_until(lambda: 2 in supervisor.cancelled)  # nobody reads the other answer any more


@pytest.mark.parametrize("begun", [False, True])
def test_what_the_engine_refuses_names_its_parameter(
    port: int, supervisor: FakeSupervisor, begun: bool
) -> None:
    why = "The JSON schema cannot be used: Pointer '/$defs/a/b' does not exist"
    with connected(port, post(stream=True)) as client:
        if begun:
            supervisor.push_soon(1, "good")
            read_until(client, b"good")
        supervisor.push_soon(1, "", "refused", 0, error=why, parameter="response_format")
        found = read_until(client, b"}}")
    assert found.startswith(b"HTTP/1.1 400 ") != begun and b"[DONE]" not in found
    error = json.loads(found[found.index(b'{"error"') :].split(b"\n")[0])["error"]
    assert (error["message"], error["param"]) == (f"{why}.", "response_format")


def test_a_deadline_is_an_error_and_not_a_short_answer(
    port: int, supervisor: FakeSupervisor
) -> None:
    with connected(port, post(deadline_seconds=2)) as client:
        supervisor.push_soon(1, "half", "deadline")
        found = read_until(client, b"}}")
    assert found.startswith(b"HTTP/1.1 504 ") and b"deadline_exceeded" in found
    assert b"x-should-retry: false" in found


# --- who goes away


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_while_it_waits_frees_its_place(
    port: int, supervisor: FakeSupervisor, streamed: bool
) -> None:
    with connected(port, post(stream=streamed, n=3)):
        wait_until(lambda: len(supervisor.submitted) == 3)
    wait_until(lambda: supervisor.cancelled == [1, 2, 3])


def test_a_client_that_leaves_inside_a_stream_frees_its_place(
    port: int, supervisor: FakeSupervisor
) -> None:
    with connected(port, post(stream=True)) as client:
        supervisor.push_soon(1, "one")
        read_until(client, b"one")
    wait_until(lambda: supervisor.cancelled == [1])
    wait_until(
        lambda: b'route="/v1/completions",status="499"} 1.0' in ask(port, "GET", "/metrics").body
    )


# --- who is slow


def test_a_slow_reader_delays_nobody_and_gets_everything(
    port: int, supervisor: FakeSupervisor
) -> None:
    words = [f"w{i} " + "x" * 1000 for i in range(1500)]
    with connected(port, post(stream=True), buffer_bytes=4096) as client:
        wait_until(lambda: bool(supervisor.submitted))
        for word in words[:-1]:
            supervisor.push_soon(1, word)
        sent_at = time.monotonic()
        assert ask(port, "GET", "/health").status == 200
        assert time.monotonic() - sent_at < 5.0
        supervisor.push_soon(1, words[-1], "stop")
        found = read_until(client, b"[DONE]")
    events = [json.loads(line[6:]) for line in found.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(words)
    assert len(events) < len(words)  # what piled up came as one event


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(port: int) -> None:
    with connected(port, post(length=10**9)) as client:
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 413 ")


def test_pipelined_requests_are_answered_in_order(port: int, supervisor: FakeSupervisor) -> None:
    supervisor.by_hand = False
    get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connected(port, post(stream=True) + get) as client:
        found = read_all(client)
    assert found.index(b"[DONE]") < found.index(b'"owned_by"')


def test_a_client_that_does_not_read_does_not_hold_a_server_that_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "CLOSING_SECONDS", 0.3)
    supervisor = FakeSupervisor(["word " * 4000] * 200)  # 4 MB, more than sockets buffer

    async def scenario(client: socket.socket) -> None:
        listener = http_server.listen("127.0.0.1", 0)
        async with http_server.serving(app_on(supervisor), listener, lambda: None):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(listener.getsockname())
            client.sendall(post(stream=True))
            while not any(stream.finished for stream in supervisor.streams.values()):
                await asyncio.sleep(0.01)

    started = time.monotonic()
    with socket.socket() as client, caplog.at_level(logging.ERROR):
        asyncio.run(scenario(client))
    assert not caplog.records and time.monotonic() - started < 4
