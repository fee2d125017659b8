"""Makes the requests of a level, as bytes ready to send.

Nothing is made while the clock runs, but for a closed loop that ends by time alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import gevent

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.conversation import Conversation
from crossover.loadtests.load_generator.http_connection import Pool
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.openai_endpoint import Message, TargetFacts, request_bytes
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.arrivals import due_times
from crossover.serving.workload.conversations import Session, draw_sessions
from crossover.serving.workload.exact_prompts import PromptMaker
from crossover.serving.workload.request_lengths import RequestSpec, draw

MAX_CLOSED_SESSIONS = 1_000  # that the users of a closed loop have in turn
MAX_LEVEL_TOKENS = 250_000_000  # of all prompts of a level together: some 2 GB of text


class Request(NamedTuple):
    """One request, ready to leave: its bytes, and its record as far as it is known."""

    wire: bytes
    record: RequestRecord


class RequestFactory:
    """Makes the requests of a level. Raises LoadError."""

    def __init__(self, plan: LoadPlan, facts: TargetFacts, pool: Pool) -> None:
        self._plan, self._facts, self._pool = plan, facts, pool
        self._maker = PromptMaker(plan.seed, facts.fixed_tokens, facts.word_tokens)

    def scheduled(self) -> list[Request]:
        """All requests of an open level, by due time."""
        plan = self._plan
        if plan.asks is not None:
            asks, due = list(plan.asks), list(plan.due)
        else:
            seconds = plan.duration_seconds + plan.follow_seconds
            due = due_times(plan.arrivals, plan.rate or 0.0, seconds, plan.seed).tolist()
            asks = draw(plan.workload, len(due), plan.seed)
        if (tokens := sum(ask.prompt_tokens for ask in asks)) > MAX_LEVEL_TOKENS:
            raise LoadError(
                f"The {len(asks)} prompts of this level have {tokens:,} tokens, but at most "
                f"{MAX_LEVEL_TOKENS:,} can be prepared. Lower the rate, the duration or "
                "the lengths"
            )
        made: list[Request] = []
        for ask, at in zip(asks, due, strict=True):
            made.append(self._request(ask, at))
            if len(made) % 512 == 0:
                gevent.sleep(0.001)  # a heartbeat may pass, or Locust's master misses its worker
        return made

    def conversations(self) -> list[tuple[float, Conversation, Session]]:
        """All sessions of a level: of an open one by the moment at which they begin, of a closed
        one as many as its requests may need."""
        plan = self._plan
        if plan.target.api != "chat":
            raise LoadError("Conversations need the chat route. Use --api chat")
        if plan.concurrency is not None:
            due = [0.0] * (plan.requests or MAX_CLOSED_SESSIONS)
        else:
            seconds = plan.duration_seconds + plan.follow_seconds
            due = due_times(plan.arrivals, plan.rate or 0.0, seconds, plan.seed).tolist()
        sessions = draw_sessions(plan.workload, len(due), plan.seed)
        return [
            (at, Conversation(plan, self._maker, session), session)
            for at, session in zip(due, sessions, strict=True)
        ]

    def turn_bytes(self, messages: list[Message], output_tokens: int) -> bytes:
        """The request of a turn, made when its history is known."""
        return request_bytes(self._pool, self._plan.target, self._facts, messages, output_tokens)

    def endless(self) -> Iterator[Request]:
        """Those of a closed level, due at 0 until they are sent."""
        done, drawn = 0, 256
        while True:
            for ask in draw(self._plan.workload, drawn, self._plan.seed)[done:]:
                yield self._request(ask, 0.0)
            done, drawn = drawn, 2 * drawn

    def _request(self, ask: RequestSpec, scheduled_seconds: float) -> Request:
        plan = self._plan
        text, tokens = self._maker.make(ask)
        record = RequestRecord(
            cell=plan.cell,
            level=plan.level,
            index=ask.index,
            scheduled_seconds=scheduled_seconds,
            requested_prompt_tokens=tokens,
            requested_output_tokens=ask.output_tokens,
        )
        wire = request_bytes(self._pool, plan.target, self._facts, text, ask.output_tokens)
        return Request(wire, record)
