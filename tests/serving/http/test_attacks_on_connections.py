"""What a stranger may send: connections that carry too much or too little.

The attacks and their tests are listed in tests/serving/http/attacked.py.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import threading
import time
from pathlib import Path

import pytest

from tests.serving.cli.test_serve import server
from tests.serving.fakes import Answer, ask, complete
from tests.serving.http.attacked import MEGABYTE, Target, port, raw, refused, target
from tests.serving.http.test_app_streams import connected, post, read_all, read_until

__all__ = ["port", "target"]


def test_a_hundred_megabytes(target: Target, port: int) -> None:
    before = target.peak_bytes()
    with connected(
        port, post(length=100 * MEGABYTE)
    ) as client:  # declared: refused before it is read
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 413 ")
    piece = b"x" * MEGABYTE
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunked += b"Transfer-Encoding: chunked\r\n\r\n"
    with connected(port, chunked) as client, contextlib.suppress(ConnectionError):
        for _ in range(100):
            client.sendall(b"100000\r\n" + piece + b"\r\n")
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 413 ")
    with (
        connected(port, post(length=10)) as client,
        contextlib.suppress(ConnectionError),
    ):  # declared too small: the rest is no request
        for _ in range(100):
            client.sendall(piece)
        assert read_all(client).count(b"HTTP/1.1 400 ") >= 1
    bomb = gzip.compress(b'{"prompt": "' + b"x" * (100 * MEGABYTE) + b'"}')
    answer = ask(port, "POST", "/v1/completions", bomb, {"Content-Encoding": "gzip"})
    refused(answer, status=415)
    assert target.peak_bytes() - before < 64 * MEGABYTE


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"x" * MEGABYTE,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: x\r\n" * 100_000,
        b"GET /" + b"x" * MEGABYTE + b" HTTP/1.1\r\nHost: x",
        b"GET /health?" + b"x=1&" * 250_000 + b" HTTP/1.1\r\nHost: x",
        b"G" * MEGABYTE,
        b"\r\n" * (MEGABYTE // 2),
        b"GET /health HTTP/1.1\r\n" + b"x" * MEGABYTE + b": x",
    ],
)
def test_a_megabyte_of_headers(target: Target, port: int, head: bytes) -> None:
    before = target.peak_bytes()
    found = raw(port, head + b"\r\n\r\n")
    assert found == b"" or found.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), found[
        :200
    ]  # "": cut off while it was still sending
    assert target.peak_bytes() - before < 16 * MEGABYTE


@pytest.mark.parametrize("rest", [b"X-More: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
@pytest.mark.parametrize("start", [b"0\r\n", b"1;"])
def test_a_body_followed_by_headers_without_end(
    target: Target, port: int, start: bytes, rest: bytes
) -> None:
    """Fields after the last chunk and extensions of a chunk: parsed, by nobody read, and once
    without any bound.
    """
    before = target.peak_bytes()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    sent = 0
    with connected(port, head + start) as client:
        with contextlib.suppress(ConnectionError):
            while sent < 64 * MEGABYTE:
                client.sendall(rest * 256)
                sent += 256 * len(rest)
    assert sent < 16 * MEGABYTE  # what the sockets hold; then the connection is gone
    assert target.peak_bytes() - before < 16 * MEGABYTE


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n0\r\n\r\nGET /x\r\n\r\n",
            {400},
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: "
            b"6\r\n\r\nhello!",
            {400},
        ),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", {400}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n\r\nhello", {400}),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, "
            b"identity\r\n\r\n0\r\n\r\n",
            {400},
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
            {400},
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
            b"chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
            {400, 415},
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
            {400, 415},
        ),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n", {200, 400}),
        (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\r\nHo\x00st: x\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\nHost: x\n\n", {200, 400}),
        (b"GET /health HTTP/1.0\r\n\r\n", {200}),
        (b"GET /health HTTP/3.7\r\n\r\n", {400}),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n", {200, 404}),
        (b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere:443\r\n\r\n", {400, 404, 405}),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "
            b"websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
            {200, 400},
        ),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "
            b"h2c\r\nHTTP2-Settings: AA\r\n\r\n",
            {200, 400},
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405}),
        (b"GET /v1/models/%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
        (b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n", {405}),
    ],
)
def test_heads_that_two_servers_would_read_differently(
    port: int, data: bytes, statuses: set[int]
) -> None:
    found = raw(port, data)
    lines = [line for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert len(lines) == 1 and int(lines[0].split()[1]) in statuses, found[
        :300
    ]  # one answer: nothing was smuggled behind the first request


def test_what_asks_for_another_protocol_smuggles_nothing(port: int) -> None:
    """The body of a request with `Upgrade` was once served as a request of its own."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    length = b"Content-Length: %d\r\n\r\n"
    with connected(port, head + upgrade + length % len(hidden)) as client:
        time.sleep(0.1)  # the body comes in a segment of its own
        client.sendall(hidden)
        said = read_until(client, b"}}")
        assert said.count(b"HTTP/1.1 ") == 1 and b"invalid_json" in said, said
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
    body = b'{"prompt": "hi"}'  # Java's HttpClient sends its requests so
    with connected(port, head + upgrade + length % len(body), body) as client:
        assert read_until(client, b"}").startswith(b"HTTP/1.1 200 ")
    with connected(port, head + b"Connection: Upgrade\r\nUpg") as client:
        time.sleep(0.1)
        client.sendall(b"rade: h2c\r\n" + length % len(hidden) + hidden)
        said = read_all(client)
        assert said.count(b"HTTP/1.1 ") == 1 and b"no_upgrade" in said, said


def test_wrong_requests_write_no_log(target: Target, port: int) -> None:
    """They are counted; a line each would be a stranger's to write."""
    before = target.server.log.read_text()
    for _ in range(5):
        assert raw(port, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert target.server.log.read_text() == before
    counts = ask(port, "GET", "/metrics").body.decode()
    found = re.search(r'http_responses_total{route="connection",status="400"} (\S+)', counts)
    assert found is not None and float(found[1]) >= 5


def test_five_hundred_slow_heads(port: int) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(500):
            crowd.enter_context(
                connected(port, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            )
        asked = time.monotonic()
        assert complete(port, max_tokens=2).status == 200
        assert time.monotonic() - asked < 5.0, "a slow head may take 10 s"


def test_readers_of_one_byte_hold_up_nobody(port: int) -> None:
    with contextlib.ExitStack() as crowd:
        readers = [
            crowd.enter_context(
                connected(port, post(stream=True, n=2, logprobs=5), buffer_bytes=1024)
            )
            for _ in range(4)
        ]
        for reader in readers:
            assert len(reader.recv(1)) == 1
        asked = time.monotonic()
        assert ask(port, "GET", "/health").status == 200
        assert time.monotonic() - asked < 5.0


def test_a_flood_is_refused_at_once_and_the_queue_is_served(tmp_path: Path) -> None:
    slow = (
        "--slots",
        "1",
        "--max-waiting",
        "8",
        "--option",
        "step_seconds=0.02",
        "--context",
        "256",
    )
    with server(tmp_path, *slow) as one:
        target = Target(one)
        answers: list[Answer] = []
        times: list[float] = []

        def flood() -> None:
            asked = time.monotonic()
            answers.append(complete(target.port, max_tokens=10, ignore_eos=True))
            times.append(time.monotonic() - asked)

        threads = [threading.Thread(target=flood) for _ in range(80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        statuses = [answer.status for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 9
        for answer in answers:
            if answer.status == 429:
                assert (
                    int(answer.headers["retry-after"]) >= 1
                    and answer.error["type"] == "rate_limit_error"
                )
        target.is_well()
