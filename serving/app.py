"""The HTTP routes: OpenAI's, and those that say what this server is doing.

    app = create_app(supervisor, tokenizer, served_name="smollm2-135m", manage=True)
    uvicorn.run(app, **server_options(limits))    # serving.listener: bounds for heads, idle and stalled connections

| POST /v1/chat/completions, /v1/completions | answers, whole or as server-sent events                                                   |
| GET  /v1/models, /v1/models/NAME           | what is served                                                                            |
| POST /tokenize, /detokenize                | text <-> token ids, as vLLM does it                                                       |
| GET  /health, /ready                       | the process lives; the engine serves (else 503 with state and reason): both without a key |
| GET  /metrics, /v1/placement, /openapi.json | numbers; what runs where and why; this interface as a document                           |

Every answer, errors too, has X-Request-Id and X-Crossover-Backend, and every error OpenAI's body. Starlette finds the route; nothing else
of it stands between a handler and the socket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from models.errors import BadChat
from models.tokenizer import Tokenizer
from serving.access import ClientGone, Exchange, Limits, check_head
from serving.answers import answer
from serving.calls import ChatCall, CompletionCall, Prompt
from serving.checks import (
    COMPLETION_TOKENS,
    Facts,
    check_ids,
    check_sequences,
    prompts_of,
    token_limit,
    turns,
    wishes,
)
from serving.metrics import CONTENT_TYPE, Metrics
from serving.openapi import document
from serving.placement_view import view
from serving.protocol import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, ApiError, Message, decode, invalid, scrubbed
from serving.replies import Detokenized, Health, ModelCard, ModelList, Readiness, Tokenized, encode
from serving.service import EngineLike, Service

logger = logging.getLogger("crossover.http")
CLIENT_GONE = 499  # nginx's number for an answer that nobody waited for; only in logs and metrics
DRAIN_SECONDS = 30.0

Handler = Callable[[Service, Exchange], Awaitable[None]]


async def chat_completions(service: Service, exchange: Exchange) -> None:
    request = decode(CHAT, await exchange.body())
    service.check_model(request.model)
    check_sequences(1, request.n or 1, service.limits)
    facts = service.facts()
    wanted = wishes(request, facts, service.limits)
    generation = request.add_generation_prompt is not False
    ids = await _chat_ids(service, facts, request.messages, generation)
    prompt = Prompt(ids, token_limit(request, len(ids), facts, None))
    await answer(ChatCall(service, exchange, request, wanted), [prompt])


async def completions(service: Service, exchange: Exchange) -> None:
    request = decode(COMPLETION, await exchange.body())
    service.check_model(request.model)
    facts = service.facts()
    wanted = wishes(request, facts, service.limits)
    bos = request.add_special_tokens is not False
    prompts: list[Prompt] = []
    for given in prompts_of(request, facts, service.limits):
        ids = given if isinstance(given, list) else await service.tokens(given, facts, "prompt", bos=bos)
        echoed = "" if not request.echo else given if isinstance(given, str) else service.text_of(given)
        prompts.append(Prompt(ids, token_limit(request, len(ids), facts, COMPLETION_TOKENS), echoed))
    await answer(CompletionCall(service, exchange, request, wanted), prompts)


async def _chat_ids(service: Service, facts: Facts, messages: list[Message], generation: bool) -> list[int]:
    try:
        text = service.tokenizer.render_chat(turns(messages, service.limits), generation)
    except BadChat as problem:
        raise invalid(scrubbed(str(problem)), "messages") from None
    return await service.tokens(text, facts, "messages", parse_special=True)


async def tokenize(service: Service, exchange: Exchange) -> None:
    request = decode(TOKENIZE, await exchange.body())
    service.check_model(request.model)
    facts = service.known_facts()
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.messages is not None:
        ids = await _chat_ids(service, facts, request.messages, request.add_generation_prompt is not False)
    else:
        bos = request.add_special_tokens is not False
        ids = await service.tokens(request.prompt or "", facts, "prompt", bos=bos, any_length=True)
    await exchange.answer(Tokenized(ids, len(ids), facts.context_tokens))


async def detokenize(service: Service, exchange: Exchange) -> None:
    request = decode(DETOKENIZE, await exchange.body())
    service.check_model(request.model)
    if request.tokens:
        check_ids(request.tokens, service.known_facts(), "tokens")
    await exchange.answer(Detokenized(service.text_of(request.tokens)))


async def models(service: Service, exchange: Exchange) -> None:
    await exchange.answer(ModelList(data=[_card(service)]))


async def model(service: Service, exchange: Exchange) -> None:
    service.check_model(exchange.scope["path_params"]["name"])
    await exchange.answer(_card(service))


def _card(service: Service) -> ModelCard:
    name = service.served_name
    context = service.known_facts().context_tokens
    return ModelCard(id=name, created=service.created, owned_by="crossover", root=name, max_model_len=context)


async def health(service: Service, exchange: Exchange) -> None:
    await exchange.answer(Health())


async def ready(service: Service, exchange: Exchange) -> None:
    supervisor = service.supervisor
    about = Readiness(state=supervisor.state, model=service.served_name, backend=supervisor.label)
    if supervisor.state == "ready":
        await exchange.answer(about)
        return
    problem = service.unavailable(supervisor.retry_after_seconds())
    reason = scrubbed(supervisor.reason) if supervisor.reason else None
    about = msgspec.structs.replace(about, reason=reason, error=problem.body.error)
    await exchange.answer(about, problem.status, problem.headers)


async def metrics(service: Service, exchange: Exchange) -> None:
    await exchange.answer_bytes(service.metrics.exposition(), CONTENT_TYPE.encode())


async def placement(service: Service, exchange: Exchange) -> None:
    await exchange.answer(view(service.supervisor, service.served_name, service.placement))


async def openapi(service: Service, exchange: Exchange) -> None:
    if service.document is None:
        service.document = encode(document(service.served_name, service.limits))
    await exchange.answer_bytes(service.document, b"application/json")


# The most used first: routes are tried in this order.
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", models),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/v1/placement", placement),
    ("GET", "/openapi.json", openapi),
    ("GET", "/v1/models/{name:path}", model),
)
_PATHS = frozenset(path for _, path, _ in ROUTES)


class _Endpoint:
    """A handler as the ASGI application that Starlette's Route takes without wrapping it."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service, self._handler = service, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._service, scope["exchange"])


class App:
    """The outermost layer: identity, key and limits before the route; errors, counts and a log line after it."""

    def __init__(self, service: Service, key: bytes | None, manage: bool, drain_seconds: float) -> None:
        self.service, self._key = service, key
        self._manage, self._drain_seconds = manage, drain_seconds
        routes = [Route(path, _Endpoint(service, handler), methods=[method]) for method, path, handler in ROUTES]
        self._router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)
        self._label, self._label_bytes = "", b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)  # lifespan; a websocket is closed
            return
        exchange = Exchange(scope, receive, send, self.service.limits)
        exchange.backend = self._backend
        scope["app"], scope["exchange"] = self, exchange
        counts = self.service.metrics
        counts.open_requests += 1
        try:
            check_head(scope, self.service.limits, self._key)
            await self._router(scope, receive, send)
        except ApiError as problem:
            await self._fail(exchange, problem)
        except HTTPException as problem:
            await self._fail(exchange, _of_starlette(problem, scope))
        except ClientGone:
            exchange.status = CLIENT_GONE
        except Exception:
            logger.exception("request %s failed", exchange.request_id.decode())
            await self._fail(exchange, ApiError(500, "the server failed on this request; its log says why", code="internal_error"))
        finally:
            counts.open_requests -= 1
            status = CLIENT_GONE if exchange.gone or exchange.status is None else exchange.status
            counts.responses[_route(scope), status] += 1
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", _log_line(scope, exchange, status))

    async def _fail(self, exchange: Exchange, problem: ApiError) -> None:
        self.service.metrics.rejected[problem.code or str(problem.status)] += 1
        await exchange.fail(problem)

    def _backend(self) -> bytes:
        label = self.service.supervisor.label
        if label != self._label:
            self._label = label
            self._label_bytes = "".join(c if 32 < ord(c) < 127 else "?" for c in label).encode()
        return self._label_bytes

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        if self._manage:
            await self.service.supervisor.start()
        try:
            yield
        finally:
            if self._manage:
                await self.service.supervisor.stop(drain=True, timeout_seconds=self._drain_seconds)


def create_app(
    supervisor: EngineLike,
    tokenizer: Tokenizer,
    *,
    served_name: str,
    limits: Limits | None = None,
    api_key: str | None = None,
    placement: Any = None,
    manage: bool = False,
    drain_seconds: float = DRAIN_SECONDS,
) -> App:
    """The whole HTTP side as one ASGI application.

    `placement`: how the choice of the engine is explained at /v1/placement: a dictionary or struct, or a function that gives
    one. `manage`: the supervisor is
    started with the application and drained, for at most `drain_seconds`, when it ends. Raises ValueError for an empty key.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty; leave it out to serve without one")
    metrics = Metrics(served_name, supervisor)
    service = Service(supervisor, tokenizer, served_name, limits or Limits(), metrics, placement)
    return App(service, None if api_key is None else api_key.strip().encode(), manage, drain_seconds)


def _of_starlette(problem: HTTPException, scope: Scope) -> ApiError:
    method, path = scope["method"], scope["path"][:200]
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        return ApiError(405, f"{method} is not allowed on {path}; {allowed} is", code="method_not_allowed", headers={"Allow": allowed})
    return ApiError(problem.status_code, f"there is no {path} here; /openapi.json lists what there is", code="not_found")


def _route(scope: Scope) -> str:
    """The route's path as a label: never what a stranger typed."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    return path if path in _PATHS else "other"


def _log_line(scope: Scope, exchange: Exchange, status: int) -> str:
    """One request as a line of JSON."""
    line = {
        "request_id": exchange.request_id.decode(),
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(time.perf_counter() - exchange.began, 6),
        "backend": exchange.backend().decode(),
    }
    return encode(line).decode()
