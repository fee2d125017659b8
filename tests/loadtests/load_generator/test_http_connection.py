"""HTTP as servers send it: in pieces, without a length, over TLS, cut off."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crossover.loadtests.errors import TargetUnusable
from crossover.loadtests.load_generator import sse_timestamps
from crossover.loadtests.load_generator.http_connection import (
    clock,
    connect,
    fetch,
    get_bytes,
    post_bytes,
)
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.records.request_record import RequestRecord

Serve = Callable[..., str]
EVENT = b'data: {"choices":[{"index":0,"text":"ab"}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that answers every request with the same pieces, one write each."""
    listeners: list[socket.socket] = []

    def start(*pieces: bytes, close: bool = False, context: ssl.SSLContext | None = None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def one(sock: socket.socket) -> None:
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while sock.recv(65536):
                    for piece in pieces:
                        sock.sendall(piece)
                        threading.Event().wait(0.002)
                    if close:
                        return

        def run() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                    one(context.wrap_socket(plain, server_side=True) if context else plain)
                except (OSError, ssl.SSLError):
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=run, daemon=True).start()
        return f"{'https' if context else 'http'}://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def ask(url: str) -> tuple[str | None, str | None, int]:
    with connect(url) as pool:
        wire = post_bytes(pool, "/v1/completions", {"prompt": "x"})
        record = stream(
            pool,
            wire,
            RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0),
            origin=clock(),
            timeout_seconds=5,
        )
    return record.error, record.error_message, len(record.content_seconds)


def test_every_way_of_cutting_a_stream_in_pieces_reads_the_same(serve: Serve) -> None:
    whole = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENT, EVENT, EVENT + LAST)
    for size in (1, 7, 64, len(whole)):
        assert ask(serve(*(whole[i : i + size] for i in range(0, len(whole), size)))) == (
            None,
            None,
            3,
        )


def test_a_connection_that_ends_within_the_answer_is_cut_off(serve: Serve) -> None:
    error, message, contents = ask(
        serve(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(EVENT) + EVENT + b"\r\n",
            close=True,
        )
    )
    assert (error, contents) == ("cut_off", 1) and "closed the connection during the response" in (
        message or ""
    )


def test_a_reply_that_is_not_http_is_reported_as_such(serve: Serve) -> None:
    error, message, _ = ask(serve(b"220 mail.example ESMTP\r\n", close=True))
    assert error == "connection" and "not valid HTTP" in (message or "")


def test_a_connection_is_used_again_and_not_when_the_server_wants_no_more(serve: Serve) -> None:
    kept = connect(serve(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    assert [fetch(kept, get_bytes(kept, "/"))[2] for _ in range(3)] == [b"ok"] * 3 and len(
        kept.idle
    ) == 1
    closing = connect(serve(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"))
    assert fetch(closing, get_bytes(closing, "/"))[2] == b"ok" and closing.idle == []
    kept.close()


def test_a_kept_connection_that_the_server_closes_costs_no_request(serve: Serve) -> None:
    """llama-server says that it keeps the connection of a stream, and closes it behind the end."""
    answer = b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\nok"
    with connect(serve(answer, close=True)) as pool:
        assert [fetch(pool, get_bytes(pool, "/"))[2] for _ in range(5)] == [b"ok"] * 5
        with pytest.raises(TargetUnusable, match="before it answered"):
            fetch(connect(serve(b"", close=True)), get_bytes(pool, "/"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1".split()
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl program to make a certificate with")
    return key, cert


def test_tls_works_and_a_certificate_is_checked(
    serve: Serve, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    big = b"x" * 300_000  # more than one TLS record, and more than one read
    pieces = (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        chunked(EVENT, b": " + big + b"\n\n", EVENT + LAST),
    )
    error, message, _ = ask(serve(*pieces, context=context))
    assert error == "connection" and "certificate is not trusted" in (message or "")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert ask(serve(*pieces, context=context)) == (None, None, 2)


def test_a_server_without_tls_is_reported_as_such(serve: Serve) -> None:
    url = serve(HEAD + b"Content-Length: 0\r\n\r\n").replace("http://", "https://")
    error, message, _ = ask(url)
    assert error == "connection" and "its URL begins with http://" in (message or "")


def test_what_a_hostile_server_sends_is_bounded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_timestamps, "MAX_BYTES", 1000)
    monkeypatch.setattr(sse_timestamps, "UNKNOWN_TOKENS", 0)
    body = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*[EVENT] * 50)
    for answer in (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2000, body):
        assert "response has more than 1000 bytes" in (ask(serve(answer, close=True))[1] or "")
