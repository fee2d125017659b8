"""The route table, the ASGI application and /openapi.json.

    app = App(registry, api_key="...")
    uvicorn.run(app, **server_options())    # crossover.serving.http.http_server

Every response, also an error, has X-Request-Id and X-Crossover-Backend, and an answer of one of
several engines has X-Crossover-Engine, its number from 1; every error has OpenAI's
error body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from crossover.serving.http import status_routes
from crossover.serving.http.api_errors import ApiError, ErrorBody, as_api_error
from crossover.serving.http.asgi_types import Receive, Scope, Send
from crossover.serving.http.body_types import (
    ChatChoice,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    TextChoice,
    TokenizeRequest,
)
from crossover.serving.http.chat_completions import chat_completions
from crossover.serving.http.completions import completions
from crossover.serving.http.generation_response import GenerationResponse, sse_event
from crossover.serving.http.http_request import Request
from crossover.serving.http.http_server import is_local_name
from crossover.serving.http.status_routes import LoadRequest, UnloadRequest
from crossover.serving.registry.registry import Registry

logger = logging.getLogger("crossover.http")
CLIENT_GONE = 499  # nginx's status for a client that closed the connection; only in metrics


class Route(NamedTuple):
    """A handler and its description in the OpenAPI document.

    `body` and `answer` are the types of request and response. A handler returns the value of the
    response, or a GenerationResponse, which writes itself, or None if it has responded already.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Any]]
    summary: str
    body: Any = None
    answer: Any = dict[str, Any]


async def openapi(request: Request) -> dict[str, Any]:
    return document(request.scope["app"].routes, request.registry)


async def preflight(request: Request) -> None:
    """Answer a browser's question whether a page of another origin may send a request."""
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
    if names := request.headers.get(b"access-control-request-headers"):
        headers["Access-Control-Allow-Headers"] = names.decode("latin-1")
    if b"access-control-request-private-network" in request.headers:
        headers["Access-Control-Allow-Private-Network"] = "true"
    await request.answer(b"", headers=headers, content_type="text/plain")


PREFLIGHT = Route("OPTIONS", "other", preflight, "A browser's question before its request")
_SLASHES = re.compile("/{2,}")
_MODEL = "/v1/models/{model}"
_PROBE_PATHS = ("/health", "/ready")  # probes have no key and may use any host name
ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a chat",
        ChatRequest,
        Completion[ChatChoice],
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        "Continue a text",
        CompletionRequest,
        Completion[TextChoice],
    ),
    Route("GET", "/health", status_routes.health, "Whether the process runs"),
    Route("GET", "/ready", status_routes.ready, "Whether an engine serves"),
    Route("GET", "/metrics", status_routes.metrics, "Prometheus metrics", answer=str),
    Route("GET", "/v1/models", status_routes.models, "The served models"),
    Route("GET", _MODEL, status_routes.one_model, "One served model"),
    Route("POST", "/tokenize", status_routes.tokenize, "Text to ids", TokenizeRequest),
    Route("POST", "/detokenize", status_routes.detokenize, "Ids to text", DetokenizeRequest),
    Route("GET", "/v1/placement", status_routes.placement, "What runs where, and why"),
    Route("GET", "/openapi.json", openapi, "This document"),
)
ADMIN_ROUTES = (
    Route("GET", "/admin/models", status_routes.list_models, "State of every model"),
    Route("POST", "/admin/load", status_routes.load_model, "Load a model", LoadRequest),
    Route("POST", "/admin/unload", status_routes.unload_model, "Unload a model", UnloadRequest),
)


class App:
    """Checks host, key and route before the handler runs; handles errors and metrics after it.

    `api_key`: None: no key is required. `admin_key`: None: there are no admin routes. `host`: the
    Host header must have this name or one of this machine; otherwise a web page could send
    requests to the server through a domain name of its own that resolves to this machine (DNS
    rebinding). None: any name is accepted. `cors_origins`: whose pages may read responses; "*":
    everybody's. `has_open_metrics`: /metrics needs no key. `requires_cache_salt`: a
    request without one is refused.
    """

    def __init__(
        self,
        registry: Registry,
        api_key: str | None = None,
        admin_key: str | None = None,
        host: str | None = None,
        cors_origins: Sequence[str] = (),
        has_open_metrics: bool = False,
        requires_cache_salt: bool = False,
    ) -> None:
        self.registry = registry
        self.routes = ROUTES if admin_key is None else (*ROUTES, *ADMIN_ROUTES)
        self._api_key = api_key
        self._admin_key = admin_key
        self._host = host
        self._cors_origins = frozenset(cors_origins)
        self._requires_cache_salt = requires_cache_salt
        self._open_paths = (*_PROBE_PATHS, "/metrics") if has_open_metrics else _PROBE_PATHS
        self._table: dict[str, dict[str, Route]] = {}  # path -> method -> route
        for route in self.routes:
            for path in {route.path, route.path.removeprefix("/v1")}:
                methods = self._table.setdefault(path, {})
                methods[route.method] = route
                if route.method == "GET":
                    methods["HEAD"] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        request = Request(self.registry, scope, receive, send)
        request.requires_cache_salt = self._requires_cache_salt
        if self._cors_origins:
            request.cors_headers = self._cors_headers(request.headers.get(b"origin", b""))
        metrics = self.registry.metrics
        metrics.open_requests.inc()
        try:
            response = await self._route(request).handler(request)
            if isinstance(response, GenerationResponse):
                await response.send()
            elif response is not None:
                await request.answer(response)
        except asyncio.CancelledError:
            if not request.is_client_gone:
                raise
        except Exception as problem:
            await self._fail(request, problem)
        finally:
            metrics.open_requests.dec()
            request.release_model()
            has_response = request.status is not None and not request.is_client_gone
            status = request.status if has_response else CLIENT_GONE
            metrics.responses.labels(request.route, str(status)).inc()

    def _route(self, request: Request) -> Route:
        """Return the route. Raises ApiError 401 without the key, 403 for a wrong Host, 404, 405.

        Doubled and trailing slashes are removed first, so that the checked path is the routed one.
        """
        headers, method = request.headers, request.scope["method"]
        path = _SLASHES.sub("/", request.scope["path"]).rstrip("/")
        if method == "OPTIONS" and request.cors_headers:
            return PREFLIGHT  # browsers send it without a key
        if path not in _PROBE_PATHS:
            if self._host is not None:
                check_host(request, self._host)
            if path.startswith("/admin/") and self._admin_key is not None:
                check_key(headers, self._admin_key)
            elif self._api_key is not None and path not in self._open_paths:
                check_key(headers, self._api_key)
        methods = self._table.get(path)
        if methods is None:
            prefix, separator, name = path.partition("/models/")
            is_relative = not {".", ".."}.isdisjoint(name.split("/"))
            if separator and prefix in ("", "/v1") and not is_relative:
                methods = self._table[_MODEL]
                request.path_name = name
        if methods is None:
            text = f"{path[:200] or '/'} does not exist. GET /openapi.json lists all routes."
            raise ApiError(404, text, "not_found")
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            text = f"{method} is not allowed at {path[:200]}. Use {allowed}."
            raise ApiError(405, text, "method_not_allowed", headers={"Allow": allowed})
        request.route = route.path
        return route

    def _cors_headers(self, origin: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers by which a browser lets a page of this origin read the response."""
        if self._cors_origins.isdisjoint({"*", origin.decode("latin-1")}) or not origin:
            return ()
        return (
            (b"access-control-allow-origin", origin),
            (
                b"access-control-expose-headers",
                b"X-Request-Id, X-Crossover-Backend, X-Crossover-Engine, Retry-After",
            ),
            (b"vary", b"Origin"),
        )

    async def _fail(self, request: Request, problem: Exception) -> None:
        """Respond to an error of a handler; inside a stream the error is the last event, without
        [DONE]. Unexpected errors are logged."""
        error = as_api_error(problem)
        if error is None:
            logger.error("Request %s failed.", request.id.decode(), exc_info=problem)
            text = "The server failed on this request. Its log has the reason."
            error = ApiError(500, text, "internal_error")
        name = "" if request.model is None else request.model.served_name
        self.registry.metrics.rejected.labels(name, error.code or str(error.status)).inc()
        if request.status is None:
            await request.answer(error.body, error.status, error.headers)
        elif not request.has_ended:
            await request.write(sse_event(error.body), last=True)


def check_host(request: Request, host: str) -> None:
    """Check the Host header. Raises ApiError 403 if it names neither `host` nor this machine."""
    header = request.headers.get(b"host")
    if header is None and request.scope["http_version"] < "1.1":
        return  # only HTTP/1.0 may leave it out, and browsers always send it
    name = "" if header is None else header.decode("latin-1")
    name_without_port = name.rpartition(":")[0]
    if host in (name, name_without_port) or is_local_name(name):
        return
    text = (
        "This server has no API key, so it answers only requests to this machine's own names, "
        f"such as localhost. The Host header of this request is {name[:200]!r}. Start the "
        "server with --api-key-env to reach it under other names."
    )
    raise ApiError(403, text, "host_not_allowed")


def check_key(headers: Mapping[bytes, bytes], key: str) -> None:
    """Check the API key. Raises ApiError 401."""
    scheme, _, sent_key = headers.get(b"authorization", b"").partition(b" ")
    # Takes the same time wherever the keys differ, so that the time does not help to guess the key.
    is_key_right = hmac.compare_digest(sent_key.strip(), key.encode())
    if not is_key_right or scheme.lower() != b"bearer":
        text = "An API key is required. Send it as Authorization: Bearer <key>."
        raise ApiError(401, text, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def document(routes: Sequence[Route], registry: Registry) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes, generated from their types."""
    models = ", ".join(registry.models)
    types = {ErrorBody, *(route.answer for route in routes), *(route.body for route in routes)}
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    content_of = {  # OpenAPI's "content", by type
        value_type: {"application/json": {"schema": schema}}
        for value_type, schema in zip(types, schemas, strict=True)
    }
    paths: dict[str, Any] = {}
    for route in routes:
        responses = {
            "200": {"description": route.summary, "content": content_of[route.answer]},
            "default": {"description": "An error", "content": content_of[ErrorBody]},
        }
        operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
        if path_parameters := re.findall("{(.*?)}", route.path):
            in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **in_path} for name in path_parameters]
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": content_of[route.body]}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    defaults = "; ".join(
        f"{name}: {msgspec.json.encode(model.sampling_defaults).decode()}"
        for name, model in registry.models.items()
    )
    description = (
        f"OpenAI-compatible inference endpoint for {models}. Responses have X-Request-Id. Sampling "
        f"parameters that a request leaves out: {defaults}."
    )
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Crossover", "version": "1", "description": description},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
        "security": [{"key": []}, {}],
    }
