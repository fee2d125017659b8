"""What one connection may cost before a route is chosen: heads, trailers and pipelined requests."""

from __future__ import annotations

import contextlib
import socket
import time

import psutil
import pytest

from crossover.serving.http.http_protocol import MAX_HEAD_BYTES
from tests.serving.fakes import FakeSupervisor, app_on, ask, served

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
MIB = 1 << 20
# What begins a request, what is repeated without end, and whether that is refused with 431.
FLOODS = {
    "one header": (GET + b"X: ", b"x" * MIB, True),
    "headers": (GET, b"a:b\r\n" * (MIB // 5), True),
    "a URL": (b"GET /", b"x" * MIB, True),
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n" * (MIB // 5), True),
    "one trailer": (CHUNKED + b"0\r\na: ", b"x" * MIB, True),
    "a chunk extension": (CHUNKED + b"5;a=", b"x" * MIB, True),
    "pipelined requests": (b"", (GET + b"\r\n") * (MIB // 42), False),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_on_one_connection_costs_little_and_others_are_answered(name: str) -> None:
    start, piece, is_refused = FLOODS[name]
    with served(app_on(FakeSupervisor())) as port:
        assert ask(port, "GET", "/health").status == 200
        process = psutil.Process()
        used, seconds = process.memory_info().rss, time.process_time()
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            with contextlib.suppress(OSError):  # the server stops reading, or closes
                connection.sendall(start)
                for _ in range(16):
                    connection.sendall(piece)
            assert ask(port, "GET", "/health").status == 200
            if is_refused:
                assert connection.recv(100).startswith(b"HTTP/1.1 431 ")
        # Of the client, too.
        assert time.process_time() - seconds < 3
        assert process.memory_info().rss - used < 25 * MIB


@pytest.mark.parametrize(("size", "status"), [(MAX_HEAD_BYTES // 2, 200), (MAX_HEAD_BYTES, 431)])
def test_a_head_has_a_bound(size: int, status: int) -> None:
    with served(app_on(FakeSupervisor())) as port:
        assert ask(port, "GET", "/health", headers={"X": "x" * size}).status == status


def test_pipelined_requests_are_all_answered_in_order() -> None:
    count = 5_000
    with (
        served(app_on(FakeSupervisor())) as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        connection.settimeout(None)
        connection.setblocking(False)
        left, received = memoryview((GET + b"\r\n") * count), bytearray()
        deadline = time.monotonic() + 60
        while received.count(b"HTTP/1.1 200") < count and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                left = left[connection.send(left[: 1 << 16]) :] if left else left
            with contextlib.suppress(BlockingIOError):
                received += connection.recv(1 << 20)
        assert received.count(b"HTTP/1.1 200") == count
