"""The HTTP server under the app: uvicorn's, with the bounds that it lacks.

    config = uvicorn.Config(app, **server_options(Limits()))

- A head must be complete within `header_seconds` and have at most `header_bytes`; uvicorn's httptools protocol waits and collects for ever.
- A connection that never sends anything is closed after the same time: 500 idle sockets cost 500 file descriptors for a while, no more.
- A reader that takes nothing of a full buffer for `stalled_seconds` loses its connection, and with it its sequence.
- What comes after a head without being body (fields after the last chunk, a chunk's extensions) has the bound of a head.
- More than `connections` at once are told so.
- What is left of a body whose answer is already written (a 413) is read and dropped, so that the client gets to read that answer; but for
  no longer than `body_seconds`.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.access import Limits
from serving.protocol import ApiError, try_again
from serving.replies import encode

OTHER_DESCRIPTORS = 96  # beside connections: engines, files that are being read, the loop's own


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol class with these bounds, for uvicorn.Config(http=...)."""

    class Guarded(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None
        _rest_timer: asyncio.TimerHandle | None = None
        _in_head = True
        _head_bytes = 0
        _bodiless_bytes = 0  # since the last piece of body: extensions of a chunk, or fields after the last one, which nobody reads

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(try_again(503, f"{limits.connections} connections are open, the most allowed", "too_many_connections", 1.0))
                return
            self._header_timer = self.loop.call_later(limits.header_seconds, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timers()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
                if self._header_timer is None:  # the first bytes of a later request on a kept connection
                    self._header_timer = self.loop.call_later(limits.header_seconds, self._too_slow)
            else:
                self._bodiless_bytes += len(data)
            super().data_received(data)
            # A head may come together with a body of any size, so what counts is what is there while it is still incomplete.
            if self._in_head and self._head_bytes > limits.header_bytes and not self.transport.is_closing():
                self._refuse(ApiError(431, f"the headers have more than {limits.header_bytes} bytes", code="headers_too_large"))
            if not self._in_head and self._bodiless_bytes > limits.header_bytes and not self.transport.is_closing():
                self.transport.abort()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # fields after the body may change nothing
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._bodiless_bytes = 0
            super().on_body(body)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = self._bodiless_bytes = 0
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            if self._rest_timer is not None:
                self._rest_timer.cancel()
                self._rest_timer = None
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._in_head and not self.transport.is_closing():
                self._rest_timer = self.loop.call_later(limits.body_seconds, self.transport.abort)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is not an HTTP request that can be read", code="invalid_http"))

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stall_timer is None:
                self._stall_timer = self.loop.call_later(limits.stalled_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            # close() waits until what was written is read; whoever does not read it by then never will.
            self.loop.call_later(limits.stalled_seconds, self.transport.abort)

        def _too_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self._refuse(ApiError(408, f"no complete request within {limits.header_seconds:g} s", code="head_too_slow"))

        def _refuse(self, problem: ApiError) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                if self.cycle.response_started or self.pipeline:
                    self.transport.abort()  # an answer is on its way: nothing may be written into it
                    return
                self.cycle.disconnected = True  # this is its answer; what the app still says goes nowhere
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

        def _stop_timers(self) -> None:
            for timer in (self._header_timer, self._stall_timer, self._rest_timer):
                if timer is not None:
                    timer.cancel()
            self._header_timer = self._stall_timer = self._rest_timer = None

    return Guarded


def room_for_connections(wanted: int) -> int:
    """How many connections this process may have at once, `wanted` at most: its limit of file descriptors is raised as far as they need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OTHER_DESCRIPTORS))


def server_options(limits: Limits) -> dict[str, Any]:
    """Arguments of uvicorn.Config that belong to this app, whoever runs it."""
    return {
        "http": guarded(limits),
        "loop": "uvloop",
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing here believes X-Forwarded-For
        "timeout_keep_alive": int(limits.idle_seconds),
        "backlog": min(limits.connections, 4096),
    }
