"""Routes that need no engine: tokenising, and what this server is doing."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from serving.errors import ContextOverflow, EngineState
from serving.http.api_errors import as_answer, invalid
from serving.http.api_schemas import DETOKENIZE, TOKENIZE
from serving.http.chat_completions import chat_prompt
from serving.http.http_request import Request
from serving.http.request_validation import check_ids
from serving.metrics import CONTENT_TYPE
from serving.registry.model_registry import ServedModel

_OF_ENGINE = ("weight_format", "slots", "context_tokens", "kv_tokens")  # as the engine has them


async def health(request: Request) -> None:
    await request.answer({"status": "ok"})


async def ready(request: Request) -> None:
    """200 where a request can be answered: an engine serves, or is loaded for the request; else a
    503 with the reason."""
    router = request.endpoint.router
    states, models = router.states(), list(router.models.values())
    serve = [one for one in models if states[one.served_name] == EngineState.ready]
    can = [one for one in models if states[one.served_name] == EngineState.unloaded]
    able = serve or [one for one in can if one.on_demand]
    model = (able or models)[0]
    about: dict[str, Any] = {
        "state": model.supervisor.state,
        "model": model.served_name,
        "backend": model.supervisor.label,
    }
    if len(states) > 1:
        about["models"] = states
    if able:
        await request.answer(about)
        return
    problem = as_answer(model.supervisor.unavailable())
    assert problem is not None, "Unavailable is a 503"
    about |= {"reason": model.supervisor.reason, "error": problem.body.error}
    await request.answer(about, problem.status, problem.headers)


async def metrics(request: Request) -> None:
    text = await request.endpoint.router.metrics.exposition()
    await request.answer(text, kind=CONTENT_TYPE)


async def models(request: Request) -> None:
    cards = [_card(model) for model in request.endpoint.router.models.values()]
    await request.answer({"object": "list", "data": cards})


async def model_card(request: Request) -> None:
    await request.answer(_card(request.look_at(request.parameter)))


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.served_name,
        "object": "model",
        "created": model.created,
        "owned_by": "crossover",
        "root": model.served_name,
        "max_model_len": model.known_facts().context_tokens,  # vLLM's name of the context
        "state": model.supervisor.state,
    }


async def tokenize(request: Request) -> None:
    body = await request.read(TOKENIZE)
    model = request.look_at(body.model)
    most = model.known_facts().context_tokens
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if body.prompt is None:
        ids, _ = await chat_prompt(request, model, body, most)
    else:
        ids = await model.tokens(body.prompt, "prompt", bos=body.add_special_tokens is not False)
    await request.answer({"tokens": ids, "count": len(ids), "max_model_len": most})


async def detokenize(request: Request) -> None:
    body = await request.read(DETOKENIZE)
    model = request.look_at(body.model)
    facts = model.known_facts()
    if len(body.tokens) > facts.context_tokens:
        raise ContextOverflow(len(body.tokens), None, facts.context_tokens, "tokens")
    if body.tokens:
        check_ids(body.tokens, facts, "tokens")
    await request.answer({"prompt": model.text_of(body.tokens)})


async def placement(request: Request) -> None:
    """The decision as it was made at the start (`explanation`), and what runs now, of `?model=` or
    the first. What is not known is null."""
    router = request.endpoint.router
    asked = dict(parse_qsl(request.scope["query_string"].decode("latin-1")))
    model = request.look_at(asked.get("model", router.first.served_name))
    served, now = model.supervisor, time.time()
    engine, loaded = msgspec.structs.asdict(served.config), served.ready
    for key in ("model_path", "tokenizer_path"):
        del engine[key]
    memory: dict[str, Any] | None = None
    if loaded is not None:
        info = loaded.info
        engine |= {key: getattr(info, key) for key in _OF_ENGINE}
        engine["kv_dtype"] = info.details.get("kv_dtype", engine["kv_dtype"])
        engine["capabilities"] = sorted(info.capabilities)
        memory = {"predicted": _predicted(model)}
        memory |= {"rss_bytes": loaded.rss_bytes, "peak_rss_bytes": loaded.peak_rss_bytes}
    found: dict[str, Any] = {
        "model": model.served_name,
        "state": served.state,
        "reason": served.reason or None,
        "engine": engine,
        "device_name": None if loaded is None else loaded.info.device_name,
        "load_seconds": None if loaded is None else loaded.load_seconds,
        "memory": memory,
        "details": {} if loaded is None else loaded.info.details,
        "restarts": served.restarts,
        "fallbacks": served.fallbacks,
        "returns": served.returns,
        "events": [
            {"seconds_ago": round(now - event.unix_seconds, 3)} | msgspec.structs.asdict(event)
            for event in served.events
        ],
        "explanation": model.about(),
    }
    if len(router.models) > 1:
        found["models"] = router.states()
    await request.answer(found)


def _predicted(model: ServedModel) -> dict[str, int] | None:
    """Memory of the engine that runs, as placement predicted it."""
    runs = model.supervisor.config
    for one in () if model.placement is None else model.placement.attempts:
        if (one.backend, one.device) == (runs.backend, runs.device):
            parts = ("weight_bytes", "kv_bytes", "overhead_bytes")
            return {part: getattr(one, part) for part in parts}
    return None
