"""/openapi.json: a fold over the route table and the types of requests and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from serving.http.api_errors import ErrorBody
from serving.http.http_request import Request


class Route(NamedTuple):
    """A handler, and what the document says of it. `body` and `answer` are types.

    `path` may end in /{name}, which is any text. `streams`: the answer may come as events.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[None]]
    summary: str
    body: Any = None
    answer: Any = dict[str, Any]
    streams: bool = False


def document(routes: Sequence[Route], models: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these routes."""
    named = [kind for route in routes for kind in (route.answer, route.body)]
    types = [ErrorBody, *(kind for kind in named if kind is not None)]
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
        "security": [{"key": []}, {}],
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    error, answer = _json(schemas[ErrorBody]), _json(schemas[route.answer])
    if route.answer is str:
        answer = {"text/plain": answer.popitem()[1]}
    if route.streams:  # before version 3.2 the schema is that of one event's data
        one = {"anyOf": [schemas[route.answer], schemas[ErrorBody], {"const": "[DONE]"}]}
        answer["text/event-stream"] = {"schema": one}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": route.summary, "content": answer},
            "default": {"description": "An error; `code` says which", "content": error},
        },
    }
    if route.path.endswith("{name}"):
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.body])}
    return operation


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
