"""/openapi.json, made from the types of serving.protocol: what the document says is what the decoder checks."""

from __future__ import annotations

from typing import Any

import msgspec

from serving import protocol, replies
from serving.access import Limits
from serving.admin_wire import FleetState, ModelChoice, ModelState, UnlistedModel, UnloadRequest
from serving.placement_view import PlacementView

_JSON = "application/json"
_TOKEN_ID = "^(0|[1-9][0-9]{0,9})$"
_KEYED: list[dict[str, list[str]]] = [{"key": []}]


def document(model: str, limits: Limits, admin: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these limits. `admin`: with the routes under /admin/."""
    p, r = protocol, replies
    types: list[Any] = [
        *(p.ChatRequest, p.CompletionRequest, p.TokenizeRequest, p.DetokenizeRequest),
        *(r.ChatCompletion, r.ChatChunk, r.Completion, r.Tokenized, r.Detokenized),
        *(r.ModelList, r.ModelCard, r.Health, r.Readiness, PlacementView, p.ErrorBody),
        *((ModelChoice, UnloadRequest, ModelState, UnlistedModel, FleetState) if admin else ()),
    ]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    stops = {"minLength": 1, "maxLength": limits.stop_characters}
    for name in ("ChatRequest", "CompletionRequest"):
        properties = components[name]["properties"]
        properties["stop"]["anyOf"] = [
            {"type": "string", **stops},
            {"type": "array", "items": {"type": "string", **stops}, "maxItems": limits.stop_strings},
            {"type": "null"},
        ]
        _bound(properties["stop_token_ids"], "array", maxItems=limits.stop_token_ids)
        _bound(properties["logit_bias"], "object", maxProperties=limits.logit_bias_keys, propertyNames={"pattern": _TOKEN_ID})
        _bound(properties["n"], "integer", maximum=min(p.MOST_CHOICES, limits.sequences))
    components["ChatRequest"]["properties"]["messages"]["maxItems"] = limits.messages
    text, ids = {"type": "string", "minLength": 1}, _some({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
    prompts = [text, ids, _some(text, limits.sequences), _some(ids, limits.sequences)]  # no mixtures, which the type alone would allow
    components["CompletionRequest"]["properties"]["prompt"] = {"anyOf": prompts}
    if admin:
        choice = components["ModelChoice"]["properties"]
        for name in ("slots", "context_tokens", "kv_tokens", "prefill_tokens", "threads"):
            _bound(choice[name], "integer", minimum=1)
        _bound(choice["step_seconds_target"], "number", exclusiveMinimum=0)
        _bound(choice["idle_unload_seconds"], "number", exclusiveMinimum=0)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Crossover",
            "version": "1",
            "description": f"OpenAI-compatible inference endpoint; serves {model!r}; every answer has X-Request-Id.",
        },
        "paths": _paths() | (_admin_paths() if admin else {}),
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _some(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    """A list of at least one."""
    return {"type": "array", "items": items, "minItems": 1} | ({} if most is None else {"maxItems": most})


def _bound(schema: dict[str, Any], kind: str, **more: Any) -> None:
    """Put the server's own bound on the variant of this kind."""
    for variant in schema.get("anyOf", [schema]):
        if variant.get("type") == kind:
            variant.update(more)


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": {
            "post": _post("Answer a chat", "ChatRequest", "ChatCompletion", _stream("ChatChunk"), (404, 429, 500, 503, 504))
        },
        "/v1/completions": {
            "post": _post("Continue a text", "CompletionRequest", "Completion", _stream("Completion"), (404, 429, 500, 503, 504))
        },
        "/v1/models": {"get": _get("What is served", "ModelList")},
        "/v1/models/{name}": {
            "get": _get("One model", "ModelCard", (404,))
            | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
        },
        "/tokenize": {"post": _post("Text or chat to token ids", "TokenizeRequest", "Tokenized", {}, (404,))},
        "/detokenize": {"post": _post("Token ids to text", "DetokenizeRequest", "Detokenized", {}, (404,))},
        "/health": {"get": _get("The process lives", "Health", keyed=False)},
        "/ready": {"get": _ready()},
        "/metrics": {"get": _operation("Prometheus metrics", {"text/plain": {"schema": {"type": "string"}}}, (401, 431))},
        "/v1/placement": {
            "get": _get("What runs where, and why", "PlacementView", (400, 404))
            | {"parameters": [{"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}]}
        },
        "/openapi.json": {"get": _operation("This document", {_JSON: {"schema": {"type": "object"}}}, (401, 431))},
    }


def _admin_paths() -> dict[str, Any]:
    """Behind the admin key: not the API key, whatever the scheme's name here says."""
    errors = (404, 409, 500, 503, 507)
    named = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
    state = {_JSON: {"schema": {"anyOf": [_ref(name)["schema"] for name in ("ModelState", "UnlistedModel")]}}}
    later = {"202": {"description": "It goes on; this is the state so far", "content": state}}
    paths: dict[str, Any] = {
        "/admin/models": {"get": _get("State of every model", "FleetState")},
        "/admin/models/{name}": {"get": _get("State of one model", "ModelState", (404,)) | named},
    }
    for path, what, body in (
        ("load", "Load a model, or add one", "ModelChoice"),
        ("unload", "Unload a model", "UnloadRequest"),
        ("swap", "Serve another model under the same name", "ModelChoice"),
    ):
        operation = _post(what, body, "ModelState", state, errors)
        operation["responses"] |= later
        paths[f"/admin/{path}"] = {"post": operation}
    return paths


def _stream(chunk: str) -> dict[str, Any]:
    """Server-sent events; before version 3.2 of OpenAPI the schema is that of one event."""
    one = {"anyOf": [_ref(name)["schema"] for name in (chunk, "ErrorBody")]}
    data = [{"const": "[DONE]"}, {"type": "string", "contentMediaType": _JSON, "contentSchema": one}]
    return {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"anyOf": data}}, "required": ["data"]}}}


def _ref(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _error(status: int) -> dict[str, Any]:
    return {"description": _MEANINGS[status], "content": {_JSON: _ref("ErrorBody")}}


_MEANINGS = {
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


def _operation(summary: str, content: dict[str, Any], errors: tuple[int, ...], keyed: bool = True) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    responses |= {str(status): _error(status) for status in errors}
    return {"summary": summary, "responses": responses, "security": [*_KEYED, {}] if keyed else []}


def _get(summary: str, answer: str, errors: tuple[int, ...] = (), keyed: bool = True) -> dict[str, Any]:
    return _operation(summary, {_JSON: _ref(answer)}, tuple(sorted({*errors, 431, *((401,) if keyed else ())})), keyed)


def _post(summary: str, body: str, answer: str, more: dict[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    operation = _operation(summary, {_JSON: _ref(answer), **more}, tuple(sorted({*errors, 400, 401, 408, 413, 415, 431})))
    return operation | {"requestBody": {"required": True, "content": {_JSON: _ref(body)}}}


def _ready() -> dict[str, Any]:
    operation = _get("The engine serves", "Readiness", keyed=False)
    operation["responses"]["503"] = {
        "description": "It does not (yet); `state` and `reason` say why",
        "content": {_JSON: _ref("Readiness")},
    }
    return operation
