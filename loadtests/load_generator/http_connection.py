"""HTTP/1.1 to one endpoint on gevent's loop, without a greenlet switch per chunk.

    pool = connect("http://127.0.0.1:8000")
    status, headers, body = fetch(pool, get_bytes(pool, "/v1/models"))

A greenlet sends its request in one piece and is woken once, when the response is complete.
Meanwhile the event loop calls `Connection._readable`, which reads bytes from the kernel and stamps
them. They are parsed (by httptools) several pieces later, at the latest at the end of the response.
A body has a length, comes in chunks, or ends with its connection (RFC 9112, 6.3). Works inside
Locust and outside it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
import zlib
from collections.abc import Iterator
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
from crossover.loadtests.load_generator.endpoint_access import NO_VALUES, Access, PrivateValues

# Ctrl-C ends the program with one sentence; gevent would print a traceback before it.
Hub.NOT_ERROR = (*Hub.NOT_ERROR, KeyboardInterrupt)

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: one clock for all processes of a machine

CONNECT_SECONDS = 30.0
# Limits of one response; what exceeds one ends the connection. A stream of events has limits of its
# own (sse_timestamps.py).
MAX_HEADERS = 200
MAX_HEADER_BYTES = 64 << 10  # of headers and trailers together
MAX_BODY_BYTES = 4 << 20  # of a response that is read as a whole, such as a list of models
INFLATED_BYTES = 1 << 20  # a compressed body is inflated in pieces of this size
MAX_UNPARSED_PIECES = 16  # pieces are parsed together, which is cheaper
MAX_UNPARSED_BYTES = 16 << 10  # of a piece; a larger one is parsed at once
_buffer = bytearray(1 << 18)  # shared by all connections: each read is parsed or copied at once
_view = memoryview(_buffer)
# Bytes of a path that are not encoded: RFC 3986's pchar and slash, and what is encoded already.
_PATH_BYTES = "/%:@!$&'()*+,;=~-._"
_ROUTES = ("/chat/completions", "/completions", "/models")  # removed from the end of a given URL
# Deviations in a response's syntax that other clients (h11, curl) accept too. They are dangerous
# only for servers behind a proxy, which may see other message boundaries.
_LENIENT = {
    "lenient_chunked_length": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
# Headers that this client writes itself, because they belong to the connection or the body.
_OWN_HEADERS = frozenset(
    (
        "connection",
        "content-length",
        "content-type",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_QUERY_BYTES = _PATH_BYTES + "?"
_NO_HTTP = (httptools.HttpParserError, httptools.HttpParserUpgrade)
# States of a response: no headers yet; headers were read; chunks that follow may be parsed later;
# the response is complete.
_AWAITED, _HEADED, _FLOWING, _WHOLE = range(4)


class ResponseTooLarge(ConnectionError):
    """A response exceeds a limit of its size. The readers of responses raise it too."""


class Connection:
    """One connection, kept between requests. The parser calls its `on_*` methods."""

    def __init__(self, sock: Any) -> None:
        """`sock`: a non-blocking socket of the standard library, or one of gevent with TLS."""
        self.is_unanswered = False  # the server closed it before the first byte of a response
        self._trouble: OSError | None = None  # why the connection ended
        self._sock = sock
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(**_LENIENT)
        self._reader: Any = None  # reads the current response; None: idle
        self._waiter: Any = None
        self._unread: list[tuple[float, bytes]] = []  # stamped pieces that are not parsed yet
        self._received = 0.0  # when the bytes that are being parsed were read from the kernel
        self._watcher = gevent.get_hub().loop.io(sock.fileno(), 1)
        self._watcher.start(self._readable)

    def exchange(self, wire: bytes, reader: Any) -> bool:
        """Send a request, wait for the complete response, and return whether the connection can be
        used again. Raises OSError, and whatever is raised in the waiting greenlet.

        The event loop calls reader.head(status, headers), then reader.body(data, received) for each
        piece, with the time on `clock` at which it was read from the kernel. `body` returns whether
        further pieces may be parsed later. `reader.is_done`: nothing more is expected of a body
        that ends with its connection. `reader.max_bytes`: of the whole response.
        `reader.check_size()` is called now and then while pieces are read, and raises
        ResponseTooLarge.
        """
        self._state = _AWAITED
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_chunked = self._has_length = self._is_reusable = False
        self._ends_with_connection = False
        self._bytes = self._header_bytes = 0
        self._max_bytes = reader.max_bytes
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
                count = 0  # a TLS socket raises this instead
            sent += count
            if not count:
                gevent.socket.wait_write(self._sock.fileno())

    def _readable(self) -> None:
        """Read bytes or the end of the connection. The event loop calls this."""
        try:
            count = self._sock.recv_into(_buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as problem:
            self._end(_tls_problem(problem) if isinstance(problem, ssl.SSLError) else problem)
            return
        now = clock()
        if self._reader is None:
            self._end(ConnectionResetError("the server sent bytes that belong to no request"))
            return
        self._bytes += count
        if not count:
            self._closed()
            return
        try:
            if self._bytes > self._max_bytes:
                raise ResponseTooLarge(f"the response has more than {self._max_bytes} bytes")
            if (
                self._state == _FLOWING
                and count <= MAX_UNPARSED_BYTES
                and len(self._unread) < MAX_UNPARSED_PIECES
            ):
                piece = bytes(_view[:count])
                self._unread.append((now, piece))
                # A chunked body ends with these bytes; if they came in two reads, the second is
                # shorter than 4 bytes.
                if count >= 4 and not piece.endswith(b"\r\n\r\n"):
                    return
                self._parse_unread()
            else:
                self._parse_unread()
                self._received = now
                self._parser.feed_data(_view[:count])
                # One long header is collected by the parser before `on_header` is called.
                if self._state == _AWAITED and self._bytes > MAX_HEADER_BYTES + len(_buffer):
                    raise _too_many_headers()
            self._reader.check_size()
        except _NO_HTTP as problem:
            cause = problem.__context__ or problem
            if not isinstance(cause, ResponseTooLarge):
                cause = ConnectionError(f"the response is not valid HTTP: {cause}")
            self._end(cause)
            return
        except ResponseTooLarge as problem:
            self._end(problem)
            return
        except Exception as problem:  # raised further, it would end no request and be seen nowhere
            self._end(ConnectionError(f"{type(problem).__name__}: {problem}"))
            return
        if self._state == _WHOLE and self._waiter is not None:
            self._waiter.switch(None)

    def _closed(self) -> None:
        """Handle a connection that the server closed: the end of a body without a length, or an
        error."""
        if self._state == _HEADED and self._ends_with_connection:
            self._watcher.stop()
            self._state = _WHOLE
            if self._waiter is not None:
                self._waiter.switch(None)
            return
        when = "during the response" if self._bytes else "before it answered"
        self._end(ConnectionResetError(f"the server closed the connection {when}"))

    def _parse_unread(self) -> None:
        """Parse the pieces that were put aside, each with its own stamp."""
        if self._unread:
            unread = self._unread
            self._unread = []
            for self._received, data in unread:
                self._parser.feed_data(data)

    def _end(self, problem: OSError) -> None:
        self._watcher.stop()
        self._trouble = problem
        if self._waiter is not None:
            self._waiter.switch(None)

    # httptools calls these methods while it parses a response.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        self._header_bytes += len(name) + len(value)
        if len(self._headers) > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            raise _too_many_headers()
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


def _too_many_headers() -> ResponseTooLarge:
    return ResponseTooLarge(
        f"the response has more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them"
    )


class Pool:
    """Connections to one endpoint, with the headers and the base path of every request.

    `base` is the path of the URL, or /v1 where that has none: the routes of OpenAI's API lie below
    it (`path_of`).
    """

    def __init__(
        self,
        url: str,
        *,
        values: PrivateValues = NO_VALUES,
        access: Access | None = None,
    ) -> None:
        """`url`: "http://host:8000", "http://host:8000/v1" or "http://host/v3". `values`: the API
        key, the headers and the query of every request. `access`: for its certificates. No
        connection is opened yet.

        Raises TargetUnusable if the URL is not valid or contains a password, which the run folder
        would record, if a header cannot carry its value, or if a certificate cannot be read.
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
                f"{url.partition('?')[0]!r} has a query behind it, which would be recorded with "
                "the URL. Give it as query"
            )
        if parts.scheme not in ("http", "https") or not host or host.isdecimal():
            raise TargetUnusable(
                f"{url!r} is not the URL of an endpoint. A URL looks like http://127.0.0.1:8000"
            )
        if parts.username is not None or parts.password is not None:
            raise TargetUnusable(
                "The url contains a user or a password, which the run folder would record. Put the "
                "key into an environment variable and name it with api_key_env"
            )
        self.values = values
        self._tls = _tls_context(parts.scheme, access or Access())
        if ":" in host:
            host = host.replace("%25", "%", 1)  # the zone of an IPv6 address follows
        host_in_url = f"[{host.partition('%')[0]}]" if ":" in host else host
        authority = f"{host_in_url}:{port}"
        self.host = f"{parts.scheme}://{authority}"  # for messages
        path = parts.path.rstrip("/")
        for route in _ROUTES:
            path = path.removesuffix(route)
        self.base = quote(path, safe=_PATH_BYTES, errors="surrogateescape") or "/v1"
        self._query = quote(values.query, safe=_QUERY_BYTES, errors="surrogateescape")
        self.headers = _header_lines(authority, values)
        self.idle: list[Connection] = []  # the most recently used one is used next
        self._address = host, port
        self._peer: tuple[int, Any] | None = None  # family and address of the first connection

    def path_of(self, path: str) -> str:
        """Return a path as it is requested. Routes of OpenAI's API, such as "/v1/models", are below
        `base`; all others, such as "/metrics", are those of the host.
        """
        return self.base + path[3:] if path.startswith("/v1/") else path

    def request_target(self, path: str) -> str:
        """Return a path with the query that every request carries, for the first line of a request.
        Messages have `path_of`, since the query may hold a key."""
        path = self.path_of(path)
        if not self._query:
            return path
        return f"{path}{'&' if '?' in path else '?'}{self._query}"

    def exchange(self, wire: bytes, reader: Any) -> None:
        """Send one request over an idle connection or a new one, and read the response to its end.
        Raises OSError.

        Some servers close a connection that they promised to keep (llama-server does after each
        stream). A request that the server did not answer for that reason is sent once more over a
        new connection (RFC 9112, 9.3.1).
        """
        is_reused = bool(self.idle)
        connection = self.idle.pop() if is_reused else self._open()
        try:
            is_reusable = connection.exchange(wire, reader)
        except OSError:
            if not (is_reused and connection.is_unanswered):
                raise
            connection = self._open()
            is_reusable = connection.exchange(wire, reader)
        if is_reusable:
            self.idle.append(connection)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Connection:
        """Open a connection. Raises OSError."""
        is_first = self._peer is None
        if self._peer is None:  # resolves the host's name, once for all connections
            sock = gevent.socket.create_connection(self._address, CONNECT_SECONDS)
            self._peer = sock.family, sock.getpeername()
        else:
            sock = gevent.socket.socket(self._peer[0], socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            if not is_first:
                sock.connect(self._peer[1])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._address[0])
            else:  # a socket of the standard library needs one call less for each piece
                sock = gevent.monkey.get_original("socket", "socket")(fileno=sock.detach())
            sock.setblocking(False)
        except ssl.SSLCertVerificationError as problem:
            sock.close()
            raise ConnectionError(
                f"its certificate is not trusted ({problem.verify_message}). Name the file of the "
                "certificate that signed it with --ca-file (ca_file in a campaign), or connect "
                "without a check with --insecure"
            ) from problem
        except ssl.SSLError as problem:
            sock.close()
            raise _tls_problem(problem) from problem
        except BaseException:
            sock.close()
            raise
        return Connection(sock)


connect = Pool


def _header_lines(authority: str, values: PrivateValues) -> str:
    """Return the headers of every request. Those of the user replace those with the same name.

    Raises TargetUnusable for a header that a request cannot carry; its value is not in the error.
    """
    lines = {
        "host": f"Host: {authority}",
        "user-agent": "User-Agent: crossover",
        "accept-encoding": "Accept-Encoding: identity",
    }
    if values.api_key is not None:
        if not (values.api_key.isascii() and values.api_key.isprintable()):
            raise TargetUnusable("The API key has characters that an HTTP header cannot carry")
        lines["authorization"] = f"Authorization: Bearer {values.api_key}"
    for name, value in values.headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise TargetUnusable(f"The header {name!r} has a name that HTTP does not allow")
        if name.lower() in _OWN_HEADERS:
            raise TargetUnusable(f"The header {name} is set by Crossover. Leave it out")
        if not (value.isascii() and value.isprintable()):
            raise TargetUnusable(
                f"The value of the header {name} has characters that HTTP cannot carry"
            )
        lines[name.lower()] = f"{name}: {value.strip()}"
    return "".join(f"{line}\r\n" for line in lines.values())


def _tls_context(scheme: str, access: Access) -> gevent.ssl.SSLContext | None:
    """Return the TLS settings of an endpoint; None: its URL begins with http://.

    Raises TargetUnusable if a file cannot be read, or if there is no TLS to which it applies.
    """
    if scheme != "https":
        set_options = {
            "--client-cert": access.client_cert,
            "--ca-file": access.ca_file,
            "--insecure": access.insecure,
        }
        if names := [name for name, value in set_options.items() if value]:
            raise TargetUnusable(
                f"The URL begins with http://, so {' and '.join(names)} would have no effect. "
                "Write https://, or leave the option out"
            )
        return None
    context = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if access.ca_file is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(access.ca_file)
        except (OSError, ValueError) as problem:
            raise TargetUnusable(
                f"--ca-file {access.ca_file!r} cannot be read as certificates in PEM: {problem}"
            ) from problem
    if access.client_cert is not None:
        certificate, _, key = access.client_cert.partition(",")
        try:
            # OpenSSL would ask the terminal for the password of an encrypted key.
            context.load_cert_chain(certificate, key or None, password="")
        except (OSError, ValueError) as problem:
            raise TargetUnusable(
                f"--client-cert {access.client_cert!r} cannot be read: {problem}. Name a file in "
                "PEM with the certificate and its key, without a password, or FILE,KEY"
            ) from problem
    return context


def _tls_problem(problem: ssl.SSLError) -> ConnectionError:
    """Return the error of a TLS connection, with what to do about it."""
    reason = problem.reason or str(problem)
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        advice = "If the server asks for a client certificate, name it with --client-cert"
    else:
        advice = "If the server has no TLS, its URL begins with http://"
    return ConnectionError(f"the TLS connection failed ({reason}). {advice}")


def is_inflatable(encoding: bytes) -> bool:
    """Return whether `Inflater` reads a body with this Content-Encoding."""
    return encoding.strip().lower() in (b"gzip", b"x-gzip", b"deflate")


class Inflater:
    """Decompresses one body, gzip or deflate (RFC 9110, 8.4.1). A gzip body may have several
    members (RFC 1952, 2.2), and some servers send deflate without zlib's header."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        """`max_bytes`: of the text."""
        self._member = _member()
        self._max_bytes = max_bytes
        self._inflated_bytes = 0
        self._is_over = False  # nothing that follows is read

    @property
    def is_complete(self) -> bool:
        """Return whether the body may end here."""
        return bool(self._member.eof)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the text of the next piece of the body, at most INFLATED_BYTES at a time. Raises
        ValueError if the piece is damaged or the text has more than `max_bytes`; pieces after that
        have no text."""
        has_more = False  # the member may have text left that needs no further data
        while (data or has_more) and not self._is_over:
            try:
                text = self._inflate(data)
            except zlib.error as problem:
                self._is_over = True
                if not self._member.eof:
                    raise ValueError(f"the body is compressed and damaged: {problem}") from problem
                return  # what follows the last member is no member: gzip ignores it too
            if self._inflated_bytes > self._max_bytes:
                self._is_over = True
                raise ValueError(
                    f"the body is compressed, and has more than {self._max_bytes} bytes"
                )
            data = self._member.unconsumed_tail or self._member.unused_data
            has_more = len(text) == INFLATED_BYTES and not self._member.eof
            if text:
                yield text

    def _inflate(self, data: bytes) -> bytes:
        """Return the next text, at most up to the end of the member. Raises zlib.error."""
        member = _member() if self._member.eof else self._member
        try:
            text: bytes = member.decompress(data, INFLATED_BYTES)
        except zlib.error:
            if self._inflated_bytes:
                raise
            member = zlib.decompressobj(-zlib.MAX_WBITS)  # deflate without a header
            text = member.decompress(data, INFLATED_BYTES)
        self._member = member
        self._inflated_bytes += len(text)
        return text


def _member() -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip and zlib headers are told apart


def ascii_host(host: str) -> str:
    """Return a host as DNS, TLS and a header need it: names in other alphabets in IDNA.

    Raises ValueError for a host that no request can carry.
    """
    if ":" not in host:  # an IPv6 address has no labels
        host = host.encode("idna").decode()  # also refuses labels that are empty or too long
    if not re.fullmatch(r"[!-~]*", host):
        raise ValueError("a host holds no spaces and no control characters")
    return host


def post_bytes(pool: Pool, path: str, body: Any) -> bytes:
    """Return a POST request with `body` as JSON, as it goes over the wire."""
    payload = msgspec.json.encode(body)
    head = (
        f"POST {pool.request_target(path)} HTTP/1.1\r\n{pool.headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode("latin-1") + payload


def get_bytes(pool: Pool, path: str) -> bytes:
    """Return a GET request as it goes over the wire."""
    return f"GET {pool.request_target(path)} HTTP/1.1\r\n{pool.headers}\r\n".encode("latin-1")


class _WholeResponse:
    """A reader for Connection.exchange that keeps the whole response."""

    is_done = False  # before the end of the body
    max_bytes = MAX_BODY_BYTES

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.data = bytearray()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, received: float) -> bool:
        self.data += data
        return True

    def check_size(self) -> None:
        """Do nothing: `max_bytes` is the only limit."""


def fetch(
    pool: Pool, wire: bytes, timeout_seconds: float = 30.0
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Send a request and return the status, headers and body of the response. Raises
    TargetUnusable if there is none within `timeout_seconds`."""
    reader = _WholeResponse()
    try:
        with gevent.Timeout(timeout_seconds):
            pool.exchange(wire, reader)
    except gevent.Timeout as problem:
        raise TargetUnusable(
            f"{pool.host} did not answer within {timeout_seconds:g} s"
        ) from problem
    except OSError as problem:
        raise TargetUnusable(f"{pool.host} cannot be reached: {problem}") from problem
    data = bytes(reader.data)
    encodings = [value for name, value in reader.headers if name.lower() == b"content-encoding"]
    if encodings and is_inflatable(encodings[-1]):
        inflater = Inflater()
        try:
            data = b"".join(inflater.feed(data))
        except ValueError as problem:
            raise TargetUnusable(f"{pool.host}: {problem}") from problem
        if reader.data and not inflater.is_complete:
            raise TargetUnusable(f"{pool.host}: the body is compressed, and its end is missing")
    return reader.status, reader.headers, data
