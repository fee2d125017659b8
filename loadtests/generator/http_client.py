"""Requests to one endpoint: a pool of its connections, and plain requests outside a stream.

pool = connect("http://127.0.0.1:8000")
status, headers, body = fetch(pool, get_bytes(pool, "/v1/models"))
"""

from __future__ import annotations

import errno
import os
import socket as names
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.monkey
import gevent.socket
import msgspec

from loadtests.errors import TargetUnusable
from loadtests.generator.connection import Connection, Reader, Tls

CONNECT_SECONDS = 30.0
WHOLE_BYTES = 64 << 20  # most of an answer that is kept
# The system's own socket, also where Locust has put gevent's in its place.
_Socket = gevent.monkey.get_original("socket", "socket")


class Pool:
    """Connections to one endpoint, with the headers and the path prefix of every request."""

    def __init__(
        self,
        address: tuple[str, int],
        host: str,
        prefix: str,
        headers: str,
        context: ssl.SSLContext | None,
    ) -> None:
        self.host = host  # scheme, name and port, for messages
        self.prefix = prefix
        self.headers = headers
        self.idle: list[Connection] = []  # the one used last is used next
        self._address = address
        self._context = context
        self._found: list[Any] | None = None  # what the name was resolved to, once

    def exchange(self, wire: bytes, reader: Reader) -> None:
        """One request over an idle connection or a new one, to its end. Raises OSError.

        Some servers close a connection that they said to keep (llama-server after each stream): a
        request that met its end unanswered is sent once more, over a new one (RFC 9112, 9.3.1).
        """
        while self.idle:
            connection = self.idle.pop()
            if not connection.is_good():
                connection.close()
                continue
            try:
                return self._over(connection, wire, reader)
            except OSError:
                if not connection.is_unanswered:
                    raise
                break
        self._over(self._open(), wire, reader)

    def _over(self, connection: Connection, wire: bytes, reader: Reader) -> None:
        if connection.exchange(wire, reader):
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
                    tls = Tls(self._context, self._address[0])
                    tls.shake_hands(sock, CONNECT_SECONDS)
                return Connection(sock, tls)
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
        raise TargetUnusable(
            f"{url!r} is no URL of an endpoint; it should look like http://127.0.0.1:8000"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise TargetUnusable("the API key holds characters that a header cannot carry")
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        if not verify_tls:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    headers = f"Host: {host}:{port}\r\nUser-Agent: crossover\r\nAccept-Encoding: identity\r\n"
    if api_key is not None:
        headers += f"Authorization: Bearer {api_key}\r\n"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Pool((parts.hostname, port), f"{parts.scheme}://{host}:{port}", prefix, headers, context)


def post_bytes(pool: Pool, path: str, body: Any) -> bytes:
    """The whole request as it goes over the wire: made before the level starts."""
    payload = msgspec.json.encode(body)
    head = (
        f"POST {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode("latin-1") + payload


def get_bytes(pool: Pool, path: str) -> bytes:
    return f"GET {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}\r\n".encode("latin-1")


class _Whole:
    """A Reader that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self._size = 0

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers
        }

    def body(self, data: bytes, received: float) -> bool:
        self._size += len(data)
        if self._size > WHOLE_BYTES:
            raise ConnectionError(f"an answer of more than {WHOLE_BYTES} bytes")
        self.parts.append(data)
        return True


def fetch(
    pool: Pool, wire: bytes, timeout_seconds: float = 30.0
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of a plain request. Raises TargetUnusable."""
    reader = _Whole()
    try:
        within(timeout_seconds, lambda: pool.exchange(wire, reader))
    except gevent.Timeout as problem:
        raise TargetUnusable(
            f"{pool.host} did not answer within {timeout_seconds:g} s"
        ) from problem
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
