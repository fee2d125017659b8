"""One replica: our app in an actor of Ray Serve, with an engine and cores or a GPU of its own.

The front (serving.ray.front) calls `answer` with a request and gets the parts of its answer. What
the app does on a server of its own it does here: admission, the engine's restarts, the fallback.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
from ray import serve
from ray.serve._private import replica as inner
from starlette.types import Message

from serving.errors import EngineFailed
from serving.hardware.own_cores import take_cores
from serving.http.app import app_of
from serving.http.auth import PASSED_KEY, Key
from serving.http.limits import Limits
from serving.metrics import ServerMetrics
from serving.placement.plan import explain
from serving.ray.connection import LOOPBACK
from serving.registry.model import ModelRouter
from serving.registry.options import ServeOptions, models_of, shared_of
from serving.registry.prepare import Machine, prepare
from serving.registry.registry import Registry
from serving.registry.room import RegistryLimits
from serving.registry.supervised import supervisor_of
from serving.supervisor.status import Event
from serving.supervisor.tasks import Background

Headers = list[tuple[bytes, bytes]]
REPLICA = b"x-crossover-replica"  # header of each answer: who gave it


class Request(NamedTuple):
    """A request whose key and size the front has checked. `key`: the name of its key; None: the
    server has none. `peer`: serving.http.auth.peer_of it."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    key: str | None
    peer: str


class Part(NamedTuple):
    """What of an answer is there since the last part. `head` (status, headers): of the first."""

    head: tuple[int, Headers] | None
    data: bytes
    is_last: bool


class Replica:
    """Ray Serve makes it in an actor; it is asked nothing before `__init__` has ended."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: ServeOptions, limits: Limits, cores: int
    ) -> None:
        """Returns when the engine serves. Raises ServingError, ModelError: the replica failed."""
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        _close_inner_port()
        own = take_cores(cores)
        if own:
            os.sched_setaffinity(0, own)
        else:
            options = msgspec.structs.replace(options, threads=cores)
            _say(f"this node has no {cores} free cores: the engine shares those of others")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        machine = Machine(options.cache, "", _say)
        (model,) = models_of(options)
        prepared = await asyncio.to_thread(prepare, model, machine)
        _say(*explain(prepared.placement), prepared.note)
        machine.is_serving = True
        self._registry = Registry(
            ModelRouter(ServerMetrics()),
            machine,
            lambda one, placed: supervisor_of(options, one, placed, _tell, _say),
            RegistryLimits(
                load_wait_seconds=options.load_wait_seconds, drain_seconds=options.drain_seconds
            ),
            shared_of(options),
        )
        self._tenant = self._registry.add(prepared)
        self._app = app_of(self._registry.router, limits)
        self._background = Background("a request")
        await self._registry.start()
        while self._tenant.supervisor.ready is None:
            self.check_health()
            await asyncio.wait({asyncio.ensure_future(self._tenant.supervisor.wait_change())})

    def check_health(self) -> None:
        """Ray Serve replaces the replica where this raises: its engines are given up."""
        if self._tenant.given_up:
            raise EngineFailed(self._tenant.supervisor.reason or "the engine failed")

    async def answer(self, request: Request, way: Any) -> AsyncIterator[Part]:
        """The parts of the app's answer. `way` is for the router, which sees the arguments."""
        call = _Call(request, self._name)
        self._background.keep(call.run(self._app))
        try:
            while True:
                part = await call.next()
                if part is None:
                    return
                yield part
        finally:
            call.gone.set()


class _Call:
    """One request between Ray and the app: what the app sends, as parts."""

    def __init__(self, request: Request, name: bytes) -> None:
        self._request = request
        self._name = name
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._is_read = False
        self._is_over = False
        self.gone = asyncio.Event()  # nobody waits for the rest

    async def run(self, app: Any) -> None:
        try:
            await app(self._scope(), self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def next(self) -> Part | None:
        """All that was sent since the last call, at least one message; None at the end."""
        if self._is_over:
            return None
        head: tuple[int, Headers] | None = None
        pieces: list[bytes] = []
        while True:
            message = await self._sent.get()
            if message is None:
                self._is_over = True
                return Part(head, b"".join(pieces), False) if pieces else None
            if message["type"] == "http.response.start":
                head = message["status"], [*message["headers"], (REPLICA, self._name)]
                continue
            pieces.append(message.get("body", b""))
            self._is_over = not message.get("more_body", False)
            if self._is_over or self._sent.empty():
                return Part(head, b"".join(pieces), self._is_over)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._sent.put_nowait(message)

    def _scope(self) -> dict[str, Any]:
        asked = self._request
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


def _close_inner_port() -> None:
    """Ray Serve opens a port of its own on all addresses, once the replica is there, for a way of
    calling that is not ours: on loopback alone."""
    listen = inner.add_port_to_grpc_server
    inner.add_port_to_grpc_server = lambda server, address: listen(
        server, address.replace("[::]", LOOPBACK)
    )


def _say(*lines: str) -> None:
    """Into the replica's log, which Ray keeps."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _tell(event: Event) -> None:
    _say(f"{event.engine} {event.kind}: {event.message}")
