"""What requests share: a Service for each model (supervisor, tokenizer, metrics), and the Desk that knows which Service a request goes to.

desk = Desk(Limits(), ServerMetrics())
desk.add(Service(supervisor, tokenizer, "smollm2-135m", desk.limits, Metrics("smollm2-135m", supervisor)))
service = await desk.enter(request.model, exchange)     # 404, or 503 where the model cannot be had; loads it where it may
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from models.tokenizer import Tokenizer
from serving.access import Exchange, Limits
from serving.backends.base import EngineConfig, Sampling
from serving.checks import Facts, context_overflow, facts_of, promised
from serving.messages import Delta, Ready, StepStats
from serving.metrics import Metrics, ServerMetrics
from serving.protocol import ApiError, scrubbed, try_again
from serving.sequences import Overloaded

_LONGEST_SPECIAL = 64  # bytes of text that a control token may stand for; the table of bytes does not say


class StreamLike(Protocol):
    """One sequence's deltas, the last one with `finish`. After `cancel` that last one comes soon."""

    def cancel(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...


class EngineLike(Protocol):
    """What the HTTP side needs of serving.supervisor.Supervisor; tests/serving/fakes.py has a small one."""

    state: str
    reason: str | None
    stats: StepStats | None
    restarts: int
    fallbacks: int
    on_step: Callable[[StepStats], None] | None  # called after each step, where it is set

    @property
    def ready(self) -> Ready | None: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def label(self) -> str: ...

    @property
    def engine_pid(self) -> int | None: ...

    def retry_after_seconds(self) -> float: ...

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling = ...,
        *,
        stop: Sequence[str] = ...,
        stop_token_ids: Sequence[int] = ...,
        min_tokens: int = ...,
        ignore_eos: bool = ...,
        deadline_seconds: float | None = ...,
        include_stop: bool = ...,
        whole: bool = ...,
    ) -> StreamLike: ...

    def check_room(self) -> None: ...

    async def start(self) -> None: ...

    async def stop(self, drain: bool = ..., timeout_seconds: float = ...) -> int: ...


def too_many(refusal: Overloaded) -> ApiError:
    """The 429 of a queue that is full."""
    return try_again(429, scrubbed(refusal.reason), refusal.kind, refusal.retry_after_seconds)


class Keeper(Protocol):
    """Who loads models when they are asked for, and lets none go that is in use: serving.fleet.Fleet."""

    async def enter(self, name: str) -> Callable[[], None]:
        """Wait until this model serves and hold it; the returned function lets go of it. Raises ApiError 503."""
        ...

    def states(self) -> dict[str, str]: ...


class Service:
    """What all requests for one model share."""

    def __init__(
        self,
        supervisor: EngineLike,
        tokenizer: Tokenizer,
        served_name: str,
        limits: Limits,
        metrics: Metrics,
        placement: Any = None,
    ) -> None:
        self.supervisor, self.tokenizer, self.served_name = supervisor, tokenizer, served_name
        self.limits, self.metrics, self.placement = limits, metrics, placement
        supervisor.on_step = metrics.stepped
        self.created = int(time.time())
        self.table = tokenizer.token_bytes()
        self._longest = max(_LONGEST_SPECIAL, max(map(len, self.table), default=0))

    def facts(self) -> Facts:
        """What the serving engine can do. Raises ApiError 503 while none serves."""
        ready = self.supervisor.ready
        if self.supervisor.state != "ready" or ready is None:
            raise self.unavailable(self.supervisor.retry_after_seconds())
        return facts_of(ready.info)

    def known_facts(self) -> Facts:
        """The same for what needs no engine: as far as the configuration tells while none serves."""
        ready = self.supervisor.ready
        return facts_of(ready.info) if ready is not None else promised(self.supervisor.config, self.tokenizer.vocabulary)

    def unavailable(self, retry_after_seconds: float) -> ApiError:
        state, reason = self.supervisor.state, scrubbed(self.supervisor.reason or "no reason given")
        return try_again(503, f"the model is not served at the moment ({state}): {reason}", state, retry_after_seconds)

    def check_room(self) -> None:
        """Raises ApiError 429 where the queue is full for everybody: said before a long prompt is made tokens of."""
        try:
            self.supervisor.check_room()
        except Overloaded as refusal:
            raise too_many(refusal) from None

    async def tokens(
        self, text: str, facts: Facts, param: str, *, bos: bool = False, parse_special: bool = False, any_length: bool = False
    ) -> list[int]:
        """Token ids of a text. Unless `any_length`, raises ApiError 400 where it is certain beforehand that the context is too short."""
        if len(text) > self.limits.inline_characters:
            fewest = len(text) // self._longest
            if fewest > facts.context_tokens and not any_length:
                raise context_overflow(fewest, None, facts.context_tokens, param, at_least=True)
            ids = await asyncio.to_thread(self.tokenizer.encode, text, parse_special=parse_special)
        else:
            ids = self.tokenizer.encode(text, parse_special=parse_special)
        head = self.tokenizer.bos_id
        return [head, *ids] if bos and head is not None else ids

    def bytes_of(self, token: int) -> bytes:
        return self.table[token] if token < len(self.table) else b""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text of token ids; control tokens have none, and a character that is cut becomes U+FFFD."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")


class Desk:
    """The models of one server. Without a keeper their engines run, or do not, by themselves."""

    def __init__(self, limits: Limits, metrics: ServerMetrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.services: dict[str, Service] = {}
        self.keeper: Keeper | None = None
        self.tracer: Any = None  # serving.tracing.Tracer, where traces are exported
        self.document: bytes | None = None  # /openapi.json, made when first asked for
        self.admin_routes = False  # whether this listener has them: the document says so

    def add(self, service: Service) -> None:
        """One more model, or another one under the same name: requests that are under way keep the Service they have."""
        self.services[service.served_name] = service
        self.metrics.add(service.metrics)
        self.document = None

    def remove(self, name: str) -> None:
        """This name is served no more."""
        service = self.services.pop(name)
        self.metrics.remove(service.metrics)
        self.document = None

    @property
    def first(self) -> Service:
        """The model that is meant where none is named."""
        return next(iter(self.services.values()))

    def named(self, model: str | None) -> Service:
        """The Service of a model. Raises ApiError: 404 for one that is not served, 400 for none where there are several."""
        if model is None:
            if len(self.services) > 1:
                raise ApiError(400, f"model is needed: {self._names()} are served", code="model_required", param="model")
            return self.first
        service = self.services.get(model)
        if service is None:
            text = f"the model {model[:200]!r} does not exist; {self._names()} {'is' if len(self.services) == 1 else 'are'} served"
            raise ApiError(404, text, code="model_not_found", param="model")
        return service

    def states(self) -> dict[str, str]:
        """The state of every model: the keeper's word where there is one, else the supervisor's."""
        if self.keeper is not None:
            return self.keeper.states()
        return {name: service.supervisor.state for name, service in self.services.items()}

    async def enter(self, model: str | None, exchange: Exchange) -> Service:
        """The Service that answers this request, its model held until the exchange ends. Raises ApiError."""
        service = self.look_at(model, exchange)
        if self.keeper is not None:
            exchange.release = await self.keeper.enter(service.served_name)
            service = self.services[service.served_name]  # a swap may have come between
            exchange.service = service
        return service

    def look_at(self, model: str | None, exchange: Exchange) -> Service:
        """The Service of a request that needs no engine. Raises ApiError."""
        service = self.named(model)
        exchange.service = service
        return service

    def _names(self) -> str:
        shown = [repr(name) for name in list(self.services)[:8]]
        return ", ".join(shown) + (f" and {len(self.services) - 8} more" if len(self.services) > 8 else "")
