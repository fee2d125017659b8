"""Connections to one endpoint, as light as Python allows: HTTP/1.1 over gevent's event loop, with no greenlet switch between chunks.

    pool = connect("http://127.0.0.1:8000")
    status, headers, body = fetch(pool, get_bytes(pool, "/v1/models"))

A greenlet sends its request in one piece and is woken once, when the answer is whole. Between, the event loop calls `Connection._readable`
for whatever has come: the bytes are taken from the kernel and stamped, and parsed some pieces later (httptools, that is llhttp), when the
answer ends at the latest. A client that reads through a socket object switches to a greenlet and back for each chunk, and parses it there.

Works inside Locust and outside it: nothing is monkey-patched, and what Locust has patched is not used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as names
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import gevent
import gevent.monkey
import gevent.socket
import httptools
import msgspec
from gevent.hub import Waiter

from loadtests.errors import TargetUnusable

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: one clock for all processes of a machine

IDLE_SECONDS = 2.0  # an idle connection older than this is not used again: servers close theirs after 5 s, and a request must not meet that
LATER = 16  # pieces of an answer that are put aside before they are parsed: parsing is cheapest by the dozen, and must not take long
FRESH_SECONDS = 0.02  # one that is idle for less is not looked at again: a server that wants to close it says so in its answer
CONNECT_SECONDS = 30.0
_Socket = gevent.monkey.get_original("socket", "socket")  # the system's own, also where Locust has put gevent's in its place
_buffer = bytearray(1 << 18)  # one for all: what was read is parsed before anything else is
_view = memoryview(_buffer)
_READ = 1


class Reader(Protocol):
    """Who takes an answer. Called from the event loop, so it must neither wait nor raise."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers are here."""

    def body(self, data: bytes, received: float) -> bool:
        """A piece of the body, and when its bytes left the kernel, on `clock`. True: what follows may come later than at once."""


class Connection:
    """One connection, kept between requests. Its parser's callbacks are its own `on_*` methods."""

    def __init__(self, sock: Any, pool: Pool, tls: Any = None) -> None:
        self.received = 0.0  # when the newest bytes left the kernel
        self.parked = 0.0  # when it last became idle
        self._sock = sock
        self._pool = pool
        self._tls = tls
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._waiter: Any = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._unread: list[tuple[float, bytes]] = []  # pieces that were taken and stamped, and are parsed later
        self._chunked = False  # what comes now are chunks of a body, of which the first was read
        self._begun = self._headed = self._whole = self._framed = self._may_wait = False
        self._keep = True
        self._trouble: OSError | None = None
        self._watcher = gevent.get_hub().loop.io(sock.fileno(), _READ)
        self._watcher.start(self._readable)

    def exchange(self, wire: bytes, reader: Reader) -> None:
        """Sends, and returns when the answer is whole. Raises OSError; what else is thrown into the greenlet comes through."""
        self._reader = reader
        self._headers = []
        self._begun = self._headed = self._whole = self._framed = self._may_wait = False
        self._keep = True
        try:
            self._send(wire)
            while not self._whole and self._trouble is None:
                self._waiter = Waiter()
                try:
                    self._waiter.get()
                finally:
                    self._waiter = None
            if not self._whole and self._trouble is not None:
                raise self._trouble
        except BaseException:
            with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._read()
            self.close()
            raise
        finally:
            self._reader = None
            self._chunked = False
        if self._keep and self._trouble is None:
            self._pool.park(self)
        else:
            self.close()

    def is_good(self) -> bool:
        """Whether a request may be sent over it: not idle for too long, and not closed by the server meanwhile."""
        idle = clock() - self.parked
        if self._trouble is not None or idle > IDLE_SECONDS:
            return False
        if idle < FRESH_SECONDS:
            return True
        try:
            return not self._sock.recv(1, names.MSG_PEEK)  # b"" is the server's end, bytes are an answer that nobody asked for
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
        self._sock.close()

    def _send(self, wire: bytes) -> None:
        if self._tls is not None:
            wire = self._tls.sealed(wire)
        sent = 0
        while sent < len(wire):
            try:
                sent += self._sock.send(memoryview(wire)[sent:] if sent else wire)
            except BlockingIOError:
                gevent.socket.wait_write(self._sock.fileno())

    def _readable(self) -> None:
        """The event loop's callback: bytes are here, or the connection's end."""
        try:
            count = self._sock.recv_into(_buffer)
        except BlockingIOError:
            return
        except OSError as problem:
            self._end(problem)
            return
        now = clock()
        if not count:
            self._end(None)
            return
        if self._reader is None:  # bytes that nobody asked for: this connection is of no more use
            self._end(ConnectionResetError("the server sent bytes that belong to no request"))
            return
        data = _view[:count]
        try:
            if self._chunked and self._tls is None and len(self._unread) < LATER:
                piece = bytes(data)
                self._unread.append((now, piece))
                # Only the end of an answer is waited for, and it ends so. In two reads, the second is shorter than four bytes.
                if count >= 4 and not piece.endswith(b"\r\n\r\n"):
                    return
                self._read()
            else:
                self._read()
                self.received = now
                self._parser.feed_data(data if self._tls is None else self._tls.opened(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ssl.SSLError) as problem:
            self._end(ConnectionError(f"an answer that is no HTTP: {problem}"))
            return
        if self._whole and self._waiter is not None:
            self._waiter.switch(None)

    def _read(self) -> None:
        """Parses what was put aside, each piece with its own stamp."""
        if self._unread:
            unread, self._unread = self._unread, []
            for self.received, data in unread:
                self._parser.feed_data(data)

    def _end(self, problem: OSError | None) -> None:
        """The connection is over, by the server's doing or by an error."""
        self._watcher.stop()
        with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._read()
        if problem is None and self._headed and not self._framed:
            self._whole, self._keep = True, False  # a body that lasts until the connection ends
        place = "within its answer" if self._begun else "before it answered"
        self._trouble = problem or ConnectionResetError(f"the server closed the connection {place}")
        if self._waiter is not None:
            self._waiter.switch(None)

    # httptools calls these.

    def on_message_begin(self) -> None:
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and the like: the answer is still to come
            self._headers = []
            return
        self._headed = True
        names_ = {name.lower() for name, _ in self._headers}
        self._framed = b"content-length" in names_ or b"transfer-encoding" in names_
        self._may_wait = b"transfer-encoding" in names_
        if self._reader is not None:
            self._reader.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._chunked = self._reader.body(data, self.received) and self._may_wait

    def on_message_complete(self) -> None:
        if self._headed:
            self._whole = True
            self._keep = self._parser.should_keep_alive()


class _Tls:
    """TLS over a socket that knows nothing of it: bytes in and out of memory."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._in, self._out, server_hostname=host)

    def shake_hands(self, sock: Any, timeout_seconds: float) -> None:
        """Waits for it. Raises OSError (ssl.SSLError is one)."""
        while True:
            try:
                self._object.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            data = self._out.read()
            while data:
                gevent.socket.wait_write(sock.fileno(), timeout_seconds)
                data = data[sock.send(data) :]
            if done:
                return
            gevent.socket.wait_read(sock.fileno(), timeout_seconds)
            received = sock.recv(65536)
            if not received:
                raise ConnectionResetError("the server closed the connection within the TLS handshake")
            self._in.write(received)

    def sealed(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._out.read()

    def opened(self, data: memoryview) -> bytes:
        self._in.write(data)
        parts: list[bytes] = []
        try:
            while part := self._object.read(65536):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)


class Pool:
    """Connections to one endpoint, the headers that every request carries, and the path that its URL ends in."""

    def __init__(self, address: tuple[str, int], host: str, prefix: str, headers: str, context: ssl.SSLContext | None) -> None:
        self.host = host  # scheme, name and port, for messages
        self.prefix = prefix
        self.headers = headers
        self.idle: list[Connection] = []  # the one used last is used next
        self._address = address
        self._context = context
        self._found: list[Any] | None = None  # what the name was resolved to, once

    def exchange(self, wire: bytes, reader: Reader) -> None:
        """One request over an idle connection or a new one, to its end. Raises OSError."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_good():
                break
            connection.close()
        else:
            connection = self._open()
        connection.exchange(wire, reader)

    def park(self, connection: Connection) -> None:
        connection.parked = clock()
        self.idle.append(connection)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Connection:
        if self._found is None:
            self._found = gevent.socket.getaddrinfo(*self._address, 0, names.SOCK_STREAM)
        failure: OSError = ConnectionError(f"{self._address[0]} has no address")
        for family, kind, protocol, _, place in self._found:
            sock = _Socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                sock.setsockopt(names.IPPROTO_TCP, names.TCP_NODELAY, 1)
                problem = sock.connect_ex(place)
                if problem == errno.EINPROGRESS:
                    gevent.socket.wait_write(sock.fileno(), CONNECT_SECONDS)
                    problem = sock.getsockopt(names.SOL_SOCKET, names.SO_ERROR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                tls = None
                if self._context is not None:
                    tls = _Tls(self._context, self._address[0])
                    tls.shake_hands(sock, CONNECT_SECONDS)
                return Connection(sock, self, tls)
            except OSError as problem_here:
                sock.close()
                failure = problem_here
            except BaseException:
                sock.close()
                raise
        raise failure


def connect(url: str, *, api_key: str | None = None, verify_tls: bool = True) -> Pool:
    """A pool for `url` ("http://host:8000", with or without /v1 at its end); opens nothing yet.

    Raises TargetUnusable for a URL that is none, or a key that a header cannot carry.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as problem:
        raise TargetUnusable(f"{url!r} has no good port: {problem}") from problem
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise TargetUnusable(f"{url!r} is no URL of an endpoint; it should look like http://127.0.0.1:8000")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise TargetUnusable("the API key holds characters that a header cannot carry")
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context() if verify_tls else ssl._create_unverified_context()
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    headers = f"Host: {host}:{port}\r\nUser-Agent: crossover\r\nAccept-Encoding: identity\r\n"
    if api_key is not None:
        headers += f"Authorization: Bearer {api_key}\r\n"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Pool((parts.hostname, port), f"{parts.scheme}://{host}:{port}", prefix, headers, context)


def post_bytes(pool: Pool, path: str, body: Any) -> bytes:
    """The whole request as it will go over the wire: made before the level starts, so that sending is one call."""
    payload = msgspec.json.encode(body)
    head = f"POST {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode("latin-1") + payload


def get_bytes(pool: Pool, path: str) -> bytes:
    return f"GET {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}\r\n".encode("latin-1")


class _Whole:
    """A Reader that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}

    def body(self, data: bytes, received: float) -> bool:
        self.parts.append(data)
        return True


def fetch(pool: Pool, wire: bytes, timeout_seconds: float = 30.0) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of a plain request. Raises TargetUnusable when there is no answer."""
    reader = _Whole()
    try:
        within(timeout_seconds, lambda: pool.exchange(wire, reader))
    except gevent.Timeout as problem:
        raise TargetUnusable(f"{pool.host} did not answer within {timeout_seconds:g} s") from problem
    except OSError as problem:
        raise TargetUnusable(f"{pool.host} cannot be reached: {problem}") from problem
    return reader.status, reader.headers, b"".join(reader.parts)


def within(seconds: float, what: Callable[[], None]) -> None:
    """Calls `what`. Raises gevent.Timeout where it takes longer."""
    timer = gevent.Timeout(seconds)
    timer.start()
    try:
        what()
    finally:
        timer.close()
