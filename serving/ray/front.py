"""The front of a fleet of replicas: HTTP here, answers from them.

    front = Front(name, wait_seconds=60)
    app = App(ModelRouter(ServerMetrics()), limits, keys, front.routes())
    front.opened(handle)

Keys, limits and the log are those of a server without replicas: it is the same App with other
handlers. A request of which the client has seen no byte is given to another replica where the one
that had it is lost; a stream that broke ends with an error event.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any

from prometheus_client import Counter, Gauge
from ray.exceptions import RayError, RayTaskError

from serving.errors import EngineState, Unavailable
from serving.http import status
from serving.http.app import ROUTES, openapi
from serving.http.auth import header, peer_of
from serving.http.exchange import ClientGone, Exchange
from serving.http.wire.errors import ApiError, as_answer, try_again
from serving.http.wire.openapi import Handler, Route
from serving.http.wire.responses import Readiness
from serving.metrics import PREFIX
from serving.ray.fleet import FLEET, Way
from serving.ray.prefixes import blocks_of
from serving.ray.replica import REPLICA, Part, Request
from serving.registry.model import ModelRouter

TRIES = 3  # replicas that a request is given to: one that ends replicas shall not end them all
PAUSE_SECONDS = 0.2  # before another try, until the router has noticed
LOOK_SECONDS = 0.02
_REFUSALS = (429, 503)  # its queue is full, or its engine is being restarted
_PASSED_ON = (b"content-type", b"accept")


class Front:
    """`name`: of the model. `wait_seconds`: that a request waits while there is no replica."""

    def __init__(self, name: str, wait_seconds: float) -> None:
        self._name = name
        self._wait_seconds = wait_seconds
        self._handle: Any = None
        self.in_flight = 0
        self.is_stopping = False
        self._until = math.inf  # of a drain; time.monotonic()
        self._retries: Counter | None = None

    def opened(self, handle: Any) -> None:
        """The deployment is there: `handle` is its DeploymentHandle."""
        self._handle = handle.options(method_name="answer", stream=True)

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
        way = Way(blocks_of(request.body))
        for number in range(TRIES):
            await self._some_replica()
            is_last = number + 1 == TRIES
            parts = self._handle.remote(request, way)
            try:
                refused = await self._passed_on(exchange, parts, None if is_last else way)
            except RayTaskError as problem:
                raise ApiError(500, "the replica failed", code="internal_error") from problem
            except RayError as problem:
                if exchange.started:
                    text = "the replica that answered has ended"
                    raise try_again(503, text, "engine_failed", 1.0) from problem
                if self._retries is not None and not is_last:
                    self._retries.inc()
                await asyncio.sleep(PAUSE_SECONDS * (number + 1))
                continue
            if refused is None:
                return
            way = way._replace(avoided=way.avoided | {refused})
        raise Unavailable(
            f"{TRIES} replicas ended while they had this request", 30.0, "engine_failed"
        )

    async def _passed_on(self, exchange: Exchange, parts: Any, way: Way | None) -> str | None:
        """Write what a replica answers, but a refusal where another one may not refuse: then its
        name. None for `way`: there is no other try. Raises RayError where the answer is lost."""
        part: Part
        try:
            async for part in parts:
                if part.head is not None:
                    code, headers = part.head
                    name = dict(headers)[REPLICA].decode()
                    is_refusal = code in _REFUSALS and part.is_last
                    if is_refusal and way is not None and _others(way, name):
                        return name
                    await exchange.open_as(code, headers)
                if part.is_last:
                    await exchange.close_stream(part.data)
                    return None
                await exchange.write(part.data)
        except asyncio.CancelledError:
            parts.cancel()
            raise
        raise RayError("the replica ended its answer early")

    async def _some_replica(self) -> None:
        """Returns when there is one. Raises Unavailable after `wait_seconds`."""
        until = time.monotonic() + self._wait_seconds
        while self._handle is None or not FLEET.replicas:
            if self.is_stopping or time.monotonic() > until:
                raise self._unavailable()
            await asyncio.sleep(LOOK_SECONDS)


def _others(way: Way, name: str) -> set[str]:
    """The replicas that have not refused the request yet."""
    return FLEET.replicas.keys() - way.avoided - {name}


def _request(exchange: Exchange, body: bytes) -> Request:
    """The request as a replica gets it: under our id, and without the key."""
    scope = exchange.scope
    headers = [(name, value) for name in _PASSED_ON if (value := header(scope, name)) is not None]
    headers.append((b"x-request-id", exchange.request_id))
    key = None if exchange.key is None else exchange.key.name
    line = scope["method"], scope["path"], scope["query_string"]
    return Request(*line, headers, body, key, peer_of(scope))
