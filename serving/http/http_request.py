"""One HTTP request as a handler sees it, from its head to the end of the response.

    body = await request.read(CHAT)
    model = await request.acquire_model(body.model)   # loaded until the response has ended
    await request.answer(value)         # or write events, the last ones with last=True

Responses are written directly to the ASGI server's `send`. From `acquire_model` on, the request's
task is cancelled when the client closes the connection.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from crossover.serving.http.api_errors import ApiError, deadline_exceeded
from crossover.serving.http.asgi_types import Receive, Scope, Send
from crossover.serving.http.body_types import decode, encode
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel, in_text_thread
from crossover.serving.supervisor.inflight_requests import Stream

T = TypeVar("T")

_JSON_TYPE = re.compile(rb"\s*application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events before it passes them on
}
# A stream without a byte for so long gets a comment, at the latest after twice that time: proxies
# and clients close connections that are silent for 30 s or more. Until the first comment, an error
# still has a status of its own.
KEEP_ALIVE_SECONDS = 7.0
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment in a stream of events
MAX_BODY_BYTES = 4 << 20
INLINE_BODY_BYTES = 64 << 10  # larger ones are decoded in the text thread


class Request:
    """One request and its response.

    `status` is None until the head of the response is sent. An error after that can no longer
    change the status, so it is sent as an event of the stream.
    """

    def __init__(self, registry: Registry, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrived_at = time.perf_counter()  # in seconds
        self.registry = registry
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.serial = secrets.token_hex(12)
        client_id = self.headers.get(b"x-request-id", b"")
        is_valid_id = _REQUEST_ID.fullmatch(client_id) is not None
        self.id = client_id if is_valid_id else b"req-" + self.serial.encode()
        self.path_name = ""  # the model's name in /v1/models/{model}
        self.requires_cache_salt = False  # of requests that generate
        self.cors_headers: Sequence[tuple[bytes, bytes]] = ()  # of the response
        self.route = "other"  # a metrics label, so never a path that a client made up
        self.body_bytes = 0
        self.deadline_seconds: float | None = None  # seconds after `arrived_at`
        self.status: int | None = None
        self.has_ended = False  # the response is complete
        self.is_client_gone = False
        self.model: ServedModel | None = None  # None: the request names none, or not yet read
        self.stream: Stream | None = None  # of the first sequence, once it is submitted
        self._acquired_model: ServedModel | None = None
        self._disconnect_watcher: asyncio.Task[None] | None = None
        self._is_silent = True  # nothing was written since the last look
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None  # that is being written

    async def read(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Return the decoded body. Raises ApiError (400, 413, 415)."""
        headers = self.headers
        content_type = headers.get(b"content-type", b"")
        if not _JSON_TYPE.fullmatch(content_type) or b"content-encoding" in headers:
            text = (
                f"The Content-Type {content_type[:80].decode('latin-1')!r} is not supported. Send "
                "application/json."
            )
            raise ApiError(415, text, "unsupported_media_type")
        content_length = headers.get(b"content-length", b"")
        # The announced size, so that a body that is too large is refused before it is received. A
        # chunked body announces none; there the received size counts.
        size = int(content_length) if content_length.isdigit() else 0
        body = bytearray()
        has_more = True
        while has_more and size <= MAX_BODY_BYTES:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_client_gone = True
                raise asyncio.CancelledError
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            size = max(size, len(body))
        if size > MAX_BODY_BYTES:
            text = f"The body has at least {size} bytes; the maximum is {MAX_BODY_BYTES}."
            raise ApiError(413, text, "body_too_large")
        self.body_bytes = size
        if size <= INLINE_BODY_BYTES:
            return decode(decoder, bytes(body))
        return await in_text_thread(decode, decoder, bytes(body))

    async def acquire_model(
        self, name: str | None, deadline_seconds: float | None = None
    ) -> ServedModel:
        """Return the model, loaded if needed, and keep it loaded until the request ends.

        Raises ModelNotServed, Unavailable; ApiError 504 at the deadline.
        """
        self.model = model = self.registry.named(name)
        self.deadline_seconds = deadline_seconds
        watch = self._cancel_on_disconnect(asyncio.current_task())
        self._disconnect_watcher = asyncio.create_task(watch)
        try:
            async with asyncio.timeout(self.seconds_left()):
                self._acquired_model = await self.registry.acquire(model.served_name)
        except TimeoutError:
            raise deadline_exceeded(self.deadline_seconds) from None
        return model

    def keep_alive(self) -> None:
        """From now on, write a comment whenever the stream is silent, whatever it waits for: a
        load, the queue, a long prompt, or an engine that restarts."""
        loop = asyncio.get_running_loop()
        self._keep_alive_timer = loop.call_later(KEEP_ALIVE_SECONDS, self._break_silence)

    def _break_silence(self) -> None:
        if self._is_silent and self._comment is None and not self.has_ended:
            self._comment = asyncio.create_task(self._write_comment())
        self._is_silent = True
        self.keep_alive()

    async def _write_comment(self) -> None:
        try:
            if self.status is None:
                await self._send_head(200, _EVENT_STREAM_HEADERS)
            await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
        finally:
            self._comment = None

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline, 0 if it has passed; None: there is none."""
        if self.deadline_seconds is None:
            return None
        return max(0.0, self.arrived_at + self.deadline_seconds - time.perf_counter())

    async def _cancel_on_disconnect(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel the request's task when the client closes the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.has_ended and task is not None:
            self.is_client_gone = True
            task.cancel()

    def release_model(self) -> None:
        """Release the model and stop watching the connection, after the request has ended in any
        way."""
        if self._disconnect_watcher is not None:
            self._disconnect_watcher.cancel()
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()
        if self._acquired_model is not None:
            self._acquired_model.release()

    async def _send_head(self, status: int, more_headers: dict[str, str]) -> None:
        self.status = status
        label = self._backend_label().encode()
        headers = [(b"x-request-id", self.id), (b"x-crossover-backend", label), *self.cors_headers]
        engine = None if self.stream is None else self.stream.engine
        if engine is not None and engine.number is not None:
            headers.append((b"x-crossover-engine", str(engine.number).encode()))
        headers += [(name.lower().encode(), value.encode()) for name, value in more_headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _backend_label(self) -> str:
        """Return the value of X-Crossover-Backend."""
        # After a failover, the engine of this request may not be the model's current one.
        if self.stream is not None and self.stream.engine is not None:
            return self.stream.engine.label
        if self.model is not None:
            return self.model.supervisor.label
        return self.registry.first.supervisor.label if self.registry.models else "none"

    async def answer(
        self,
        value: Any,
        status: int = 200,
        headers: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        """Write a complete response: bytes unchanged, anything else as JSON."""
        body = value if isinstance(value, bytes) else encode(value)
        body_headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
        if self._comment is not None:  # it has not begun, since there is no status yet
            self._comment.cancel()
            self._comment = None
        await self._send_head(status, body_headers | (headers or {}))
        await self.write(body, last=True)

    async def write(self, data: bytes, last: bool = False) -> None:
        """Write events of a streamed response, and wait while the client does not read them.

        The first call also sends the head. `last` ends the response.
        """
        if self._comment is not None:
            await asyncio.wait([self._comment])
        if self.status is None:
            await self._send_head(200, _EVENT_STREAM_HEADERS)
        self.has_ended = last
        if data or last:
            self._is_silent = False
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
