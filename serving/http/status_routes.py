"""Routes that need no engine: tokenising, and what this server is doing."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from serving.errors import ContextOverflow, EngineState
from serving.http.api_schemas import DETOKENIZE, TOKENIZE
from serving.http.http_request import Request
from serving.http.request_validation import check_ids
from serving.metrics import CONTENT_TYPE
from serving.registry.loaded_model import ServedModel

_OF_ENGINE = ("weight_format", "slots", "context_tokens", "kv_tokens")  # as the engine has them
_OF_MEMORY = ("weight_bytes", "kv_bytes", "overhead_bytes")


async def health(request: Request) -> dict[str, str]:
    return {"status": "ok"}


async def ready(request: Request) -> dict[str, Any]:
    """Whether a request can be answered: an engine serves, or is loaded for the request. Raises
    Unavailable with the reason."""
    router = request.router
    states, models = router.states(), list(router.models.values())
    able = [one for one in models if states[one.served_name] == EngineState.ready]
    if not able:
        can = [one for one in models if states[one.served_name] == EngineState.unloaded]
        able = [one for one in can if one.on_demand]
    if not able:
        raise models[0].supervisor.unavailable()
    name, served = able[0].served_name, able[0].supervisor
    return {"state": served.state, "model": name, "backend": served.label, "models": states}


async def metrics(request: Request) -> None:
    await request.answer(request.router.metrics.exposition(), kind=CONTENT_TYPE)


async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_card(one) for one in request.router.models.values()]}


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.served_name,
        "object": "model",
        "created": model.created,
        "owned_by": "crossover",
        "max_model_len": model.known_facts().context_tokens,  # vLLM's name of the context
        "state": model.supervisor.state,
    }


async def tokenize(request: Request) -> dict[str, Any]:
    body = await request.read(TOKENIZE)
    model = request.model = request.router.named(body.model)
    ids = await model.tokens(body.prompt, "prompt", bos=body.add_special_tokens is not False)
    most = model.known_facts().context_tokens
    return {"tokens": ids, "count": len(ids), "max_model_len": most}


async def detokenize(request: Request) -> dict[str, str]:
    body = await request.read(DETOKENIZE)
    model = request.model = request.router.named(body.model)
    facts = model.known_facts()
    if len(body.tokens) > facts.context_tokens:
        raise ContextOverflow(len(body.tokens), None, facts.context_tokens, "tokens")
    check_ids(body.tokens, facts, "tokens")
    return {"prompt": await model.text_of(body.tokens)}


async def placement(request: Request) -> dict[str, Any]:
    """The decision as it was made at the start (`explanation`), and what runs now, of `?model=` or
    the first. What is not known is null."""
    router, now = request.router, time.time()
    asked = dict(parse_qsl(request.scope["query_string"].decode("latin-1")))
    model = request.model = router.named(asked.get("model", router.first.served_name))
    served = model.supervisor
    engine, loaded = msgspec.structs.asdict(served.config), served.ready
    for key in ("model_path", "tokenizer_path"):
        del engine[key]
    found: dict[str, Any] = dict.fromkeys(("memory", "device_name", "load_seconds", "details"))
    if loaded is not None:
        info = loaded.info
        engine |= {key: getattr(info, key) for key in _OF_ENGINE}
        engine["kv_dtype"] = info.details.get("kv_dtype", engine["kv_dtype"])
        engine["capabilities"] = sorted(info.capabilities)
        found["memory"] = {
            "predicted": _predicted(model),
            "rss_bytes": loaded.rss_bytes,
            "peak_rss_bytes": loaded.peak_rss_bytes,
        }
        found |= {"device_name": info.device_name, "details": info.details}
        found["load_seconds"] = loaded.load_seconds
    return found | {
        "model": model.served_name,
        "models": router.states(),
        "state": served.state,
        "reason": served.reason or None,
        "engine": engine,
        "restarts": served.restarts,
        "fallbacks": served.fallbacks,
        "returns": served.returns,
        "events": [
            {"seconds_ago": round(now - event.unix_seconds, 3)} | msgspec.structs.asdict(event)
            for event in served.events
        ],
        "explanation": model.about(),
    }


def _predicted(model: ServedModel) -> dict[str, int] | None:
    """Memory of the engine that runs, as placement predicted it."""
    runs = model.supervisor.config
    for one in () if model.placement is None else model.placement.attempts:
        if (one.backend, one.device) == (runs.backend, runs.device):
            return {part: getattr(one, part) for part in _OF_MEMORY}
    return None
