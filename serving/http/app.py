"""The route table, and the ASGI application around it.

    app = app_of(router, limits, api_key="...")
    uvicorn.run(app, **server_options(limits))    # serving.http.connections

Every answer, errors too, has X-Request-Id and X-Crossover-Backend; every error has OpenAI's body.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette import routing
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from serving.errors import ServingError
from serving.http import status
from serving.http.auth import PASSED_KEY, Key, check_head, key_of, only_key
from serving.http.chat.route import chat_completions
from serving.http.completions import completions
from serving.http.exchange import Bodies, ClientGone, Exchange
from serving.http.limits import Limits
from serving.http.placement import PlacementView
from serving.http.wire.errors import ApiError, as_answer
from serving.http.wire.openapi import Handler, Route, document
from serving.http.wire.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from serving.http.wire.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    Tokenized,
)
from serving.http.wire.sse import encode
from serving.registry.loaded_model import ModelRouter

logger = logging.getLogger("crossover.http")
CLIENT_GONE = 499  # nginx's number for an answer that nobody waited for; only in logs and metrics


async def openapi(router: ModelRouter, exchange: Exchange) -> None:
    app: App = exchange.scope["app"]
    await exchange.answer_bytes(app.document(), b"application/json")


_GENERATES = (404, 429, 500, 503, 504)

# Tried in this order: the most used first.
ROUTES = (
    Route(
        *("POST", "/v1/chat/completions", chat_completions, "Answer a chat"),
        body=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatChunk,
        errors=_GENERATES,
    ),
    Route(
        *("POST", "/v1/completions", completions, "Continue a text"),
        body=CompletionRequest,
        answer=Completion,
        chunk=Completion,
        errors=_GENERATES,
    ),
    Route("GET", "/health", status.health, "The process lives", Health, keyed=False),
    Route(
        *("GET", "/ready", status.ready, "The engine serves", Readiness),
        others={503: Readiness},
        keyed=False,
    ),
    Route("GET", "/metrics", status.metrics, "Prometheus metrics", "text/plain"),
    Route("GET", "/v1/models", status.models, "What is served", ModelList),
    Route(
        *("POST", "/tokenize", status.tokenize, "Text or chat to token ids", Tokenized),
        body=TokenizeRequest,
        errors=(404,),
    ),
    Route(
        *("POST", "/detokenize", status.detokenize, "Token ids to text", Detokenized),
        body=DetokenizeRequest,
        errors=(404,),
    ),
    Route(
        *("GET", "/v1/placement", status.placement, "What runs where, and why", PlacementView),
        errors=(400, 404),
        query="model",
    ),
    Route("GET", "/openapi.json", openapi, "This document", dict[str, Any]),
    Route("GET", "/v1/models/{name:path}", status.model, "One model", ModelCard, errors=(404,)),
)


class _Endpoint:
    """A handler as the ASGI application that Starlette's Route takes without wrapping it."""

    def __init__(self, router: ModelRouter, handler: Handler) -> None:
        self._models = router
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._models, scope["exchange"])


class App:
    """Identity, key and limits before the route; errors, counts and a log line after it."""

    def __init__(
        self,
        router: ModelRouter,
        limits: Limits,
        keys: Sequence[Key] = (),
        routes: Sequence[Route] = ROUTES,
        admin_keys: Sequence[Key] = (),
    ) -> None:
        self.router = router
        self.limits = limits
        self.bodies = Bodies(limits.bodies_bytes)
        self._keys = keys
        self._admin_keys = admin_keys
        self._routes = routes
        self._labels = {
            path: route.path
            for route in routes
            for path in (route.path, *_without_version(route.path))
        }
        endpoints = [
            routing.Route(path, _Endpoint(router, route.handler), methods=[route.method])
            for route in routes
            for path in (route.path, *_without_version(route.path))
        ]
        self._router = routing.Router(endpoints, redirect_slashes=False)
        self._documents: dict[tuple[str, ...], bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)  # lifespan; a websocket is closed
            return
        exchange = Exchange(scope, receive, send, self.limits, self.bodies)
        exchange.backend = lambda: self._backend(exchange)
        scope["app"] = self
        scope["exchange"] = exchange
        self.router.metrics.open_requests.inc()
        try:
            admin = self._admin_keys and scope["path"].startswith("/admin/")
            keys = self._admin_keys if admin else self._keys
            exchange.key = check_head(scope, self.limits, keys) or scope.get(PASSED_KEY)
            await self._router(scope, receive, send)
        except ClientGone:
            exchange.status = CLIENT_GONE
        except Exception as problem:
            await self._fail(exchange, _answer_to(problem, exchange))
        finally:
            self._finish(exchange)

    def trusts(self, scope: Scope) -> bool:
        """Whether a request to a route that needs no key has it all the same."""
        return not self._keys or key_of(scope, self._keys) is not None

    def _finish(self, exchange: Exchange) -> None:
        """Count, trace and log an exchange that has ended."""
        counts = self.router.metrics
        counts.open_requests.dec()
        gone = exchange.gone or exchange.status is None
        code = CLIENT_GONE if gone or exchange.status is None else exchange.status
        route = self._route(exchange.scope)
        counts.ignored.inc(len(exchange.ignored))
        counts.responses.labels(route, str(code)).inc()
        if exchange.release is not None:
            exchange.release()
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", encode(_log_line(exchange, code)).decode())

    async def _fail(self, exchange: Exchange, problem: ApiError) -> None:
        exchange.error = problem.code or str(problem.status)
        models = self.router.models
        served_model = exchange.served_model or (self.router.first if len(models) == 1 else None)
        name = "" if served_model is None else served_model.served_name
        self.router.metrics.rejected.labels(name, exchange.error).inc()
        await exchange.fail(problem)

    def _backend(self, exchange: Exchange) -> bytes:
        """What answers, as a header's value: the engine of the request's model, or the first's."""
        served_model = exchange.served_model or (self.router.first if self.router.models else None)
        label = "none" if served_model is None else served_model.supervisor.label
        return "".join(c if 32 < ord(c) < 127 else "?" for c in label).encode()

    def _route(self, scope: Scope) -> str:
        """The route's path as a label: never what a stranger typed."""
        return self._labels.get(getattr(scope.get("route"), "path", ""), "other")

    def document(self) -> bytes:
        """/openapi.json, made once for these models."""
        names = tuple(self.router.models)
        if names not in self._documents:
            made = document(self._routes, ", ".join(names), self.limits)
            self._documents = {names: encode(made)}
        return self._documents[names]


def app_of(
    router: ModelRouter,
    limits: Limits,
    api_key: str | Sequence[Key] | None = None,
    admin: Sequence[Route] = (),
    admin_key: str | None = None,
) -> App:
    """The HTTP side of a router. `api_key`: the only one, or named ones. `admin`: routes under
    /admin/, opened by `admin_key` alone.

    Raises ValueError for an empty key, and for admin routes without a key.
    """
    if bool(admin) != (admin_key is not None):
        raise ValueError("admin routes and an admin key belong together")
    keys = only_key(api_key, "API") if isinstance(api_key, str | None) else api_key
    return App(router, limits, keys, (*ROUTES, *admin), only_key(admin_key, "admin"))


def _answer_to(problem: Exception, exchange: Exchange) -> ApiError:
    """The answer to whatever a handler has raised; what nobody foresaw is logged."""
    if isinstance(problem, HTTPException):
        return _of_starlette(problem, exchange.scope)
    answer = as_answer(problem) if isinstance(problem, ServingError) else None
    if answer is not None:
        return answer
    number = exchange.request_id.decode()
    logger.error("request %s failed", number, exc_info=problem, extra={"request_id": number})
    text = "the server failed on this request; its log says why"
    return ApiError(500, text, code="internal_error")


def _of_starlette(problem: HTTPException, scope: Scope) -> ApiError:
    method, path = scope["method"], scope["path"][:200]
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        text = f"{method} is not allowed on {path}; {allowed} is"
        return ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed})
    text = f"there is no {path} here; /openapi.json lists what there is"
    return ApiError(problem.status_code, text, code="not_found")


def _without_version(path: str) -> tuple[str, ...]:
    """The other path of a route below /v1."""
    return (path.removeprefix("/v1"),) if path.startswith("/v1/") else ()


def _log_line(exchange: Exchange, code: int) -> dict[str, Any]:
    """One request: what was asked of whom, what came of it, tokens and times."""
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "event": "request",
        "request_id": exchange.request_id.decode(),
        "method": exchange.scope["method"],
        "path": exchange.scope["path"][:200],
        "status": code,
        "seconds": round(time.perf_counter() - exchange.began, 6),
        "backend": exchange.backend().decode(),
    }
    if exchange.ignored:
        line["ignored"] = sorted(key[:80] for key in exchange.ignored)[:16]
    if exchange.served_model is not None:
        line["model"] = exchange.served_model.served_name
    if exchange.key is not None and exchange.key.name:
        line["key"] = exchange.key.name
    if exchange.error is not None:
        line["error"] = exchange.error
    choices = exchange.choices
    if choices:
        line["prompt_tokens"] = sum(len(c.prompt.ids) for c in choices if c.first_of_prompt)
        line["completion_tokens"] = sum(choice.tokens for choice in choices)
        line["finish"] = sorted({c.ended_as for c in choices if c.ended_as is not None})
        firsts = [c.times.first for c in choices if c.times.first is not None]
        if firsts:
            line["ttft_seconds"] = round(min(firsts) - exchange.began, 6)
    return line
