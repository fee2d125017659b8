"""One HTTP request, from its head to the end of its answer: what a handler is given.

    body = await request.read(CHAT)
    model = await request.hold(body.model)     # loaded where it may be, until the answer has ended
    await request.answer(value)                # or write events, and close with the last ones

Answers are written straight to the ASGI server's `send`.
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
from serving.http.api_schemas import decode, encode
from serving.http.body_limits import Limits, read_body
from serving.http.errors import ApiError, ClientGone, too_late
from serving.registry.loaded_model import ModelRouter, ServedModel

T = TypeVar("T")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_EVENTS = b"text/event-stream; charset=utf-8"


@dataclass(eq=False)
class Endpoint:
    """What all requests share. `waiting_for_load`: how many wait until their model is loaded."""

    router: ModelRouter
    limits: Limits
    waiting_for_load: int = 0


def event(value: Any) -> bytes:
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
        self._sending = send
        self.serial = secrets.token_hex(12)
        given = self.headers.get(b"x-request-id", b"")
        self.id = given if _REQUEST_ID.fullmatch(given) else b"req-" + self.serial.encode()
        self.route = "other"  # as a label: never what a stranger typed
        self.parameter = ""  # of the path
        self.body_bytes = 0
        self.status: int | None = None
        self.error: str | None = None  # the code of the error that was answered
        self.ended = self.gone = False
        self.model: ServedModel | None = None  # once it is known
        self.release: Callable[[], None] | None = None  # lets go of the model
        self.generated: Any = None  # its serving.http.sse_stream.Answer, where it has one

    async def read(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as its type. Raises ApiError (400, 408, 413, 415), ClientGone."""
        limits, tokens = self.endpoint.limits, self.endpoint.router.slot_tokens
        body = await read_body(self.headers, self._receive, limits, tokens)
        self.body_bytes = len(body)
        return decode(decoder, body)

    def look_at(self, name: str | None) -> ServedModel:
        """The model of a request that needs no engine. Raises UnknownModel, ModelNotNamed."""
        self.model = self.endpoint.router.named(name)
        return self.model

    def seconds_left(self, deadline_seconds: float | None) -> float | None:
        """Of a deadline from the arrival. Raises ApiError 504 where it is past."""
        if deadline_seconds is None:
            return None
        left = deadline_seconds - (time.perf_counter() - self.began)
        if left <= 0:
            raise too_late(deadline_seconds)
        return left

    async def hold(self, name: str | None, deadline_seconds: float | None = None) -> ServedModel:
        """The model, held until the request ends, and loaded first where it may be.

        Raises UnknownModel, ModelNotNamed, Unavailable; Overloaded where too many wait for loads;
        ApiError 504 at the deadline; ClientGone.
        """
        endpoint, model = self.endpoint, self.look_at(name)
        if model.supervisor.state == EngineState.ready:
            self.release = await endpoint.router.hold(model.served_name)
            return model
        if endpoint.waiting_for_load >= endpoint.limits.waiting_for_load:
            text = f"{endpoint.waiting_for_load} requests wait for models that are being loaded"
            raise Overloaded(text, 5.0)
        endpoint.waiting_for_load += 1
        holding = asyncio.ensure_future(endpoint.router.hold(model.served_name))
        watching = asyncio.ensure_future(self.until_gone())
        try:
            left = self.seconds_left(deadline_seconds)
            both = {holding, watching}
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            endpoint.waiting_for_load -= 1
            watching.cancel()
            if not holding.done():
                holding.cancel()
        if not holding.done():
            raise ClientGone if watching.done() else too_late(deadline_seconds or 0.0)
        self.release = holding.result()
        return model

    async def until_gone(self) -> None:
        """Returns when the client has closed the connection (or the answer is complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = not self.ended

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

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises ClientGone where the connection is closed and the server has not said so: of
        requests sent in one go, it tells the last one only."""
        try:
            await self._sending(message)
        except RuntimeError as problem:
            if "closed" not in str(problem):
                raise
            self.gone = True
            raise ClientGone from problem

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
        self.error = problem.code or str(problem.status)
        if self.ended or self.gone:
            return
        if self.status is None:
            await self.answer(problem.body, problem.status, problem.headers)
        else:
            await self.close_stream(event(problem.body))
