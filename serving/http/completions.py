"""POST /v1/completions, and the answer of both endpoints: submits sequences, writes their deltas.

The head of a streamed response is sent with the first delta. Until then an error becomes a response
with its own status, and the sequence can move to another engine. A request that ends early cancels
its sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    COMPLETION,
    Completion,
    Finish,
    Generation,
    StreamOptions,
    TextChoice,
    Usage,
    encode,
)
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import prompts_of, token_limit, validate
from crossover.serving.registry.loaded_models import in_text_thread
from crossover.serving.supervisor.inflight_requests import Stream

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; vLLM sends this number in its place
ROLE, END = Part("role", ""), Part("end", "")
MARK = "\u0001text\u0001"  # the place of the text in an encoded event
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
    submitted: float
    splitter: OutputParser | None  # None: all of the text is content
    first: float = 0.0  # when its first token was generated
    last: float = 0.0  # when its last tokens arrived
    tokens: int = 0
    cached: int | None = None
    is_over: bool = False
    finish: Finish | None = None  # None: it is running, or it failed
    text: str = ""  # the text so far, if the answer is not streamed
    opened: bool = False
    frame: tuple[bytes, bytes] | None = None  # the bytes of an event around plain content
    details: list[TokenDetail] = field(default_factory=list)  # log-probabilities not written yet
    calls: int = 0  # tool calls written so far


async def completions(request: Request) -> Answer:
    body = await request.read(COMPLETION)
    model = await request.hold(body.model, body.deadline_seconds)
    facts = model.facts()
    generation = validate(body, facts, body.logprobs)
    model.supervisor.requests.check_room()  # before a long prompt is tokenised
    bos = body.add_special_tokens is not False
    limits: Any = {"most": facts.context_tokens, "vocabulary": facts.vocabulary}
    prompts: list[tuple[list[int], int]] = []
    for ids in prompts_of(body, facts):
        if prompts:
            await asyncio.sleep(0)  # short texts are tokenized on the loop, one per turn of it
        if isinstance(ids, str):
            ids = await model.tokens(ids, "prompt", bos=bos, **limits)
        prompts.append((ids, token_limit(body, len(ids), facts)))
    return Answer(request, body, generation, prompts)


class Answer:
    """The answer to one request in the format of completions; a subclass answers chats."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    opening: tuple[Part, ...] = ()  # the parts before a choice's first content
    form: OutputFormat | None = (
        None  # what splitters look for in the text; None: all of it is content
    )

    def __init__(
        self,
        request: Request,
        body: Generation,
        generation: GenerationRequest,
        prompts: Sequence[tuple[list[int], int]],
    ) -> None:
        """`generation`: the request without a prompt; its seed is that of the first answer to each
        prompt. `prompts`: pairs of token ids and maximum output tokens."""
        assert request.model is not None
        self.request = request
        self.model = request.model
        self.sampling = generation.sampling
        self.sequences: list[GenerationRequest] = []
        self.id = f"{self.prefix}-{request.serial}"
        self.created = int(time.time())
        self.n = body.n or 1
        self.streamed = bool(body.stream)
        self.options = body.stream_options or StreamOptions()
        has_counts = self.options.continuous_usage_stats
        self.is_plain = self.sampling.logprobs is None and not has_counts
        self.choices: list[Choice] = []
        replace, seed, left = msgspec.structs.replace, self.sampling.seed, request.seconds_left()
        for ids, most in prompts:
            one = replace(generation, prompt=ids, max_tokens=most, deadline_seconds=left)
            self.sequences.append(one)
            for number in range(1, self.n):
                sampling = replace(self.sampling, seed=(seed + number) % (1 << 63))
                self.sequences.append(replace(one, sampling=sampling))

    def shown(self, choice: Choice, part: Part) -> Any:
        """Return a chunk's choice for a part or END, with the pending log-probabilities."""
        is_end = part is END
        logprobs = None if is_end and not choice.details else self.logprobs(choice)
        return TextChoice(choice.index, part.text, logprobs, choice.finish if is_end else None)

    def whole(self, choice: Choice, parts: Sequence[Part]) -> Any:
        """Return the choice of an answer that is not streamed."""
        return TextChoice(choice.index, choice.text, self.logprobs(choice), choice.finish)

    def told(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        """Return log-probabilities in OpenAI's legacy format, without offsets."""
        tops = []
        for detail in details:
            pairs = zip(detail.top_ids, detail.top_values, strict=True)
            said = dict(pairs) | {detail.token: detail.logprob}
            tops.append({self._name(token): max(said[token], LOWEST_LOGPROB) for token in said})
        return {
            "tokens": [self._name(detail.token) for detail in details],
            "token_logprobs": [max(detail.logprob, LOWEST_LOGPROB) for detail in details],
            "top_logprobs": tops,
        }

    def _name(self, token: int) -> str:
        r"""Return a token as a key: its text, with \xe2 for incomplete characters, or its id."""
        data = self.model.bytes_of(token)
        return data.decode("utf-8", "backslashreplace") if data else f"token_id:{token}"

    async def send(self) -> None:
        """Submit every sequence of the request or none, count their tokens, and stream them if the
        request asks for that. Raises ApiError, Unavailable, Overloaded.

        Events of plain content differ only in their text, so the rest is encoded once.
        """
        arrived, metrics = asyncio.Event(), self.model.metrics
        try:
            for index, sequence in enumerate(self.sequences):
                stream = self.model.supervisor.submit(sequence, arrived)
                self.request.stream = self.request.stream or stream
                splitter = None if self.form is None else OutputParser(self.form)
                self.choices.append(Choice(index, stream, time.perf_counter(), splitter))
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
                            metrics.inter_token.observe(now - choice.last)
                        else:
                            self._began(choice, delta, now)
                        metrics.generation_tokens.inc(delta.tokens)
                        choice.tokens += delta.tokens
                        choice.last = now
                    if delta.finish is not None:
                        running -= 1
                        self._ended(choice, FinishReason(delta.finish))
                        if choice.finish is None:
                            raise self._failure(delta)
                    if not self.streamed:
                        choice.text += delta.text
                    elif delta.text and choice.frame is not None and choice.finish is None:
                        head, tail = choice.frame
                        await self.request.write(head + encode(delta.text) + tail)
                    else:
                        await self.request.write(self._events(choice, delta.text))
            await self._finish()
        finally:
            for choice in self.choices:
                choice.stream.cancel()  # no effect on a sequence that has ended
                if not choice.is_over:
                    self._ended(choice, FinishReason.CANCELLED)

    async def _finish(self) -> None:
        """Write the end of the response: the last event, or the complete answer."""
        if self.streamed:
            last = self._event([], self.usage()) if self.options.include_usage else b""
            await self.request.write(last + b"data: [DONE]\n\n", last=True)
        elif self.is_plain:
            await self.request.answer(self._body())
        else:  # log-probabilities can take seconds, so they are encoded in a thread
            await self.request.answer(await in_text_thread(self._body))

    def _began(self, choice: Choice, delta: Delta, now: float) -> None:
        """Record the arrival of the first tokens."""
        metrics, prompt_tokens = self.model.metrics, choice.stream.prompt_tokens
        choice.first, choice.cached = now, delta.cached_tokens
        queue, prefill = delta.queue_seconds, delta.prefill_seconds
        if queue is not None and prefill is not None:
            metrics.queue.observe(queue)
            metrics.prefill.observe(prefill)
            if not self.streamed:  # all came at once: the engine says when the first was made
                choice.first = choice.submitted + queue + prefill
        metrics.ttft.observe(choice.first - self.request.began)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cache_queries.inc(prompt_tokens)
        metrics.cache_hits.inc(choice.cached or 0)

    def _ended(self, choice: Choice, finish: FinishReason) -> None:
        choice.is_over, choice.finish = True, _FINISHES.get(finish)
        metrics = self.model.metrics
        metrics.finished[finish].inc()
        if choice.finish is not None:
            metrics.e2e.observe(choice.last - self.request.began)
            if choice.tokens > 1:
                metrics.per_token.observe((choice.last - choice.first) / (choice.tokens - 1))

    def _events(self, choice: Choice, text: str) -> bytes:
        """Return the events for a delta's text; none while the text is held back."""
        parts = self._parts(choice, text)
        if not choice.opened:
            choice.opened = True
            parts[:0] = self.opening
        if choice.finish is not None:
            parts.append(END)
        data = b""
        usage: Usage | None | UnsetType = None if self.options.include_usage else UNSET
        for part in parts:
            if self.options.continuous_usage_stats:
                tokens = 0 if part is ROLE else choice.tokens
                usage = usage_of(choice.stream.prompt_tokens, tokens, choice.cached)
            data += self._event([self.shown(choice, part)], usage)
        if text and self.is_plain and choice.splitter is None and choice.finish is None:
            marked = self._event([self.shown(choice, Part("content", MARK))], usage)
            head, _, tail = marked.partition(encode(MARK))
            choice.frame = head, tail
        return data

    def _parts(self, choice: Choice, text: str) -> list[Part]:
        if choice.splitter is not None:
            return choice.splitter.push(text, choice.finish is not None)
        return [Part("content", text)] if text else []

    def _event(self, choices: list[Any], usage: Usage | None | UnsetType) -> bytes:
        """Return one chunk of a streamed answer."""
        name, kind = self.model.served_name, self.chunk_kind
        return sse_event(Completion(self.id, kind, self.created, name, choices, usage))

    def _body(self) -> bytes:
        """Return the complete answer."""
        choices = [self.whole(choice, self._parts(choice, choice.text)) for choice in self.choices]
        name, usage = self.model.served_name, self.usage()
        return encode(Completion(self.id, self.kind, self.created, name, choices, usage))

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log-probabilities not written yet; None: the request asked for none."""
        if self.sampling.logprobs is None:
            return None
        details, choice.details = choice.details, []
        return self.told(details)

    def usage(self) -> Usage:
        """Return the usage of the request; each prompt counts once, however many answers it has."""
        firsts = self.choices[:: self.n]
        cached = [choice.cached for choice in firsts if choice.cached is not None]
        prompt_tokens = sum(choice.stream.prompt_tokens for choice in firsts)
        tokens = sum(choice.tokens for choice in self.choices)
        return usage_of(prompt_tokens, tokens, sum(cached) if cached else None)

    def _failure(self, delta: Delta) -> ApiError:
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
