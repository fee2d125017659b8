"""The response to a completion or a chat: submits its sequences and writes what they generate.

    class CompletionResponse(GenerationResponse): ...     # the format of one endpoint
    await CompletionResponse(request, body, generation, prompts).send()

The head of a streamed response is sent with the first delta. Until then an error becomes a response
with its own status, and the sequence can move to another engine. A request that ends early cancels
its sequences.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from crossover.serving.engine.ipc_messages import (
    Delta,
    FinishReason,
    GenerationRequest,
    TokenDetail,
)
from crossover.serving.http.answer_parts import OutputFormat, OutputParser, Part
from crossover.serving.http.api_errors import ApiError, too_late, try_again
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
ROLE = Part("role", "")  # the chunk that names the speaker of a chat
END = Part("end", "")  # the chunk with the finish reason
_TEXT_MARK = "\u0001text\u0001"  # the place of the text in an encoded event
_FINISHES: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


def sse_event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request and its progress so far. Times are those of perf_counter."""

    index: int
    stream: Stream
    submitted_at: float
    parser: OutputParser | None  # None: all of the text is content
    first_token_at: float = 0.0  # when its first token was generated
    last_token_at: float = 0.0  # when its last tokens arrived
    tokens: int = 0
    cached_tokens: int | None = None
    is_over: bool = False
    finish: Finish | None = None  # None: it is running, or it failed
    text: str = ""  # the text so far, if the response is not streamed
    is_opened: bool = False  # its opening parts are written
    event_frame: tuple[bytes, bytes] | None = None  # the bytes of an event around plain content
    details: list[TokenDetail] = field(default_factory=list)  # log-probabilities not written yet
    call_count: int = 0  # tool calls written so far


class GenerationResponse(ABC):
    """The response to one request. A subclass is the format of one endpoint."""

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]  # the key "object" of a complete response
    chunk_type: ClassVar[str]  # and of each chunk of a streamed one
    opening_parts: ClassVar[tuple[Part, ...]] = ()  # before a choice's first content

    def __init__(
        self,
        request: Request,
        body: Generation,
        generation: GenerationRequest,
        prompts: Sequence[tuple[list[int], int]],
        output_format: OutputFormat | None = None,
    ) -> None:
        """`generation`: the request without a prompt; its seed is that of the first answer to each
        prompt. `prompts`: pairs of token ids and maximum output tokens. `output_format`: how the
        text marks reasoning and tool calls; None: all of it is content."""
        assert request.model is not None
        self.request = request
        self.model = request.model
        self.sampling = generation.sampling
        self.output_format = output_format
        self.sequences: list[GenerationRequest] = []
        self.id = f"{self.id_prefix}-{request.serial}"
        self.created = int(time.time())
        self.n = body.n or 1
        self.is_streamed = bool(body.stream)
        self.options = body.stream_options or StreamOptions()
        has_counts = self.options.continuous_usage_stats
        self.is_plain = self.sampling.logprobs is None and not has_counts
        self.choices: list[Choice] = []
        replace = msgspec.structs.replace
        seed = self.sampling.seed
        deadline_seconds = request.seconds_left()
        for ids, max_tokens in prompts:
            sequence = replace(
                generation, prompt=ids, max_tokens=max_tokens, deadline_seconds=deadline_seconds
            )
            self.sequences.append(sequence)
            for number in range(1, self.n):
                sampling = replace(self.sampling, seed=(seed + number) % (1 << 63))
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
        """Submit every sequence of the request or none, count their tokens, and stream them if the
        request asks for that. Raises ApiError, Unavailable, Overloaded.

        Events of plain content differ only in their text, so the rest is encoded once.
        """
        arrived = asyncio.Event()  # set whenever one of the sequences has a delta
        metrics = self.model.metrics
        try:
            for index, sequence in enumerate(self.sequences):
                stream = self.model.supervisor.submit(sequence, arrived)
                self.request.stream = self.request.stream or stream
                parser = None if self.output_format is None else OutputParser(self.output_format)
                self.choices.append(Choice(index, stream, time.perf_counter(), parser))
            running = len(self.choices)
            while running:
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
                            self._count_first_tokens(choice, delta, now)
                        metrics.generation_tokens.inc(delta.tokens)
                        choice.tokens += delta.tokens
                        choice.last_token_at = now
                    if delta.finish is not None:
                        running -= 1
                        self._end_choice(choice, FinishReason(delta.finish))
                        if choice.finish is None:
                            raise self._error_of(delta)
                    if not self.is_streamed:
                        choice.text += delta.text
                    elif delta.text and choice.event_frame is not None and choice.finish is None:
                        head, tail = choice.event_frame
                        await self.request.write(head + encode(delta.text) + tail)
                    else:
                        await self.request.write(self._encode_events(choice, delta.text))
            await self._finish()
        finally:
            for choice in self.choices:
                choice.stream.cancel()  # no effect on a sequence that has ended
                if not choice.is_over:
                    self._end_choice(choice, FinishReason.CANCELLED)

    async def _finish(self) -> None:
        """Write the end of the response: the last event, or the complete answer."""
        if self.is_streamed:
            last = self._encode_chunk([], self.total_usage()) if self.options.include_usage else b""
            await self.request.write(last + b"data: [DONE]\n\n", last=True)
        elif self.is_plain:
            await self.request.answer(self._encode_body())
        else:  # log-probabilities can take seconds, so they are encoded in a thread
            await self.request.answer(await in_text_thread(self._encode_body))

    def _count_first_tokens(self, choice: Choice, delta: Delta, now: float) -> None:
        """Record the arrival of the first tokens."""
        metrics, prompt_tokens = self.model.metrics, choice.stream.prompt_tokens
        choice.first_token_at, choice.cached_tokens = now, delta.cached_tokens
        queue, prefill = delta.queue_seconds, delta.prefill_seconds
        if queue is not None and prefill is not None:
            metrics.queue.observe(queue)
            metrics.prefill.observe(prefill)
            if not self.is_streamed:
                # All tokens came at once, so the engine's times say when the first was generated.
                choice.first_token_at = choice.submitted_at + queue + prefill
        metrics.ttft.observe(choice.first_token_at - self.request.arrived_at)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cache_queries.inc(prompt_tokens)
        metrics.cache_hits.inc(choice.cached_tokens or 0)

    def _end_choice(self, choice: Choice, finish: FinishReason) -> None:
        choice.is_over, choice.finish = True, _FINISHES.get(finish)
        metrics = self.model.metrics
        metrics.finished[finish].inc()
        if choice.finish is not None:
            metrics.e2e.observe(choice.last_token_at - self.request.arrived_at)
            if choice.tokens > 1:
                metrics.per_token.observe(
                    (choice.last_token_at - choice.first_token_at) / (choice.tokens - 1)
                )

    def _encode_events(self, choice: Choice, text: str) -> bytes:
        """Return the events for a delta's text; b"" while the parser holds all of the text back."""
        parts = self._parts(choice, text)
        if not choice.is_opened:
            choice.is_opened = True
            parts[:0] = self.opening_parts
        if choice.finish is not None:
            parts.append(END)
        data = b""
        usage: Usage | None | UnsetType = None if self.options.include_usage else UNSET
        for part in parts:
            if self.options.continuous_usage_stats:
                tokens = 0 if part is ROLE else choice.tokens
                usage = usage_of(choice.stream.prompt_tokens, tokens, choice.cached_tokens)
            data += self._encode_chunk([self.chunk_choice(choice, part)], usage)
        if text and self.is_plain and choice.parser is None and choice.finish is None:
            marked = self._encode_chunk(
                [self.chunk_choice(choice, Part("content", _TEXT_MARK))], usage
            )
            head, _, tail = marked.partition(encode(_TEXT_MARK))
            choice.event_frame = head, tail
        return data

    def _parts(self, choice: Choice, text: str) -> list[Part]:
        if choice.parser is not None:
            return choice.parser.push(text, choice.finish is not None)
        return [Part("content", text)] if text else []

    def _encode_chunk(self, choices: list[Any], usage: Usage | None | UnsetType) -> bytes:
        """Return one chunk of a streamed answer."""
        name, kind = self.model.served_name, self.chunk_type
        return sse_event(Completion(self.id, kind, self.created, name, choices, usage))

    def _encode_body(self) -> bytes:
        """Return the complete answer."""
        choices = [
            self.complete_choice(choice, self._parts(choice, choice.text))
            for choice in self.choices
        ]
        name, usage = self.model.served_name, self.total_usage()
        return encode(Completion(self.id, self.object_type, self.created, name, choices, usage))

    def take_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log-probabilities not written yet; None: the request asked for none."""
        if self.sampling.logprobs is None:
            return None
        details, choice.details = choice.details, []
        return self.format_logprobs(details)

    def total_usage(self) -> Usage:
        """Return the usage of the request; each prompt counts once, however many answers it has."""
        firsts = self.choices[:: self.n]
        cached = [choice.cached_tokens for choice in firsts if choice.cached_tokens is not None]
        prompt_tokens = sum(choice.stream.prompt_tokens for choice in firsts)
        tokens = sum(choice.tokens for choice in self.choices)
        return usage_of(prompt_tokens, tokens, sum(cached) if cached else None)

    def _error_of(self, delta: Delta) -> ApiError:
        """Return the error of a sequence that failed."""
        supervisor, key = self.model.supervisor, delta.parameter
        if delta.finish == FinishReason.DEADLINE:
            return too_late(self.request.deadline_seconds)
        text = delta.error or "The server cancelled the request."
        if delta.finish == FinishReason.REFUSED:
            return ApiError(400, text, "unsupported_parameter", key)
        return try_again(503, text, "engine_failed", supervisor.retry_after_seconds())


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """Return the counts in OpenAI's layout, without cached tokens if they are unknown."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
