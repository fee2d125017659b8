"""Routes that need no engine: tokenising, and what this server is doing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, UnsetType

from serving.backends.backend_interface import GpuLoad, MemoryParts
from serving.errors import ContextOverflow, EngineState
from serving.http.api_schemas import (
    DETOKENIZE,
    TOKENIZE,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    Tokenized,
    encode,
)
from serving.http.chat_completions import chat_prompt
from serving.http.errors import as_answer, invalid, scrubbed
from serving.http.http_request import Request
from serving.http.request_validation import check_ids
from serving.metrics import CONTENT_TYPE
from serving.registry.loaded_model import INLINE_CHARACTERS, TEXT_WORK, ServedModel

PIECE = 4096  # values of a long list that are encoded at once

# Of an EngineConfig: no paths of the server's machine.
_SHOWN = (
    *("backend", "device", "weight_format", "quality_kl_nats", "slots", "context_tokens"),
    *("kv_tokens", "kv_dtype", "threads", "cores", "nice"),
    *("prefix_reuse", "prefill_tokens", "step_seconds_target"),
)
_OF_ENGINE = ("weight_format", "slots", "context_tokens", "kv_tokens")  # as the engine has them


class Memory(msgspec.Struct, frozen=True):
    """In bytes; None where it is not known."""

    predicted: MemoryParts | None
    measured: MemoryParts | None
    rss_bytes: int  # of the engine's process, right after the load
    peak_rss_bytes: int
    gpu: GpuLoad | None = None  # where the device's memory and the load's time went


class Happening(msgspec.Struct, frozen=True):
    """Something that befell the engines, and how long ago."""

    seconds_ago: float
    kind: str
    engine: str
    message: str
    cause: str | None


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """`explanation`: the decision as it was made at the start; the rest is as it is now."""

    model: str
    state: EngineState
    reason: str | None
    engine: dict[str, Any]
    device_name: str | None
    load_seconds: float | None
    memory: Memory | None
    restarts: int
    fallbacks: int
    returns: int
    events: list[Happening]
    explanation: dict[str, Any] | None
    details: dict[str, str]
    models: dict[str, EngineState] | UnsetType = UNSET  # name -> state, where there are several


async def health(request: Request) -> None:
    await request.answer(Health())


async def ready(request: Request) -> None:
    """200 where a request can be answered: an engine serves, or is loaded for the request."""
    router = request.endpoint.router
    states = router.states()
    by_state = {state: name for name, state in reversed(states.items())}
    name = by_state.get(EngineState.ready) or by_state.get(EngineState.unloaded)
    model = router.first if name is None else router.models[name]
    supervisor = model.supervisor
    about = Readiness(
        state=supervisor.state,
        model=model.served_name,
        backend=supervisor.label,
        models=states if len(states) > 1 else UNSET,
    )
    if name is not None:
        await request.answer(about)
        return
    known = supervisor.reason if request.trusted else None
    problem = as_answer(model.unavailable(known))
    assert problem is not None, "Unavailable is a 503"
    reason = None if known is None else scrubbed(known)
    about = msgspec.structs.replace(about, reason=reason, error=problem.body.error)
    await request.answer(about, problem.status, problem.headers)


async def metrics(request: Request) -> None:
    text = await request.endpoint.router.metrics.exposition()
    await request.answer_bytes(text, CONTENT_TYPE.encode())


async def models(request: Request) -> None:
    cards = [_card(model) for model in request.endpoint.router.models.values()]
    await request.answer(ModelList(data=cards))


async def model_card(request: Request) -> None:
    await request.answer(_card(request.look_at(request.parameter)))


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.served_name,
        created=model.created,
        root=model.served_name,
        max_model_len=model.known_facts().context_tokens,
        state=model.supervisor.state,
    )


async def tokenize(request: Request) -> None:
    body = await request.read(TOKENIZE)
    model = request.look_at(body.model)
    most = model.known_facts().context_tokens
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if body.messages is not None:
        ids = (await chat_prompt(model, body, body.messages, most)).ids
    else:
        bos = body.add_special_tokens is not False
        ids = await model.tokens(body.prompt or "", "prompt", bos=bos)

    def encoded() -> bytes:
        """Piece by piece: a whole list would hold up the event loop, in a thread too."""
        pieces = (encode(ids[at : at + PIECE])[1:-1] for at in range(0, len(ids), PIECE))
        tokens = msgspec.Raw(b"[%s]" % b",".join(pieces))
        return encode({"tokens": tokens, "count": len(ids), "max_model_len": most})

    if len(ids) > INLINE_CHARACTERS:
        await request.answer_bytes(await TEXT_WORK.run(len(ids), encoded))
    else:
        await request.answer(Tokenized(ids, len(ids), most))


async def detokenize(request: Request) -> None:
    body = await request.read(DETOKENIZE)
    model = request.look_at(body.model)
    facts = model.known_facts()
    if len(body.tokens) > facts.context_tokens:
        raise ContextOverflow(len(body.tokens), None, facts.context_tokens, "tokens")
    if body.tokens:
        check_ids(body.tokens, facts, "tokens")
    skip = body.skip_special_tokens is not False
    await request.answer(Detokenized(await model.text_of(body.tokens, skip)))


async def placement(request: Request) -> None:
    router = request.endpoint.router
    asked = router.first.served_name
    query = request.scope["query_string"].decode("latin-1")
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key != "model":
            raise invalid(f"unknown query parameter {key[:80]!r}; model is known", key[:80])
        asked = value
    shown = view(request.look_at(asked))
    if len(router.models) > 1:
        shown = msgspec.structs.replace(shown, models=router.states())
    await request.answer(shown)


def view(model: ServedModel) -> PlacementView:
    """The supervisor's state as a value to encode, without paths and addresses."""
    served = model.supervisor
    ready, now = served.ready, time.time()
    engine = {key: getattr(served.config, key) for key in _SHOWN}
    memory: Memory | None = None
    if ready is not None:
        info = ready.info
        engine |= {key: getattr(info, key) for key in _OF_ENGINE}
        engine["kv_dtype"] = info.details.get("kv_dtype", engine["kv_dtype"])
        engine["capabilities"] = sorted(info.capabilities)
        resident = ready.rss_bytes, ready.peak_rss_bytes
        memory = Memory(info.predicted, info.measured, *resident, info.gpu)
    events = [
        Happening(round(now - e.unix_seconds, 3), e.kind, e.engine, scrubbed(e.message), e.cause)
        for e in served.events
    ]
    return PlacementView(
        model=model.served_name,
        state=served.state,
        reason=scrubbed(served.reason) if served.reason else None,
        engine=engine,
        device_name=ready.info.device_name if ready else None,
        load_seconds=ready.load_seconds if ready else None,
        memory=memory,
        restarts=served.restarts,
        fallbacks=served.fallbacks,
        returns=served.returns,
        events=events,
        explanation=_clean(model.about()),
        details=_clean(ready.info.details) if ready else {},
    )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
