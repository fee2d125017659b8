"""Makes the requests of a level, as bytes that are ready to send.

All requests are made before the level starts, except for turns of conversations, which depend on
earlier answers, and for closed loops that end by time alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import gevent

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.conversation import Conversation
from crossover.loadtests.load_generator.http_connection import Pool
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.openai_endpoint import Message, request_bytes
from crossover.loadtests.load_generator.target import TargetFacts
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.arrivals import due_times
from crossover.serving.workload.conversations import Session, draw_sessions, mean_turns_of
from crossover.serving.workload.exact_prompts import PromptMaker
from crossover.serving.workload.request_lengths import RequestSpec, draw

MAX_CLOSED_SESSIONS = 1_000  # sessions of a closed loop that ends by time alone
MAX_LEVEL_REQUESTS = 2_000_000  # each takes about 1 KB beside its prompt
MAX_LEVEL_TOKENS = 250_000_000  # of all prompts of a level together: about 2 GB of text


class ReadyRequest(NamedTuple):
    """One request that is ready to send: its bytes, and its record with the fields known so far."""

    wire: bytes
    record: RequestRecord


class RequestFactory:
    """Makes the requests of a level. Raises LoadError."""

    def __init__(self, load: LoadPlan, facts: TargetFacts, pool: Pool) -> None:
        self._load, self._facts, self._pool = load, facts, pool
        self._maker = PromptMaker(load.plan.seed, facts.fixed_tokens, facts.word_tokens)

    def scheduled(self) -> list[ReadyRequest]:
        """Return all requests of an open loop in the order of their scheduled times, or all
        requests of a burst.

        Raises LoadError if there are too many, or if their prompts have more than
        MAX_LEVEL_TOKENS.
        """
        plan = self._load.plan
        if plan.burst is not None:
            lengths = zip(plan.burst.prompt_tokens, plan.burst.output_tokens, strict=True)
            specs = [RequestSpec(index, *pair) for index, pair in enumerate(lengths)]
            due = [0.0] * len(specs)
        else:
            due = self._due_times(plan.rate or 0.0)
            specs = draw(self._load.workload, len(due), plan.seed)
        if (tokens := sum(spec.prompt_tokens for spec in specs)) > MAX_LEVEL_TOKENS:
            raise LoadError(
                f"The {len(specs)} prompts of this level have {tokens:,} tokens, but at most "
                f"{MAX_LEVEL_TOKENS:,} can be prepared. Lower the rate, the duration or "
                "the lengths"
            )
        requests: list[ReadyRequest] = []
        for spec, scheduled_seconds in zip(specs, due, strict=True):
            requests.append(self._request(spec, scheduled_seconds))
            if len(requests) % 512 == 0:
                gevent.sleep(0.001)  # lets heartbeats pass, so that Locust keeps this worker
        return requests

    def conversations(self) -> list[tuple[float, Conversation, Session]]:
        """Return all sessions of a level with their scheduled times, in seconds. In a closed loop
        these are 0, and there are as many sessions as its requests may need.

        Raises LoadError unless the level uses the chat route, and if there are too many.
        """
        load, plan = self._load, self._load.plan
        if load.target.api != "chat":
            raise LoadError("Conversations need the chat route. Use --api chat")
        if plan.concurrency is not None:
            due = [0.0] * (plan.requests or MAX_CLOSED_SESSIONS)
        else:  # the rate is of requests; a conversation has several
            due = self._due_times((plan.rate or 0.0) / mean_turns_of(load.workload))
        sessions = draw_sessions(load.workload, len(due), plan.seed)
        return [
            (begin_seconds, Conversation(load, self._maker, session), session)
            for begin_seconds, session in zip(due, sessions, strict=True)
        ]

    def turn_bytes(self, messages: list[Message], output_tokens: int) -> bytes:
        """Return the request of a turn, whose messages include the history."""
        return request_bytes(self._pool, self._load.target, self._facts, messages, output_tokens)

    def endless(self) -> Iterator[ReadyRequest]:
        """Yield requests of a closed loop without end. They are scheduled at 0; whoever sends one
        replaces that time."""
        yielded_count, drawn_count = 0, 256
        while True:
            specs = draw(self._load.workload, drawn_count, self._load.plan.seed)
            for spec in specs[yielded_count:]:
                yield self._request(spec, 0.0)
            yielded_count, drawn_count = drawn_count, 2 * drawn_count

    def _due_times(self, rate: float) -> list[float]:
        """Return the scheduled times of an open loop at `rate` arrivals/s, to the end of its load
        after the window. Raises LoadError if there are more than MAX_LEVEL_REQUESTS."""
        load, plan = self._load, self._load.plan
        seconds = plan.duration_seconds + load.follow_seconds
        if rate * seconds > MAX_LEVEL_REQUESTS:
            raise LoadError(
                f"This level has about {rate * seconds:,.0f} arrivals, but at most "
                f"{MAX_LEVEL_REQUESTS:,} can be prepared. Lower the rate or the duration"
            )
        due: list[float] = due_times(load.arrivals, rate, seconds, plan.seed).tolist()
        return due

    def _request(self, spec: RequestSpec, scheduled_seconds: float) -> ReadyRequest:
        load = self._load
        text, tokens = self._maker.make(spec)
        record = RequestRecord(
            cell=load.cell,
            level=load.level,
            index=spec.index,
            scheduled_seconds=scheduled_seconds,
            requested_prompt_tokens=tokens,
            requested_output_tokens=spec.output_tokens,
        )
        wire = request_bytes(self._pool, load.target, self._facts, text, spec.output_tokens)
        return ReadyRequest(wire, record)
