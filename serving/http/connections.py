"""The HTTP server under the app: uvicorn's, with bounds on connections; and its listening socket.

    config = uvicorn.Config(app, **server_options(Limits()))

- A TLS handshake must be complete within HANDSHAKE_SECONDS, and is not begun where connections and
  handshakes together have as many descriptors as `connections` may.
- A head must be complete within `header_seconds` and have at most `header_bytes`; the same bytes
  are allowed for what follows a head without being body (chunk extensions, trailing fields).
- A reader that takes nothing of a full buffer for `stalled_seconds` loses its connection.
- A head has at most `header_fields`, and `pipelined` requests may follow one that is not answered.
  What breaks a bound is not parsed to its end: the parser runs on the event loop.
- A body comes in chunks of CHUNK_BYTES on average, but for the first FREE_CHUNKS.
- Where `connections` are open, another one takes the place of the one that has waited longest for
  a request. Where each has one, it is told so.
- The rest of a body whose answer is written (a 413) is dropped for `body_seconds` at most, so that
  the client gets to read that answer.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import os
import re
import resource
import secrets
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.errors import ServingError
from serving.http.limits import Limits
from serving.http.wire.errors import ApiError, try_again
from serving.http.wire.sse import encode

OTHER_DESCRIPTORS = 96  # beside connections: engines, files that are being read, the loop's own
DESCRIPTORS = "/proc/self/fd"
HANDSHAKE_SECONDS = 10.0  # until then uvicorn does not know of a connection
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
FREE_CHUNKS = 1024  # of a body, of any size
CHUNK_BYTES = 32
SEND_BUFFER_BYTES = 128 << 10  # of one connection in the kernel; Linux doubles it


class _Timer:
    """Calls something once, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, what: Callable[[], None]):
        self._loop = loop
        self._seconds = seconds
        self._what = what
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait, where it does not wait already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._what)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _without_upgrade(data: bytes) -> bytes:
    """A head in one piece without the header that asks for another protocol, as RFC 9110 allows.

    Java's HttpClient sends `Upgrade: h2c` with each request. The length stays what it is.
    """
    if b"pgrade" not in data:
        return data
    head, mark, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nIgnored:", head) + mark + body


class GuardedProtocol(HttpToolsProtocol):
    """One connection within `limits`. `idle`: those of the server without a request, the one that
    has waited longest first."""

    def __init__(
        self,
        *arguments: Any,
        limits: Limits,
        on_refused: Callable[[int], None],
        idle: dict[GuardedProtocol, None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._on_refused = on_refused
        self._idle = idle
        self._header_timer = _Timer(self.loop, limits.header_seconds, self._too_slow)
        self._stall_timer = _Timer(self.loop, limits.stalled_seconds, self._abort)
        self._rest_timer = _Timer(self.loop, limits.body_seconds, self._abort)
        self._in_head = True
        self._head_bytes = 0
        self._bodiless_bytes = 0  # since the last piece of body
        self._body_bytes = self._chunks = 0
        self._pieces: list[bytes] = []  # of a body, from the data that is being parsed
        self._problem: ApiError | None = None  # why parsing was broken off

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self._limits.connections
        if len(self.connections) > most:
            longest = next(iter(self._idle), None)
            if longest is None:
                text = f"{most} connections are open, the most allowed"
                self._refuse(try_again(503, text, "too_many_connections", 1.0))
                return
            del self._idle[longest]
            longest._abort()
        self._idle[self] = None
        self._header_timer.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        for timer in (self._header_timer, self._stall_timer, self._rest_timer):
            timer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            data = _without_upgrade(data)
            self._head_bytes += len(data)
            self._header_timer.start()  # of a later request on a kept connection
        else:
            self._bodiless_bytes += len(data)
        super().data_received(data)
        self._give_body()
        # A head may come with a body of any size: an incomplete head is what counts.
        most = self._limits.header_bytes
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > most:
            text = f"the headers have more than {most} bytes"
            self._refuse(ApiError(431, text, code="headers_too_large"))
        elif not self._in_head and self._bodiless_bytes > most:
            self._abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # fields after the body may change nothing
            most = self._limits.header_fields
            if len(self.headers) >= most:
                text = f"the request has more than {most} headers"
                self._break_off(ApiError(431, text, code="headers_too_large"))
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > FREE_CHUNKS + self._body_bytes // CHUNK_BYTES:
            text = f"the body comes in chunks of less than {CHUNK_BYTES} bytes"
            self._break_off(ApiError(400, text, code="chunks_too_small"))

    def on_body(self, body: bytes) -> None:
        self._bodiless_bytes = 0
        self._body_bytes += len(body)
        self._pieces.append(body)

    def _give_body(self) -> None:
        """What has come of a body, in one piece: uvicorn copies all it has for each."""
        if self._pieces:
            whole = b"".join(self._pieces)
            self._pieces = []
            super().on_body(whole)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined:
            text = f"more than {self._limits.pipelined} requests follow one that is not answered"
            self._break_off(ApiError(400, text, code="too_many_requests_at_once"))
        self._idle.pop(self, None)
        self._in_head = False
        self._body_bytes = self._chunks = 0
        self._head_bytes = self._bodiless_bytes = 0
        self._header_timer.stop()
        if self.parser.should_upgrade():
            # The parser takes no body for such a request's own: it would be another request.
            text = "Upgrade is not offered; send the request without it"
            self._refuse(ApiError(400, text, code="no_upgrade"))
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._give_body()
        self._in_head = True
        self._rest_timer.stop()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._in_head:
            self._rest_timer.start()
        if self.cycle.response_complete:
            self._idle[self] = None

    def _break_off(self, problem: ApiError) -> None:
        """Stop the parser, whose callback this is called from. Raises ValueError."""
        self._problem = problem
        raise ValueError

    def send_400_response(self, msg: str) -> None:
        text = "this is not an HTTP request that can be read"
        self._refuse(self._problem or ApiError(400, text, code="invalid_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer.stop()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # close() waits until what was written is read, which may be never.
        self.loop.call_later(self._limits.stalled_seconds, self._abort)

    def _abort(self) -> None:
        self.transport.abort()

    def _too_slow(self) -> None:
        self._header_timer.stop()
        if not self.transport.is_closing():
            text = f"no complete request within {self._limits.header_seconds:g} s"
            self._refuse(ApiError(408, text, code="head_too_slow"))

    def _refuse(self, problem: ApiError) -> None:
        """Answer from here, without the app, and close."""
        self._on_refused(problem.status)
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self._abort()  # nothing may be written into an answer that is on its way
                return
            self.cycle.disconnected = True  # what the app still says goes nowhere
            self.cycle.message_event.set()
        body = encode(problem.body)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": f"req-{secrets.token_hex(12)}",
            **problem.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[problem.status] + head.encode() + b"\r\n" + body)
        self.transport.close()


def room_for_connections(wanted: int) -> int:
    """Connections that this process may have, `wanted` at most; raises its limit of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - OTHER_DESCRIPTORS))


def server_options(
    limits: Limits, on_refused: Callable[[int], None] = lambda status: None
) -> dict[str, Any]:
    """Arguments of uvicorn.Config that belong to this app, whoever runs it: of one server.

    `on_refused` gets the status of each answer that is not the app's.
    """
    return {
        "http": functools.partial(GuardedProtocol, limits=limits, on_refused=on_refused, idle={}),
        "loop": "uvloop",
        "ws": "none",
        "log_config": None,  # the server's own log takes uvicorn's lines too
        "log_level": "error",  # a line for each wrong request is a stranger's to write
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing here believes X-Forwarded-For
        "timeout_keep_alive": int(limits.idle_seconds),
        "backlog": min(limits.connections, 4096),
    }


def bound_handshakes(loop: asyncio.AbstractEventLoop, connections: int) -> None:
    """From now on the loop's TLS servers give a handshake HANDSHAKE_SECONDS (uvicorn has no option
    for it, and asyncio's default is 60 s), and silent sockets cannot take all descriptors.
    """
    create = loop.create_server
    most = connections + OTHER_DESCRIPTORS // 2

    def bounded(*arguments: Any, ssl: Any = None, **options: Any) -> Any:
        if ssl is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
            ssl.wrap_bio = _refusing(ssl.wrap_bio, most)
        return create(*arguments, ssl=ssl, **options)

    loop.create_server = bounded  # type: ignore[method-assign]


def _refusing(wrap: Callable[..., Any], most: int) -> Callable[..., Any]:
    """SSLContext.wrap_bio, which begins a handshake, while `most` descriptors or fewer are open."""

    def wrap_bio(*given: Any, **named: Any) -> Any:
        # Linux 6.2 and later give the count as a size; before that it is 0.
        count = os.stat(DESCRIPTORS).st_size or len(os.listdir(DESCRIPTORS))
        if count > most:
            raise ConnectionAbortedError(f"{count} descriptors are open")  # closes this one alone
        return wrap(*given, **named)

    return wrap_bio


class CannotListen(ServingError):
    """The address is taken, or not this machine's."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one. Raises CannotListen in one sentence."""
    listener = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this. Else the kernel keeps megabytes for a reader that stalls.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
        listener.set_inheritable(False)
    except (OSError, OverflowError, UnicodeError) as problem:
        if listener is not None:
            listener.close()
        taken = getattr(problem, "errno", None) == errno.EADDRINUSE
        advice = "; --port 0 takes a free one" if taken else ""
        why = getattr(problem, "strerror", None) or problem
        raise CannotListen(f"cannot listen on {host}:{port}: {why}{advice}") from problem
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    host = str(listener.getsockname()[0]).partition("%")[0]
    return ipaddress.ip_address(host).is_loopback


def url_of(listener: socket.socket, tls: bool = False) -> str:
    """The URL under which this machine reaches the socket; a wildcard address is its loopback."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
