"""One request as what it will say: its sequences with what is known of each, and the chunks or the body that they become.

A content event costs one JSON string and one concatenation: what is constant about it is encoded once, when the stream begins.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from serving.access import Exchange
from serving.checks import Wishes
from serving.messages import Delta, TokenDetail
from serving.metrics import Metrics
from serving.protocol import Generation
from serving.replies import (
    LOWEST_LOGPROB,
    MARK,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
    content_frame,
    encode,
    event,
    usage_of,
)
from serving.service import Service, StreamLike

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Prompt:
    """One prompt of a request: its ids, and its text where it is to be echoed."""

    __slots__ = ("ids", "text", "max_tokens")

    def __init__(self, ids: list[int], max_tokens: int, text: str = "") -> None:
        self.ids, self.text, self.max_tokens = ids, text, max_tokens


class Choice:
    """One sequence of a request, and what is known of it so far. Times are of time.perf_counter."""

    __slots__ = (
        *("index", "prompt", "first_of_prompt", "stream", "whole", "submitted", "first", "last", "tokens", "first_tokens", "cached"),
        *("finish", "pieces", "details", "scores", "opened", "frame", "offset", "over", "queue_seconds", "prefill_seconds", "ended_as"),
    )

    def __init__(self, index: int, prompt: Prompt, first_of_prompt: bool, stream: StreamLike, whole: bool) -> None:
        self.index, self.prompt, self.first_of_prompt, self.stream, self.whole = index, prompt, first_of_prompt, stream, whole
        self.submitted = time.perf_counter()
        self.first: float | None = None
        self.last = self.submitted
        self.tokens = self.first_tokens = 0
        self.cached: int | None = None
        self.finish: FinishReason | None = None
        self.ended_as: str | None = None  # stop, length, cancelled, deadline, error, refused
        self.queue_seconds: float | None = None  # as the engine measured them
        self.prefill_seconds: float | None = None
        self.pieces: list[str] = []
        self.details: list[TokenDetail] = []  # not written yet
        self.scores: list[TokenDetail] | None = None  # of the prompt's tokens from the second on, where asked for; not written yet
        self.opened = self.over = False
        self.frame: tuple[bytes, bytes] | None = None
        self.offset = len(prompt.text)  # characters written, for text_offset

    def took(self, delta: Delta, began: float, metrics: Metrics) -> None:
        """Account for one delta."""
        now = time.perf_counter()
        if delta.cached_tokens is not None:
            self.cached = delta.cached_tokens
        if delta.details:
            self.details += delta.details
        if delta.prompt_details is not None:
            self.scores = delta.prompt_details
        if not delta.tokens:
            return
        self.tokens += delta.tokens
        metrics.generation_tokens += delta.tokens
        if self.first is None:
            self._began(delta, now, began, metrics)
        else:
            metrics.inter_token.observe(now - self.last)
        self.last = now

    def _began(self, delta: Delta, now: float, began: float, metrics: Metrics) -> None:
        queue, prefill = self.queue_seconds, self.prefill_seconds = delta.queue_seconds, delta.prefill_seconds
        self.first, self.first_tokens = now, delta.tokens
        if self.whole:  # one delta at the end: when the first token was made, the engine says
            known = queue is not None and prefill is not None
            self.first = min(now, self.submitted + (queue or 0.0) + (prefill or 0.0)) if known else None
            self.first_tokens = 1
        if self.first is not None:
            metrics.ttft.observe(self.first - began)
        if queue is not None:
            metrics.queue.observe(queue)
        if prefill is not None:
            metrics.prefill.observe(prefill)
        metrics.prompt_tokens += len(self.prompt.ids)
        metrics.cached_tokens += self.cached or 0
        metrics.prompt_lengths.observe(len(self.prompt.ids))

    def ended(self, finish: str, began: float, metrics: Metrics) -> None:
        """Account for the end; only the first one counts."""
        if self.over:
            return
        self.over = True
        self.ended_as = finish
        metrics.finished[finish] += 1
        if finish not in _REASONS:
            return
        self.finish = _REASONS[finish]
        metrics.e2e.observe(self.last - began)
        metrics.output_lengths.observe(self.tokens)
        metrics.asked_lengths.observe(self.prompt.max_tokens)
        if self.first is not None:
            metrics.decode.observe(self.last - self.first)
            if self.prefill_seconds is not None:
                metrics.inference.observe(self.prefill_seconds + self.last - self.first)
            if self.tokens > self.first_tokens:
                metrics.per_token.observe((self.last - self.first) / (self.tokens - self.first_tokens))

    @property
    def usage(self) -> Usage:
        return usage_of(len(self.prompt.ids), self.tokens, self.cached)


class Call(ABC):
    """One request on its way to an answer; what differs between chat and completions is in the subclasses."""

    prefix: str

    def __init__(self, service: Service, exchange: Exchange, request: Generation, wishes: Wishes) -> None:
        self.service, self.exchange, self.request, self.wishes = service, exchange, request, wishes
        self.id = f"{self.prefix}-{exchange.serial}"
        self.created = int(time.time())
        self.streamed = bool(request.stream)
        options = request.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self.usage_always = self.wants_usage and options is not None and bool(options.continuous_usage_stats)
        self.wants_logprobs = wishes.shows_logprobs

    @abstractmethod
    def chunk(
        self, choice: Choice, text: str | None, finish: FinishReason | None, usage: Usage | None | UnsetType
    ) -> ChatChunk | Completion:
        """One chunk: of content (`text`) or the choice's last one (`finish`). Takes the choice's unwritten details."""

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """What precedes a choice's first content."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> ChatChunk | Completion:
        """The chunk without choices that holds the usage."""

    @abstractmethod
    def body(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion | Completion:
        """The whole answer."""

    def usage_in(self, choice: Choice) -> Usage | None | UnsetType:
        """The `usage` of a chunk that is not the last: the count so far, null, or not there at all."""
        if self.usage_always:
            return choice.usage
        return None if self.wants_usage else UNSET

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """The events that one delta becomes; none where its text is still held back."""
        data = b""
        if not choice.opened:
            choice.opened = True
            data = self.opening(choice)
        text = delta.text
        if text:
            if self.usage_always or self.wants_logprobs:
                data += event(self.chunk(choice, text, None, self.usage_in(choice)))
            else:
                if choice.frame is None:
                    choice.frame = content_frame(self.chunk(choice, MARK, None, self.usage_in(choice)))
                head, tail = choice.frame
                data += head + encode(text) + tail
            choice.offset += len(text)
        if choice.finish is not None:
            data += event(self.chunk(choice, None, choice.finish, self.usage_in(choice)))
        return data

    def fingerprint(self) -> str | None:
        """OpenAI's mark of what made the answer: backend, device and weight format decide the numerics."""
        ready = self.service.supervisor.ready
        return None if ready is None else f"{ready.info.name}-{ready.info.device}-{ready.info.weight_format}"


class ChatCall(Call):
    prefix = "chatcmpl"

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
        if not self.wants_logprobs:
            return None
        details, choice.details = choice.details, []
        return ChatLogprobs([self._token(detail) for detail in details])

    def _token(self, detail: TokenDetail) -> TokenLogprob:
        text, data = _shown(self.service, detail.token)
        top = [TopLogprob(*_named(self.service, i, v)) for i, v in zip(detail.top_ids, detail.top_values, strict=True)]
        return TokenLogprob(text, _finite(detail.logprob), data, top)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None | UnsetType) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.service.served_name, choices=choices, usage=usage)

    def chunk(self, choice: Choice, text: str | None, finish: FinishReason | None, usage: Usage | None | UnsetType) -> ChatChunk:
        delta = ChatDelta(content=text) if text is not None else ChatDelta()
        logprobs = self._logprobs(choice) if text is not None or choice.details else None
        return self._chunk([ChatChunkChoice(choice.index, delta, logprobs, finish)], usage)

    def opening(self, choice: Choice) -> bytes:
        usage = self.usage_in(choice)
        if isinstance(usage, Usage):
            usage = usage_of(usage.prompt_tokens, 0, choice.cached)
        return event(self._chunk([ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))], usage))

    def last_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.service.served_name,
            system_fingerprint=self.fingerprint(),
            choices=[
                ChatChoice(c.index, AssistantMessage("assistant", "".join(c.pieces)), self._logprobs(c), c.finish)
                for c in choices
                if c.finish is not None
            ],
            usage=usage,
        )


class CompletionCall(Call):
    prefix = "cmpl"

    def _logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        if not self.wants_logprobs:
            return None
        details, choice.details = choice.details, []
        return CompletionLogprobs(
            [_legacy_name(self.service, detail.token) for detail in details],
            [_finite(detail.logprob) for detail in details],
            [self._top(detail) for detail in details],
            self._offsets([detail.token for detail in details], choice.offset),
        )

    def _prompt_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        """Of an echoed prompt; nothing came before its first token, so that one has none."""
        scores, choice.scores = choice.scores, None
        if scores is None:
            return None
        ids = choice.prompt.ids
        return CompletionLogprobs(
            [_legacy_name(self.service, token) for token in ids],
            [None, *(_finite(detail.logprob) for detail in scores)],
            [None, *(self._top(detail) for detail in scores)],
            self._offsets(ids, 0),
        )

    def _top(self, detail: TokenDetail) -> dict[str, float]:
        top = {_legacy_name(self.service, i): _finite(v) for i, v in zip(detail.top_ids, detail.top_values, strict=True)}
        return top | {_legacy_name(self.service, detail.token): _finite(detail.logprob)}

    def _offsets(self, tokens: Sequence[int], offset: int) -> list[int]:
        """Where each token's text begins, in characters."""
        decoder, offsets = _UTF8("replace"), list[int]()
        for token in tokens:
            offsets.append(offset)
            offset += len(decoder.decode(self.service.bytes_of(token)))
        return offsets

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType, whole: bool = False) -> Completion:
        mark = self.fingerprint() if whole else UNSET
        return Completion(
            id=self.id, created=self.created, model=self.service.served_name, system_fingerprint=mark, choices=choices, usage=usage
        )

    def chunk(self, choice: Choice, text: str | None, finish: FinishReason | None, usage: Usage | None | UnsetType) -> Completion:
        logprobs = self._logprobs(choice) if text is not None or choice.details else None
        return self._completion([CompletionChoice(choice.index, text or "", logprobs, finish)], usage)

    def opening(self, choice: Choice) -> bytes:
        if not choice.prompt.text:
            return b""
        return event(
            self._completion([CompletionChoice(choice.index, choice.prompt.text, self._prompt_logprobs(choice))], self.usage_in(choice))
        )

    def last_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        found = [CompletionChoice(c.index, c.prompt.text + "".join(c.pieces), self._all_logprobs(c), c.finish) for c in choices]
        return self._completion(found, usage, whole=True)

    def _all_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        before, after = self._prompt_logprobs(choice), self._logprobs(choice)
        if before is None or after is None:
            return after
        return CompletionLogprobs(
            before.tokens + after.tokens,
            before.token_logprobs + after.token_logprobs,
            before.top_logprobs + after.top_logprobs,
            before.text_offset + after.text_offset,
        )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _shown(service: Service, token: int) -> tuple[str, list[int] | None]:
    """(text, bytes) of a token in chat's log-probabilities; a control token is shown by its id and has no bytes."""
    data = service.bytes_of(token)
    return (data.decode("utf-8", "replace"), list(data)) if data else (f"token_id:{token}", None)


def _named(service: Service, token: int, logprob: float) -> tuple[str, float, list[int] | None]:
    text, data = _shown(service, token)
    return text, _finite(logprob), data


def _legacy_name(service: Service, token: int) -> str:
    """A token as the key of completions' log-probabilities: its text, `bytes:\\xe2\\x82` where it is no whole text, or its id."""
    data = service.bytes_of(token)
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
