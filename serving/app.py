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

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

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
from serving.metrics import CONTENT_TYPE, Metrics, ServerMetrics
from serving.openapi import document
from serving.placement_view import view
from serving.protocol import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, ApiError, Message, decode, invalid, scrubbed
from serving.replies import Detokenized, Health, ModelCard, ModelList, Readiness, Tokenized, encode
from serving.service import Desk, EngineLike, Service

logger = logging.getLogger("crossover.http")
CLIENT_GONE = 499  # nginx's number for an answer that nobody waited for; only in logs and metrics
DRAIN_SECONDS = 30.0
_TURN_CHARACTERS = 64  # a turn's own work, as so many characters of text

Handler = Callable[[Desk, Exchange], Awaitable[None]]


async def chat_completions(desk: Desk, exchange: Exchange) -> None:
    request = decode(CHAT, await exchange.body())
    check_sequences(1, request.n or 1, desk.limits)
    service = await desk.enter(request.model, exchange)
    facts = service.facts()
    wanted = wishes(request, facts, service.limits)
    service.check_room()
    generation = request.add_generation_prompt is not False
    ids = await _chat_ids(service, facts, request.messages, generation)
    prompt = Prompt(ids, token_limit(request, len(ids), facts, None))
    await answer(ChatCall(service, exchange, request, wanted), [prompt])


async def completions(desk: Desk, exchange: Exchange) -> None:
    request = decode(COMPLETION, await exchange.body())
    service = await desk.enter(request.model, exchange)
    facts = service.facts()
    wanted = wishes(request, facts, service.limits)
    service.check_room()
    bos = request.add_special_tokens is not False
    prompts: list[Prompt] = []
    for given in prompts_of(request, facts, service.limits):
        ids = given if isinstance(given, list) else await service.tokens(given, facts, "prompt", bos=bos)
        echoed = "" if not request.echo else given if isinstance(given, str) else service.text_of(given)
        prompts.append(Prompt(ids, token_limit(request, len(ids), facts, COMPLETION_TOKENS), echoed))
    await answer(CompletionCall(service, exchange, request, wanted), prompts)


async def _chat_ids(service: Service, facts: Facts, messages: list[Message], generation: bool) -> list[int]:
    told = turns(messages, service.limits)
    size = sum(len(turn["content"]) + _TURN_CHARACTERS for turn in told)
    render = service.tokenizer.render_chat
    try:
        # A template is a program: over a long chat it may take a second, in which nobody else should have to wait.
        long = size > service.limits.inline_characters
        text = await asyncio.to_thread(render, told, generation) if long else render(told, generation)
    except BadChat as problem:
        raise invalid(scrubbed(str(problem)), "messages") from None
    return await service.tokens(text, facts, "messages", parse_special=True)


async def tokenize(desk: Desk, exchange: Exchange) -> None:
    request = decode(TOKENIZE, await exchange.body())
    service = desk.look_at(request.model, exchange)
    facts = service.known_facts()
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.messages is not None:
        ids = await _chat_ids(service, facts, request.messages, request.add_generation_prompt is not False)
    else:
        bos = request.add_special_tokens is not False
        ids = await service.tokens(request.prompt or "", facts, "prompt", bos=bos, any_length=True)
    await exchange.answer(Tokenized(ids, len(ids), facts.context_tokens))


async def detokenize(desk: Desk, exchange: Exchange) -> None:
    request = decode(DETOKENIZE, await exchange.body())
    service = desk.look_at(request.model, exchange)
    if request.tokens:
        check_ids(request.tokens, service.known_facts(), "tokens")
    await exchange.answer(Detokenized(service.text_of(request.tokens)))


async def models(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(ModelList(data=[_card(service) for service in desk.services.values()]))


async def model(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(_card(desk.look_at(exchange.scope["path_params"]["name"], exchange)))


def _card(service: Service) -> ModelCard:
    name = service.served_name
    context = service.known_facts().context_tokens
    state = service.supervisor.state
    return ModelCard(id=name, created=service.created, owned_by="crossover", root=name, max_model_len=context, state=state)


async def health(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(Health())


async def ready(desk: Desk, exchange: Exchange) -> None:
    """200 when a request can be answered: by an engine that serves, or by one that is loaded for it."""
    states = desk.states()
    service = next((desk.services[name] for name, state in states.items() if state == "ready"), None)
    service = service or next((desk.services[name] for name, state in states.items() if state == "unloaded"), desk.first)
    supervisor = service.supervisor
    about = Readiness(state=supervisor.state, model=service.served_name, backend=supervisor.label)
    if len(states) > 1:
        about = msgspec.structs.replace(about, models=states)
    if states[service.served_name] in ("ready", "unloaded"):
        await exchange.answer(about)
        return
    problem = service.unavailable(supervisor.retry_after_seconds())
    reason = scrubbed(supervisor.reason) if supervisor.reason else None
    about = msgspec.structs.replace(about, reason=reason, error=problem.body.error)
    await exchange.answer(about, problem.status, problem.headers)


async def metrics(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer_bytes(await desk.metrics.exposition(), CONTENT_TYPE.encode())


async def placement(desk: Desk, exchange: Exchange) -> None:
    asked = _query(exchange, "model")
    service = desk.look_at(desk.first.served_name if asked is None else asked, exchange)
    shown = view(service.supervisor, service.served_name, service.placement)
    if len(desk.services) > 1:
        shown = msgspec.structs.replace(shown, models=desk.states())
    await exchange.answer(shown)


def _query(exchange: Exchange, name: str) -> str | None:
    """One parameter of the query string. Raises ApiError for any other, so that a misspelt one is not ignored."""
    found = parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for key, _ in found:
        if key != name:
            raise invalid(f"unknown query parameter {key[:80]!r}; {name} is known", key[:80])
    return found[-1][1] if found else None


async def openapi(desk: Desk, exchange: Exchange) -> None:
    if desk.document is None:
        desk.document = encode(document(", ".join(desk.services), desk.limits, desk.admin_routes))
    await exchange.answer_bytes(desk.document, b"application/json")


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


class _Endpoint:
    """A handler as the ASGI application that Starlette's Route takes without wrapping it."""

    def __init__(self, desk: Desk, handler: Handler) -> None:
        self._desk, self._handler = desk, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._desk, scope["exchange"])


class App:
    """The outermost layer: identity, key and limits before the route; errors, counts and a log line after it."""

    def __init__(
        self,
        desk: Desk,
        key: bytes | None,
        routes: Sequence[tuple[str, str, Handler]],
        manage: float | None = None,
        admin_key: bytes | None = None,
    ) -> None:
        self.desk, self._key, self._drain_seconds, self._admin_key = desk, key, manage, admin_key
        self._paths = frozenset(path for _, path, _ in routes)
        found = [Route(path, _Endpoint(desk, handler), methods=[method]) for method, path, handler in routes]
        self._router = Router(found, redirect_slashes=False, lifespan=self._lifespan)
        self._labels: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)  # lifespan; a websocket is closed
            return
        exchange = Exchange(scope, receive, send, self.desk.limits)
        exchange.backend = lambda: self._backend(exchange)
        scope["app"], scope["exchange"] = self, exchange
        counts = self.desk.metrics
        counts.open_requests += 1
        try:
            admin = self._admin_key is not None and scope["path"].startswith("/admin/")
            check_head(scope, self.desk.limits, self._admin_key if admin else self._key)
            await self._router(scope, receive, send)
        except ApiError as problem:
            await self._fail(exchange, problem)
        except HTTPException as problem:
            await self._fail(exchange, _of_starlette(problem, scope))
        except ClientGone:
            exchange.status = CLIENT_GONE
        except Exception:
            request_id = exchange.request_id.decode()
            logger.exception("request %s failed", request_id, extra={"request_id": request_id})
            await self._fail(exchange, ApiError(500, "the server failed on this request; its log says why", code="internal_error"))
        finally:
            counts.open_requests -= 1
            status = CLIENT_GONE if exchange.gone or exchange.status is None else exchange.status
            counts.responses[self._route(scope), status] += 1
            if exchange.release is not None:
                exchange.release()
            if self.desk.tracer is not None:
                exchange.trace_id = self.desk.tracer.record(exchange, self._route(scope), status)
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", _log_line(scope, exchange, status))

    async def _fail(self, exchange: Exchange, problem: ApiError) -> None:
        exchange.error = problem.code or str(problem.status)
        services = self.desk.services
        service = exchange.service or (self.desk.first if len(services) == 1 else None)
        self.desk.metrics.rejected[service.served_name if service is not None else "", exchange.error] += 1
        await exchange.fail(problem)

    def _backend(self, exchange: Exchange) -> bytes:
        """What answers, as a header's value: the model's engine once the model is known, else the only (or first) one's."""
        service = exchange.service or (self.desk.first if self.desk.services else None)
        label = "none" if service is None else service.supervisor.label
        if label not in self._labels:
            self._labels[label] = "".join(c if 32 < ord(c) < 127 else "?" for c in label).encode()
        return self._labels[label]

    def _route(self, scope: Scope) -> str:
        """The route's path as a label: never what a stranger typed."""
        route = scope.get("route")
        path = getattr(route, "path", None)
        return path if path in self._paths else "other"

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        if self._drain_seconds is not None:
            await self.desk.first.supervisor.start()
        try:
            yield
        finally:
            if self._drain_seconds is not None:
                await self.desk.first.supervisor.stop(drain=True, timeout_seconds=self._drain_seconds)


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
    desk = Desk(limits or Limits(), ServerMetrics())
    desk.add(Service(supervisor, tokenizer, served_name, desk.limits, Metrics(served_name, supervisor), placement))
    return app_of(desk, api_key, drain_seconds if manage else None)


def app_of(
    desk: Desk,
    api_key: str | None = None,
    manage: float | None = None,
    admin: Sequence[tuple[str, str, Handler]] = (),
    admin_key: str | None = None,
) -> App:
    """The HTTP side of a desk with any number of models. Raises ValueError for an empty key.

    `manage`: start the first model's supervisor with the application and drain it, for at most so many seconds, when it ends.
    `admin`: routes under /admin/, which `admin_key` opens and the API key does not. Raises ValueError for such routes without a key.
    """
    if bool(admin) != (admin_key is not None):
        raise ValueError("admin routes and an admin key belong together")
    desk.admin_routes = bool(admin)
    return App(desk, _key(api_key, "API"), (*ROUTES, *admin), manage, _key(admin_key, "admin"))


def _key(key: str | None, what: str) -> bytes | None:
    if key is not None and not key.strip():
        raise ValueError(f"the {what} key is empty; leave it out to serve without one")
    return None if key is None else key.strip().encode()


def _of_starlette(problem: HTTPException, scope: Scope) -> ApiError:
    method, path = scope["method"], scope["path"][:200]
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        return ApiError(405, f"{method} is not allowed on {path}; {allowed} is", code="method_not_allowed", headers={"Allow": allowed})
    return ApiError(problem.status_code, f"there is no {path} here; /openapi.json lists what there is", code="not_found")


def _log_line(scope: Scope, exchange: Exchange, status: int) -> str:
    """One request as a line of JSON: what was asked of whom, what came of it, and the times that its sequences were measured by."""
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "event": "request",
        "request_id": exchange.request_id.decode(),
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(time.perf_counter() - exchange.began, 6),
        "backend": exchange.backend().decode(),
    }
    if exchange.service is not None:
        line["model"] = exchange.service.served_name
    if exchange.error is not None:
        line["error"] = exchange.error
    if exchange.trace_id is not None:
        line["trace_id"] = exchange.trace_id
    if exchange.choices:
        firsts = [choice.first for choice in exchange.choices if choice.first is not None]
        line["prompt_tokens"] = sum(len(choice.prompt.ids) for choice in exchange.choices if choice.first_of_prompt)
        line["completion_tokens"] = sum(choice.tokens for choice in exchange.choices)
        line["finish"] = sorted({choice.ended_as for choice in exchange.choices if choice.ended_as is not None})
        if firsts:
            line["ttft_seconds"] = round(min(firsts) - exchange.began, 6)
    return encode(line).decode()
