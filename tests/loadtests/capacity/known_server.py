"""A server whose step times are known: it answers requests, with a stamp for every token.

Played step by step, apart from crossover.serving.capacity.batching_simulator, which it is held
against.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import LevelFinished, LevelStarted
from crossover.loadtests.records.level_plan import Burst, LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.shape.model_spec import Routing
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.conversations import Session, sent_turns

STEP_TIMES = StepTimeModel(
    base_seconds=0.02,
    row_seconds=0.003,
    prompt_token_seconds=0.0005,
    context_token_seconds=2e-6,
    pass_seconds=0.01,
)
# A mixture of experts whose steps are bound by reading weights.
# As of a GPU server: products, attention by token pairs, and a host that works meanwhile.
SERVER_STEPS = StepTimeModel(
    base_seconds=0.002,
    context_token_seconds=1e-7,
    weights_seconds=0.010,
    product_token_seconds=0.00004,
    token_pair_seconds=2e-9,
    host_seconds=0.004,
    host_row_seconds=0.0005,
)
EXPERTS_STEP_TIMES = StepTimeModel(
    base_seconds=0.004,
    row_seconds=0.002,
    prompt_token_seconds=0.0005,
    context_token_seconds=1e-6,
    pass_seconds=0.002,
    expert_seconds=0.03,
    experts=Routing(128, 8),
)
# As KnownServer schedules: no target for a step's time.
SETTINGS = SchedulerSettings(slots=8, step_tokens=2048, step_seconds_target=None)


@dataclasses.dataclass(eq=False)
class _Request:
    """A request on its way."""

    index: int
    due: float
    prompt: int
    output: int
    cached: int
    session: Session | None = None
    turn: int = 0
    added: int = 0
    left: int = 0
    stamps: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class KnownServer:
    """`steps(rows, prompt tokens, context, passes)` says what a step takes."""

    steps: Callable[[int, int, int, int], float]
    slots: int = 8
    chunk: int = 1  # tokens that come together
    prefill_tokens: int = 256  # of a step while someone decodes
    step_tokens: int = 2048
    reuses: bool = True  # histories of conversations
    reasoning_share: float = 0.0  # of the chunks of an answer
    whole_prompts: bool = False  # nobody decodes while a prompt is computed
    sent_bursts: list[Burst] = dataclasses.field(default_factory=list)
    spent_seconds: float = 0.0  # of bursts
    now: float = 0.0  # seconds since the level's start, for steps that depend on it

    def __call__(self, burst: Burst) -> Level:
        """All streams sent at one moment."""
        self.sent_bursts.append(burst)
        level = self.level([0.0] * burst.streams, burst.prompt_tokens, burst.output_tokens)
        self.spent_seconds += float(level.chunks.max())
        return level

    def level(
        self,
        due: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
    ) -> Level:
        """An open-loop level, from an idle server to its last answer."""
        records = self.records(due, prompt_tokens, output_tokens, cached_tokens)
        seconds = float(due[-1]) + 1e-6
        started = LevelStarted(
            cell="c",
            level="l",
            plan=LevelPlan(rate=1.0, window_seconds=seconds),
        )
        ended = LevelFinished(cell="c", level="l", due=len(records), window_seconds=seconds)
        return Level.of(records, started, ended)

    def records(
        self,
        due: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
        cell: str = "c",
        level: str = "l",
    ) -> list[RequestRecord]:
        """What became of requests that are due at these times, in their order."""
        cached = [0] * len(due) if cached_tokens is None else list(cached_tokens)
        columns = zip(due, prompt_tokens, output_tokens, cached, strict=True)
        requests = [
            _Request(i, float(at), int(p), int(o), int(c))
            for i, (at, p, o, c) in enumerate(columns)
        ]
        return [self._record(one, cell, level) for one in self._play(requests)]

    def converse(
        self,
        begins: Sequence[float],
        sessions: Sequence[Session],
        *,
        thinks: bool = True,
        most: int | None = None,
        until: float = math.inf,
        cell: str = "c",
        level: str = "l",
    ) -> list[RequestRecord]:
        """What became of conversations that begin at these times. Each slot keeps the conversation
        that it had last, until another one needs it; the slot idle for longest is taken first.

        `thinks` False: one conversation after the other, at most `most` turns. `until`: no turn
        that is due later is sent.
        """
        turns = {one.index: list(sent_turns(one, None)) for one in sessions}
        count = sum(map(len, turns.values()))
        left = count if most is None else min(most, count)
        number = 0
        sent_requests: list[_Request] = []

        def requests_of(session: Session, turn: int, due: float) -> list[_Request]:
            nonlocal number
            if number >= left or due >= until:
                return []
            sent = turns[session.index][turn]
            known = sent.kept_tokens if self.reuses else 0
            new = _Request(number, due, sent.prompt_tokens, sent.output_tokens, known)
            new.session, new.turn, new.added = session, turn, session.turns[turn].prompt_tokens
            number += 1
            sent_requests.append(new)
            return [new]

        def follow(done: _Request) -> list[_Request]:
            assert done.session is not None
            after = done.turn + 1
            if after < len(done.session.turns):
                think = done.session.turns[after].think_seconds if thinks else 0.0
                return requests_of(done.session, after, done.stamps[-1] + think)
            following = done.session.index + 1
            if not thinks and following < len(sessions):
                return requests_of(sessions[following], 0, done.stamps[-1])
            return []

        first = zip(begins, sessions, strict=True) if thinks else [(0.0, sessions[0])]
        self._play([one for at, session in first for one in requests_of(session, 0, at)], follow)
        return [self._record(one, cell, level) for one in sent_requests]

    def _play(
        self,
        requests: Sequence[_Request],
        follow: Callable[[_Request], list[_Request]] = lambda one: [],
    ) -> list[_Request]:
        """The requests, answered; `follow`: what an answer is followed by."""
        waiting = [(one.due, one.index, one) for one in requests]
        heapq.heapify(waiting)
        running: list[_Request] = []
        kept: dict[int, float] = {}  # session -> since when an idle slot holds it
        now = 0.0
        while waiting or running:
            if not running:
                now = max(now, waiting[0][0])
            while waiting and waiting[0][0] <= now and len(running) < self.slots:
                one = heapq.heappop(waiting)[2]
                if one.session is not None and one.session.index not in kept:
                    one.cached = 0
                    if len(kept) + len(running) >= self.slots:
                        del kept[min(kept, key=lambda each: kept[each])]
                elif one.session is not None:
                    del kept[one.session.index]
                one.left = one.prompt - one.cached
                running.append(one)
            filling = [one for one in running if one.left > 0]
            decoding = [one for one in running if one.left == 0]
            if self.whole_prompts and filling:
                decoding = []
            room = self.prefill_tokens if decoding else self.step_tokens
            taken, filled, passes = 0, [], int(bool(decoding))
            for one in filling:
                piece = min(one.left, room - taken)
                one.left -= piece
                taken += piece
                passes += piece > 0
                if one.left == 0:
                    filled.append(one)
            self.now = now
            context = sum(one.prompt + len(one.stamps) for one in decoding)
            now += self.steps(len(decoding), taken, context, passes)
            for one in decoding + filled:
                one.stamps.append(now)
                if len(one.stamps) == one.output:
                    running.remove(one)
                    if one.session is not None:
                        kept[one.session.index] = now
                    for after in follow(one):
                        heapq.heappush(waiting, (after.due, after.index, after))
        return list(requests)

    def _record(self, one: _Request, cell: str, level: str) -> RequestRecord:
        seen = one.stamps[self.chunk - 1 :: self.chunk] or one.stamps[-1:]
        answer = min(int(self.reasoning_share * len(seen)), len(seen) - 1)
        return RequestRecord(
            cell=cell,
            level=level,
            index=one.index,
            session=None if one.session is None else one.session.index,
            turn=None if one.session is None else one.turn,
            scheduled_seconds=one.due,
            sent_seconds=one.due,
            first_content_seconds=seen[0],
            first_answer_seconds=seen[answer] if self.reasoning_share else None,
            last_content_seconds=seen[-1],
            ended_seconds=one.stamps[-1],
            content_seconds=seen,
            first_chunk_tokens=self.chunk,
            requested_prompt_tokens=one.prompt,
            requested_output_tokens=one.output,
            prompt_tokens=one.prompt,
            cached_tokens=one.cached,
            added_tokens=None if one.session is None else one.added,
            output_tokens=one.output,
            status=200,
        )


class Skewed:
    """What steps take beside their typical time: a few percent, and now and then a stall."""

    def __init__(self, seed: int, spread: float = 0.03, stalls: float = 0.01) -> None:
        self._rng = np.random.default_rng(seed)
        self._spread, self._stalls = spread, stalls

    def __call__(self) -> float:
        stall = 4.0 if self._rng.random() < self._stalls else 1.0
        return stall * float(np.exp(self._spread * self._rng.normal()))
