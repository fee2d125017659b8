"""Routes that need no engine: tokenising, and what this server is doing."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET

from serving.errors import ContextOverflow, EngineState
from serving.http.exchange import Exchange
from serving.http.placement import view
from serving.http.prompts import chat_prompt, check_ids
from serving.http.wire.decoding import DETOKENIZE, TOKENIZE
from serving.http.wire.errors import as_answer, invalid, scrubbed
from serving.http.wire.responses import (
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    Tokenized,
)
from serving.http.wire.sse import encode, in_pieces
from serving.metrics import CONTENT_TYPE
from serving.registry.model import INLINE_CHARACTERS, ModelRouter, ServedModel
from serving.registry.text_work import TEXT_WORK


async def tokenize(router: ModelRouter, exchange: Exchange) -> None:
    request = await exchange.read(TOKENIZE)
    served_model = exchange.look_at(router, request.model)
    most = served_model.known_facts().context_tokens
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.messages is not None:
        ids = (await chat_prompt(served_model, request, exchange.limits, most)).ids
    else:
        bos = request.add_special_tokens is not False
        ids = await served_model.tokens(request.prompt or "", "prompt", bos=bos)
    found = Tokenized(ids, len(ids), most)
    if request.return_token_strs:
        shown = await served_model.shown(ids)
        found = msgspec.structs.replace(found, token_strs=shown)
    if len(ids) <= INLINE_CHARACTERS:
        await exchange.answer(found)
    else:
        body = await TEXT_WORK.run(len(ids), _encoded, found)
        await exchange.answer_bytes(body, b"application/json")


def _encoded(found: Tokenized) -> bytes:
    fields = msgspec.to_builtins(msgspec.structs.replace(found, tokens=[], token_strs=UNSET))
    fields["tokens"] = in_pieces(found.tokens)
    if found.token_strs is not UNSET:
        fields["token_strs"] = in_pieces(found.token_strs)
    return encode(fields)


async def detokenize(router: ModelRouter, exchange: Exchange) -> None:
    request = await exchange.read(DETOKENIZE)
    served_model = exchange.look_at(router, request.model)
    facts = served_model.known_facts()
    if len(request.tokens) > facts.context_tokens:
        raise ContextOverflow(len(request.tokens), None, facts.context_tokens, "tokens")
    if request.tokens:
        check_ids(request.tokens, facts, "tokens")
    skip = request.skip_special_tokens is not False
    await exchange.answer(Detokenized(await served_model.text_of(request.tokens, skip)))


async def models(router: ModelRouter, exchange: Exchange) -> None:
    await exchange.answer(
        ModelList(data=[_card(served_model) for served_model in router.models.values()])
    )


async def model(router: ModelRouter, exchange: Exchange) -> None:
    await exchange.answer(_card(exchange.look_at(router, exchange.scope["path_params"]["name"])))


def _card(served_model: ServedModel) -> ModelCard:
    return ModelCard(
        id=served_model.served_name,
        created=served_model.created,
        owned_by="crossover",
        root=served_model.served_name,
        max_model_len=served_model.known_facts().context_tokens,
        state=served_model.supervisor.state,
    )


async def health(router: ModelRouter, exchange: Exchange) -> None:
    await exchange.answer(Health())


async def ready(router: ModelRouter, exchange: Exchange) -> None:
    """200 where a request can be answered: an engine serves, or is loaded for the request."""
    states = router.states()
    by_state = {state: name for name, state in reversed(states.items())}
    name = by_state.get(EngineState.ready) or by_state.get(EngineState.unloaded)
    served_model = router.first if name is None else router.models[name]
    supervisor = served_model.supervisor
    about = Readiness(
        state=supervisor.state, model=served_model.served_name, backend=supervisor.label
    )
    if len(states) > 1:
        about = msgspec.structs.replace(about, models=states)
    if name is not None:
        await exchange.answer(about)
        return
    known = supervisor.reason if exchange.scope["app"].trusts(exchange.scope) else None
    problem = as_answer(served_model.unavailable(known))
    assert problem is not None
    reason = None if known is None else scrubbed(known)
    about = msgspec.structs.replace(about, reason=reason, error=problem.body.error)
    await exchange.answer(about, problem.status, problem.headers)


async def metrics(router: ModelRouter, exchange: Exchange) -> None:
    await exchange.answer_bytes(await router.metrics.exposition(), CONTENT_TYPE.encode())


async def placement(router: ModelRouter, exchange: Exchange) -> None:
    asked = _query(exchange, "model")
    served_model = exchange.look_at(router, router.first.served_name if asked is None else asked)
    shown = view(served_model.supervisor, served_model.served_name, served_model.placement)
    if len(router.models) > 1:
        shown = msgspec.structs.replace(shown, models=router.states())
    await exchange.answer(shown)


def _query(exchange: Exchange, name: str) -> str | None:
    """One parameter of the query string. Raises ApiError for any other."""
    found = parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for key, _ in found:
        if key != name:
            raise invalid(f"unknown query parameter {key[:80]!r}; {name} is known", key[:80])
    return found[-1][1] if found else None
