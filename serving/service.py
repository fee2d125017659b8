"""What every request shares: the supervisor, the tokenizer, the limits and the metrics; and what the HTTP side asks of a supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from models.tokenizer import Tokenizer
from serving.access import Limits
from serving.backends.base import EngineConfig, Sampling
from serving.checks import Facts, context_overflow, facts_of, promised
from serving.messages import Delta, Ready, StepStats
from serving.metrics import Metrics
from serving.protocol import ApiError, scrubbed, try_again

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

    async def start(self) -> None: ...

    async def stop(self, drain: bool = ..., timeout_seconds: float = ...) -> int: ...


class Service:
    """What every request shares."""

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
        self.document: bytes | None = None  # /openapi.json, made when first asked for
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

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.served_name:
            text = f"the model {model[:200]!r} does not exist; {self.served_name!r} is served"
            raise ApiError(404, text, code="model_not_found", param="model")

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
