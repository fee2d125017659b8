"""/openapi.json: a fold over the route table and the types of requests and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.http.errors import ErrorBody
from serving.http.http_request import Request

_JSON = "application/json"


@dataclass(frozen=True)
class Route:
    """A handler, and what the document says of it. `answer` and `body` are types.

    `path` may end in /{name}, which is any text. `keyed`: the API key is asked for. `streams`: the
    answer may come as events.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[None]]
    summary: str
    body: Any = None
    answer: Any = dict[str, Any]  # a media type where it is not JSON
    streams: bool = False
    keyed: bool = True


def document(routes: Sequence[Route], models: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these routes."""
    named = [kind for route in routes for kind in (route.answer, route.body)]
    types = [ErrorBody, *(kind for kind in named if kind is not None and not isinstance(kind, str))]
    template = "#/components/schemas/{name}"
    found, components = msgspec.json.schema_components(types, ref_template=template)
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    about = f"OpenAI-compatible inference endpoint; serves {models}; answers have X-Request-Id."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Crossover", "version": "1", "description": about},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": schemas.get(route.answer)}}
    if isinstance(route.answer, str):
        content = {route.answer: {"schema": {"type": "string"}}}
    error = {"schema": schemas[ErrorBody]}
    if route.streams:  # before version 3.2 the schema is that of one event's data
        one = {"anyOf": [schemas[route.answer], schemas[ErrorBody], {"const": "[DONE]"}]}
        content["text/event-stream"] = {"schema": one}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": route.summary, "content": content},
            "default": {"description": "An error; `code` says which", "content": {_JSON: error}},
        },
        "security": [{"key": []}, {}] if route.keyed else [],
    }
    text = {"type": "string"}
    if route.path.endswith("{name}"):
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": text}]
    if route.path == "/v1/placement":
        operation["parameters"] = [{"name": "model", "in": "query", "schema": text}]
    if route.body is not None:
        body = {_JSON: {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
