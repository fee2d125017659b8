"""One HTTP/1.1 connection on gevent's loop, without a greenlet switch per chunk.

A greenlet sends its request in one piece and is woken once, when the answer is whole. Meanwhile
the loop calls `Connection._readable`: bytes are taken from the kernel, stamped, and parsed some
pieces later (httptools), at the end of the answer at the latest.
Works inside Locust and outside it: nothing is patched, and Locust's patches are not used.
"""

from __future__ import annotations

import contextlib
import socket as names
import ssl
import time
from enum import Enum
from typing import Any, Protocol

import gevent
import gevent.socket
import httptools
from gevent.hub import Waiter

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: one clock for all processes of a machine

IDLE_SECONDS = 2.0  # idle for longer: not used again, since servers close theirs after 5 s
HEADERS = 256  # most of an answer, trailers included
HEAD_BYTES = 65536  # most of an answer's status line and headers; more ends the connection
LATER = 16  # pieces put aside before they are parsed: parsing is cheapest by the dozen
FRESH_SECONDS = 0.02  # idle for less: not checked for having been closed
_buffer = bytearray(1 << 18)  # shared: what was read is parsed or copied before the next read
_view = memoryview(_buffer)
_READ = 1
_NO_HTTP = (httptools.HttpParserError, httptools.HttpParserUpgrade)


class Reader(Protocol):
    """Who takes an answer. Called from the event loop, so it must not wait.

    Where it raises ConnectionError, the connection ends.
    """

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers are here."""

    def body(self, data: bytes, received: float) -> bool:
        """A piece of the body, and when it left the kernel, on `clock`. True: more may wait."""


class _State(Enum):
    """How far an answer has come."""

    AWAITED = "awaited"
    BEGUN = "begun"
    HEADED = "headed"
    FLOWING = "flowing"  # chunks follow that may be parsed later
    WHOLE = "whole"


class _Framing(Enum):
    """What tells the end of a body."""

    LENGTH = "length"
    CHUNKS = "chunks"
    CLOSE = "close"


class _Answer:
    """One answer on its way to `reader`."""

    __slots__ = ("framing", "head_bytes", "headers", "reader", "reusable", "state")

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.state = _State.AWAITED
        self.framing = _Framing.CLOSE
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_bytes = 0  # read before they were whole
        self.reusable = False  # the connection may carry another request


class Connection:
    """One connection, kept between requests. Its parser's callbacks are its own `on_*` methods."""

    def __init__(self, sock: Any, tls: Tls | None = None) -> None:
        self.received = 0.0  # when the newest bytes left the kernel
        self.parked = 0.0  # when it last became idle
        self.is_unanswered = False  # the server closed it before the first byte of an answer
        self._sock = sock
        self._tls = tls
        self._parser = httptools.HttpResponseParser(self)
        self._answer: _Answer | None = None  # None: idle
        self._waiter: Any = None
        self._unread: list[tuple[float, bytes]] = []  # stamped pieces, to be parsed later
        self._trouble: OSError | None = None  # why it is over
        self._watcher = gevent.get_hub().loop.io(sock.fileno(), _READ)
        self._watcher.start(self._readable)

    def exchange(self, wire: bytes, reader: Reader) -> bool:
        """Send, and return when the answer is whole. Raises OSError, and what is thrown in.

        False: the connection is closed and takes no other request.
        """
        answer = _Answer(reader)
        self._answer = answer
        try:
            self._send(wire)
            while answer.state is not _State.WHOLE:
                if self._trouble is not None:
                    raise self._trouble
                self._waiter = Waiter()
                try:
                    self._waiter.get()
                finally:
                    self._waiter = None
        except BaseException as problem:
            with contextlib.suppress(*_NO_HTTP):
                self._read()
            is_closed = isinstance(problem, ConnectionResetError | BrokenPipeError)
            self.is_unanswered = is_closed and answer.head_bytes == 0
            self.close()
            raise
        finally:
            self._answer = None
        if answer.reusable and self._trouble is None:
            self.parked = clock()
            return True
        self.close()
        return False

    def is_good(self) -> bool:
        """Whether a request may be sent over it: not idle for too long, and not closed."""
        idle = clock() - self.parked
        if self._trouble is not None or idle > IDLE_SECONDS:
            return False
        if idle < FRESH_SECONDS:
            return True
        try:
            self._sock.recv(1, names.MSG_PEEK)  # closed, or bytes that nobody asked for
            return False
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
        answer = self._answer
        if answer is None:
            self._end(ConnectionResetError("the server sent bytes that belong to no request"))
            return
        if answer.state in (_State.AWAITED, _State.BEGUN):
            answer.head_bytes += count
            # A read may hold a large piece of the body behind the head.
            if answer.head_bytes > HEAD_BYTES + len(_buffer):
                self._end(ConnectionError(f"an answer's head of more than {HEAD_BYTES} bytes"))
                return
        data = _view[:count]
        try:
            if answer.state is _State.FLOWING and self._tls is None and len(self._unread) < LATER:
                piece = bytes(data)
                self._unread.append((now, piece))
                # An answer ends so; where that came in two reads, the second is shorter.
                if count >= 4 and not piece.endswith(b"\r\n\r\n"):
                    return
                self._read()
            else:
                self._read()
                self.received = now
                self._parser.feed_data(data if self._tls is None else self._tls.opened(data))
        except (*_NO_HTTP, ssl.SSLError) as problem:
            self._end(
                ConnectionError(f"an answer that is no HTTP: {problem.__context__ or problem}")
            )
            return
        if answer.state is _State.WHOLE and self._waiter is not None:
            self._waiter.switch(None)

    def _read(self) -> None:
        """Parses what was put aside, each piece with its own stamp."""
        if self._unread:
            unread = self._unread
            self._unread = []
            for self.received, data in unread:
                self._parser.feed_data(data)

    def _end(self, problem: OSError | None) -> None:
        """The connection is over, by the server's doing or by an error."""
        self._watcher.stop()
        with contextlib.suppress(*_NO_HTTP):
            self._read()
        answer = self._answer
        place = "before it answered"
        if answer is not None and answer.state is not _State.AWAITED:
            place = "within its answer"
            headed = answer.state is not _State.BEGUN
            if problem is None and headed and answer.framing is _Framing.CLOSE:
                answer.state = _State.WHOLE
        self._trouble = problem or ConnectionResetError(f"the server closed the connection {place}")
        if self._waiter is not None:
            self._waiter.switch(None)

    # httptools calls these, only while there is an answer.

    def on_message_begin(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if answer.state is _State.WHOLE:
            raise ConnectionError("a second answer to one request")  # ends the connection
        if answer.state is _State.AWAITED:
            answer.state = _State.BEGUN

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            if len(self._answer.headers) >= HEADERS:
                raise ConnectionError(f"an answer with more than {HEADERS} headers")
            self._answer.headers.append((name, value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        status = self._parser.get_status_code()
        if answer is None:
            return
        if status < 200:  # 100 Continue and the like: the answer is still to come
            answer.headers = []
            return
        found = {name.lower() for name, _ in answer.headers}
        if b"transfer-encoding" in found:
            answer.framing = _Framing.CHUNKS
        elif b"content-length" in found:
            answer.framing = _Framing.LENGTH
        answer.state = _State.HEADED
        answer.reader.head(status, answer.headers)

    def on_body(self, data: bytes) -> None:
        answer = self._answer
        if answer is not None:
            may_wait = answer.reader.body(data, self.received)
            flows = may_wait and answer.framing is _Framing.CHUNKS
            answer.state = _State.FLOWING if flows else _State.HEADED

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is not None and answer.state in (_State.HEADED, _State.FLOWING):
            answer.state = _State.WHOLE
            answer.reusable = self._parser.should_keep_alive()


class Tls:
    """TLS over a socket that knows nothing of it: bytes in and out of memory."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
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
                raise ConnectionResetError(
                    "the server closed the connection within the TLS handshake"
                )
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
