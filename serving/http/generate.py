"""From a valid request to its answer: sequences submitted, deltas written, the client watched.

    await answer(ChatCall(served_model, exchange, request, valid), prompts)

The head of a streamed answer leaves with the first delta: until then an error is an answer with its
own status, and the sequence can move to another engine. A client that goes away cancels its
sequences.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec

from serving.engine.messages import Delta, FinishReason
from serving.errors import EngineState, Overloaded, Unavailable
from serving.http.call import Call, Choice, Prompt
from serving.http.exchange import ClientGone, Exchange
from serving.http.wire.errors import ApiError, invalid, scrubbed, try_again
from serving.http.wire.responses import Usage, usage_of
from serving.http.wire.sse import encode
from serving.registry.model import StreamLike
from serving.registry.text_work import TEXT_WORK

INLINE_DETAILS = 64  # tokens with log-probabilities; more are put into words in a thread


async def answer(call: Call, prompts: Sequence[Prompt]) -> None:
    """Submit every sequence of the request and write its answer. Raises ApiError, ClientGone."""
    exchange, metrics = call.exchange, call.served_model.metrics
    _check_size(call, prompts)
    choices = submitted(call, prompts)
    exchange.call = call
    exchange.choices = choices
    metrics.asked_choices.observe(call.valid.choices)
    watcher = asyncio.create_task(_watched(exchange, choices))
    try:
        async with aclosing(interleaved(choices)) as deltas:
            await (_streamed if call.streamed else _whole)(call, choices, deltas)
    finally:
        watcher.cancel()
        for choice in choices:
            choice.stream.cancel()
            choice.ended(FinishReason.CANCELLED, exchange.began, metrics)  # unless it has ended


def _check_size(call: Call, prompts: Sequence[Prompt]) -> None:
    """Raises ApiError 400 where a whole answer would repeat too much of the prompts, or might hold
    too many log-probabilities."""
    sampling, limits = call.valid.generation.sampling, call.exchange.limits
    most = limits.answer_logprobs
    echoed = call.valid.choices * sum(len(prompt.text) for prompt in prompts)
    if echoed > limits.echo_characters and not call.streamed:
        text = f"{echoed} characters of prompts; {limits.echo_characters} are allowed"
        raise invalid(f"echo: {text} without stream", "echo")
    if call.streamed or sampling.logprobs is None:
        return
    tokens = call.valid.choices * sum(prompt.max_tokens for prompt in prompts)
    size = tokens * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        scored = call.valid.choices * sum(len(prompt.ids) for prompt in prompts)
        size += scored * (1 + sampling.prompt_logprobs)
    if size > most:
        text = f"{size} of them in an answer of up to {tokens} tokens; {most} are allowed"
        raise invalid(f"logprobs: {text} without stream", "logprobs")


def submitted(call: Call, prompts: Sequence[Prompt]) -> list[Choice]:
    """All sequences of the request, or none. Raises Unavailable, Overloaded.

    As many as there are slots are submitted now; another one when one of them has ended.
    """
    asked = [(prompt, number) for prompt in prompts for number in range(call.valid.choices)]
    ready = call.served_model.supervisor.ready
    slots = len(asked) if ready is None else ready.info.slots
    turns = asyncio.Semaphore(slots)
    choices: list[Choice] = []
    try:
        for index, (prompt, number) in enumerate(asked):
            stream = _stream(call, prompt, number) if index < slots else None
            if stream is None or len(asked) > slots:
                stream = _InTurn(call, prompt, number, turns, stream)
            first, whole = number == 0, not call.streamed
            choices.append(Choice(index, prompt, first, stream, whole, call.cached_grain))
    except (Unavailable, Overloaded):
        for accepted in choices:
            accepted.stream.cancel()
        raise
    return choices


def _stream(call: Call, prompt: Prompt, choice: int) -> StreamLike:
    """One sequence, submitted."""
    request = call.valid.sequence(prompt.ids, max(1, prompt.max_tokens), choice)
    if prompt.max_tokens:
        return call.served_model.supervisor.submit(request)
    if request.sampling.prompt_logprobs is None:
        return _NOTHING
    return _PromptOnly(call.served_model.supervisor.submit(request))


class _InTurn:
    """The stream of a sequence that is submitted when its request has fewer at work than slots."""

    def __init__(
        self,
        call: Call,
        prompt: Prompt,
        choice: int,
        turns: asyncio.Semaphore,
        stream: StreamLike | None = None,
    ) -> None:
        self._asked = call, prompt, choice
        self._turns = turns
        self._stream = stream
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async with self._turns:
            while self._stream is None:
                if self._cancelled:
                    yield Delta(0, 0, "", FinishReason.CANCELLED)
                    return
                try:
                    self._stream = _stream(*self._asked)
                except Overloaded as full:  # others have come between
                    await asyncio.sleep(min(1.0, full.retry_after_seconds))
                except Unavailable as problem:
                    yield Delta(0, 0, "", FinishReason.ERROR, error=str(problem))
                    return
            async for delta in self._stream:
                yield delta


class _Nothing:
    """The stream of a request for 0 tokens, which no engine sees."""

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Delta]:
        yield Delta(0, 0, "", FinishReason.LENGTH)


_NOTHING = _Nothing()


class _PromptOnly:
    """A stream of one token, made to have its prompt scored, without that token."""

    def __init__(self, stream: StreamLike) -> None:
        self._stream = stream

    def cancel(self) -> None:
        self._stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._stream:
            stopped = delta.finish == FinishReason.STOP
            finish = FinishReason.LENGTH if stopped else delta.finish
            yield msgspec.structs.replace(delta, tokens=0, text="", details=[], finish=finish)


async def interleaved(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
    """The deltas of all choices as they come. What a slow reader leaves, the streams merge."""
    if len(choices) == 1:
        async for delta in choices[0].stream:
            yield choices[0], delta
        return
    arrived: asyncio.Queue[tuple[Choice, Delta] | None] = asyncio.Queue(maxsize=len(choices))

    async def feed(choice: Choice) -> None:
        async for delta in choice.stream:
            await arrived.put((choice, delta))

    async def feed_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(feed(choice))
        except Exception:
            await arrived.put(None)
            raise
        await arrived.put(None)

    feeding = asyncio.create_task(feed_all())
    try:
        while (item := await arrived.get()) is not None:
            yield item
        await feeding  # raises what a stream has raised
    finally:
        feeding.cancel()


async def _watched(exchange: Exchange, choices: Sequence[Choice]) -> None:
    await exchange.until_gone()
    if exchange.gone:
        for choice in choices:
            choice.stream.cancel()


def _take(call: Call, choice: Choice, delta: Delta) -> None:
    """Account for a delta. Raises where the sequence did not end as it should."""
    began, metrics = call.exchange.began, call.served_model.metrics
    choice.took(delta, began, metrics)
    if delta.finish is not None:
        choice.ended(delta.finish, began, metrics)
        if choice.finish is None:
            raise _failure(call, delta)


async def _streamed(
    call: Call, choices: Sequence[Choice], deltas: AsyncIterator[tuple[Choice, Delta]]
) -> None:
    exchange = call.exchange
    async for choice, delta in deltas:
        _take(call, choice, delta)
        size = len(choice.details) + len(choice.scores or ())
        if size <= INLINE_DETAILS:
            data = call.events(choice, delta)
        else:  # an echoed prompt's, or what a reader has left for long
            data = await TEXT_WORK.run(0, call.events, choice, delta)
        if not exchange.started:
            await exchange.open_stream()
        if data:
            await exchange.write(data)
        if exchange.gone:
            raise ClientGone
    _check_ended(choices)
    await exchange.close_stream(call.last(_total(choices)))


async def _whole(
    call: Call, choices: Sequence[Choice], deltas: AsyncIterator[tuple[Choice, Delta]]
) -> None:
    async for choice, delta in deltas:
        _take(call, choice, delta)
        if delta.text:
            choice.pieces.append(delta.text)
    _check_ended(choices)
    made, kept = call.valid.choices, call.valid.kept
    shown = choices if kept == made else _best(choices, made, kept)

    def encoded() -> bytes:
        return encode(call.body(shown, _total(choices)))

    size = sum(len(choice.details) + len(choice.scores or ()) for choice in shown)
    body = encoded() if size <= INLINE_DETAILS else await TEXT_WORK.run(0, encoded)
    await call.exchange.answer_bytes(body, b"application/json")


def _check_ended(choices: Sequence[Choice]) -> None:
    for choice in choices:
        if choice.ended_as is None:
            raise RuntimeError(f"sequence {choice.index} of the request ended without a finish")


def _best(choices: Sequence[Choice], made: int, kept: int) -> list[Choice]:
    """OpenAI's best_of: the `kept` of `made` answers with the highest logprob per token."""
    best: list[Choice] = []
    for first in range(0, len(choices), made):
        best += sorted(choices[first : first + made], key=_logprob_per_token, reverse=True)[:kept]
    for index, choice in enumerate(best):
        choice.index = index
    return best


def _logprob_per_token(choice: Choice) -> float:
    if not choice.details:
        return -math.inf
    return sum(detail.logprob for detail in choice.details) / len(choice.details)


def _total(choices: Sequence[Choice]) -> Usage:
    """Usage of the request: each prompt counts once, however many answers it has."""
    firsts = [choice for choice in choices if choice.first_of_prompt]
    cached = [choice.cached for choice in firsts if choice.cached is not None]
    prompt_tokens = sum(len(choice.prompt.ids) for choice in firsts)
    tokens = sum(choice.tokens for choice in choices)
    return usage_of(prompt_tokens, tokens, sum(cached) if cached else None)


def _failure(call: Call, delta: Delta) -> Exception:
    supervisor = call.served_model.supervisor
    if call.exchange.gone:
        return ClientGone()
    if delta.finish == FinishReason.DEADLINE:
        seconds = call.valid.generation.deadline_seconds
        text = f"the answer was not complete after {seconds:g} s"
        return ApiError(504, text, code="deadline_exceeded", headers={"X-Should-Retry": "false"})
    text = delta.error or "the request was cancelled by the server"
    if delta.parameter is None:  # else it quotes the request, and nothing of ours
        text = scrubbed(text)
    if delta.finish == FinishReason.REFUSED:
        return ApiError(400, text, code="unsupported_parameter", param=call.parameter(delta))
    if supervisor.state != EngineState.ready:
        return try_again(503, text, "engine_failed", supervisor.retry_after_seconds())
    return ApiError(500, text, code="engine_failed")
