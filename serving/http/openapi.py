"""/openapi.json: a fold over the route table and the types of requests and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from serving.http.api_errors import ErrorBody
from serving.http.http_request import Request


class Route(NamedTuple):
    """A handler, and what the document says of it. `body` and `answer` are types.

    A handler returns what the answer says, or an Answer that writes itself; None: it has answered.
    `path` may end in /{name}, which is any text.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Any]]
    summary: str
    body: Any = None
    answer: Any = dict[str, Any]


def document(routes: Sequence[Route], models: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these routes."""
    types = {ErrorBody, *(route.answer for route in routes), *(route.body for route in routes)}
    template = "#/components/schemas/{name}"
    found, components = msgspec.json.schema_components(types, ref_template=template)
    as_json = {
        kind: {"application/json": {"schema": schema}}
        for kind, schema in zip(types, found, strict=True)
    }
    paths: dict[str, Any] = {}
    for route in routes:
        answers = {
            "200": {"description": route.summary, "content": as_json[route.answer]},
            "default": {"description": "An error", "content": as_json[ErrorBody]},
        }
        operation: dict[str, Any] = {"summary": route.summary, "responses": answers}
        if route.path.endswith("{name}"):
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": as_json[route.body]}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    about = f"OpenAI-compatible inference endpoint; serves {models}; answers have X-Request-Id."
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Crossover", "version": "1", "description": about},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
        "security": [{"key": []}, {}],
    }
