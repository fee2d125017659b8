"""The response to a completion or a chat: submits its sequences and writes what they generate.

    class CompletionResponse(GenerationResponse): ...     # the format of one endpoint
    await CompletionResponse(request, body, generation, prompts).send()

The head of a streamed response is sent with the first delta, or with the first comment that keeps
a silent stream alive (Request.keep_alive). Until then an error becomes a response with its own
status. The sequence can move to another engine until the first delta. A request that ends early
cancels its sequences.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from crossover.serving.engine.ipc_messages import (
    Delta,
    FinishReason,
    GenerationRequest,
    TokenDetail,
)
from crossover.serving.http.answer_parts import OutputFormat, OutputParser, Part
from crossover.serving.http.api_errors import ApiError, deadline_exceeded, retry_later
from crossover.serving.http.body_types import (
    Completion,
    Finish,
    Generation,
    StreamOptions,
    Usage,
    encode,
)
from crossover.serving.http.http_request import Request
from crossover.serving.registry.served_model import in_text_thread
from crossover.serving.supervisor.inflight_requests import Stream

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; vLLM sends this number in its place
ROLE = Part("role", "")  # stands for the first chunk of a chat, which has only the role
END = Part("end", "")  # stands for the last chunk, which has the finish reason
_PLACEHOLDER = "\u0001text\u0001"  # stands for the text in an event_frame
_FINISH_REASONS: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


def sse_event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request and its progress. Times are in seconds, by time.perf_counter()."""

    index: int
    stream: Stream
    submitted_at: float
    parser: OutputParser | None  # None: all of the text is content
    first_token_at: float = 0.0  # when its first token was generated
    last_token_at: float = 0.0  # when its last tokens arrived
    tokens: int = 0
    cached_tokens: int | None = None
    has_ended: bool = False
    finish: Finish | None = None  # None: it is running, or it failed
    text: str = ""  # the text so far, if the response is not streamed
    has_opening_parts: bool = False  # the opening parts have been written
    # The bytes before and after the text in an event of plain content; None: not known yet, or such
    # events differ in more than their text.
    event_frame: tuple[bytes, bytes] | None = None
    details: list[TokenDetail] = field(default_factory=list)  # log-probabilities not written yet
    call_count: int = 0  # tool calls written so far


class Prompt(NamedTuple):
    """A prompt, and the maximum output tokens of each answer to it."""

    token_ids: list[int]
    max_tokens: int


class GenerationResponse(ABC):
    """The response to one request. A subclass is the format of one endpoint."""

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]  # the key "object" of a complete response
    chunk_type: ClassVar[str]  # the key "object" of a chunk of a streamed response
    opening_parts: ClassVar[tuple[Part, ...]] = ()  # before a choice's first content

    def __init__(
        self,
        request: Request,
        body: Generation,
        generation: GenerationRequest,
        prompts: Sequence[Prompt],
        output_format: OutputFormat | None = None,
    ) -> None:
        """`generation`: what all sequences share. The first answer to each prompt has its seed, the
        next ones the seeds after it. `output_format`: how the text marks reasoning and tool calls;
        None: all of it is content."""
        assert request.model is not None
        self.request = request
        self.model = request.model
        self.sampling = generation.sampling
        self.output_format = output_format
        self.sequences: list[GenerationRequest] = []
        self.id = f"{self.id_prefix}-{request.serial}"
        self.created = int(time.time())
        self.answers_per_prompt = body.n or 1
        self.is_streamed = bool(body.stream)
        self.options = body.stream_options or StreamOptions()
        has_usage_in_chunks = self.options.continuous_usage_stats
        # Chunks have nothing but text: neither log-probabilities nor token counts.
        self.is_plain = self.sampling.logprobs is None and not has_usage_in_chunks
        self.choices: list[Choice] = []
        replace = msgspec.structs.replace
        seconds_left = request.seconds_left()
        for prompt in prompts:
            sequence = replace(
                generation,
                prompt=prompt.token_ids,
                max_tokens=prompt.max_tokens,
                deadline_seconds=seconds_left,
            )
            self.sequences.append(sequence)
            for number in range(1, self.answers_per_prompt):
                seed = (self.sampling.seed + number) % (1 << 63)
                sampling = replace(self.sampling, seed=seed)
                self.sequences.append(replace(sequence, sampling=sampling))

    @abstractmethod
    def chunk_choice(self, choice: Choice, part: Part) -> Any:
        """Return the choice of a chunk for a part or END, with the pending log-probabilities."""

    @abstractmethod
    def complete_choice(self, choice: Choice, parts: Sequence[Part]) -> Any:
        """Return the choice of a response that is not streamed."""

    @abstractmethod
    def format_logprobs(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        """Return log-probabilities in the format of the endpoint."""

    async def send(self) -> None:
        """Submit all sequences, record their metrics, and write the response.

        If one of them cannot be submitted, those before it are canceled. Raises ApiError,
        Unavailable, Overloaded.
        """
        arrived = asyncio.Event()  # set whenever one of the sequences has a delta
        metrics = self.model.metrics
        try:
            for index, sequence in enumerate(self.sequences):
                stream = self.model.supervisor.submit(sequence, arrived)
                self.request.stream = self.request.stream or stream
                parser = None
                if self.output_format is not None:
                    parser = OutputParser(self.output_format, self.is_streamed)
                self.choices.append(Choice(index, stream, time.perf_counter(), parser))
            running_count = len(self.choices)
            while running_count:
                await arrived.wait()
                arrived.clear()
                for choice in self.choices:
                    delta = choice.stream.take()
                    if delta is None:
                        continue
                    choice.details += delta.details
                    if delta.tokens:
                        now = time.perf_counter()
                        if choice.tokens:
                            metrics.inter_token.observe(now - choice.last_token_at)
                        else:
                            self._record_first_tokens(choice, delta, now)
                        metrics.generation_tokens.inc(delta.tokens)
                        choice.tokens += delta.tokens
                        choice.last_token_at = now
                    if delta.finish is not None:
                        running_count -= 1
                        self._end_choice(choice, FinishReason(delta.finish))
                        if choice.finish is None:
                            raise self._error_of(delta)
                    if not self.is_streamed:
                        choice.text += delta.text
                    elif delta.text and choice.event_frame is not None and choice.finish is None:
                        before_text, after_text = choice.event_frame
                        await self.request.write(before_text + encode(delta.text) + after_text)
                    else:
                        await self.request.write(self._encode_events(choice, delta.text))
            await self._write_end()
        finally:
            for choice in self.choices:
                choice.stream.cancel()  # no effect on a sequence that has ended
                if not choice.has_ended:
                    self._end_choice(choice, FinishReason.CANCELLED)

    async def _write_end(self) -> None:
        """Write the end of the response: the last events, or the complete answer."""
        if self.is_streamed:
            usage_event = b""
            if self.options.include_usage:
                usage_event = self._encode_chunk([], self.total_usage())
            await self.request.write(usage_event + b"data: [DONE]\n\n", last=True)
        elif self.is_plain:
            await self.request.answer(self._encode_body())
        else:  # log-probabilities can take seconds, so they are encoded in a thread
            await self.request.answer(await in_text_thread(self._encode_body))

    def _record_first_tokens(self, choice: Choice, delta: Delta, now: float) -> None:
        """Record when the first token of a sequence was generated, and the tokens of its prompt."""
        metrics = self.model.metrics
        prompt_tokens = choice.stream.prompt_tokens
        choice.first_token_at = now
        choice.cached_tokens = delta.cached_tokens
        queue_seconds, prefill_seconds = delta.queue_seconds, delta.prefill_seconds
        if queue_seconds is not None and prefill_seconds is not None:
            metrics.queue.observe(queue_seconds)
            metrics.prefill.observe(prefill_seconds)
            if not self.is_streamed:
                # All tokens came at once, so the engine's times say when the first was generated.
                choice.first_token_at = choice.submitted_at + queue_seconds + prefill_seconds
        metrics.ttft.observe(choice.first_token_at - self.request.arrived_at)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cache_queries.inc(prompt_tokens)
        metrics.cache_hits.inc(choice.cached_tokens or 0)

    def _end_choice(self, choice: Choice, reason: FinishReason) -> None:
        """Record the end of a sequence, and its latencies unless it failed."""
        choice.has_ended = True
        choice.finish = _FINISH_REASONS.get(reason)
        metrics = self.model.metrics
        metrics.finished[reason].inc()
        if choice.finish is not None:
            metrics.e2e.observe(choice.last_token_at - self.request.arrived_at)
            if choice.tokens > 1:
                decode_seconds = choice.last_token_at - choice.first_token_at
                metrics.per_token.observe(decode_seconds / (choice.tokens - 1))

    def _encode_events(self, choice: Choice, text: str) -> bytes:
        """Return the events for a delta's text; b"" while the parser holds all of the text back.

        The first call for plain content also sets the choice's `event_frame`, since the later
        events differ from this one only in their text.
        """
        parts = self._parts(choice, text)
        if not choice.has_opening_parts:
            choice.has_opening_parts = True
            parts = [*self.opening_parts, *parts]
        if choice.finish is not None:
            parts.append(END)
        events = b""
        usage: Usage | None | UnsetType = None if self.options.include_usage else UNSET
        for part in parts:
            if self.options.continuous_usage_stats:
                tokens = 0 if part is ROLE else choice.tokens
                usage = usage_of(choice.stream.prompt_tokens, tokens, choice.cached_tokens)
            events += self._encode_chunk([self.chunk_choice(choice, part)], usage)
        if text and self.is_plain and choice.parser is None and choice.finish is None:
            placeholder_choice = self.chunk_choice(choice, Part("content", _PLACEHOLDER))
            event = self._encode_chunk([placeholder_choice], usage)
            before_text, _, after_text = event.partition(encode(_PLACEHOLDER))
            choice.event_frame = before_text, after_text
        return events

    def _parts(self, choice: Choice, text: str) -> list[Part]:
        """Return the parts that this text adds to the answer."""
        if choice.parser is not None:
            return choice.parser.push(text, choice.finish is not None)
        return [Part("content", text)] if text else []

    def _encode_chunk(self, choices: list[Any], usage: Usage | None | UnsetType) -> bytes:
        """Return one chunk of a streamed answer as an event."""
        name = self.model.served_name
        return sse_event(Completion(self.id, self.chunk_type, self.created, name, choices, usage))

    def _encode_body(self) -> bytes:
        """Return the complete answer."""
        choices = [
            self.complete_choice(choice, self._parts(choice, choice.text))
            for choice in self.choices
        ]
        name = self.model.served_name
        usage = self.total_usage()
        return encode(Completion(self.id, self.object_type, self.created, name, choices, usage))

    def take_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log-probabilities not written yet; None: the request asked for none."""
        if self.sampling.logprobs is None:
            return None
        details, choice.details = choice.details, []
        return self.format_logprobs(details)

    def total_usage(self) -> Usage:
        """Return the usage of the request; each prompt counts once, however many answers it has."""
        first_of_each_prompt = self.choices[:: self.answers_per_prompt]
        prompt_tokens = sum(choice.stream.prompt_tokens for choice in first_of_each_prompt)
        output_tokens = sum(choice.tokens for choice in self.choices)
        cached = [
            choice.cached_tokens
            for choice in first_of_each_prompt
            if choice.cached_tokens is not None
        ]
        return usage_of(prompt_tokens, output_tokens, sum(cached) if cached else None)

    def _error_of(self, delta: Delta) -> ApiError:
        if delta.finish == FinishReason.DEADLINE:
            return deadline_exceeded(self.request.deadline_seconds)
        text = delta.error or "The server cancelled the request."
        if delta.finish == FinishReason.REFUSED:
            return ApiError(400, text, "unsupported_parameter", delta.parameter)
        retry_after_seconds = self.model.supervisor.retry_after_seconds()
        return retry_later(503, text, "engine_failed", retry_after_seconds)


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """Return the token counts as OpenAI's usage object. `cached_tokens`: None: not known."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
