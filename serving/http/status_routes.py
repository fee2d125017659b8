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

from crossover.models.formatting import size
from crossover.models.machine_limits import available_bytes
from crossover.serving.backends.backend_interface import BackendInfo, EngineConfig, EngineMemory
from crossover.serving.engine.ipc_messages import Ready
from crossover.serving.errors import ContextOverflow, EngineState
from crossover.serving.hardware.machine_facts import peak_resident_bytes, resident_bytes
from crossover.serving.hardware.numa import memory_share_on
from crossover.serving.http.api_errors import ApiError
from crossover.serving.http.body_types import DETOKENIZE, TOKENIZE, RequestStruct
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import check_ids
from crossover.serving.metrics import CONTENT_TYPE
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel
from crossover.serving.supervisor.engine_process import EngineProcess

# Keys of /v1/placement that are null while no engine is ready.
_KEYS_OF_READY_ENGINE = (
    "memory",
    "device_name",
    "load_seconds",
    "details",
    "prefix_reuse",
    "prompt_cache",
)


async def health(request: Request) -> dict[str, str]:
    return {"status": "ok"}


async def ready(request: Request) -> dict[str, Any]:
    """Return the first model that can answer a request: one that is loaded, or else one that a
    request would load. Raises Unavailable, with the reason of the first model, if there is none."""
    states = request.registry.states()
    models = list(request.registry.models.values())
    ready_models = [model for model in models if states[model.served_name] == EngineState.ready]
    unloaded = [model for model in models if states[model.served_name] == EngineState.unloaded]
    available = ready_models or [model for model in unloaded if model.on_demand]
    if not available:
        raise models[0].supervisor.unavailable()
    supervisor = available[0].supervisor
    return {
        "state": supervisor.state,
        "model": available[0].served_name,
        "backend": supervisor.label,
        "models": states,
    }


async def metrics(request: Request) -> None:
    await request.answer(request.registry.metrics.exposition(), content_type=CONTENT_TYPE)


async def models(request: Request) -> dict[str, Any]:
    served_models = request.registry.models.values()
    return {"object": "list", "data": [_model_object(model) for model in served_models]}


async def one_model(request: Request) -> dict[str, Any]:
    """Return the model with this id, which may contain slashes. Raises ModelNotServed."""
    models = request.registry.models
    for name, model in models.items():
        # Doubled and trailing slashes were removed from the path, so the name is compared alike.
        if re.sub("/+", "/", name).strip("/") == request.path_name:
            return _model_object(model)
    return _model_object(request.registry.named(request.path_name))


def _model_object(model: ServedModel) -> dict[str, Any]:
    """Return OpenAI's model object, with `max_model_len` as vLLM adds it."""
    context_tokens = model.engine_limits(to_generate=False).context_tokens
    return {
        "id": model.served_name,
        "object": "model",
        "created": model.created,
        "owned_by": "crossover",
        "max_model_len": context_tokens,
        "state": model.supervisor.state,
        "sampling_defaults": model.sampling_defaults,
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
    ready = supervisor.ready
    engine = msgspec.structs.asdict(supervisor.config)
    for private_key in ("model_path", "tokenizer_path"):
        del engine[private_key]
    settings = engine.pop("settings")
    of_ready_engine: dict[str, Any] = dict.fromkeys(_KEYS_OF_READY_ENGINE)
    if ready is not None:  # the settings and format that the engine chose
        settings, engine["weight_format"] = ready.info.settings, ready.info.weight_format
        of_ready_engine = _describe_ready_engine(model, ready)
    return of_ready_engine | {
        "model": model.served_name,
        # The shape of the model, so that a client can plan what else could serve it. Null: the
        # engine has no model.
        "shape": None if model.prepared is None else model.prepared.request.model,
        "models": registry.states(),
        "state": supervisor.state,
        "reason": supervisor.reason or None,
        "engine": engine | msgspec.structs.asdict(settings),
        # All processes that serve, load or are on standby.
        "engine_processes": [_describe_process(engine) for engine in supervisor.engines],
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


def _describe_process(engine: EngineProcess) -> dict[str, Any]:
    """Return what one engine process runs on and does, for /v1/placement."""
    return {
        "pid": engine.pid,
        "engine": engine.name,
        "is_ready": engine.ready is not None,
        "cores": engine.config.cores,
        "memory_nodes": engine.config.memory_nodes,
        "share_on_nodes": _share_on_nodes(engine),
        "rss_bytes": None if engine.pid is None else resident_bytes(engine.pid),
        "in_flight": engine.in_flight,
    }


def _share_on_nodes(engine: EngineProcess) -> float | None:
    """Return the share of an engine's memory on the NUMA nodes that it was given; None: it was
    given none, or it is not running."""
    if engine.pid is None or not engine.alive:
        return None
    return memory_share_on(engine.config.memory_nodes, engine.pid)


def _describe_ready_engine(model: ServedModel, ready: Ready) -> dict[str, Any]:
    """Return the values of _KEYS_OF_READY_ENGINE."""
    supervisor, info = model.supervisor, ready.info
    # The processes' memory now, because it grows with the contexts after the load.
    pids = supervisor.serving_pids
    rss_bytes, peak_rss_bytes = ready.rss_bytes, ready.peak_rss_bytes
    if pids:
        rss_bytes = sum(resident_bytes(pid) or 0 for pid in pids)
        peak_rss_bytes = sum(peak_resident_bytes(pid) or 0 for pid in pids)
    return {
        "memory": {
            "predicted": _predicted_memory(model),
            "rss_bytes": rss_bytes,
            "peak_rss_bytes": peak_rss_bytes,
            # Of the memory, on the NUMA nodes that the engine was given (of several engines, the
            # smallest share); null: given none.
            "share_on_nodes": min(
                (
                    share
                    for engine in supervisor.engines
                    if (share := _share_on_nodes(engine)) is not None
                ),
                default=None,
            ),
        },
        "device_name": info.device_name,
        "load_seconds": ready.load_seconds,
        "details": info.details,
        "prefix_reuse": _describe_prefix_reuse(supervisor.config, info),
        "prompt_cache": _prompt_cache(model),
    }


def _prompt_cache(model: ServedModel) -> dict[str, int] | None:
    """Return the size of the engine's prompt cache and what is in it; None: there is none."""
    supervisor = model.supervisor
    if supervisor.ready is None or not supervisor.ready.info.settings.stored_tokens:
        return None
    stats = supervisor.requests.stats
    cache = None if stats is None else stats.prompt_cache
    return {
        "bytes": supervisor.config.prompt_cache_bytes * supervisor.ready.info.settings.engines,
        "used_bytes": 0 if cache is None else cache.used_bytes,
        "sequences": 0 if cache is None else cache.sequences,
    }


def _describe_prefix_reuse(config: EngineConfig, info: BackendInfo) -> str:
    """Return which prefixes of earlier prompts a new prompt can reuse, and why not more."""
    if not config.prefix_reuse:
        return "nothing: prefix_reuse is off"
    stored = ""
    if info.settings.stored_tokens:
        stored = f", also of {size(config.prompt_cache_bytes)} of earlier sequences"
    if info.rewinds:
        return f"any common prefix{stored}"
    if info.has_checkpoints:
        return (
            "from checkpoints, shortly before the end of each prompt and where two prompts "
            f"diverge{stored}, since {info.why_not_rewinds}"
        )
    return f"nothing: {info.why_not_rewinds or 'this engine cannot truncate a sequence'}"


def _predicted_memory(model: ServedModel) -> EngineMemory | None:
    """Return the predicted memory of the running engine; None: there is no prediction for it."""
    if model.placement is None:
        return None
    config = model.supervisor.config
    for attempt in model.placement.attempts:
        if (attempt.backend, attempt.device) == (config.backend, config.device):
            return attempt.memory
    return None


# --- the admin routes


class LoadRequest(RequestStruct, kw_only=True, frozen=True):
    name: str


class UnloadRequest(LoadRequest, kw_only=True, frozen=True):
    """`drain`: let running requests finish first."""

    drain: bool = True


LOAD = msgspec.json.Decoder(LoadRequest)
UNLOAD = msgspec.json.Decoder(UnloadRequest)


async def list_models(request: Request) -> dict[str, Any]:
    """Return all models and the memory they share; `memory_limit_bytes` null: no limit is set."""
    registry = request.registry
    return {
        "models": [_model_state(model) for model in registry.models.values()],
        "available_bytes": available_bytes(),  # what a new process can take
        "memory_limit_bytes": registry.limits.memory_bytes,
    }


def _model_state(model: ServedModel) -> dict[str, Any]:
    """Return one model's state and memory for the admin routes; unknown values are null."""
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
    return await _finish_work(request, name, lambda registry: registry.load(name))


async def unload_model(request: Request) -> dict[str, Any]:
    body = await request.read(UNLOAD)
    return await _finish_work(
        request, body.name, lambda registry: registry.unload(body.name, body.drain)
    )


async def _finish_work(
    request: Request, name: str, work: Callable[[Registry], Awaitable[Any]]
) -> dict[str, Any]:
    """Do the work on the model of this name and return the model's state after it.

    The work is finished even if the client disconnects: only `acquire_model` watches for that.
    Raises ApiError 404.
    """
    registry = request.registry
    if name not in registry.models:
        text = f"The model {name[:200]!r} does not exist. GET /admin/models lists all models."
        raise ApiError(404, text, "model_not_found", "name")
    await work(registry)
    return _model_state(registry.models[name])
