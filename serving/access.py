"""Who may come in, and with how much: the limits of a request, the API key, and one HTTP exchange from its head to its last byte.

Everything that a stranger can make large has a bound here, and a bound that is broken is an answer of its own (413, 431, 408, 401),
never a slow or dying server. An Exchange writes straight to the ASGI server's `send`: for a streamed answer there is nothing between
the event's bytes and the socket.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from serving.protocol import ApiError
from serving.replies import encode, event

Headers = list[tuple[bytes, bytes]]

OPEN_ROUTES = frozenset({"/health", "/ready"})  # asked by probes, which have no key
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_JSON_TYPE = re.compile(rb"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most of everything. Breaking one is a 4xx that names it."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # from the head of a request to the end of its body
    header_bytes: int = 32 << 10
    header_seconds: float = 15.0  # from the first byte (or the connection) to the end of the head
    idle_seconds: float = 75.0  # a kept connection with nothing on it
    stalled_seconds: float = 60.0  # a reader that takes nothing of what waits for it
    connections: int = 4096
    sequences: int = 128  # prompts * n of one request
    messages: int = 4096
    stop_strings: int = 16
    stop_characters: int = 1024  # of one stop string
    stop_token_ids: int = 256
    logit_bias_keys: int = 1024
    deadline_seconds: float | None = None  # for every request; a request may ask for a shorter one
    inline_characters: int = 4096  # longer texts are tokenised in a thread, so that others do not wait


def same_key(given: bytes, key: bytes) -> bool:
    """Compares in a time that does not depend on where the two differ."""
    return hmac.compare_digest(given, key)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    for found, value in scope["headers"]:
        if found == name:
            return bytes(value)
    return None


def check_head(scope: Scope, limits: Limits, key: bytes | None) -> None:
    """Raises ApiError for a head that is too large, or that lacks the key where one is wanted."""
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > limits.header_bytes:
        raise ApiError(431, f"the headers have {size} bytes; {limits.header_bytes} are allowed", code="headers_too_large", headers=_CLOSE)
    if key is None or scope["path"] in OPEN_ROUTES:
        return
    scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not same_key(given.strip(), key):
        raise ApiError(
            401, "an API key is needed: Authorization: Bearer <key>", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


_CLOSE = {"Connection": "close"}


class Exchange:
    """One request and its answer. `started`: the answer's head is on its way, so an error can only be an event any more."""

    __slots__ = (
        *("scope", "limits", "serial", "request_id", "began", "backend", "status", "started", "ended", "gone", "_receive", "_send"),
        *("service", "release", "call", "choices", "error", "trace_id"),
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.began = time.perf_counter()
        self.scope, self.limits = scope, limits
        self._receive, self._send = receive, send
        self.serial = secrets.token_hex(12)
        given = header(scope, b"x-request-id")
        self.request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else b"req-" + self.serial.encode()
        self.backend: Any = None  # a function that says what serves at the moment, as bytes
        self.status: int | None = None
        self.started = self.ended = self.gone = False
        self.service: Any = None  # the Service that answers, once it is known
        self.release: Any = None  # a function that lets go of its model
        self.call: Any = None  # the Call and its choices, once there are any: for traces and the log
        self.choices: Sequence[Any] = ()
        self.trace_id: str | None = None
        self.error: str | None = None  # the code of the error that was answered

    async def body(self) -> bytes:
        """The whole body. Raises ApiError where it is not JSON by its type, too large, or too slow; ClientGone where it is cut off."""
        kind = header(self.scope, b"content-type")
        if kind is None or not _JSON_TYPE.fullmatch(kind.strip()):
            shown = "no Content-Type" if kind is None else f"Content-Type {kind[:80].decode('latin-1')!r}"
            raise ApiError(415, f"{shown}; send application/json", code="unsupported_media_type")
        encoding = header(self.scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            shown = encoding[:80].decode("latin-1")
            raise ApiError(415, f"Content-Encoding {shown!r}; bodies are taken as they are", code="unsupported_content_encoding")
        length = header(self.scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self.limits.body_bytes:
            raise self._too_large(int(length))
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
                    if size > self.limits.body_bytes:
                        raise self._too_large(size)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.body_seconds:g} s"
            raise ApiError(408, text, code="body_too_slow", headers=_CLOSE) from None

    def _too_large(self, size: int) -> ApiError:
        text = f"the body has {size} bytes or more; {self.limits.body_bytes} are allowed"
        return ApiError(413, text, code="body_too_large")

    async def until_gone(self) -> None:
        """Returns when the client has closed the connection (or the answer is complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = not self.ended

    def _head(self, kind: bytes, more: Sequence[tuple[bytes, bytes]]) -> Headers:
        backend = self.backend() if self.backend is not None else b"none"
        return [(b"content-type", kind), (b"x-request-id", self.request_id), (b"x-crossover-backend", backend), *more]

    async def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A whole JSON answer."""
        await self.answer_bytes(encode(value), b"application/json", status, headers)

    async def answer_bytes(self, body: bytes, kind: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A whole answer of any type."""
        more = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()]
        more.append((b"content-length", str(len(body)).encode()))
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": self._head(kind, more)})
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self) -> None:
        """The head of a streamed answer."""
        self.started, self.status = True, 200
        headers = self._head(b"text/event-stream; charset=utf-8", _STREAM_HEADERS)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Some events of a streamed answer; waits while the client's side is full."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close_stream(self, data: bytes = b"") -> None:
        """The last events of a streamed answer."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, problem: ApiError) -> None:
        """The problem as an answer; inside a stream as its last event (so there is no [DONE])."""
        if self.ended or self.gone:
            return
        if self.started:
            await self.close_stream(event(problem.body))
        else:
            await self.answer(problem.body, problem.status, problem.headers)


_STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ClientGone(Exception):
    """The client closed the connection: nobody is there to answer."""
