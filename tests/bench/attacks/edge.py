"""Attacks on the HTTP side: bodies, connections, names, and a log that nobody reads."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.serving.cli.test_serve import server
from tests.serving.fakes import ask, complete, wait_until
from tests.serving.http.test_app_streams import connected, post, read_until
from tests.tools.holds import MOST_SECONDS, held, watched_server

MEGABYTE = 1 << 20


class Attack(NamedTuple):
    """`run` gets an empty folder; it says what happened, and whether the server held."""

    item: str
    what: str
    before: str
    run: Callable[[Path], tuple[str, bool]]


def port_of(about: dict[str, str]) -> int:
    return int(about["url"].rsplit(":", 1)[1])


def _filled(head: bytes, piece: bytes, tail: bytes) -> bytes:
    """A body of 4 MiB, full of the piece."""
    return head + piece * ((4 * MEGABYTE - len(head) - len(tail) - 8) // len(piece)) + tail


def json_of_small_values(folder: Path) -> tuple[str, bool]:
    bodies = {
        "lists": _filled(b'{"prompt":[', b"[],", b"[]]}"),
        "ids": _filled(b'{"prompt":[', b"1,", b"1]}"),
        "strings": _filled(b'{"prompt":"x","stop":[', b'"a",', b'"a"]}'),
        "escapes": _filled(b'{"prompt":"', b"\\n", b'"}'),
        "messages": _filled(b'{"messages":[', b'{"role":"user","content":"x"},', b"{}]}"),
    }
    options = ("--max-body", "4MiB", "--context", "4096")
    longest = 0.0
    with watched_server(folder, *options) as one:
        port = port_of(one.wait_ready())
        for name, body in bodies.items():
            path = "/v1/chat/completions" if name == "messages" else "/v1/completions"
            with held(port) as hold:
                assert ask(port, "POST", path, body).status == 400, name
            longest = max(longest, hold.seconds)
    return f"loop held <= {longest * 1000:g} ms", longest <= MOST_SECONDS


def bodies_held_back(folder: Path) -> tuple[str, bool]:
    """100 connections that send 4 MiB each but for the last bytes."""
    with server(folder, "--max-body", "4MiB") as one, contextlib.ExitStack() as crowd:
        about = one.wait_ready()
        port, process = port_of(about), psutil.Process(int(about["pid"]))
        before = process.memory_info().rss
        size = 4 * MEGABYTE - 100
        for _ in range(100):
            client = crowd.enter_context(connected(port, post(length=4 * MEGABYTE)))
            with contextlib.suppress(OSError):
                client.sendall(b"x" * (size - 100))
        grown = (process.memory_info().rss - before) >> 20
        is_served = complete(port, max_tokens=2).status == 200
    return f"RSS +{grown} MiB, small requests served: {is_served}", grown < 420 and is_served


def upgrade(folder: Path) -> tuple[str, bool]:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(hidden)
    )
    with server(folder) as one:
        port = port_of(one.wait_ready())
        with connected(port, head) as client:
            with contextlib.suppress(TimeoutError):
                client.settimeout(0.3)
                client.recv(1)
            client.settimeout(1.0)
            client.sendall(hidden)
            said = read_until(client, b"}}")
            with contextlib.suppress(TimeoutError, ConnectionError):
                said += client.recv(65536)
    answers = said.count(b"HTTP/1.1 ")
    return f"{answers} answer", answers == 1


def full_segments(folder: Path) -> tuple[str, bool]:
    """Small requests, and chunks of one byte, as many as a segment holds."""
    chunks = post().replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX-Was: ")
    chunks = chunks.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + b"1\r\nx\r\n" * 100_000
    longest = 0.0
    with watched_server(folder) as one:
        port = port_of(one.wait_ready())
        for data in (b"GET /health HTTP/1.1\r\n\r\n" * 20_000, chunks):
            with held(port) as hold, connected(port) as client:
                with contextlib.suppress(OSError):
                    client.sendall(data)
                    client.recv(65536)
            longest = max(longest, hold.seconds)
    return f"loop held <= {longest * 1000:g} ms", longest <= MOST_SECONDS


def all_connections(folder: Path) -> tuple[str, bool]:
    """As many heads without an end as there may be connections, then a request."""
    with (
        server(folder, "--max-connections", "60") as one,
        contextlib.ExitStack() as crowd,
    ):
        port = port_of(one.wait_ready())
        for _ in range(60):
            crowd.enter_context(connected(port, b"GET /health HTT"))
        status = ask(port, "GET", "/health").status
    return f"{status}", status == 200


def foreign_host(folder: Path) -> tuple[str, bool]:
    with server(folder) as one:
        answer = ask(port_of(one.wait_ready()), "GET", "/v1/models", None, {"Host": "evil.example"})
    return f"{answer.status}", answer.status == 403


def log_that_nobody_reads(folder: Path) -> tuple[str, bool]:
    """Standard error is a full disk; the engine is killed; then SIGTERM."""
    with server(folder, log=Path("/dev/full")) as one:
        about = one.wait_ready()
        port = port_of(about)
        os.kill(int(about["engine_pid"]), signal.SIGKILL)
        wait_until(lambda: ask(port, "GET", "/ready").status == 503)
        wait_until(lambda: ask(port, "GET", "/ready").status == 200)
        served = complete(port, max_tokens=2).status
        status = one.end()
    return f"503, then {served}; SIGTERM ends it with {status}", (served, status) == (200, 0)


ATTACKS = (
    Attack("M6", "JSON of 4 MiB", "605 ms on the loop", json_of_small_values),
    Attack("M4", "100 bodies of 4 MiB held back", "+4 MiB each, no bound", bodies_held_back),
    Attack("M3", "a request in the body of an Upgrade", "2 answers", upgrade),
    Attack("", "20,000 requests, or chunks, at once", "345 ms on the loop", full_segments),
    Attack("", "all connections, with slow heads", "503 for 15 s", all_connections),
    Attack("L2", "a name of the DNS on loopback", "200", foreign_host),
    Attack("H3", "a full log, then an engine's death", "ready for ever", log_that_nobody_reads),
)
