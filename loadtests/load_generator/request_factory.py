"""Makes the requests of a level, as bytes ready to send.

Nothing is made while the clock runs: all requests of an open level are bytes before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gevent
import msgspec

from loadtests.load_generator.http_connection import Pool
from loadtests.load_generator.load_plan import LoadPlan
from loadtests.load_generator.openai_endpoint import TargetFacts, count_tokens, request_bytes
from loadtests.records.request_record import RequestRecord
from loadtests.workload.arrivals import due_times
from loadtests.workload.exact_prompts import PromptMaker
from loadtests.workload.request_lengths import Ask, draw


class Request(msgspec.Struct, frozen=True):
    """One request, ready to leave: its bytes, and its record as far as it is known."""

    wire: bytes
    record: RequestRecord
    think_seconds: float = 0.0  # closed loop: pause before it


class RequestFactory:
    """Makes the requests of a level."""

    def __init__(self, plan: LoadPlan, facts: TargetFacts, pool: Pool) -> None:
        self._plan = plan
        self._facts = facts
        self._pool = pool

        def count(text: str) -> int:
            return count_tokens(pool, facts, text) + facts.prompt_overhead_tokens

        self._maker = PromptMaker(count if facts.tokenizer is not None else None, seed=plan.seed)
        self._drawn: list[Ask] = []
        self._begun = 0  # asks of the sessions that have begun
        self._said: dict[str, list[str]] = {}  # session -> the user's words of each turn

    def scheduled(self) -> list[Request]:
        """All requests of an open level, by due time."""
        plan = self._plan
        if plan.asks is not None:
            asks, due = list(plan.asks), list(plan.due)
        else:
            seconds = plan.duration_seconds + plan.follow_seconds
            due = due_times(plan.arrivals, plan.rate or 0.0, seconds, plan.seed).tolist()
            asks = draw(plan.workload, len(due), plan.seed, due_seconds=due)
        made: list[Request] = []
        for ask, at in zip(asks, due, strict=True):
            made.append(self._request(ask, at))
            if len(made) % 512 == 0:
                gevent.sleep(0.001)  # a heartbeat may pass, or Locust's master misses its worker
        return made

    def next_session(self) -> list[Request]:
        """The turns of the next session of a closed level; without sessions, the next request."""
        turns = [self._drawn_at(self._begun)]
        if self._plan.workload.turns > 1:  # without due times its turns are adjacent
            while (ask := self._drawn_at(self._begun + len(turns))).session == turns[0].session:
                turns.append(ask)
        self._begun += len(turns)
        return [self._request(ask, 0.0) for ask in turns]

    def with_answers(self, request: Request, answers: Sequence[str]) -> bytes:
        """The bytes of a later turn with the server's real answers in place of filler.

        A chat's history is messages with roles, a completion's is one text.
        """
        record = request.record
        first, *later = self._said[record.session or ""][: (record.turn or 0) + 1]
        pairs = list(zip(answers, later, strict=True))
        prompt: Any = first + "".join(f"{answer} {words}" for answer, words in pairs)
        if self._plan.target.api == "chat":
            said = [("user", first)]
            for answer, words in pairs:
                said += [("assistant", answer), ("user", words)]
            prompt = [{"role": role, "content": content} for role, content in said]
        return self._wire(prompt, record.asked_output_tokens or 1)

    def _drawn_at(self, position: int) -> Ask:
        if position >= len(self._drawn):
            self._drawn = draw(self._plan.workload, max(256, 2 * position), self._plan.seed)
        return self._drawn[position]

    def _wire(self, prompt: Any, output_tokens: int) -> bytes:
        return request_bytes(self._pool, self._plan.target, self._facts, prompt, output_tokens)

    def _request(self, ask: Ask, due_seconds: float) -> Request:
        plan = self._plan
        text, tokens = self._maker.make(ask)
        session = None if ask.session is None else str(ask.session)
        if session is not None:
            words = text.split(" ")[-(ask.prompt_tokens - ask.history_tokens) :]
            self._said.setdefault(session, []).append(" ".join(words))
        record = RequestRecord(
            cell=plan.cell,
            level=plan.level,
            index=ask.index,
            due_seconds=due_seconds,
            asked_prompt_tokens=tokens,
            asked_output_tokens=ask.output_tokens,
            session=session,
            turn=ask.turn,
        )
        return Request(self._wire(text, ask.output_tokens), record, ask.think_seconds)
