"""The front of a fleet of replicas: HTTP here, answers from them.

    front = Front(name, wait_seconds=60, slots=16)
    app = App(ModelRouter(ServerMetrics()), limits, keys, front.routes())
    front.opened(handle)

Keys, limits and the log are those of a server without replicas: it is the same App with other
handlers. Ray says which replicas there are; requests go to them directly (serving.ray.lines), so
the front knows how many each has. A request of which the client has seen no byte is given to
another replica where the one that had it is lost; a stream that broke ends with an error event.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter as Counts
from contextlib import aclosing
from typing import Any

from prometheus_client import Counter, Gauge
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serving.errors import EngineState, Unavailable
from serving.http import status
from serving.http.app import ROUTES, openapi
from serving.http.auth import header, peer_of
from serving.http.exchange import ClientGone, Exchange
from serving.http.wire.errors import as_answer, try_again
from serving.http.wire.openapi import Handler, Route
from serving.http.wire.responses import Readiness
from serving.metrics import PREFIX
from serving.ray.fleet import FLEET
from serving.ray.frames import Address, Request, encode
from serving.ray.lines import Lines, Lost
from serving.ray.prefixes import PrefixTable, blocks_of
from serving.registry.model import ModelRouter
from serving.supervisor.tasks import Background

TRIES = 3  # replicas that a request is given to: one that ends replicas shall not end them all
FIND_SECONDS = 5.0  # that a replica has to say where it is
PAUSE_SECONDS = 0.2  # after which it is asked again
LOOK_SECONDS = 0.02
_REFUSALS = (429, 503)  # its queue is full, or its engine is being restarted
_PASSED_ON = (b"content-type", b"accept")


class Front:
    """`name`: of the model. `wait_seconds`: that a request waits while there is no replica.
    `slots`: of each replica."""

    def __init__(self, name: str, wait_seconds: float, slots: int) -> None:
        self._name = name
        self._wait_seconds = wait_seconds
        self._handle: Any = None
        self.in_flight = 0
        self.is_stopping = False
        self._until = math.inf  # of a drain; time.monotonic()
        self._retries: Counter | None = None
        self._lines = Lines()
        self._table = PrefixTable(slots)
        self._loads: Counts[str] = Counts()  # replica -> requests that it has of us
        self._asked: set[str] = set()  # replicas that are being asked where they are
        self._background = Background("finding a replica")

    def opened(self, handle: Any) -> None:
        """The deployment is there: `handle` is its DeploymentHandle."""
        self._handle = handle.options(method_name="address")

    def find(self) -> None:
        """Ask replicas that are new, or were lost, where they are, and forget those that are gone;
        returns at once."""
        for name in FLEET.missing - self._asked:
            self._asked.add(name)
            self._background.keep(self._find(name))
        self._lines.keep(set(FLEET.addresses.values()))
        self._table.keep(FLEET.names)

    async def _find(self, name: str) -> None:
        try:
            FLEET.found(*await asyncio.wait_for(self._handle.remote(name), FIND_SECONDS))
        except (RayError, RayServeException, TimeoutError):
            await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._asked.discard(name)

    def count_in(self, router: ModelRouter) -> None:
        """Show replicas and retries in the metrics of this front."""
        registry = router.metrics.registry
        replicas = Gauge(PREFIX + "replicas", "Replicas that take requests", registry=registry)
        replicas.set_function(lambda: len(FLEET.replicas))
        self._retries = Counter(
            PREFIX + "requests_given_again",
            "Requests given to another replica, since the one that had it was lost",
            registry=registry,
        )

    async def stop(self, drain: bool, seconds: float) -> int:
        """Take no more requests; the number of those that were cut off. A call without `drain`
        ends an earlier drain."""
        self.is_stopping = True
        self._until = min(self._until, time.monotonic() + (seconds if drain else 0.0))
        while self.in_flight and time.monotonic() < self._until:
            await asyncio.sleep(LOOK_SECONDS)
        return self.in_flight

    def routes(self) -> tuple[Route, ...]:
        """The routes of the app; all that need an engine or its tokenizer are the replicas'."""
        here: dict[Handler, Handler] = {
            status.health: status.health,
            status.metrics: status.metrics,
            status.ready: self.ready,
            openapi: openapi,
        }
        return tuple(
            dataclasses.replace(route, handler=here.get(route.handler, self.forward))
            for route in ROUTES
        )

    async def ready(self, router: ModelRouter, exchange: Exchange) -> None:
        """200 where a request can be answered: a replica takes requests."""
        count = len(FLEET.replicas)
        label = f"ray/{count} replica{'' if count == 1 else 's'}"
        if count and not self.is_stopping:
            await exchange.answer(
                Readiness(state=EngineState.ready, model=self._name, backend=label)
            )
            return
        problem = as_answer(self._unavailable())
        assert problem is not None
        await exchange.answer(
            Readiness(state=self._state, model=self._name, backend=label, error=problem.body.error),
            problem.status,
            problem.headers,
        )

    @property
    def _state(self) -> EngineState:
        return EngineState.draining if self.is_stopping else EngineState.loading

    def _unavailable(self) -> Unavailable:
        why = "the server is shutting down" if self.is_stopping else "no replica is ready yet"
        text = f"the model is not served at the moment ({self._state}): {why}"
        return Unavailable(text, 5.0, self._state)

    async def forward(self, router: ModelRouter, exchange: Exchange) -> None:
        """Have a replica answer. Raises ApiError, Unavailable, ClientGone."""
        with exchange.bodies.held() as hold:  # until it is answered: it may be given again
            is_post = exchange.scope["method"] == "POST"
            body = await exchange.read_bytes(hold) if is_post else b""
            if self.is_stopping:
                raise self._unavailable()
            self.in_flight += 1
            work = asyncio.create_task(self._answered(exchange, _request(exchange, body)))
            gone = asyncio.create_task(exchange.until_gone())
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientGone
                await work
            finally:
                work.cancel()
                gone.cancel()
                self.in_flight -= 1

    async def _answered(self, exchange: Exchange, request: Request) -> None:
        blocks = blocks_of(request.body)
        asked = encode(request)
        refused: set[str] = set()
        for number in range(TRIES):
            name, address = await self._replica(blocks, refused)
            is_final = number + 1 == TRIES or not FLEET.addresses.keys() - refused - {name}
            self._loads[name] += 1
            try:
                if await self._passed_on(exchange, address, asked, is_final):
                    return
                refused.add(name)
            except Lost as problem:
                FLEET.lost(name)
                if exchange.started:
                    text = "the replica that answered has ended"
                    raise try_again(503, text, "engine_failed", 1.0) from problem
                if self._retries is not None and number + 1 < TRIES:
                    self._retries.inc()
            finally:
                self._loads[name] -= 1
                if not self._loads[name]:
                    del self._loads[name]
        raise Unavailable(
            f"{TRIES} replicas ended while they had this request", 30.0, "engine_failed"
        )

    async def _passed_on(
        self, exchange: Exchange, address: Address, asked: bytes, is_final: bool
    ) -> bool:
        """Write what a replica answers. False: it refuses, and another one may not, which is not
        looked at where this try `is_final`. Raises Lost."""
        async with aclosing(self._lines.answer(address, asked)) as parts:
            async for part in parts:
                if part.head is not None:
                    if part.head.status in _REFUSALS and part.is_last and not is_final:
                        return False
                    await exchange.open_as(*part.head)
                if part.is_last:
                    await exchange.close_stream(part.data)
                else:
                    await exchange.write(part.data)
        return True

    async def _replica(self, blocks: tuple[bytes, ...], refused: set[str]) -> tuple[str, Address]:
        """The one that the request is given to. Raises Unavailable."""
        addresses = await self._some_replicas()
        names = addresses.keys() - refused or addresses.keys()
        name = self._table.choose(blocks, {name: self._loads[name] for name in names})
        self._table.sent(blocks, name)
        return name, addresses[name]

    async def _some_replicas(self) -> dict[str, Address]:
        """Those that take requests, once there are any. Raises Unavailable after `wait_seconds`."""
        until = time.monotonic() + self._wait_seconds
        while not (addresses := FLEET.addresses):  # read once: Ray's thread may take the last away
            if self.is_stopping or time.monotonic() > until:
                raise self._unavailable()
            await asyncio.sleep(LOOK_SECONDS)
        return addresses


def _request(exchange: Exchange, body: bytes) -> Request:
    """The request as a replica gets it: under our id, and without the key."""
    scope = exchange.scope
    headers = [(name, value) for name in _PASSED_ON if (value := header(scope, name)) is not None]
    headers.append((b"x-request-id", exchange.request_id))
    key = None if exchange.key is None else exchange.key.name
    line = scope["method"], scope["path"], scope["query_string"]
    return Request(*line, headers, body, key, peer_of(scope))
