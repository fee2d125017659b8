"""/openapi.json: a fold over the route table and the types of requests and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serving.http.exchange import Exchange
from serving.http.limits import Limits
from serving.http.wire.errors import ErrorBody
from serving.http.wire.requests import MOST_CHOICES
from serving.registry.loaded_model import ModelRouter

Handler = Callable[[ModelRouter, Exchange], Awaitable[None]]

_JSON = "application/json"
_TOKEN_ID = "^(0|[1-9][0-9]{0,9})$"
_MEANINGS = {
    202: "It goes on; this is the state so far",
    400: "The request is wrong; `param` names where",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The body came too slowly",
    409: "It is under way already",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "The queue is full; Retry-After says when to come back",
    431: "The headers are too large",
    500: "The engine failed on this request",
    503: "No engine serves at the moment; Retry-After says when to come back",
    504: "The request's deadline passed",
    507: "The model cannot fit in this machine's memory",
}
_OF_ANY_BODY = (400, 408, 413, 415)


@dataclass(frozen=True)
class Route:
    """A handler, and what the document says of it. `answer`, `body`, `chunk`, `others`: types.

    A tuple of types is any of them.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answer: Any  # a media type where it is not JSON
    body: Any = None
    chunk: Any = None  # of a streamed answer
    errors: tuple[int, ...] = ()
    others: Mapping[int, Any] = field(default_factory=dict)  # answers of other statuses
    query: str | None = None  # the one parameter of the query string
    keyed: bool = True

    @property
    def types(self) -> Iterator[Any]:
        """Every type that the document needs for this route."""
        for each in (self.answer, self.body, self.chunk, *self.others.values()):
            if each is not None and not isinstance(each, str):
                yield from each if isinstance(each, tuple) else (each,)


def document(routes: Sequence[Route], model: str, limits: Limits) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these routes and limits."""
    types = list(dict.fromkeys([each for route in routes for each in route.types] + [ErrorBody]))
    found, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    _bound_by(limits, components)
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path", "")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Crossover",
            "version": "1",
            "description": f"OpenAI-compatible inference endpoint; serves {model!r}; "
            "every answer has X-Request-Id.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    def json(kind: Any) -> dict[str, Any]:
        if isinstance(kind, tuple):
            return {_JSON: {"schema": {"anyOf": [schemas[each] for each in kind]}}}
        return {_JSON: {"schema": schemas[kind]}}

    content = {route.answer: {"schema": {"type": "string"}}}
    if not isinstance(route.answer, str):
        content = json(route.answer)
    if route.chunk is not None:
        content |= _stream({"anyOf": [schemas[route.chunk], schemas[ErrorBody]]})
    responses: dict[str, Any] = {"200": {"description": route.summary, "content": content}}
    errors = {*route.errors, 431}
    errors |= {401} if route.keyed else set()
    errors |= set(_OF_ANY_BODY) if route.body is not None else set()
    answers = dict.fromkeys(sorted(errors), ErrorBody) | dict(route.others)
    for status, kind in answers.items():
        responses[str(status)] = {"description": _MEANINGS[status], "content": json(kind)}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    operation["security"] = [{"key": []}, {}] if route.keyed else []
    parameters = [_parameter(name, "path") for name in re.findall(r"\{(\w+)", route.path)]
    if route.query is not None:
        parameters.append(_parameter(route.query, "query"))
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": json(route.body)}
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    needed = place == "path"
    return {"name": name, "in": place, "required": needed, "schema": {"type": "string"}}


def _stream(one: dict[str, Any]) -> dict[str, Any]:
    """Server-sent events; before version 3.2 of OpenAPI the schema is that of one event."""
    data = [
        {"const": "[DONE]"},
        {"type": "string", "contentMediaType": _JSON, "contentSchema": one},
    ]
    properties = {"data": {"anyOf": data}}
    schema = {"type": "object", "properties": properties, "required": ["data"]}
    return {"text/event-stream": {"schema": schema}}


def _bound_by(limits: Limits, components: dict[str, Any]) -> None:
    """Put the server's limits into the schemas, and what the types alone cannot say."""
    stop = {"type": "string", "minLength": 1, "maxLength": limits.stop_characters}
    stops = {"type": "array", "items": stop, "maxItems": limits.stop_strings}
    biases = {"maxProperties": limits.logit_bias_keys, "propertyNames": {"pattern": _TOKEN_ID}}
    for name in ("ChatRequest", "CompletionRequest"):
        properties = components[name]["properties"]
        properties["stop"]["anyOf"] = [stop, stops, {"type": "null"}]
        _bound(properties["stop_token_ids"], "array", maxItems=limits.stop_token_ids)
        _bound(properties["logit_bias"], "object", **biases)
        _bound(properties["n"], "integer", maximum=min(MOST_CHOICES, limits.sequences))
    components["ChatRequest"]["properties"]["messages"]["maxItems"] = limits.messages
    text = {"type": "string", "minLength": 1}
    ids = _some({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
    many = {"maxItems": limits.sequences}
    prompts = [text, ids, _some(text) | many, _some(ids) | many]  # no mixtures
    components["CompletionRequest"]["properties"]["prompt"] = {"anyOf": prompts}


def _some(items: dict[str, Any]) -> dict[str, Any]:
    """A list of at least one."""
    return {"type": "array", "items": items, "minItems": 1}


def _bound(schema: dict[str, Any], kind: str, **more: Any) -> None:
    """Put the server's own bound on the variant of this kind."""
    for variant in schema.get("anyOf", [schema]):
        if variant.get("type") == kind:
            variant.update(more)
