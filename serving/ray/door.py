"""Where the front asks a replica: a port that answers whoever knows its token.

    door = Door(app, b"the replica's name")
    address = await door.open("127.0.0.1")    # for the front
    await door.drained()

Answers go from here to the front without Ray: its way of streaming costs some hundred microseconds
for each part of an answer, and knows only late how many requests a replica has.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Any, cast

from starlette.types import ASGIApp, Message

from serving.http.auth import PASSED_KEY, Key
from serving.http.connections import room_for_connections
from serving.ray.frames import (
    TOKEN_BYTES,
    Address,
    Frames,
    Head,
    Headers,
    Request,
    encode,
    frame,
    request_of,
)
from serving.ray.sockets import server_tls, watch
from serving.supervisor.tasks import Background

REPLICA = b"x-crossover-replica"  # header of each answer: who gave it
TOKEN_SECONDS = 10.0  # that a connection has for its handshake, and then to show the token
LOOK_SECONDS = 0.02
BACKLOG = 1024  # connections that the front may open at once
MOST_SILENT = 2 * BACKLOG  # connections without the token, which the front shows at once
PIECE_BYTES = 256 << 10  # of an answer in one frame; the loop goes on between two


class Door:
    """Answers requests with `app`, in the event loop that opens it."""

    def __init__(self, app: ASGIApp, name: bytes) -> None:
        self.app = app
        self.name = name
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.in_flight = 0
        self.connections: set[_Connection] = set()
        self.silent: dict[_Connection, None] = {}  # have not shown the token; the oldest first
        self.most_silent = MOST_SILENT
        self.background = Background("a request")

    async def open(self, host: str) -> Address:
        """Listen on `host`, on a port that is free."""
        loop = asyncio.get_running_loop()
        self.most_silent = room_for_connections(2 * MOST_SILENT) // 2  # the rest is the front's
        tls = server_tls()
        self._server = await loop.create_server(
            lambda: _Connection(self),
            host,
            0,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else TOKEN_SECONDS,
            backlog=BACKLOG,
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(host, port, self.token)

    def close(self) -> None:
        """Take no more connections, and cut those that there are."""
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for one in list(self.connections):
            one.transport.abort()

    def cut_oldest(self) -> None:
        """Of too many that have not shown the token: whoever has had the most time for it."""
        if len(self.silent) > self.most_silent:
            oldest = next(iter(self.silent))
            del self.silent[oldest]
            oldest.transport.abort()

    async def drained(self) -> None:
        """Returns when no request is in flight."""
        while self.in_flight:
            await asyncio.sleep(LOOK_SECONDS)


class _Connection(asyncio.Protocol):
    """One connection of the front: requests, one after the other."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._token = b""
        self._frames = Frames()
        self._call: _Call | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._door.connections.add(self)
        self._door.silent[self] = None
        self._door.cut_oldest()
        watch(self.transport)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(TOKEN_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        missing = TOKEN_BYTES - len(self._token)
        if missing:
            self._token += data[:missing]
            data = data[missing:]
            if len(self._token) < TOKEN_BYTES:
                return
            if not hmac.compare_digest(self._token, self._door.token):
                self.transport.abort()
                return
            self._patience.cancel()
            self._door.silent.pop(self, None)
        for one in self._frames.fed(data):
            if self._call is not None:  # the front waits for the end of an answer
                self.transport.abort()
                return
            self._call = _Call(request_of(one.data), self)
            self._door.in_flight += 1
            self._door.background.keep(self._answered(self._call))

    async def _answered(self, call: _Call) -> None:
        try:
            await self._door.app(_scope(call.request), call.receive, call.send)
        finally:
            self._door.in_flight -= 1
            if not call.is_over:
                self.transport.abort()

    async def write(self, data: bytes, is_over: bool) -> None:
        """Waits while the front's side is full. `is_over`: the next request may come."""
        if is_over:
            self._call = None
        if not self.transport.is_closing():
            self.transport.write(data)
        await self._may_write.wait()

    @property
    def name(self) -> bytes:
        return self._door.name

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, problem: Exception | None) -> None:
        self._patience.cancel()
        self._door.connections.discard(self)
        self._door.silent.pop(self, None)
        self._may_write.set()
        if self._call is not None:
            self._call.gone.set()


class _Call:
    """One request to the app. `is_over`: the last of its answer was sent."""

    def __init__(self, request: Request, connection: _Connection) -> None:
        self.request = request
        self.is_over = False
        self.gone = asyncio.Event()  # nobody waits for the rest
        self._connection = connection
        self._is_read = False
        self._head = b""  # it goes with the first of the body

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Headers = [*message["headers"], (REPLICA, self._connection.name)]
            self._head = frame(encode(Head(message["status"], headers)))
            return
        body, at = message.get("body", b""), 0
        while len(body) - at > PIECE_BYTES:
            await self._write(frame(body[at : at + PIECE_BYTES]))
            at += PIECE_BYTES
            await asyncio.sleep(0)
        self.is_over = not message.get("more_body", False)
        if self.is_over:
            self.gone.set()
        await self._write(frame(body[at:], self.is_over))

    async def _write(self, data: bytes) -> None:
        data = self._head + data
        self._head = b""
        await self._connection.write(data, self.is_over)


def _scope(asked: Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": asked.headers,
        "client": (asked.peer, 0),
        "server": None,
        PASSED_KEY: None if asked.key is None else Key(asked.key, b""),
    }
