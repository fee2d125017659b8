"""One served model, as all of its requests share it: tokenizer, limits, state, reference count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from crossover.models.errors import BadChat
from crossover.models.tokenizer import Tokenizer, load_tokenizer
from crossover.serving.errors import ContextOverflow, EngineState, TokenOutOfRange
from crossover.serving.hardware.machine_facts import resident_bytes
from crossover.serving.metrics import Metrics
from crossover.serving.placement.placement_policy import Attempt, Placement, explain
from crossover.serving.registry.eviction import BytesByPlace, bytes_by_place
from crossover.serving.registry.prepare_model import Prepared
from crossover.serving.supervisor.engine_supervisor import RETRY_SECONDS, Supervisor

T = TypeVar("T")
Vocabulary = tuple[Tokenizer, list[bytes]]  # a tokenizer, and the bytes of each token
INLINE_CHARACTERS = 4096  # longer texts are tokenised in a thread, so that others do not wait
# Maximum bytes that the text of a control token is assumed to have; the table of token bytes has
# none for them.
_MAX_CONTROL_TOKEN_BYTES = 64
_TEXT_THREAD = ThreadPoolExecutor(1, "text")


async def in_text_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run work on a long text in the text thread, one at a time, and return its result."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_TEXT_THREAD, partial(function, *args, **kwargs))


class EngineLimits(msgspec.Struct, frozen=True):
    """The limits of an engine that validation needs."""

    context_tokens: int
    vocabulary: int  # rows of the model's embedding


def read_vocabulary(tokenizer_path: str) -> Vocabulary:
    """Load a tokenizer: 1 to 3 s for 128,000 tokens. Raises ModelError."""
    tokenizer = load_tokenizer(tokenizer_path)
    with suppress(BadChat):  # a template that cannot be compiled: each chat reports it
        tokenizer.try_forms()
    return tokenizer, tokenizer.token_bytes()


class ServedModel:
    """One model as all of its requests share it.

    `prepared`: None if something else starts and stops its engines. Times are time.monotonic().
    """

    def __init__(
        self,
        supervisor: Supervisor,
        vocabulary: Vocabulary,
        metrics: Metrics,
        prepared: Prepared | Any = None,
    ) -> None:
        self.served_name = metrics.model
        self.supervisor = supervisor
        self.tokenizer, self.token_table = vocabulary
        self.metrics = metrics
        self.prepared = prepared
        self.placement: Placement | Any = None if prepared is None else prepared.placement
        supervisor.requests.on_step = metrics.stepped
        self.created = int(time.time())
        longest_token_bytes = max(map(len, self.token_table), default=0)
        self._max_token_bytes = max(_MAX_CONTROL_TOKEN_BYTES, longest_token_bytes)
        self.reference_count = 0  # requests that are being answered
        self.last_used_at = time.monotonic()  # a request began or ended, or the model was loaded
        self.on_demand = True  # a request may load it
        self.load: asyncio.Task[None] | None = None  # the load that is queued or running

    # What a request needs.

    def engine_limits(self, to_generate: bool = True) -> EngineLimits:
        """Return the limits of the serving engine. One sequence may use the whole KV pool.

        While no engine serves, raises Unavailable, or returns those of the configuration if nothing
        is `to_generate`.
        """
        supervisor = self.supervisor
        ready = supervisor.ready
        if to_generate and (ready is None or supervisor.state != EngineState.ready):
            raise supervisor.unavailable()
        if ready is not None:
            info = ready.info
            return EngineLimits(info.settings.longest_tokens, info.vocabulary)
        context_tokens = supervisor.config.settings.longest_tokens
        return EngineLimits(context_tokens, self.tokenizer.vocabulary)

    async def tokens(
        self,
        text: str,
        parameter: str,
        limits: EngineLimits | None = None,
        *,
        add_bos: bool = False,
        parse_special: bool = False,
    ) -> list[int]:
        """Return the token ids of a text, which is the request's `parameter`.

        With `limits`, raises ContextOverflow for a text that is certainly longer than the context,
        and TokenOutOfRange for an id without a row in the model.
        """
        encode = partial(self.tokenizer.encode, text, parse_special=parse_special)
        min_tokens = len(text) // self._max_token_bytes
        if limits is not None and min_tokens > limits.context_tokens:
            raise ContextOverflow(min_tokens, limits.context_tokens, parameter)
        ids = encode() if len(text) <= INLINE_CHARACTERS else await in_text_thread(encode)
        bos_id = self.tokenizer.bos_id if add_bos else None
        if limits is not None:
            vocabulary = limits.vocabulary
            if (highest := max(ids, default=0)) >= vocabulary:
                token_text = self.tokenizer.token_text(highest)
                raise TokenOutOfRange(highest, token_text, vocabulary, parameter)
            if bos_id is not None and bos_id >= vocabulary:
                bos_id = None
        return ids if bos_id is None else [bos_id, *ids]

    def tokens_out_of_range(self) -> dict[int, str]:
        """Return the ids in the model's files that its engine has no rows for, with their texts:
        ids of the tokenizer, and of BOS and EOS tokens. Empty while no engine serves."""
        ready, tokenizer = self.supervisor.ready, self.tokenizer
        if ready is None:
            return {}
        rows = ready.info.vocabulary
        boundary_ids = {*tokenizer.eos_ids}
        if tokenizer.bos_id is not None:
            boundary_ids.add(tokenizer.bos_id)
        ids = {
            *range(rows, tokenizer.vocabulary),
            *(token for token in boundary_ids if token >= rows),
        }
        texts = {token: tokenizer.token_text(token) for token in sorted(ids)}
        return {token: text for token, text in texts.items() if text or token in boundary_ids}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; control tokens have none."""
        return self.token_table[token] if token < len(self.token_table) else b""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; an incomplete character becomes U+FFFD, and control tokens
        have no text."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def placement_report(self) -> dict[str, Any] | None:
        """Return the placement decision, as numbers and text, for /v1/placement."""
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    # Its state.

    @property
    def state(self) -> EngineState:
        """Return the supervisor's state; a requested load that has not started is loading, too."""
        state = self.supervisor.state
        is_queued = state in (EngineState.unloaded, EngineState.failed) and self.load is not None
        return EngineState.loading if is_queued else state

    @property
    def is_busy(self) -> bool:
        """Return whether it must not be evicted: requests are in flight, or it is loading."""
        return self.reference_count > 0 or self.supervisor.in_flight > 0 or self.load is not None

    @property
    def has_given_up(self) -> bool:
        """Return whether it has failed and no retry is under way."""
        return self.supervisor.state == EngineState.failed and self.load is None

    @property
    def is_retry_due(self) -> bool:
        """Return whether it failed at least RETRY_SECONDS ago."""
        return self.has_given_up and time.monotonic() >= self.supervisor.since + RETRY_SECONDS

    def acquire(self) -> None:
        """Keep the model loaded until `release`: a request uses it."""
        self.reference_count += 1
        self.last_used_at = time.monotonic()

    def release(self) -> None:
        """Record that a request that used the model has ended."""
        self.reference_count -= 1
        self.last_used_at = time.monotonic()

    # Its memory.

    def attempts(self) -> list[Attempt]:
        """Return the placements of the engines that are or will be loaded, including standby."""
        has_standby = self.prepared.model.standby == "warm"
        supervisor = self.supervisor
        configs = supervisor.configs[:2] if has_standby else (supervisor.config, *supervisor.loaded)
        engines = [(config.backend, config.device) for config in configs]
        return [
            attempt
            for attempt in self.placement.attempts
            if (attempt.backend, attempt.device) in engines
        ]

    @property
    def predicted_bytes(self) -> BytesByPlace:
        """Return the predicted bytes, by place, that unloading it frees."""
        return bytes_by_place(self.attempts())

    @property
    def measured_bytes(self) -> int:
        """Return the current RSS of its engine processes."""
        return sum(resident_bytes(pid) or 0 for pid in self.supervisor.pids)
