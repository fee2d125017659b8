"""One HTTP request, from its head to the end of its answer: what a handler is given.

    body = await request.read(CHAT)
    model = await request.hold(body.model)     # loaded where it may be, until the answer has ended
    await request.answer(value)                # or write events, and close with the last ones

Answers are written straight to the ASGI server's `send`. From `hold` on, a client that closes the
connection ends the request: its task is cancelled.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from serving.errors import EngineState, Overloaded
from serving.http.api_errors import ApiError, too_late
from serving.http.api_schemas import decode, encode
from serving.registry.model_registry import Registry, ServedModel

T = TypeVar("T")

_JSON_TYPE = re.compile(rb"\s*application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_EVENTS = b"text/event-stream; charset=utf-8"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request; `waiting_for_load` of the process. What breaks one is a 4xx that names it.

    A proxy bounds connections, heads and their pace.
    """

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # from the head of a request to the end of its body
    waiting_for_load: int = 256  # requests for models that are being loaded
    sequences: int = 128  # prompts * n of one request
    answer_logprobs: int = 200_000  # log-probabilities of an answer that is not streamed
    deadline_seconds: float | None = None  # of every request; one may ask for a shorter deadline


@dataclass(eq=False)
class Endpoint:
    """What all requests share. `waiting_for_load`: how many wait until their model is loaded."""

    router: Registry
    limits: Limits
    waiting_for_load: int = 0


def sse_event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


class Request:
    """`status` is known once the head of the answer has left: an error is an event then."""

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.began = time.perf_counter()
        self.endpoint = endpoint
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.serial = secrets.token_hex(12)
        given = self.headers.get(b"x-request-id", b"")
        self.id = given if _REQUEST_ID.fullmatch(given) else b"req-" + self.serial.encode()
        self.route = "other"  # as a label: never what a stranger typed
        self.parameter = ""  # of the path
        self.body_bytes = 0
        self.deadline_seconds: float | None = None  # from its arrival
        self.status: int | None = None
        self.ended = self.gone = False
        self.model: ServedModel | None = None  # once it is known
        self._release: Callable[[], None] | None = None  # lets go of the model
        self._watcher: asyncio.Task[None] | None = None

    async def read(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as its type. Raises ApiError (400, 408, 413, 415)."""
        headers, limits = self.headers, self.endpoint.limits
        kind = headers.get(b"content-type", b"")
        if not _JSON_TYPE.fullmatch(kind):
            text = f"Content-Type {kind[:80].decode('latin-1')!r}; send application/json"
            raise ApiError(415, text, "unsupported_media_type")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            text = "Content-Encoding: bodies are taken as they are"
            raise ApiError(415, text, "unsupported_content_encoding")
        most, length = limits.body_bytes, headers.get(b"content-length", b"")
        size, more, body = int(length) if length.isdigit() else 0, True, bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while more and size <= most:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone = True
                        raise asyncio.CancelledError
                    body += message.get("body", b"")
                    more, size = message.get("more_body", False), max(size, len(body))
        except TimeoutError:
            text = f"the body did not arrive within {limits.body_seconds:g} s"
            close = {"Connection": "close"}
            raise ApiError(408, text, "body_too_slow", headers=close) from None
        if size > most:
            text = f"the body has {size} bytes or more; {most} are allowed"
            raise ApiError(413, text, "body_too_large")
        self.body_bytes = size
        return decode(decoder, bytes(body))

    def look_at(self, name: str | None) -> ServedModel:
        """The model of a request that needs no engine. Raises UnknownModel, ModelNotNamed."""
        self.model = self.endpoint.router.named(name)
        return self.model

    async def hold(self, name: str | None, deadline_seconds: float | None = None) -> ServedModel:
        """The model, held until the request ends, and loaded first where it may be.

        Raises UnknownModel, ModelNotNamed, Unavailable; Overloaded where too many wait for loads;
        ApiError 504 at the deadline.
        """
        endpoint, model = self.endpoint, self.look_at(name)
        deadlines = (deadline_seconds, endpoint.limits.deadline_seconds)  # none is 0
        self.deadline_seconds = min(filter(None, deadlines), default=None)
        self._watcher = asyncio.create_task(self._watch(asyncio.current_task()))
        waits = model.supervisor.state != EngineState.ready
        if waits and endpoint.waiting_for_load >= endpoint.limits.waiting_for_load:
            text = f"{endpoint.waiting_for_load} requests wait for models that are being loaded"
            raise Overloaded(text, 5.0)
        endpoint.waiting_for_load += waits
        try:
            async with asyncio.timeout(self.seconds_left()):
                self._release = await endpoint.router.hold(model.served_name)
        except TimeoutError:
            raise too_late(self.deadline_seconds or 0.0) from None
        finally:
            endpoint.waiting_for_load -= waits
        return model

    def seconds_left(self) -> float | None:
        """Of its deadline; None: it has none. Raises ApiError 504 where it is past."""
        if self.deadline_seconds is None:
            return None
        left = self.deadline_seconds - (time.perf_counter() - self.began)
        if left <= 0:
            raise too_late(self.deadline_seconds)
        return left

    async def _watch(self, task: asyncio.Task[Any] | None) -> None:
        """Ends the request when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.ended and task is not None:
            self.gone = True
            task.cancel()

    def let_go(self) -> None:
        """It has ended, in whatever way."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._release is not None:
            self._release()

    @property
    def backend(self) -> str:
        """What answers: the engine of the request's model, or the first's."""
        router = self.endpoint.router
        model = self.model or (router.first if router.models else None)
        return "none" if model is None else model.supervisor.label

    async def _start(self, status: int, kind: bytes, *more: tuple[bytes, bytes]) -> None:
        self.status = status
        backend = self.backend.encode("ascii", "replace")
        named = [(b"x-request-id", self.id), (b"x-crossover-backend", backend)]
        headers = [(b"content-type", kind), *named, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(
        self,
        value: Any,
        status: int = 200,
        headers: dict[str, str] | None = None,
        kind: str = "application/json",
    ) -> None:
        """A whole answer: bytes as they are, anything else as JSON."""
        body = value if isinstance(value, bytes) else encode(value)
        given = (headers or {}) | {"Content-Length": str(len(body))}
        more = [(name.lower().encode(), text.encode()) for name, text in given.items()]
        await self._start(status, kind.encode(), *more)
        await self.close_stream(body)

    async def write(self, data: bytes) -> None:
        """Some events of a streamed answer; waits while the client's side is full. The first ones
        come with the head."""
        if self.status is None:
            no_cache = (b"cache-control", b"no-cache")
            await self._start(200, _EVENTS, no_cache, (b"x-accel-buffering", b"no"))
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close_stream(self, data: bytes = b"") -> None:
        """The last events of a streamed answer."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, problem: ApiError) -> None:
        """The problem as an answer; inside a stream as its last event, without a [DONE]."""
        if self.ended:
            return
        if self.status is None:
            await self.answer(problem.body, problem.status, problem.headers)
        else:
            await self.close_stream(sse_event(problem.body))
