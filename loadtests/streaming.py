"""One request over server-sent events, timed: bytes out, chunks in, one RequestRecord.

    pool = connect("http://127.0.0.1:8000")
    wire = post_bytes(pool, "/v1/completions", body)
    record = stream(pool, wire, Ask(cell="c", level="l", index=0, due_seconds=0.0), origin=clock(), timeout_seconds=60)

The clock of a request starts when it was **due**, not when it was sent and not when headers came back. Every piece of the answer is stamped
when its bytes left the kernel, before anything is parsed, so that chunks which arrived together carry the same time however long they
take to read. A chunk is content when it carries text or, where the server counts as it goes, when its count has grown; role, usage
and `[DONE]` are not content.

Works inside Locust and outside it: gevent's sockets are used by name, nothing is monkey-patched. Every request is a single send of bytes
that were made before; Locust's own `iter_lines` is not used, since it waits for blocks of 1024 bytes.
"""

from __future__ import annotations

import socket as plain_socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.socket
import msgspec
from geventhttpclient._parser import HTTPParseError
from geventhttpclient.connectionpool import ConnectionPool, SSLConnectionPool
from geventhttpclient.response import HTTPSocketPoolResponse

from loadtests.errors import TargetUnusable
from loadtests.records import RequestRecord

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: one clock for all processes of a machine

MOST_CONNECTIONS = 65_536  # more than a machine has ports: requests never wait for one another in here
IDLE_SECONDS = 2.0  # an idle connection older than this is not used again: servers close theirs after 5 s, and a request must not meet that
CONNECT_SECONDS = 30.0
_ERROR_BYTES = 500


class GaveUp(BaseException):
    """Thrown into a request that is still on its way when the drain time is over."""


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class Chunk(msgspec.Struct):
    """What is read of one SSE event, of /v1/completions and of /v1/chat/completions alike."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


class Response(HTTPSocketPoolResponse):  # type: ignore[misc]
    """An answer that knows when its newest bytes arrived (`received`, on `clock`)."""

    received = 0.0

    def feed(self, data: str | bytes) -> None:
        self.received = clock()
        if not data and not self.message_begun:
            raise ConnectionResetError("the server closed the connection before it answered")
        super().feed(data)
        if not data and not self.message_complete:
            raise ConnectionResetError("the server closed the connection within its answer")


class _Kept:
    """What keeps connections quick: the address is looked up once, small writes leave at once, stale connections are dropped."""

    _address: list[Any] | None = None
    _parked: dict[int, float]

    def _resolve(self) -> list[Any]:
        if self._address is None:
            self._address = super()._resolve()  # type: ignore[misc]
        return self._address

    def after_connect(self, sock: Any) -> None:
        sock.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)

    def return_socket(self, sock: Any) -> None:
        self._parked[id(sock)] = clock()
        super().return_socket(sock)  # type: ignore[misc]

    def _is_socket_alive(self, sock: Any) -> bool:
        parked = self._parked.pop(id(sock), 0.0)
        return clock() - parked < IDLE_SECONDS and bool(super()._is_socket_alive(sock))  # type: ignore[misc]


class _PlainPool(_Kept, ConnectionPool):  # type: ignore[misc]
    pass


class _TlsPool(_Kept, SSLConnectionPool):  # type: ignore[misc]
    pass


@dataclass
class Pool:
    """Connections to one endpoint, the headers that every request carries, and the path that its URL ends in."""

    connections: Any
    host: str
    prefix: str
    headers: str

    def close(self) -> None:
        self.connections.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(url: str, *, api_key: str | None = None, verify_tls: bool = True, timeout_seconds: float = 600.0) -> Pool:
    """A pool for `url` ("http://host:8000", with or without /v1 at its end); opens nothing yet.

    `timeout_seconds` is the longest silence between two pieces of an answer. Raises TargetUnusable for a URL that is none.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as problem:
        raise TargetUnusable(f"{url!r} has no good port: {problem}") from problem
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise TargetUnusable(f"{url!r} is no URL of an endpoint; it should look like http://127.0.0.1:8000")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise TargetUnusable("the API key holds characters that a header cannot carry")
    common: dict[str, Any] = {"size": MOST_CONNECTIONS, "connection_timeout": CONNECT_SECONDS, "network_timeout": timeout_seconds}
    place = (parts.hostname, port, parts.hostname, port)
    if parts.scheme == "https":
        factory = None if verify_tls else ssl._create_unverified_context
        connections: Any = _TlsPool(*place, insecure=not verify_tls, ssl_context_factory=factory, **common)
    else:
        connections = _PlainPool(*place, **common)
    connections._parked = {}
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    headers = f"Host: {host}:{port}\r\nUser-Agent: crossover\r\nAccept-Encoding: identity\r\n"
    if api_key is not None:
        headers += f"Authorization: Bearer {api_key}\r\n"
    return Pool(connections, f"{parts.scheme}://{host}:{port}", parts.path.rstrip("/").removesuffix("/v1"), headers)


def post_bytes(pool: Pool, path: str, body: Any) -> bytes:
    """The whole request as it will go over the wire: made before the level starts, so that sending is one call."""
    payload = msgspec.json.encode(body)
    head = f"POST {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode("latin-1") + payload


def get_bytes(pool: Pool, path: str) -> bytes:
    return f"GET {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}\r\n".encode("latin-1")


def open_response(pool: Pool, wire: bytes) -> Response:
    """Sends and returns once the headers are here. Raises OSError or HTTPParseError."""
    sock = pool.connections.get_socket()
    try:
        sock.sendall(wire)
    except BaseException:
        pool.connections.release_socket(sock)
        raise
    return Response(sock, pool.connections)


def fetch(pool: Pool, wire: bytes, timeout_seconds: float = 30.0) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of a plain request. Raises TargetUnusable when there is no answer."""
    try:
        with gevent.Timeout(timeout_seconds):
            response = open_response(pool, wire)
            return response.status_code, {name.lower(): str(value) for name, value in response.items()}, response.read()
    except gevent.Timeout as problem:
        raise TargetUnusable(f"{pool.host} did not answer within {timeout_seconds:g} s") from problem
    except (OSError, HTTPParseError) as problem:
        raise TargetUnusable(f"{pool.host} cannot be reached: {problem}") from problem


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before it is sent; the fields of RequestRecord of the same names."""

    cell: str
    level: str
    index: int
    due_seconds: float
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    session: str | None = None
    turn: int | None = None
    worker: int | None = None


@dataclass
class _Seen:
    """What has come back so far."""

    status: int | None = None
    contents: list[float] = field(default_factory=list)
    first_chunk_tokens: int | None = None
    counted: int = 0
    usage: Usage | None = None
    chunk_usage: bool = False  # usage came beside content, not only at the end
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None
    error_message: str | None = None
    backend: str | None = None
    request_id: str | None = None
    on_first: Callable[[], None] | None = None


def stream(
    pool: Pool, wire: bytes, ask: Ask, *, origin: float, timeout_seconds: float, on_first: Callable[[], None] | None = None
) -> RequestRecord:
    """Sends `wire` now and reads its stream to the end. Never raises for what the server or the network does: that is the record's `error`.

    `origin` is the moment on `clock` that all times of the record count from. `on_first` is called when the first content is here.
    """
    seen = _Seen(on_first=on_first)
    sent = clock()
    response: Response | None = None
    try:
        with gevent.Timeout(timeout_seconds):
            response = open_response(pool, wire)
            seen.status = response.status_code
            seen.backend = _header(response, "x-crossover-backend")
            seen.request_id = _header(response, "x-request-id")
            if seen.status == 200:
                _read_events(response, seen)
            else:
                _read_refusal(response, seen)
    except gevent.Timeout:
        _fail(seen, "timeout", f"no end within {timeout_seconds:g} s")
    except GaveUp as problem:
        _fail(seen, "timeout", str(problem))
    except TimeoutError as problem:
        _fail(seen, "timeout", str(problem) or "no bytes for too long")
    except (OSError, HTTPParseError) as problem:
        _fail(seen, "connection" if seen.status is None else "cut_off", f"{type(problem).__name__}: {problem}")
    finally:
        if response is not None:
            response.release()
    return _record(ask, seen, sent - origin, clock() - origin, origin)


def _read_events(response: Response, seen: _Seen) -> None:
    while line := response.readline(b"\n"):
        if line.startswith(b"data:"):
            _read_data(line[5:].strip(), response.received, seen)
        elif line.startswith(b"event: error"):
            _fail(seen, "stream_error", "the stream ended in an error event")
    rest = response.read()
    if rest.startswith(b"data:"):
        _read_data(rest[5:].strip(), response.received, seen)
    if not seen.done and seen.finish_reason is None:
        _fail(seen, "cut_off", "the stream ended without [DONE] and without a finish reason")


def _read_data(data: bytes, now: float, seen: _Seen) -> None:
    if data == b"[DONE]":
        seen.done = True
        return
    try:
        chunk = _decode_chunk(data)
    except msgspec.MsgspecError as problem:
        _fail(seen, "stream_error", f"a chunk that is none: {problem}")
        return
    if chunk.error is not None:
        seen.error = None  # more telling than "event: error" before it
        _fail(seen, "stream_error", bytes(chunk.error).decode(errors="replace")[:_ERROR_BYTES])
        return
    if chunk.usage is not None:
        seen.usage = chunk.usage
    if not chunk.choices:
        return
    count = chunk.usage.completion_tokens if chunk.usage is not None else None
    seen.chunk_usage = seen.chunk_usage or count is not None
    has_text = False
    for choice in chunk.choices:
        seen.finish_reason = choice.finish_reason or seen.finish_reason
        piece = choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning))
        has_text = has_text or bool(piece) or (choice.delta is not None and choice.delta.tool_calls is not None)
    if has_text or (count is not None and count > seen.counted):
        if not seen.contents:
            seen.first_chunk_tokens = count
            if seen.on_first is not None:
                seen.on_first()
        seen.contents.append(now)
    seen.counted = count if count is not None else seen.counted


def _read_refusal(response: Response, seen: _Seen) -> None:
    seen.error = "refused" if seen.status == 429 else f"http_{seen.status}"
    seen.error_message = response.read()[:_ERROR_BYTES].decode(errors="replace").strip() or None


def _fail(seen: _Seen, error: str, message: str) -> None:
    """The first thing that went wrong is the one that is kept."""
    if seen.error is None:
        seen.error, seen.error_message = error, message


def _header(response: Response, name: str) -> str | None:
    value = response.get(name)
    return value if isinstance(value, str) else None


def _record(ask: Ask, seen: _Seen, sent_seconds: float, ended_seconds: float, origin: float) -> RequestRecord:
    usage = seen.usage or Usage()
    contents = [round(moment - origin, 6) for moment in seen.contents]
    if seen.error is None and not contents:
        seen.error, seen.error_message = "empty", "the stream ended well and held no content"
    return RequestRecord(
        cell=ask.cell,
        level=ask.level,
        index=ask.index,
        due_seconds=round(ask.due_seconds, 6),
        sent_seconds=round(sent_seconds, 6),
        first_content_seconds=contents[0] if contents else None,
        last_content_seconds=contents[-1] if contents else None,
        ended_seconds=round(ended_seconds, 6),
        content_seconds=contents,
        first_chunk_tokens=seen.first_chunk_tokens,
        asked_prompt_tokens=ask.asked_prompt_tokens,
        asked_output_tokens=ask.asked_output_tokens,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None,
        output_tokens=usage.completion_tokens,
        status=seen.status,
        error=seen.error,
        error_message=seen.error_message,
        finish_reason=seen.finish_reason,
        backend=seen.backend,
        request_id=seen.request_id,
        session=ask.session,
        turn=ask.turn,
        worker=ask.worker,
    )
