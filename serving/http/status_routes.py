"""Routes that need no engine: tokenization, the state of the server, and its models.

The admin routes have a key of their own: GET /admin/models, POST /admin/load {"name": "small"},
POST /admin/unload {"name": "small", "drain": false}. The response to a load or unload is sent when
it is complete; it continues if the client disconnects. Errors: 404 unknown model, 503 no room now,
507 the model cannot fit, 500 it did not load.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from crossover.models.machine_limits import available_bytes
from crossover.serving.backends.backend_interface import BackendInfo
from crossover.serving.errors import ContextOverflow, EngineState
from crossover.serving.hardware.machine_facts import peak_resident_bytes, resident_bytes
from crossover.serving.http.api_errors import ApiError
from crossover.serving.http.body_types import DETOKENIZE, TOKENIZE, WireStruct
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import check_ids
from crossover.serving.metrics import CONTENT_TYPE
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel

_OF_LOADED = ("memory", "device_name", "load_seconds", "details", "prefix_reuse")
_OF_MEMORY = ("weight_bytes", "kv_bytes", "state_bytes", "buffer_bytes", "overhead_bytes")


async def health(request: Request) -> dict[str, str]:
    return {"status": "ok"}


async def ready(request: Request) -> dict[str, Any]:
    """Return what serves, or would be loaded for a request. Raises Unavailable with the reason."""
    states = request.registry.states()
    models = list(request.registry.models.values())
    able = [model for model in models if states[model.served_name] == EngineState.ready]
    if not able:
        unloaded = [model for model in models if states[model.served_name] == EngineState.unloaded]
        able = [model for model in unloaded if model.on_demand]
    if not able:
        raise models[0].supervisor.unavailable()
    supervisor = able[0].supervisor
    return {
        "state": supervisor.state,
        "model": able[0].served_name,
        "backend": supervisor.label,
        "models": states,
    }


async def metrics(request: Request) -> None:
    await request.answer(request.registry.metrics.exposition(), kind=CONTENT_TYPE)


async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_card(model) for model in request.registry.models.values()]}


async def one_model(request: Request) -> dict[str, Any]:
    """Return the model with this id, which may contain slashes. Raises UnknownModel."""
    models = request.registry.models
    for name in models:  # the path has lost doubled and trailing slashes, the name may have them
        if re.sub("/+", "/", name).strip("/") == request.path_name:
            return _card(models[name])
    return _card(request.registry.named(request.path_name))


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.served_name,
        "object": "model",
        "created": model.created,
        "owned_by": "crossover",
        "max_model_len": model.engine_limits(to_generate=False).context_tokens,  # vLLM's name of it
        "state": model.supervisor.state,
    }


async def tokenize(request: Request) -> dict[str, Any]:
    body = await request.read(TOKENIZE)
    model = request.model = request.registry.named(body.model)
    add_bos = body.add_special_tokens is not False
    ids = await model.tokens(body.prompt, "prompt", add_bos=add_bos)
    context_tokens = model.engine_limits(to_generate=False).context_tokens
    return {"tokens": ids, "count": len(ids), "max_model_len": context_tokens}


async def detokenize(request: Request) -> dict[str, str]:
    body = await request.read(DETOKENIZE)
    model = request.model = request.registry.named(body.model)
    limits = model.engine_limits(to_generate=False)
    if len(body.tokens) > limits.context_tokens:
        raise ContextOverflow(len(body.tokens), limits.context_tokens, "tokens")
    check_ids(body.tokens, limits, "tokens")
    return {"prompt": model.text_of(body.tokens)}


async def placement(request: Request) -> dict[str, Any]:
    """Return the placement decision as made at the start (`explanation`) and what runs now, for the
    model `?model=` or the first one. Unknown values are null."""
    registry = request.registry
    now = time.time()
    query = dict(parse_qsl(request.scope["query_string"].decode("latin-1")))
    model = request.model = registry.named(query.get("model", registry.first.served_name))
    supervisor = model.supervisor
    engine = msgspec.structs.asdict(supervisor.config)
    ready = supervisor.ready
    pid = supervisor.engine_pid
    for key in ("model_path", "tokenizer_path"):
        del engine[key]
    settings = engine.pop("settings")
    loaded: dict[str, Any] = dict.fromkeys(_OF_LOADED)
    if ready is not None:
        info = ready.info
        settings, engine["weight_format"] = info.settings, info.weight_format
        loaded["memory"] = {
            "predicted": _predicted_memory(model),
            # Read now: a process takes more as contexts grow than it did when it was loaded.
            "rss_bytes": resident_bytes(pid) if pid is not None else ready.rss_bytes,
            "peak_rss_bytes": peak_resident_bytes(pid) if pid is not None else ready.peak_rss_bytes,
        }
        loaded["prefix_reuse"] = _describe_prefix_reuse(supervisor.config.prefix_reuse, info)
        loaded |= {"device_name": info.device_name, "details": info.details}
        loaded["load_seconds"] = ready.load_seconds
    return loaded | {
        "model": model.served_name,
        # For a plan of what else could serve it; null: an engine without a model.
        "shape": None if model.prepared is None else model.prepared.request.model,
        "models": registry.states(),
        "state": supervisor.state,
        "reason": supervisor.reason or None,
        "engine": engine | msgspec.structs.asdict(settings),
        "restarts": supervisor.restarts,
        "fallbacks": supervisor.fallbacks,
        "bridges": supervisor.bridges,
        "returns": supervisor.returns,
        "events": [
            {"seconds_ago": round(now - event.unix_seconds, 3)} | msgspec.structs.asdict(event)
            for event in supervisor.events
        ],
        "explanation": model.placement_report(),
    }


def _describe_prefix_reuse(is_enabled: bool, info: BackendInfo) -> str:
    """Return which prefixes of earlier prompts a new prompt can reuse, and why not more."""
    if not is_enabled:
        return "nothing: prefix_reuse is off"
    if info.rewinds:
        return "any common prefix"
    if info.has_checkpoints:
        return (
            "from checkpoints, shortly before the end of each prompt and where two prompts "
            f"diverge, since {info.why_not_rewinds}"
        )
    return f"nothing: {info.why_not_rewinds or 'this engine cannot truncate a sequence'}"


def _predicted_memory(model: ServedModel) -> dict[str, int] | None:
    """Return the memory of the running engine as placement predicted it."""
    config = model.supervisor.config
    for attempt in () if model.placement is None else model.placement.attempts:
        if (attempt.backend, attempt.device) == (config.backend, config.device):
            return {part: getattr(attempt, part) for part in _OF_MEMORY}
    return None


# --- the admin routes


class LoadRequest(WireStruct, kw_only=True, frozen=True):
    name: str


class UnloadRequest(LoadRequest, kw_only=True, frozen=True):
    """`drain`: running requests may finish."""

    drain: bool = True


LOAD = msgspec.json.Decoder(LoadRequest)
UNLOAD = msgspec.json.Decoder(UnloadRequest)


async def list_models(request: Request) -> dict[str, Any]:
    """Return all models and the memory they share; `memory_limit_bytes` null: no limit is set."""
    registry = request.registry
    return {
        "models": [_state(model) for model in registry.models.values()],
        "available_bytes": available_bytes(),  # what a new process can take
        "memory_limit_bytes": registry.limits.memory_bytes,
    }


def _state(model: ServedModel) -> dict[str, Any]:
    """Return one model and the RSS of its engine processes; unknown values are null."""
    supervisor, placement = model.supervisor, model.placement
    predicted = sum(attempt.need_bytes for attempt in model.attempts())
    return {
        "name": model.served_name,
        "state": model.state,
        "reason": supervisor.reason,
        "engine": supervisor.label,
        "engine_pid": supervisor.engine_pid,
        "on_demand": model.on_demand,
        "memory": {
            "device": placement.device,
            "predicted_bytes": predicted or placement.need_bytes,
            "measured_bytes": model.measured_bytes if supervisor.pids else None,
        },
        "in_flight": supervisor.in_flight,
        "idle_seconds": round(time.monotonic() - model.last_used_at, 3),
    }


async def load_model(request: Request) -> dict[str, Any]:
    name = (await request.read(LOAD)).name
    return await _done(request, name, lambda registry: registry.load(name))


async def unload_model(request: Request) -> dict[str, Any]:
    body = await request.read(UNLOAD)
    return await _done(request, body.name, lambda registry: registry.unload(body.name, body.drain))


async def _done(
    request: Request, name: str, work: Callable[[Registry], Awaitable[Any]]
) -> dict[str, Any]:
    """Finish the work, also if the client disconnects, and return the model's state after it."""
    registry = request.registry
    if name not in registry.models:
        text = f"The model {name[:200]!r} does not exist. GET /admin/models lists all models."
        raise ApiError(404, text, "model_not_found", "name")
    await work(registry)
    return _state(registry.models[name])
