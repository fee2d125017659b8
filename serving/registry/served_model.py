"""One served model, as all of its requests share it: tokenizer, limits, state, reference count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from crossover.models.text.sampling_defaults import SamplingDefaults
from crossover.models.text.tokenizer import Tokenizer, load_tokenizer
from crossover.serving.errors import ContextOverflow, EngineState, TokenOutOfRange
from crossover.serving.hardware.machine_facts import resident_bytes
from crossover.serving.metrics import Metrics
from crossover.serving.placement.placement_policy import Attempt, Placement, explain
from crossover.serving.registry.eviction import BytesByPlace, bytes_by_place
from crossover.serving.registry.prepare_model import Prepared
from crossover.serving.supervisor.engine_supervisor import RETRY_SECONDS, Supervisor

T = TypeVar("T")
# Longer texts are tokenized in a thread, so that they do not keep the event loop from others.
INLINE_CHARACTERS = 4096
# An upper bound of the text of a control token, which the table of token bytes does not have.
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


class Vocabulary(NamedTuple):
    """A model's tokenizer, and the bytes of each token by its id; control tokens have none."""

    tokenizer: Tokenizer
    token_bytes: list[bytes]


def read_vocabulary(tokenizer_path: str) -> Vocabulary:
    """Load a tokenizer, which takes 1 to 3 s for 128,000 tokens. Raises ModelError."""
    tokenizer = load_tokenizer(tokenizer_path)
    tokenizer.try_forms()
    return Vocabulary(tokenizer, tokenizer.token_bytes())


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
        self.tokenizer = vocabulary.tokenizer
        self.token_bytes = vocabulary.token_bytes
        self.metrics = metrics
        self.prepared = prepared
        # The values of sampling parameters that a request leaves out.
        self.sampling_defaults = self.tokenizer.sampling_defaults
        if prepared is not None and prepared.model.sampling_defaults == "openai":
            self.sampling_defaults = SamplingDefaults()
        self._rendering = asyncio.Lock()  # the model's process renders one chat at a time
        self.placement: Placement | Any = None if prepared is None else prepared.placement
        supervisor.requests.on_step = metrics.observe_step
        self.created = int(time.time())
        longest_token_bytes = max(map(len, self.token_bytes), default=0)
        self._max_token_bytes = max(_MAX_CONTROL_TOKEN_BYTES, longest_token_bytes)
        self.reference_count = 0  # requests that are being answered
        # When a request began or ended, or the model was loaded.
        self.last_used_at = time.monotonic()
        self.on_demand = True  # False: an administrator unloaded it, so no request may load it
        self.load: asyncio.Task[None] | None = None  # the load that is queued or running

    # What a request needs.

    def engine_limits(self, to_generate: bool = True) -> EngineLimits:
        """Return the limits of the engine that serves. One sequence may use the whole KV pool.

        `to_generate`: an engine is needed, so Unavailable is raised while none serves. Otherwise
        the limits of the configuration are returned meanwhile.
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

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        is_long: bool,
    ) -> str:
        """Return the messages as a prompt (see RendersChat.render_chat). Raises BadChat."""
        arguments = messages, add_generation_prompt, variables
        if is_long:
            return await in_text_thread(self.tokenizer.render_chat, *arguments)
        async with self._rendering:
            return await self.tokenizer.render_chat_soon(*arguments)

    async def tokens(
        self,
        text: str,
        parameter: str,
        limits: EngineLimits | None = None,
        *,
        add_bos: bool = False,
    ) -> list[int]:
        """Return the token ids of a text, in which the texts of control tokens are these tokens.

        `parameter`: the key of the request that has the text. `add_bos`: the ids begin with the
        model's BOS token, if it has one; a text that begins with it already gets no second one.

        If `limits` are given, raises ContextOverflow for a text that is certainly longer than the
        context, and TokenOutOfRange for an id without a row in the model's embedding.
        """
        encode = partial(self.tokenizer.encode, text, parse_special=True)
        min_tokens = len(text) // self._max_token_bytes
        if limits is not None and min_tokens > limits.context_tokens:
            raise ContextOverflow(min_tokens, limits.context_tokens, parameter)
        ids = encode() if len(text) <= INLINE_CHARACTERS else await in_text_thread(encode)
        bos_id = self.tokenizer.bos_id if add_bos else None
        if limits is not None:
            highest_id = max(ids, default=0)
            if highest_id >= limits.vocabulary:
                token_text = self.tokenizer.token_text(highest_id)
                raise TokenOutOfRange(highest_id, token_text, limits.vocabulary, parameter)
            if bos_id is not None and bos_id >= limits.vocabulary:
                bos_id = None
        return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]

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
        named_ids = {*range(rows, tokenizer.vocabulary), *boundary_ids}
        texts: dict[int, str] = {}
        for token in sorted(named_ids):
            text = tokenizer.token_text(token)
            # Ids of the tokenizer without a text are unused, and no request can contain them.
            if token >= rows and (text or token in boundary_ids):
                texts[token] = text
        return texts

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; control tokens have none."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; an incomplete character becomes U+FFFD, and control tokens
        have no text."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def placement_report(self) -> dict[str, Any] | None:
        """Return the placement decision as numbers, and as text under "lines", for
        /v1/placement."""
        return {**msgspec.to_builtins(self.placement), "lines": explain(self.placement)}

    # Its state.

    @property
    def state(self) -> EngineState:
        """Return the supervisor's state, or "loading" if a load is queued but has not started."""
        state = self.supervisor.state
        has_no_engine = state in (EngineState.unloaded, EngineState.failed)
        return EngineState.loading if has_no_engine and self.load is not None else state

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
        """Return whether it failed at least RETRY_SECONDS ago, so that it may be loaded again."""
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
        supervisor = self.supervisor
        if self.prepared.model.standby == "warm":
            configs = supervisor.configs[:2]  # the preferred engine, and its standby
        else:
            configs = (supervisor.config, *supervisor.loaded)
        engines = [(config.backend, config.device) for config in configs]
        return [
            attempt
            for attempt in self.placement.attempts
            if (attempt.backend, attempt.device) in engines
        ]

    @property
    def predicted_bytes(self) -> BytesByPlace:
        """Return the predicted bytes that unloading it frees, by place."""
        return bytes_by_place(self.attempts())

    @property
    def measured_bytes(self) -> int:
        """Return the current RSS of its engine processes."""
        return sum(resident_bytes(pid) or 0 for pid in self.supervisor.pids)
