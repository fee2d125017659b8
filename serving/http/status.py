"""Routes that need no engine: tokenising, and what this server is doing."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from serving.errors import EngineState
from serving.http.exchange import Exchange
from serving.http.placement import view
from serving.http.prompts import chat_ids, check_ids
from serving.http.wire.decoding import DETOKENIZE, TOKENIZE, decode
from serving.http.wire.errors import as_answer, invalid, scrubbed
from serving.http.wire.responses import (
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    Tokenized,
)
from serving.metrics import CONTENT_TYPE
from serving.registry.model import Desk, Service


async def tokenize(desk: Desk, exchange: Exchange) -> None:
    request = decode(TOKENIZE, await exchange.body())
    service = exchange.look_at(desk, request.model)
    most = service.known_facts().context_tokens
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.messages is not None:
        generation = request.add_generation_prompt is not False
        ids = await chat_ids(service, request.messages, exchange.limits, generation, most)
    else:
        bos = request.add_special_tokens is not False
        ids = await service.tokens(request.prompt or "", "prompt", bos=bos)
    await exchange.answer(Tokenized(ids, len(ids), most))


async def detokenize(desk: Desk, exchange: Exchange) -> None:
    request = decode(DETOKENIZE, await exchange.body())
    service = exchange.look_at(desk, request.model)
    if request.tokens:
        check_ids(request.tokens, service.known_facts(), "tokens")
    await exchange.answer(Detokenized(service.text_of(request.tokens)))


async def models(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(ModelList(data=[_card(service) for service in desk.services.values()]))


async def model(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(_card(exchange.look_at(desk, exchange.scope["path_params"]["name"])))


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.served_name,
        created=service.created,
        owned_by="crossover",
        root=service.served_name,
        max_model_len=service.known_facts().context_tokens,
        state=service.supervisor.state,
    )


async def health(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(Health())


async def ready(desk: Desk, exchange: Exchange) -> None:
    """200 where a request can be answered: an engine serves, or is loaded for the request."""
    states = desk.states()
    by_state = {state: name for name, state in reversed(states.items())}
    name = by_state.get(EngineState.ready) or by_state.get(EngineState.unloaded)
    service = desk.first if name is None else desk.services[name]
    supervisor = service.supervisor
    about = Readiness(state=supervisor.state, model=service.served_name, backend=supervisor.label)
    if len(states) > 1:
        about = msgspec.structs.replace(about, models=states)
    if name is not None:
        await exchange.answer(about)
        return
    problem = as_answer(service.unavailable())
    assert problem is not None
    reason = scrubbed(supervisor.reason) if supervisor.reason else None
    about = msgspec.structs.replace(about, reason=reason, error=problem.body.error)
    await exchange.answer(about, problem.status, problem.headers)


async def metrics(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer_bytes(await desk.metrics.exposition(), CONTENT_TYPE.encode())


async def placement(desk: Desk, exchange: Exchange) -> None:
    asked = _query(exchange, "model")
    service = exchange.look_at(desk, desk.first.served_name if asked is None else asked)
    shown = view(service.supervisor, service.served_name, service.placement)
    if len(desk.services) > 1:
        shown = msgspec.structs.replace(shown, models=desk.states())
    await exchange.answer(shown)


def _query(exchange: Exchange, name: str) -> str | None:
    """One parameter of the query string. Raises ApiError for any other."""
    found = parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for key, _ in found:
        if key != name:
            raise invalid(f"unknown query parameter {key[:80]!r}; {name} is known", key[:80])
    return found[-1][1] if found else None
