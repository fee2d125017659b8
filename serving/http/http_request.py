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
from typing import Any, TypeVar

import msgspec

from crossover.serving.http.api_errors import ApiError, too_late
from crossover.serving.http.asgi_types import Receive, Scope, Send
from crossover.serving.http.body_types import decode, encode
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel
from crossover.serving.supervisor.inflight_requests import Stream

T = TypeVar("T")

_JSON_TYPE = re.compile(rb"\s*application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_EVENTS = "text/event-stream; charset=utf-8"
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MAX_BODY_BYTES = 4 << 20  # limits of connections, headers and upload pace are a proxy's task


class Request:
    """`status` is set once the head of the response is sent; an error is an event from then on."""

    def __init__(self, registry: Registry, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrived_at = time.perf_counter()
        self.registry = registry
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.serial = secrets.token_hex(12)
        given = self.headers.get(b"x-request-id", b"")
        self.id = given if _REQUEST_ID.fullmatch(given) else b"req-" + self.serial.encode()
        self.path_name = ""  # the last part of a path that ends in a name
        self.route = "other"  # a metrics label, so never a path that a client made up
        self.body_bytes = 0
        self.deadline_seconds: float | None = None  # from its arrival
        self.status: int | None = None
        self.has_ended = False  # its response is complete
        self.is_client_gone = False
        self.model: ServedModel | None = None  # once it is known
        self.stream: Stream | None = None  # of its first answer, once it is submitted
        self._acquired_model: ServedModel | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def read(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Return the decoded body. Raises ApiError (400, 413, 415)."""
        headers = self.headers
        kind = headers.get(b"content-type", b"")
        if not _JSON_TYPE.fullmatch(kind) or b"content-encoding" in headers:
            text = (
                f"The Content-Type {kind[:80].decode('latin-1')!r} is not supported. Send "
                "application/json."
            )
            raise ApiError(415, text, "unsupported_media_type")
        length = headers.get(b"content-length", b"")
        # The announced size, or the received one if that is larger.
        size = int(length) if length.isdigit() else 0
        has_more = True
        body = bytearray()
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
        return decode(decoder, bytes(body))

    async def acquire_model(
        self, name: str | None, deadline_seconds: float | None = None
    ) -> ServedModel:
        """Return the model, loaded if needed, and keep it loaded until the request ends.

        Raises UnknownModel, Unavailable; ApiError 504 at the deadline.
        """
        self.model = model = self.registry.named(name)
        self.deadline_seconds = deadline_seconds
        self._watcher = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            async with asyncio.timeout(self.seconds_left()):
                self._acquired_model = await self.registry.acquire(model.served_name)
        except TimeoutError:
            raise too_late(self.deadline_seconds) from None
        return model

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline, 0 if it has passed; None: there is none."""
        if self.deadline_seconds is None:
            return None
        return max(0.0, self.arrived_at + self.deadline_seconds - time.perf_counter())

    async def _watch(self, task: asyncio.Task[Any] | None) -> None:
        """End the request when the client closes the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.has_ended and task is not None:
            self.is_client_gone = True
            task.cancel()

    def release_model(self) -> None:
        """Release the model: the request has ended, normally or not."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._acquired_model is not None:
            self._acquired_model.release()

    async def _send_head(self, status: int, more_headers: dict[str, str]) -> None:
        self.status = status
        model = self.model or (self.registry.first if self.registry.models else None)
        # A request that was moved is answered by another engine than the model's current one.
        engine = None if self.stream is None else self.stream.engine
        if engine is not None:
            backend = engine.label
        else:
            backend = "none" if model is None else model.supervisor.label
        headers = [(b"x-request-id", self.id), (b"x-crossover-backend", backend.encode())]
        headers += [(name.lower().encode(), text.encode()) for name, text in more_headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(
        self,
        value: Any,
        status: int = 200,
        headers: dict[str, str] | None = None,
        kind: str = "application/json",
    ) -> None:
        """Write a complete response: bytes unchanged, anything else as JSON."""
        body = value if isinstance(value, bytes) else encode(value)
        body_headers = {"Content-Type": kind, "Content-Length": str(len(body))}
        await self._send_head(status, body_headers | (headers or {}))
        await self.write(body, last=True)

    async def write(self, data: bytes, last: bool = False) -> None:
        """Write events of a streamed response; wait while the client does not read. The first call
        also sends the head."""
        if self.status is None:
            await self._send_head(200, {"Content-Type": _EVENTS} | _UNBUFFERED)
        self.has_ended = last
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
