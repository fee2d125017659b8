"""Makes the requests of one load generator's share of a level, as bytes ready to send.

Nothing is made while the clock runs: all requests of an open level are bytes before it starts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import gevent
import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.generator.connection import clock
from loadtests.generator.endpoint import TargetFacts, body_of, count_tokens, path_of
from loadtests.generator.http_client import Pool, post_bytes
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.sse_request import Ask
from loadtests.workload import requests as workloads
from loadtests.workload.arrivals import Times, deal, due_times
from loadtests.workload.prompts import PromptMaker

DIGESTED = 256  # requests whose lengths are part of a level's digest
SILENT_SECONDS = 0.2  # that making requests keeps all else of the process waiting
T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """One request, ready to leave."""

    index: int
    due_seconds: float  # open loop
    wire: bytes
    prompt_tokens: int
    output_tokens: int
    session: str | None
    turn: int | None
    think_seconds: float  # closed loop: pause before it

    @property
    def needs_answers(self) -> bool:
        """True for a later turn of a session: its prompt continues the answers before it."""
        return bool(self.turn)

    def ask(self, plan: LoadPlan, due_seconds: float, worker: int = 0) -> Ask:
        """What is known of its record before it is sent."""
        return Ask(
            cell=plan.cell,
            level=plan.level,
            index=self.index,
            due_seconds=due_seconds,
            asked_prompt_tokens=self.prompt_tokens,
            asked_output_tokens=self.output_tokens,
            session=self.session,
            turn=self.turn,
            worker=worker,
        )


class Share(msgspec.Struct, frozen=True):
    """Which part of a level this load generator has."""

    index: int
    workers: int


class RequestFactory:
    """Makes the requests of one load generator's share of a level."""

    def __init__(self, plan: LoadPlan, facts: TargetFacts, pool: Pool, share: Share) -> None:
        self._plan = plan
        self._facts = facts
        self._pool = pool
        self._share = share

        def count(text: str) -> int:
            return count_tokens(pool, facts, text) + facts.prompt_overhead_tokens

        self._maker = PromptMaker(count if facts.tokenizer is not None else None, seed=plan.seed)
        self._drawn: list[workloads.Ask] = []
        self._next = share.index
        self._begun = 0  # asks of the sessions that have begun
        self._said: dict[str, list[str]] = {}  # session -> the user's words of each turn
        self._due: Times | None = None

    @property
    def draws(self) -> str:
        """A digest of what all load generators of the level send: the same in each of them.

        Due times count to the microsecond: logarithms differ between CPUs in the last digit.
        """
        due = np.zeros(0) if self._due is None else np.round(self._due * 1e6)
        asks = workloads.draw(self._plan.workload, DIGESTED, self._plan.seed)
        lengths = [(ask.prompt_tokens, ask.output_tokens, ask.session) for ask in asks]
        return hashlib.sha256(due.tobytes() + msgspec.msgpack.encode(lengths)).hexdigest()

    def scheduled(self) -> list[Request]:
        """All requests of this share of an open level, by due time.

        A session stays with one load generator, which must see the answers its turns continue.
        """
        plan = self._plan
        if plan.rate_per_second is None:
            raise LoadError("a level without a rate has no due times")
        window = plan.duration_seconds
        due = due_times(plan.arrivals, plan.rate_per_second, window + plan.follow_seconds, plan.seed)
        self._due = due
        asks = workloads.draw(plan.workload, len(due), plan.seed, due_seconds=due.tolist())
        if plan.workload.turns > 1:
            mine = [(ask, float(due[ask.index])) for ask in asks if self._is_mine(ask)]
        else:
            indices, times = deal(due, self._share.index, self._share.workers)
            dealt = zip(indices.tolist(), times.tolist(), strict=True)
            mine = [(asks[index], at) for index, at in dealt]
        return [self._request(ask, at) for ask, at in self._heard(mine)]

    def _heard(self, mine: Sequence[T]) -> Iterator[T]:
        """All of them; now and then a worker's heartbeat may pass, or its master calls it lost."""
        silent_since = clock()
        for one in mine:
            if self._share.workers > 1 and clock() - silent_since > SILENT_SECONDS:
                gevent.sleep(0.001)
                silent_since = clock()
            yield one

    def next_session(self) -> list[Request]:
        """The turns of the next session of a closed level; without sessions, the next request."""
        if self._plan.workload.turns <= 1:
            return [self.fresh()]
        while True:
            turns = self._turns(self._begun)
            self._begun += len(turns)
            if self._is_mine(turns[0]):
                return [self._request(ask, 0.0, self._pause(ask)) for ask in turns]

    def with_answers(self, request: Request, answers: Sequence[str]) -> bytes:
        """The bytes of a later turn with the server's real answers in place of filler.

        A chat's history is messages with roles, a completion's is one text.
        Raises LoadError for a wrong number of answers.
        """
        said = self._said.get(request.session or "", [])[: (request.turn or 0) + 1]
        if not request.needs_answers or len(answers) != len(said) - 1:
            raise LoadError(
                f"turn {request.turn} of session {request.session} continues from "
                f"{len(said) - 1} answers, got {len(answers)}"
            )
        prompt: Any
        if self._plan.target.api == "chat":
            prompt = [{"role": "user", "content": said[0]}]
            for answer, words in zip(answers, said[1:], strict=True):
                prompt.append({"role": "assistant", "content": answer})
                prompt.append({"role": "user", "content": words})
        else:
            later = zip(answers, said[1:], strict=True)
            prompt = said[0] + "".join(f"{answer} {words}" for answer, words in later)
        return self._wire(prompt, request.output_tokens)

    def fresh(self) -> Request:
        """The next request of a closed level."""
        ask = self._drawn_at(self._next)
        self._next += self._share.workers
        return self._request(ask, 0.0, self._pause(ask))

    def of(self, ask: workloads.Ask) -> Request:
        """The request of an ask that is not drawn, to be sent at once."""
        return self._request(ask, 0.0)

    def _drawn_at(self, position: int) -> workloads.Ask:
        if position >= len(self._drawn):
            self._drawn = workloads.draw(
                self._plan.workload, max(256, 2 * position), self._plan.seed
            )
        return self._drawn[position]

    def _turns(self, position: int) -> list[workloads.Ask]:
        """The session whose first turn is at `position`: turns without due times are adjacent."""
        turns = [self._drawn_at(position)]
        while (ask := self._drawn_at(position + len(turns))).session == turns[0].session:
            turns.append(ask)
        return turns

    def _is_mine(self, ask: workloads.Ask) -> bool:
        return (ask.session or 0) % self._share.workers == self._share.index

    def _pause(self, ask: workloads.Ask) -> float:
        mean = self._plan.workload.think_seconds
        if ask.think_seconds or not mean:
            return ask.think_seconds
        return random.Random(f"{self._plan.seed}/think/{ask.index}").expovariate(1 / mean)

    def _wire(self, prompt: Any, output_tokens: int) -> bytes:
        target = self._plan.target
        body = body_of(target, self._facts, prompt, output_tokens)
        return post_bytes(self._pool, path_of(target), body)

    def _request(
        self, ask: workloads.Ask, due_seconds: float, think_seconds: float = 0.0
    ) -> Request:
        prompt = self._maker.make(ask)
        session = None if ask.session is None else str(ask.session)
        if session is not None:
            words = prompt.text.split(" ")[-(ask.prompt_tokens - ask.history_tokens) :]
            self._said.setdefault(session, []).append(" ".join(words))
        return Request(
            index=ask.index,
            due_seconds=due_seconds,
            wire=self._wire(prompt.text, ask.output_tokens),
            prompt_tokens=prompt.tokens,
            output_tokens=ask.output_tokens,
            session=session,
            turn=ask.turn,
            think_seconds=think_seconds,
        )
