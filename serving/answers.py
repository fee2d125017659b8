"""From a checked request to its answer: sequences submitted, their deltas turned into chunks or into one body, the client watched.

    call = ChatCall(service, exchange, request)
    await answer(call, prompts)

The head of a streamed answer leaves with the first delta, not before: until then an error still is an answer with a status of its own,
a sequence can still move to another engine (so X-Crossover-Backend tells the truth), and a client that takes the head for the first
token measures no fairy tale. A client that goes away cancels its sequences at once, streamed or not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec

from serving.access import ClientGone, Exchange
from serving.calls import Call, Choice, Prompt
from serving.checks import seeded
from serving.messages import Delta
from serving.protocol import ApiError, scrubbed, try_again
from serving.replies import (
    DONE,
    Usage,
    event,
    usage_of,
)
from serving.service import StreamLike, too_many
from serving.supervisor import Overloaded, Unavailable


async def answer(call: Call, prompts: Sequence[Prompt]) -> None:
    """Submit every sequence of the request and write its answer. Raises ApiError, or ClientGone."""
    exchange = call.exchange
    choices = submitted(call, prompts)
    exchange.call, exchange.choices = call, choices
    call.service.metrics.asked_choices.observe(call.wishes.choices)
    watcher = asyncio.create_task(_watched(exchange, choices))
    try:
        async with aclosing(interleaved(choices)) as deltas:
            await (_streamed if call.streamed else _whole)(call, choices, deltas)
    finally:
        watcher.cancel()
        for choice in choices:
            choice.stream.cancel()
            choice.ended("cancelled", exchange.began, call.service.metrics)  # unless it has ended already


def submitted(call: Call, prompts: Sequence[Prompt]) -> list[Choice]:
    """All sequences of the request, or none: where one is refused, those before it are cancelled."""
    wishes, choices = call.wishes, list[Choice]()
    try:
        for prompt in prompts:
            for choice in range(wishes.choices):
                stream: StreamLike = _NOTHING
                if prompt.max_tokens or wishes.sampling.prompt_logprobs is not None:
                    stream = call.service.supervisor.submit(
                        prompt.ids,
                        max(1, prompt.max_tokens),
                        seeded(wishes.sampling, choice),
                        stop=wishes.stop,
                        stop_token_ids=wishes.stop_token_ids,
                        min_tokens=wishes.min_tokens,
                        ignore_eos=wishes.ignore_eos,
                        deadline_seconds=wishes.deadline_seconds,
                        include_stop=wishes.include_stop,
                        whole=not call.streamed,
                    )
                    stream = stream if prompt.max_tokens else _PromptOnly(stream)
                choices.append(Choice(len(choices), prompt, choice == 0, stream, not call.streamed))
    except (Unavailable, Overloaded) as refusal:
        for accepted in choices:
            accepted.stream.cancel()
        if isinstance(refusal, Overloaded):
            raise too_many(refusal) from None
        raise call.service.unavailable(refusal.retry_after_seconds) from None
    return choices


class _Nothing:
    """The stream of a request for 0 tokens: there is nothing that an engine could do for it."""

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Delta]:
        yield Delta(0, 0, "", "length")


_NOTHING = _Nothing()


class _PromptOnly:
    """A stream of one token, made to have its prompt scored, without that token."""

    def __init__(self, stream: StreamLike) -> None:
        self._stream = stream

    def cancel(self) -> None:
        self._stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._stream:
            finish = "length" if delta.finish == "stop" else delta.finish
            yield msgspec.structs.replace(delta, tokens=0, text="", details=[], finish=finish)


async def interleaved(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
    """The deltas of all choices as they come. A slow reader leaves them with their streams, which merge them."""
    if len(choices) == 1:
        async for delta in choices[0].stream:
            yield choices[0], delta
        return
    arrived: asyncio.Queue[tuple[Choice, Delta]] = asyncio.Queue(maxsize=len(choices))

    async def feed(choice: Choice) -> None:
        async for delta in choice.stream:
            await arrived.put((choice, delta))

    tasks = [asyncio.create_task(feed(choice)) for choice in choices]
    try:
        for _ in choices:
            finished = False
            while not finished:
                choice, delta = await arrived.get()
                finished = delta.finish is not None
                yield choice, delta
    finally:
        for task in tasks:
            task.cancel()


async def _watched(exchange: Exchange, choices: Sequence[Choice]) -> None:
    await exchange.until_gone()
    if exchange.gone:
        for choice in choices:
            choice.stream.cancel()


def _take(call: Call, choice: Choice, delta: Delta) -> None:
    """Account for a delta. Raises where the sequence did not end as it should."""
    began, metrics = call.exchange.began, call.service.metrics
    choice.took(delta, began, metrics)
    if delta.finish is not None:
        choice.ended(delta.finish, began, metrics)
        if choice.finish is None:
            raise _failure(call, delta)


async def _streamed(call: Call, choices: Sequence[Choice], deltas: AsyncIterator[tuple[Choice, Delta]]) -> None:
    exchange = call.exchange
    async for choice, delta in deltas:
        _take(call, choice, delta)
        data = call.events(choice, delta)
        if not exchange.started:
            await exchange.open_stream()
        if data:
            await exchange.write(data)
        if exchange.gone:
            raise ClientGone
    last = event(call.last_chunk(_total(choices))) if call.wants_usage else b""
    await exchange.close_stream(last + DONE)


async def _whole(call: Call, choices: Sequence[Choice], deltas: AsyncIterator[tuple[Choice, Delta]]) -> None:
    async for choice, delta in deltas:
        _take(call, choice, delta)
        if delta.text:
            choice.pieces.append(delta.text)
    wishes = call.wishes
    shown = choices if wishes.kept == wishes.choices else _best(choices, wishes.choices, wishes.kept)
    await call.exchange.answer(call.body(shown, _total(choices)))


def _best(choices: Sequence[Choice], made: int, kept: int) -> list[Choice]:
    """OpenAI's best_of: of the `made` answers to each prompt the `kept` with the highest log-probability per token, best first."""
    best: list[Choice] = []
    for first in range(0, len(choices), made):
        best += sorted(choices[first : first + made], key=_logprob_per_token, reverse=True)[:kept]
    for index, choice in enumerate(best):
        choice.index = index
    return best


def _logprob_per_token(choice: Choice) -> float:
    return sum(detail.logprob for detail in choice.details) / len(choice.details) if choice.details else -math.inf


def _total(choices: Sequence[Choice]) -> Usage:
    """Usage of the request: each prompt counts once, however many answers it has."""
    firsts = [choice for choice in choices if choice.first_of_prompt]
    cached = [choice.cached for choice in firsts if choice.cached is not None]
    prompt_tokens = sum(len(choice.prompt.ids) for choice in firsts)
    return usage_of(prompt_tokens, sum(choice.tokens for choice in choices), sum(cached) if cached else None)


def _failure(call: Call, delta: Delta) -> Exception:
    supervisor = call.service.supervisor
    if call.exchange.gone:
        return ClientGone()
    if delta.finish == "deadline":
        text = f"the answer was not complete after {call.wishes.deadline_seconds:g} s"
        return ApiError(504, text, code="deadline_exceeded", headers={"X-Should-Retry": "false"})
    text = scrubbed(delta.error or "the request was cancelled by the server")
    if delta.finish == "refused":
        return ApiError(400, text, code="unsupported_parameter")
    if supervisor.state != "ready":
        return try_again(503, text, "engine_failed", supervisor.retry_after_seconds())
    return ApiError(500, text, code="engine_failed")
