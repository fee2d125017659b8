"""One request on its way to an answer (Call), and its sequences with their timings (Choice).

A content event costs one JSON string and one concatenation: its constant parts are encoded once.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from serving.engine.messages import Delta, FinishReason, TokenDetail
from serving.http.auth import is_local
from serving.http.chat.parts import Splitter
from serving.http.exchange import Exchange
from serving.http.validation import ValidRequest
from serving.http.wire.requests import Generation
from serving.http.wire.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Finish,
    Usage,
    usage_of,
)
from serving.http.wire.sse import DONE, MARK, content_frame, encode, event
from serving.metrics import Metrics
from serving.registry.model import ServedModel, StreamLike

_FINISHES: dict[str, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
SHARED_GRAIN = 64  # tokens


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request; `text` where it is to be echoed."""

    ids: list[int]
    max_tokens: int
    text: str = ""


@dataclass(slots=True)
class Timings:
    """Of one sequence, by time.perf_counter; the engine measured the two durations."""

    submitted: float
    last: float
    first: float | None = None
    first_tokens: int = 0  # that came with the first delta
    queue_seconds: float | None = None
    prefill_seconds: float | None = None

    def began(self, delta: Delta, now: float, whole: bool) -> None:
        """The first tokens are here; of a `whole` answer the engine says when they were made."""
        self.queue_seconds = delta.queue_seconds
        self.prefill_seconds = delta.prefill_seconds
        self.first = now
        self.first_tokens = delta.tokens
        if whole:
            self.first_tokens = 1
            self.first = None
            if delta.queue_seconds is not None and delta.prefill_seconds is not None:
                made = self.submitted + delta.queue_seconds + delta.prefill_seconds
                self.first = min(now, made)

    def observe(self, tokens: int, metrics: Metrics) -> None:
        """Count a sequence that ended as it should."""
        if self.first is None:
            return
        decode = self.last - self.first
        metrics.decode.observe(decode)
        if self.prefill_seconds is not None:
            metrics.inference.observe(self.prefill_seconds + decode)
        if tokens > self.first_tokens:
            metrics.per_token.observe(decode / (tokens - self.first_tokens))


def _now() -> Timings:
    now = time.perf_counter()
    return Timings(now, now)


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request, and what is known of it so far."""

    index: int
    prompt: Prompt
    first_of_prompt: bool
    stream: StreamLike
    whole: bool  # one delta at the end
    cached_grain: int = 1  # cached tokens are told in multiples of it
    times: Timings = field(default_factory=_now)
    tokens: int = 0
    cached: int | None = None
    ended_as: FinishReason | None = None
    pieces: list[str] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)  # not written yet
    scores: list[TokenDetail] | None = None  # of the prompt from its second token; not written yet
    opened: bool = False
    frame: tuple[bytes, bytes] | None = None
    written: int = 0  # characters, for text_offset
    reasoning_tokens: int | None = None  # of `tokens`, where known
    splitter: Splitter | None = None  # where there is more in the text than content
    calls: int = 0  # of tools, written

    def __post_init__(self) -> None:
        self.written = len(self.prompt.text)

    @property
    def finish(self) -> Finish | None:
        """As the answer says it; None where the sequence runs or ended badly."""
        return None if self.ended_as is None else _FINISHES.get(self.ended_as)

    @property
    def usage(self) -> Usage:
        return usage_of(len(self.prompt.ids), self.tokens, self.cached)

    def took(self, delta: Delta, began: float, metrics: Metrics) -> None:
        """Account for one delta."""
        if delta.cached_tokens is not None:
            self.cached = delta.cached_tokens // self.cached_grain * self.cached_grain
        if delta.details:
            self.details += delta.details
        if delta.prompt_details is not None:
            self.scores = (self.scores or []) + delta.prompt_details
        if delta.reasoning_tokens is not None:
            self.reasoning_tokens = delta.reasoning_tokens
        if not delta.tokens:
            return
        now = time.perf_counter()
        metrics.generation_tokens.inc(delta.tokens)
        if delta.tokens > 1 and not self.whole:
            metrics.merged_events.inc()
        if self.tokens:
            metrics.inter_token.observe(now - self.times.last)
        else:
            self.times.began(delta, now, self.whole)
            self._observe_begin(began, metrics)
        self.tokens += delta.tokens
        self.times.last = now

    def _observe_begin(self, began: float, metrics: Metrics) -> None:
        times, prompt_tokens = self.times, len(self.prompt.ids)
        if times.first is not None:
            metrics.ttft.observe(times.first - began)
        if times.queue_seconds is not None:
            metrics.queue.observe(times.queue_seconds)
        if times.prefill_seconds is not None:
            metrics.prefill.observe(times.prefill_seconds)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cache_queries.inc(prompt_tokens)
        metrics.cache_hits.inc(self.cached or 0)
        metrics.prompt_lengths.observe(prompt_tokens)

    def ended(self, finish: FinishReason, began: float, metrics: Metrics) -> None:
        """Account for the end; only the first one counts."""
        if self.ended_as is not None:
            return
        self.ended_as = FinishReason(finish)
        metrics.finished[finish].inc()
        if self.finish is None:
            return
        metrics.e2e.observe(self.times.last - began)
        metrics.output_lengths.observe(self.tokens)
        metrics.asked_lengths.observe(self.prompt.max_tokens)
        self.times.observe(self.tokens, metrics)


class Call(ABC):
    """What differs between chat and completions is in the subclasses."""

    prefix: str

    def __init__(
        self,
        served_model: ServedModel,
        exchange: Exchange,
        request: Generation,
        valid: ValidRequest,
    ) -> None:
        self.served_model = served_model
        self.exchange = exchange
        self.request = request
        key, salt = exchange.key, request.cache_salt
        # Whoever shares a key could read another's prompt by the count of its cached tokens;
        # without keys it is whoever reaches the port, where that is not the machine itself.
        is_shared = not is_local(exchange.origin.owner) if key is None else not key.name
        self.cached_grain = SHARED_GRAIN if is_shared and not salt else 1
        cache = "\0".join(("" if key is None else key.name, salt or ""))
        request_id = 1 + secrets.randbits(62)
        origin = msgspec.structs.replace(exchange.origin, request=request_id, cache=cache)
        generation = msgspec.structs.replace(valid.generation, origin=origin)
        self.valid = msgspec.structs.replace(valid, generation=generation)
        self.id = f"{self.prefix}-{exchange.serial}"
        self.created = int(time.time())
        self.streamed = bool(request.stream)
        options = request.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        self.usage_always = self.wants_usage and always

    @abstractmethod
    def chunk(
        self, choice: Choice, text: str | None, finish: Finish | None
    ) -> ChatChunk | Completion:
        """A chunk of content (`text`) or the choice's last one; takes its unwritten details."""

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """What precedes a choice's first content."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> ChatChunk | Completion:
        """The chunk without choices that holds the usage."""

    def last(self, usage: Usage) -> bytes:
        """The events at the end of a stream."""
        return (event(self.last_chunk(usage)) if self.wants_usage else b"") + DONE

    @abstractmethod
    def body(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion | Completion:
        """The whole answer."""

    def parameter(self, refused: Delta) -> str | None:
        """The key of the request that an engine has refused."""
        return refused.parameter

    def usage_in(self, choice: Choice) -> Usage | None | UnsetType:
        """The `usage` of a chunk that is not the last: the count so far, null, or not there."""
        if self.usage_always:
            return choice.usage
        return None if self.wants_usage else UNSET

    def opened(self, choice: Choice) -> bytes:
        """The events before a choice's first content; none once they are written."""
        if choice.opened:
            return b""
        choice.opened = True
        return self.opening(choice)

    def content(self, choice: Choice, text: str) -> bytes:
        """The event of some text."""
        if self.usage_always or self.valid.shows_logprobs:
            data = event(self.chunk(choice, text, None))
        else:
            if choice.frame is None:
                choice.frame = content_frame(self.chunk(choice, MARK, None))
            head, tail = choice.frame
            data = head + encode(text) + tail
        choice.written += len(text)
        return data

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """The events that one delta becomes; none where its text is still held back."""
        data = self.opened(choice)
        if delta.text:
            data += self.content(choice, delta.text)
        if choice.finish is not None:
            data += event(self.chunk(choice, None, choice.finish))
        return data

    def take_details(self, choice: Choice) -> list[TokenDetail] | None:
        """The choice's unwritten log-probabilities; None where the answer shows none."""
        if not self.valid.shows_logprobs:
            return None
        details = choice.details
        choice.details = []
        return details

    def fingerprint(self) -> str | None:
        """OpenAI's mark of what decides the numerics: backend, device and weight format."""
        ready = self.served_model.supervisor.ready
        if ready is None:
            return None
        return f"{ready.info.name}-{ready.info.device}-{ready.info.weight_format}"
