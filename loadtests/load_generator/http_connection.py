"""HTTP/1.1 to one endpoint on gevent's loop, without a greenlet switch per chunk.

    pool = connect("http://127.0.0.1:8000")
    status, headers, body = fetch(pool, get_bytes(pool, "/v1/models"))

A greenlet sends its request in one piece and is woken once, when the answer is whole. Meanwhile
the loop calls `Connection._readable`: bytes are taken from the kernel, stamped, and parsed some
pieces later (httptools), at the end of the answer at the latest. A body has a length, comes in
chunks, or ends with its connection (RFC 9112, 6.3). Works inside Locust and outside it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from typing import Any
from urllib.parse import quote, urlsplit

import gevent
import gevent.monkey
import gevent.socket
import gevent.ssl
import httptools
import msgspec
from gevent.hub import Hub, Waiter

from crossover.loadtests.errors import TargetUnusable

# Ctrl-C ends the program with a sentence; gevent would print a traceback before it.
Hub.NOT_ERROR = (*Hub.NOT_ERROR, KeyboardInterrupt)

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: one clock for all processes of a machine

CONNECT_SECONDS = 30.0
MAX_BYTES = 64 << 20  # of one answer; more ends the connection
LATER = 16  # pieces put aside before they are parsed: parsing is cheapest by the dozen
_buffer = bytearray(1 << 18)  # shared: what was read is parsed or copied before the next read
_view = memoryview(_buffer)
# Bytes of a path that stay as they are: RFC 3986's pchar and slash, and what is encoded already.
_PATH_BYTES = "/%:@!$&'()*+,;=~-._"
_ROUTES = ("/chat/completions", "/completions", "/models")  # URLs are copied with them at their end
# A response's syntax that other clients (h11, curl) read too. Danger is for servers, whose framing
# a proxy may see in another way; a client believes its server.
_LENIENT = {
    "lenient_chunked_length": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
_NO_HTTP = (httptools.HttpParserError, httptools.HttpParserUpgrade)
# How far an answer has come. FLOWING: chunks follow that may be parsed later.
_AWAITED, _HEADED, _FLOWING, _WHOLE = range(4)


class Connection:
    """One connection, kept between requests. Its parser's callbacks are its own `on_*` methods."""

    def __init__(self, sock: Any) -> None:
        """`sock` does not block: one of the system's, or of gevent's with TLS."""
        self.is_unanswered = False  # the server closed it before the first byte of an answer
        self._trouble: OSError | None = None  # why it is over
        self._sock = sock
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(**_LENIENT)
        self._reader: Any = None  # of the answer on its way; None: idle
        self._waiter: Any = None
        self._unread: list[tuple[float, bytes]] = []  # stamped pieces, to be parsed later
        self._received = 0.0  # when the bytes that are parsed now left the kernel
        self._watcher = gevent.get_hub().loop.io(sock.fileno(), 1)
        self._watcher.start(self._readable)

    def exchange(self, wire: bytes, reader: Any) -> bool:
        """Send, and return when the answer is whole. Raises OSError, and what is thrown in.

        The event loop calls reader.head(status, headers), then reader.body(data, received) for
        each piece, with the time on `clock` at which it left the kernel; true: more may wait.
        `reader.is_done`: nothing more is expected of a body that ends with its connection.
        False: the connection is closed and takes no other request.
        """
        self._state = _AWAITED
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_chunked = self._has_length = self._is_reusable = False
        self._ends_with_connection = False
        self._bytes = 0
        self._reader = reader
        try:
            self._send(wire)
            while self._state != _WHOLE:
                if self._trouble is not None:
                    raise self._trouble
                self._waiter = Waiter()
                try:
                    self._waiter.get()
                finally:
                    self._waiter = None
        except BaseException as problem:
            with contextlib.suppress(*_NO_HTTP):
                self._parse_unread()
            is_closed = isinstance(problem, ConnectionResetError | BrokenPipeError)
            self.is_unanswered = is_closed and not self._bytes
            self.close()
            raise
        self._reader = None
        if self._is_reusable and self._trouble is None:
            return True
        self.close()
        return False

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
        self._sock.close()

    def _send(self, wire: bytes) -> None:
        sent = 0
        while sent < len(wire):
            try:
                count = self._sock.send(memoryview(wire)[sent:] if sent else wire)
            except BlockingIOError:
                count = 0  # as TLS says it
            sent += count
            if not count:
                gevent.socket.wait_write(self._sock.fileno())

    def _readable(self) -> None:
        """The event loop's callback: bytes are here, or the connection's end."""
        try:
            count = self._sock.recv_into(_buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as problem:
            self._end(problem)
            return
        now = clock()
        if self._reader is None:
            self._end(ConnectionResetError("the server sent bytes that belong to no request"))
            return
        self._bytes += count
        if not count:
            self._closed()
            return
        if self._bytes > MAX_BYTES:
            self._end(ConnectionError(f"the response has more than {MAX_BYTES} bytes"))
            return
        try:
            if self._state == _FLOWING and len(self._unread) < LATER:
                piece = bytes(_view[:count])
                self._unread.append((now, piece))
                # An answer ends so; where that came in two reads, the second is shorter.
                if count < 4 or piece.endswith(b"\r\n\r\n"):
                    self._parse_unread()
            else:
                self._parse_unread()
                self._received = now
                self._parser.feed_data(_view[:count])
        except _NO_HTTP as problem:
            why = problem.__context__ or problem
            self._end(ConnectionError(f"the response is not valid HTTP: {why}"))
            return
        if self._state == _WHOLE and self._waiter is not None:
            self._waiter.switch(None)

    def _closed(self) -> None:
        """The server closed the connection: an error, or the end of a body without a length."""
        if self._state == _HEADED and self._ends_with_connection:
            self._watcher.stop()
            self._state = _WHOLE
            if self._waiter is not None:
                self._waiter.switch(None)
            return
        place = "during the response" if self._bytes else "before it answered"
        self._end(ConnectionResetError(f"the server closed the connection {place}"))

    def _parse_unread(self) -> None:
        """Parses what was put aside, each piece with its own stamp."""
        if self._unread:
            unread = self._unread
            self._unread = []
            for self._received, data in unread:
                self._parser.feed_data(data)

    def _end(self, problem: OSError) -> None:
        """The connection is over, by the server's doing or by an error."""
        self._watcher.stop()
        self._trouble = problem
        if self._waiter is not None:
            self._waiter.switch(None)

    # httptools calls these, while an answer is read.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        match name.lower():
            case b"transfer-encoding":
                self._is_chunked = b"chunked" in value.lower()
            case b"content-length":
                self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response, such as 103 Early Hints: the answer follows
            self._headers = []
            return
        self._state = _HEADED
        has_body = status not in (204, 304)
        self._ends_with_connection = has_body and not self._is_chunked and not self._has_length
        self._reader.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        may_wait = self._reader.body(data, self._received)
        self._state = _FLOWING if may_wait and self._is_chunked else _HEADED
        if self._ends_with_connection and self._reader.is_done:
            self._state = _WHOLE  # the server may keep the connection open

    def on_message_complete(self) -> None:
        if self._state != _AWAITED:
            self._state = _WHOLE
            self._is_reusable = self._parser.should_keep_alive()


class Pool:
    """Connections to one endpoint, with the headers and the base path of every request.

    `base` is the path of the URL, or /v1 where that has none: the routes of OpenAI's API lie below
    it (`path_of`).
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url`: "http://host:8000", "http://host:8000/v1" or "http://host/v3". Opens nothing yet.

        Raises TargetUnusable for a URL that is none or holds a password, which a run would keep,
        and for a key that a header cannot carry.
        """
        url = url.strip()
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            host = ascii_host(parts.hostname or "")
        except ValueError as problem:  # UnicodeError is one
            raise TargetUnusable(f"{url!r} has no valid host or port: {problem}") from problem
        if parts.query:
            raise TargetUnusable(
                f"{url!r} holds a query (?{parts.query}), which requests would not carry: leave it "
                "out"
            )
        if parts.scheme not in ("http", "https") or not host:
            raise TargetUnusable(
                f"{url!r} is not the URL of an endpoint. A URL looks like http://127.0.0.1:8000"
            )
        if parts.username is not None or parts.password is not None:
            raise TargetUnusable(
                "The url contains a user or a password, which the run folder would record. Put the "
                "key into an environment variable and name it with api_key_env"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise TargetUnusable("The API key has characters that an HTTP header cannot carry")
        self._tls: gevent.ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls.load_default_certs()
        if ":" in host:
            host = host.replace("%25", "%", 1)  # before its zone, which only this machine knows
        place = f"[{host.partition('%')[0]}]" if ":" in host else host
        self.host = f"{parts.scheme}://{place}:{port}"  # for messages
        path = parts.path.rstrip("/")
        for route in _ROUTES:
            path = path.removesuffix(route)
        self.base = quote(path, safe=_PATH_BYTES, errors="surrogateescape") or "/v1"
        lines = [f"Host: {place}:{port}", "User-Agent: crossover", "Accept-Encoding: identity"]
        lines += [] if api_key is None else [f"Authorization: Bearer {api_key}"]
        self.headers = "".join(f"{line}\r\n" for line in lines)
        self.idle: list[Connection] = []  # the one used last is used next
        self._address = host, port
        self._peer: tuple[int, Any] | None = None  # family and place of the first connection

    def path_of(self, path: str) -> str:
        """A path as it is requested: "/v1/models" is OpenAI's, and lies below `base`; all others,
        such as "/metrics", are the host's.
        """
        return self.base + path[3:] if path.startswith("/v1/") else path

    def exchange(self, wire: bytes, reader: Any) -> None:
        """One request over an idle connection or a new one, to its end. Raises OSError.

        Some servers close a connection that they said to keep (llama-server after each stream): a
        request that met its end unanswered is sent once more, over a new one (RFC 9112, 9.3.1).
        """
        was_kept = bool(self.idle)
        connection = self.idle.pop() if was_kept else self._open()
        try:
            may_keep = connection.exchange(wire, reader)
        except OSError:
            if not (was_kept and connection.is_unanswered):
                raise
            connection = self._open()
            may_keep = connection.exchange(wire, reader)
        if may_keep:
            self.idle.append(connection)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Connection:
        if self._peer is None:  # its name is resolved once
            sock = gevent.socket.create_connection(self._address, CONNECT_SECONDS)
            self._peer = sock.family, sock.getpeername()
        else:
            sock = gevent.socket.socket(self._peer[0], socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(self._peer[1])  # nothing to do for the first
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._address[0])
            else:  # the system's own: a call less for each piece
                sock = gevent.monkey.get_original("socket", "socket")(fileno=sock.detach())
            sock.setblocking(False)
        except ssl.SSLCertVerificationError as problem:
            sock.close()
            raise ConnectionError(
                f"its certificate is not trusted ({problem.verify_message}). Set SSL_CERT_FILE to "
                "a file of trusted certificates"
            ) from problem
        except BaseException:
            sock.close()
            raise
        return Connection(sock)


connect = Pool


def ascii_host(host: str) -> str:
    """A host as DNS, TLS and a header take it: IDNA for names in other alphabets.

    Raises ValueError for one that no request can carry.
    """
    if ":" not in host:  # an address of IPv6 has no labels
        host = host.encode("idna").decode()  # of ASCII too: labels that are empty or too long
    if not re.fullmatch(r"[!-~]*", host):
        raise ValueError("a host holds no spaces and no control characters")
    return host


def post_bytes(pool: Pool, path: str, body: Any) -> bytes:
    """The whole request as it goes over the wire: made before the level starts."""
    payload = msgspec.json.encode(body)
    head = (
        f"POST {pool.path_of(path)} HTTP/1.1\r\n{pool.headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode("latin-1") + payload


def get_bytes(pool: Pool, path: str) -> bytes:
    return f"GET {pool.path_of(path)} HTTP/1.1\r\n{pool.headers}\r\n".encode("latin-1")


class _Whole:
    """A Reader that keeps everything."""

    is_done = False  # before the end of the body

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.data = bytearray()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, received: float) -> bool:
        self.data += data
        return True


def fetch(
    pool: Pool, wire: bytes, timeout_seconds: float = 30.0
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of a plain request. Raises TargetUnusable."""
    reader = _Whole()
    try:
        with gevent.Timeout(timeout_seconds):
            pool.exchange(wire, reader)
    except gevent.Timeout as problem:
        raise TargetUnusable(
            f"{pool.host} did not answer within {timeout_seconds:g} s"
        ) from problem
    except OSError as problem:
        raise TargetUnusable(f"{pool.host} cannot be reached: {problem}") from problem
    return reader.status, reader.headers, bytes(reader.data)
