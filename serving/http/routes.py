"""The route table, and the ASGI application around it.

    app = App(router, limits, api_key="...")
    uvicorn.run(app, **server_options())    # serving.http.http_server

Every answer, errors too, has X-Request-Id and X-Crossover-Backend; every error has OpenAI's body.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from serving.http import admin_routes, status_routes
from serving.http.admin_routes import LoadRequest, UnloadRequest
from serving.http.api_errors import ApiError, as_answer
from serving.http.api_schemas import (
    ChatChoice,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    TextChoice,
    TokenizeRequest,
)
from serving.http.chat_completions import chat_completions
from serving.http.completions import completions
from serving.http.http_request import Endpoint, Limits, Request
from serving.http.openapi import Route, document
from serving.registry.model_registry import Registry

logger = logging.getLogger("crossover.http")
CLIENT_GONE = 499  # nginx's number for an answer that nobody waited for; only in metrics


async def openapi(request: Request) -> None:
    names = ", ".join(request.endpoint.router.models)
    await request.answer(document(request.scope["app"].routes, names))


_CHAT = ("POST", "/v1/chat/completions", chat_completions, "Answer a chat")
_TEXT = ("POST", "/v1/completions", completions, "Continue a text")
ROUTES = (
    Route(*_CHAT, ChatRequest, Completion[ChatChoice], streams=True),
    Route(*_TEXT, CompletionRequest, Completion[TextChoice], streams=True),
    Route("GET", "/health", status_routes.health, "The process lives"),
    Route("GET", "/ready", status_routes.ready, "The engine serves"),
    Route("GET", "/metrics", status_routes.metrics, "Prometheus metrics", answer=str),
    Route("GET", "/v1/models", status_routes.models, "What is served"),
    Route("GET", "/v1/models/{name}", status_routes.model_card, "One model"),
    Route("POST", "/tokenize", status_routes.tokenize, "To token ids", TokenizeRequest),
    Route("POST", "/detokenize", status_routes.detokenize, "Ids to text", DetokenizeRequest),
    Route("GET", "/v1/placement", status_routes.placement, "What runs where, and why"),
    Route("GET", "/openapi.json", openapi, "This document"),
)
ADMIN_ROUTES = (
    Route("GET", "/admin/models", admin_routes.list_models, "State of every model"),
    Route("POST", "/admin/load", admin_routes.load_model, "Load it", LoadRequest),
    Route("POST", "/admin/unload", admin_routes.unload_model, "Unload it", UnloadRequest),
)


class App:
    """Host, key and route before the handler; errors and counts after it.

    `local_names`: a Host that is a name of the DNS is refused. Without `admin_key` there are no
    admin routes.
    """

    def __init__(
        self,
        router: Registry,
        limits: Limits,
        api_key: str | None = None,
        admin_key: str | None = None,
        local_names: bool = False,
    ) -> None:
        self.endpoint = Endpoint(router, limits)
        self.routes = ROUTES if admin_key is None else (*ROUTES, *ADMIN_ROUTES)
        self._api_key = api_key
        self._admin_key = admin_key
        self._local_names = local_names
        self._table: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            for path in {route.path, route.path.removeprefix("/v1")}:
                self._table.setdefault(path, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        request = Request(self.endpoint, scope, receive, send)
        metrics = self.endpoint.router.metrics
        metrics.open_requests.inc()
        try:
            await self._route(request).handler(request)
        except asyncio.CancelledError:
            if not request.gone:
                raise
        except Exception as problem:
            await self._fail(request, problem)
        finally:
            metrics.open_requests.dec()
            request.let_go()
            code = CLIENT_GONE if request.gone or request.status is None else request.status
            metrics.responses.labels(request.route, str(code)).inc()

    def _route(self, request: Request) -> Route:
        """Raises ApiError 403 for a foreign name of this server, 401 without the key, 404, 405."""
        headers, method, path = request.headers, request.scope["method"], request.scope["path"]
        if self._local_names:
            check_host(headers)
        routes = self._table.get(path)
        if routes is None:
            folder, _, name = path.partition("/models/")
            if name and folder in ("", "/v1"):
                request.parameter = name
                routes = self._table["/v1/models/{name}"]
        if path.startswith("/admin/") and self._admin_key is not None:
            check_key(headers, self._admin_key)
        elif self._api_key is not None and path not in ("/health", "/ready"):
            check_key(headers, self._api_key)
        if routes is None:
            text = f"there is no {path[:200]} here; /openapi.json lists what there is"
            raise ApiError(404, text, "not_found")
        if method not in routes:
            allowed = ", ".join(sorted(routes))
            text = f"{method} is not allowed on {path[:200]}; {allowed} is"
            raise ApiError(405, text, "method_not_allowed", headers={"Allow": allowed})
        route = routes[method]
        request.route = route.path
        return route

    async def _fail(self, request: Request, problem: Exception) -> None:
        """The answer to whatever a handler has raised; what nobody foresaw is logged."""
        answer = as_answer(problem)
        if answer is None:
            number = request.id.decode()
            logger.error("request %s failed", number, exc_info=problem)
            text = "the server failed on this request; its log says why"
            answer = ApiError(500, text, "internal_error")
        router = self.endpoint.router
        model = request.model or (router.first if len(router.models) == 1 else None)
        name = "" if model is None else model.served_name
        router.metrics.rejected.labels(name, answer.code or str(answer.status)).inc()
        await request.fail(answer)


def check_key(headers: Mapping[bytes, bytes], key: str) -> None:
    """Raises ApiError 401 for a request without the key, after a time that does not depend on
    where they differ."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    is_same = hmac.compare_digest(given.strip(), key.encode())
    if not is_same or scheme.lower() != b"bearer":
        text = "an API key is needed: Authorization: Bearer <key>"
        raise ApiError(401, text, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def check_host(headers: Mapping[bytes, bytes]) -> None:
    """Raises ApiError 403 where the Host is a name of the DNS other than localhost.

    A web page reaches a server on loopback under its own name where it has the DNS answer
    127.0.0.1 (DNS rebinding). Addresses and names without a dot are nobody's.
    """
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if "." in name and not name.endswith(".localhost"):
            text = f"Host {name[:80]!r}: without a key, local names only are served"
            raise ApiError(403, text, "wrong_host") from None
