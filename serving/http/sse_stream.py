"""From a valid request to its answer: sequences submitted, deltas written, the client watched.

    await ChatAnswer(request, body, generation, prompts).send()

A content event costs one JSON string and one concatenation: its constant parts are encoded once.
The head of a streamed answer leaves with the first delta: until then an error is an answer with its
own status, and the sequence can move to another engine. A client that goes away cancels its
sequences.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from serving.engine.ipc_messages import Delta, FinishReason, GenerationRequest, TokenDetail
from serving.errors import EngineState
from serving.http.api_schemas import Finish, Generation, PromptTokensDetails, Usage, encode
from serving.http.body_limits import ClientGone
from serving.http.errors import ApiError, invalid, scrubbed, try_again
from serving.http.http_request import Request, event
from serving.registry.loaded_model import TEXT_WORK
from serving.supervisor.inflight_requests import Stream

DONE = b"data: [DONE]\n\n"
MARK = "\u0001text\u0001"
INLINE_DETAILS = 64  # tokens with log-probabilities; more are put into words in a thread
_ODD = 0x9E3779B97F4A7C15  # golden ratio * 2^64: seeds of sibling answers far apart
_SEED_MASK = (1 << 63) - 1
_FINISHES: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}

_MARK_JSON = encode(MARK)


def content_frame(chunk: Any) -> tuple[bytes, bytes]:
    """The event of a chunk whose text is `MARK`, cut at the text.

    Only the text differs between the content chunks of one choice: the rest is encoded once.
    """
    head, found, tail = event(chunk).partition(_MARK_JSON)
    assert found, "the chunk does not hold MARK"
    return head, tail


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request; `text` where it is to be echoed."""

    ids: list[int]
    max_tokens: int
    text: str = ""


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request, and what is known of it so far. Times are perf_counter's."""

    index: int
    prompt: Prompt
    first_of_prompt: bool
    stream: Stream
    submitted: float
    written: int  # characters, for text_offset
    last: float = 0.0  # when its last tokens came
    first: float | None = None  # when its first token was made
    first_tokens: int = 0  # that came with it
    tokens: int = 0
    cached: int | None = None
    ended_as: FinishReason | None = None
    pieces: list[str] = field(default_factory=list)  # of an answer that is not streamed
    details: list[TokenDetail] = field(default_factory=list)  # not written yet
    scores: list[TokenDetail] | None = None  # of the prompt from its second token
    opened: bool = False
    frame: tuple[bytes, bytes] | None = None
    splitter: Any = None  # tool_calls.Splitter, where there is more in the text than content
    calls: int = 0  # of tools, written

    @property
    def finish(self) -> Finish | None:
        """As the answer says it; None where the sequence runs or ended badly."""
        return None if self.ended_as is None else _FINISHES.get(self.ended_as)

    @property
    def usage(self) -> Usage:
        return usage_of(len(self.prompt.ids), self.tokens, self.cached)


class Answer(ABC):
    """The answer to one request. What differs between chat and completions is in the subclasses."""

    prefix: str

    def __init__(
        self,
        request: Request,
        body: Generation,
        generation: GenerationRequest,
        prompts: Sequence[Prompt],
    ) -> None:
        """`generation`: without a prompt; its seed is that of the first answer to each prompt."""
        assert request.model is not None
        self.request = request
        self.model = request.model
        self.generation = generation
        self.prompts = prompts
        self.id = f"{self.prefix}-{request.serial}"
        self.created = int(time.time())
        self.n = body.n or 1
        self.streamed = bool(body.stream)
        self.shows_logprobs = generation.sampling.logprobs is not None
        options = body.stream_options
        self.wants_usage = bool(options and options.include_usage)
        self.usage_always = bool(options and options.continuous_usage_stats)
        self.choices: list[Choice] = []
        self._turn = asyncio.Lock()  # of writing: one event after the other
        # OpenAI's mark of what decides the numerics.
        ready = self.model.supervisor.ready
        self.fingerprint: str | None = None
        if ready is not None:
            parts = (ready.info.name, ready.info.device, ready.info.weight_format)
            self.fingerprint = "-".join(parts)

    # What the subclasses say.

    @abstractmethod
    def chunk(self, choice: Choice, text: str | None, finish: Finish | None) -> Any:
        """One chunk with text, or the one with the finish; takes the choice's details."""

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """What precedes a choice's first content."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Any:
        """The chunk without choices that holds the usage."""

    @abstractmethod
    def body(self, usage: Usage) -> Any:
        """The whole answer."""

    def refused_key(self, refused: Delta) -> str | None:
        """The key of the request that an engine has refused."""
        return refused.parameter

    # From here on it is the same for all.

    async def send(self) -> None:
        """Submit every sequence of the request, or none, and write its answer.

        Raises ApiError, ClientGone, Unavailable, Overloaded.
        """
        self._check_size()
        self.request.choices = self.choices
        watcher = asyncio.create_task(self._watch())
        try:
            for prompt in self.prompts:
                for number in range(self.n):
                    self._submit(prompt, number)
            if len(self.choices) == 1:
                await self._follow(self.choices[0])
            else:
                try:
                    async with asyncio.TaskGroup() as group:
                        for choice in self.choices:
                            group.create_task(self._follow(choice))
                except BaseExceptionGroup as problems:
                    raise problems.exceptions[0] from None
            usage = self._usage()
            if self.streamed:
                last = event(self.usage_chunk(usage)) if self.wants_usage else b""
                await self.request.close_stream(last + DONE)
            else:
                body = await self._worded(lambda: encode(self.body(usage)))
                await self.request.answer_bytes(body)
        finally:
            watcher.cancel()
            for choice in self.choices:
                choice.stream.cancel()
                self._ended(choice, FinishReason.CANCELLED)  # unless it has ended

    def _submit(self, prompt: Prompt, number: int) -> None:
        generation, seed = self.generation, self.generation.sampling.seed
        sampling = generation.sampling
        if number:
            seed = (seed + number * _ODD) & _SEED_MASK
            sampling = msgspec.structs.replace(sampling, seed=seed)
        sequence = msgspec.structs.replace(
            generation, prompt=prompt.ids, max_tokens=prompt.max_tokens, sampling=sampling
        )
        stream = self.model.supervisor.submit(sequence)
        now = time.perf_counter()
        index = len(self.choices)
        self.choices.append(Choice(index, prompt, number == 0, stream, now, len(prompt.text)))

    async def _watch(self) -> None:
        await self.request.until_gone()
        if self.request.gone:
            for choice in self.choices:
                choice.stream.cancel()

    async def _follow(self, choice: Choice) -> None:
        """Take the deltas of one sequence, and write them where the answer is streamed."""
        request = self.request
        async for delta in choice.stream:
            self._take(choice, delta)
            if request.gone:
                raise ClientGone
            if not self.streamed:
                if delta.text:
                    choice.pieces.append(delta.text)
                continue
            if choice.details or choice.scores:
                data = await self._worded(partial(self.events, choice, delta))
            else:
                data = self.events(choice, delta)
            async with self._turn:
                await request.write(data)
        if choice.ended_as is None:
            raise RuntimeError(f"sequence {choice.index} of the request ended without a finish")

    async def _worded(self, words: Any) -> bytes:
        """The bytes that `words` makes; of many log-probabilities in a thread."""
        size = sum(len(one.details) + len(one.scores or ()) for one in self.choices)
        made: bytes = words() if size <= INLINE_DETAILS else await TEXT_WORK.run(0, words)
        return made

    def _take(self, choice: Choice, delta: Delta) -> None:
        """Account for one delta. Raises where the sequence did not end as it should."""
        if delta.cached_tokens is not None:
            choice.cached = delta.cached_tokens
        if delta.details:
            choice.details += delta.details
        if delta.prompt_details is not None:
            choice.scores = (choice.scores or []) + delta.prompt_details
        if delta.tokens:
            now = time.perf_counter()
            metrics = self.model.metrics
            metrics.generation_tokens.inc(delta.tokens)
            if choice.tokens:
                metrics.inter_token.observe(now - choice.last)
            else:
                self._began(choice, delta, now)
            choice.tokens += delta.tokens
            choice.last = now
        if delta.finish is not None:
            self._ended(choice, FinishReason(delta.finish))
            if choice.finish is None:
                raise self._failure(delta)

    def _began(self, choice: Choice, delta: Delta, now: float) -> None:
        """The first tokens are here; of a whole answer the engine says when they were made."""
        metrics, prompt_tokens = self.model.metrics, len(choice.prompt.ids)
        choice.first, choice.first_tokens = now, delta.tokens
        queue, prefill = delta.queue_seconds, delta.prefill_seconds
        if not self.streamed:
            choice.first_tokens = 1
            choice.first = None
            if queue is not None and prefill is not None:
                choice.first = min(now, choice.submitted + queue + prefill)
        if choice.first is not None:
            metrics.ttft.observe(choice.first - self.request.began)
        if queue is not None:
            metrics.queue.observe(queue)
        if prefill is not None:
            metrics.prefill.observe(prefill)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cache_queries.inc(prompt_tokens)
        metrics.cache_hits.inc(choice.cached or 0)
        metrics.prompt_lengths.observe(prompt_tokens)

    def _ended(self, choice: Choice, finish: FinishReason) -> None:
        """Account for the end; only the first one counts."""
        if choice.ended_as is not None:
            return
        choice.ended_as = finish
        metrics = self.model.metrics
        metrics.finished[finish].inc()
        if choice.finish is None:
            return
        metrics.e2e.observe(choice.last - self.request.began)
        metrics.output_lengths.observe(choice.tokens)
        if choice.first is not None:
            decode_seconds = choice.last - choice.first
            metrics.decode.observe(decode_seconds)
            if choice.tokens > choice.first_tokens:
                metrics.per_token.observe(decode_seconds / (choice.tokens - choice.first_tokens))

    def usage_in(self, choice: Choice) -> Usage | None | UnsetType:
        """The `usage` of a chunk that is not the last: the count so far, null, or not there."""
        if self.usage_always:
            return choice.usage
        return None if self.wants_usage else UNSET

    def content(self, choice: Choice, text: str) -> bytes:
        """The event of some text."""
        if self.usage_always or self.shows_logprobs:
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
        data = b""
        if not choice.opened:
            choice.opened = True
            data = self.opening(choice)
        if delta.text:
            data += self.content(choice, delta.text)
        if choice.finish is not None:
            data += event(self.chunk(choice, None, choice.finish))
        return data

    def take_details(self, choice: Choice) -> list[TokenDetail] | None:
        """The choice's unwritten log-probabilities; None where the answer shows none."""
        if not self.shows_logprobs:
            return None
        details = choice.details
        choice.details = []
        return details

    def _usage(self) -> Usage:
        """Usage of the request: each prompt counts once, however many answers it has."""
        firsts = [choice for choice in self.choices if choice.first_of_prompt]
        cached = [choice.cached for choice in firsts if choice.cached is not None]
        prompt_tokens = sum(len(choice.prompt.ids) for choice in firsts)
        tokens = sum(choice.tokens for choice in self.choices)
        return usage_of(prompt_tokens, tokens, sum(cached) if cached else None)

    def _check_size(self) -> None:
        """Raises ApiError 400 where a whole answer would repeat too much of the prompts, or might
        hold too many log-probabilities."""
        if self.streamed:
            return
        limits, sampling = self.request.endpoint.limits, self.generation.sampling
        echoed = self.n * sum(len(prompt.text) for prompt in self.prompts)
        if echoed > limits.echo_characters:
            text = f"{echoed} characters of prompts; {limits.echo_characters} are allowed"
            raise invalid(f"echo: {text} without stream", "echo")
        if sampling.logprobs is None:
            return
        tokens = sum(prompt.max_tokens for prompt in self.prompts)
        if sampling.prompt_logprobs is not None:
            tokens += sum(len(prompt.ids) for prompt in self.prompts)
        size = self.n * tokens * (1 + sampling.logprobs)
        if size > limits.answer_logprobs:
            text = f"up to {size} of them; {limits.answer_logprobs} are allowed"
            raise invalid(f"logprobs: {text} without stream", "logprobs")

    def _failure(self, delta: Delta) -> Exception:
        """What a sequence that ended badly becomes."""
        if self.request.gone:
            return ClientGone()
        supervisor = self.model.supervisor
        if delta.finish == FinishReason.DEADLINE:
            text = f"the answer was not complete after {self.generation.deadline_seconds:g} s"
            headers = {"X-Should-Retry": "false"}
            return ApiError(504, text, code="deadline_exceeded", headers=headers)
        text = delta.error or "the request was cancelled by the server"
        if delta.parameter is None:  # else it quotes the request, and nothing of ours
            text = scrubbed(text)
        if delta.finish == FinishReason.REFUSED:
            key = self.refused_key(delta)
            return ApiError(400, text, code="unsupported_parameter", param=key)
        if supervisor.state != EngineState.ready:
            return try_again(503, text, "engine_failed", supervisor.retry_after_seconds())
        return ApiError(500, text, code="engine_failed")


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """The counts as OpenAI lays them out; unknown cached tokens leave their part out."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
