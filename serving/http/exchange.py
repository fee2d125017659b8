"""One HTTP request and its answer, written straight to the ASGI server's `send`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from serving.engine.messages import Origin
from serving.http.auth import CLOSE, Key, header, peer_of
from serving.http.limits import Limits
from serving.http.wire.decoding import check_work, decode
from serving.http.wire.errors import ApiError, try_again
from serving.http.wire.sse import encode, event
from serving.registry.model import ModelRouter, ServedModel
from serving.registry.text_work import TEXT_WORK

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

SMALL_BYTES = 64 << 10  # of a body that is decoded at once and counts for nothing
INLINE_BYTES = 256 << 10  # of a body that is decoded on the event loop: 17 ms at the most
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_JSON_TYPE = re.compile(rb"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)
_STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Bodies:
    """Memory of all bodies that are being received or decoded; small ones do not count."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """Gives what is told the bytes that one body has so far. It raises ApiError 503."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            more = max(0, size - SMALL_BYTES) - mine
            if self.bytes + more > self.most_bytes:
                text = f"bodies of other requests hold {self.bytes} bytes: no room for this one"
                raise try_again(503, text, "too_many_bytes", 1.0)
            self.bytes += more
            mine += more

        try:
            yield hold
        finally:
            self.bytes -= mine


class ClientGone(Exception):
    """The client closed the connection: nobody is there to answer."""


class Exchange:
    """`started`: the head of the answer has left, so an error can only be an event."""

    __slots__ = (
        *(
            "scope",
            "limits",
            "bodies",
            "serial",
            "request_id",
            "began",
            "backend",
            "status",
            "error",
        ),
        *("started", "ended", "gone", "served_model", "release", "call", "choices", "trace_id"),
        "key",
        *("ignored", "_receive", "_send"),
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: Limits, bodies: Bodies
    ) -> None:
        self.began = time.perf_counter()
        self.scope = scope
        self.limits = limits
        self.bodies = bodies
        self._receive = receive
        self._send = send
        self.serial = secrets.token_hex(12)
        self.request_id = _request_id(header(scope, b"x-request-id"), self.serial)
        self.backend: Callable[[], bytes] = lambda: b"none"  # what serves at the moment
        self.key: Key | None = None  # that it came with
        self.status: int | None = None
        self.error: str | None = None  # the code of the error that was answered
        self.started = self.ended = self.gone = False
        self.served_model: ServedModel | None = None  # once the model is known
        self.release: Callable[[], None] | None = None  # lets go of the model
        self.call: Any = None  # the generate.Call, for traces and the log
        self.choices: Sequence[Any] = ()
        self.trace_id: str | None = None
        self.ignored: set[str] = set()  # keys of the request that are not known

    @property
    def origin(self) -> Origin:
        """Whose it is: the key's, or its address's where several people may have the key or none is
        asked for. All who come through one proxy have one address."""
        if self.key is None or not self.key.name:
            return Origin(peer_of(self.scope))
        return Origin(self.key.name, self.key.share)

    async def acquire(self, router: ModelRouter, model: str | None) -> ServedModel:
        """The model, held until the exchange ends and loaded where it may be."""
        served_model = self.look_at(router, model)
        name, owner = served_model.served_name, self.origin.owner
        self.served_model, self.release = await router.acquire(name, owner)
        return self.served_model

    def look_at(self, router: ModelRouter, model: str | None) -> ServedModel:
        """The model of a request that needs no engine."""
        served_model = router.named(model)
        self.served_model = served_model
        return served_model

    async def read(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as its type. Raises ApiError (400, 408, 413, 415, 429, 503), ClientGone."""
        with self.bodies.held() as hold:
            body = await self.read_bytes(hold)
            if len(body) <= SMALL_BYTES:
                return self._decode(decoder, body)
            if len(body) <= INLINE_BYTES and not self.limits.ignore_unknown_fields:
                return self._large(decoder, body)
            # Several calls that last some milliseconds: the loop goes on between them.
            return await TEXT_WORK.run(len(body), self._large, decoder, body)

    def _large(self, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
        check_work(body, self.limits.body_work)
        return self._decode(decoder, body)

    def _decode(self, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
        lenient = self.limits.ignore_unknown_fields
        return decode(decoder, body, self.ignored if lenient else None)

    async def read_bytes(self, hold: Callable[[int], None]) -> bytes:
        """The body as it came. `hold`: of `bodies.held`, for as long as the body is kept. Raises as
        `read` does."""
        self._check_type()
        most = self.limits.body_for(self.scope["app"].router.slot_tokens)
        length = header(self.scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > most:
            raise _too_large(int(length), most)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > most:
                        raise _too_large(size, most)
                    hold(size)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.body_seconds:g} s"
            raise ApiError(408, text, code="body_too_slow", headers=CLOSE) from None

    def _check_type(self) -> None:
        kind = header(self.scope, b"content-type")
        if kind is None or not _JSON_TYPE.fullmatch(kind.strip()):
            shown = "no Content-Type"
            if kind is not None:
                shown = f"Content-Type {kind[:80].decode('latin-1')!r}"
            raise ApiError(415, f"{shown}; send application/json", code="unsupported_media_type")
        encoding = header(self.scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            shown = encoding[:80].decode("latin-1")
            text = f"Content-Encoding {shown!r}; bodies are taken as they are"
            raise ApiError(415, text, code="unsupported_content_encoding")

    async def until_gone(self) -> None:
        """Returns when the client has closed the connection (or the answer is complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = not self.ended

    async def _start(self, status: int, kind: bytes, more: Headers) -> None:
        self.started = True
        self.status = status
        headers = [
            (b"content-type", kind),
            (b"x-request-id", self.request_id),
            (b"x-crossover-backend", self.backend()),
            *more,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(
        self, value: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """A whole JSON answer."""
        await self.answer_bytes(encode(value), b"application/json", status, headers)

    async def answer_bytes(
        self, body: bytes, kind: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """A whole answer of any type."""
        more = [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in (headers or {}).items()
        ]
        more.append((b"content-length", str(len(body)).encode()))
        await self._start(status, kind, more)
        await self.close_stream(body)

    async def open_stream(self) -> None:
        """The head of a streamed answer."""
        await self._start(200, b"text/event-stream; charset=utf-8", _STREAM_HEADERS)

    async def open_as(self, status: int, headers: Headers) -> None:
        """The head of an answer that another server made."""
        self.started = True
        self.status = status
        named = dict(headers)
        self.backend = lambda: named.get(b"x-crossover-backend", b"none")
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Some events of a streamed answer; waits while the client's side is full."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close_stream(self, data: bytes = b"") -> None:
        """The last events of a streamed answer."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, problem: ApiError) -> None:
        """The problem as an answer; inside a stream as its last event, without a [DONE]."""
        if self.ended or self.gone:
            return
        if self.started:
            await self.close_stream(event(problem.body))
        else:
            await self.answer(problem.body, problem.status, problem.headers)


def _too_large(size: int, most: int) -> ApiError:
    text = f"the body has {size} bytes or more; {most} are allowed"
    return ApiError(413, text, code="body_too_large")


def _request_id(given: bytes | None, serial: str) -> bytes:
    """The client's own id where it is harmless, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return b"req-" + serial.encode()
