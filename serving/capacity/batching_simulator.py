"""Simulation of continuous batching: a step-time model, settings, due times and lengths -> TTFT and
TPOT.

    played = simulate(step_times, SchedulerSettings(slots=8), due, prompt_tokens, output_tokens)
    played.good(ttft_seconds=2.0, tpot_seconds=0.2).mean()

The settings are the scheduler's (serving/engine/scheduler.py), and so is the rule of a step
(serving/capacity/plan_step.py): it decodes one token of every sequence past its prompt, then
takes prompt tokens, oldest first, up to a budget. Requests are admitted in order of arrival to a
free slot while the KV pool has room for their prompts beside all that is promised to others. Where
answers outgrow the pool, the youngest waits again, and all its tokens are computed anew. Time
outside of steps is left out.

Requests may be the turns of conversations (`Turns`): a turn then comes when its user has read the
answer before it and thought. Where the engine reuses prefixes, the slots keep what they hold, and
each prompt gets the slot that the engine's own rule gives it (serving/capacity/choose_slot.py).

Events are played, not tokens: steps that only decode are summed in closed form up to the next
arrival or ending.
"""

from __future__ import annotations

import bisect
import heapq
import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.capacity.choose_slot import (
    COMPUTED_TAIL,
    choose_checkpointed_slot,
    choose_slot,
    max_checkpoints,
)
from crossover.serving.capacity.plan_step import plan_step
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepObservation, StepTimeModel

Array = npt.NDArray[np.float64]
# What an engine goes on from: any common beginning; where its KV cannot be cut back (a recurrent
# state, a window of attention), the checkpoints that it makes of each prompt; nothing.
Reuse = Literal["any prefix", "checkpoints", "none"]
Numbers = Sequence[float] | npt.NDArray[np.float64] | npt.NDArray[np.int64]


class Turns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Of n requests that are turns of conversations: arrays are [n], session by session, the turns
    of each in their order."""

    session: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]  # 0.. within the session
    think_seconds: Array  # from the end of the answer before to this turn
    # Tokens at the start of its prompt that are what the turn before left in the KV of its slot;
    # 0 of a first turn.
    history_tokens: npt.NDArray[np.int64]
    shared_tokens: int = 0  # at the start of every prompt, the same in all sessions
    reuse: Reuse = "any prefix"
    # Turns whose times are given: the first ones, unless a session is under way at the start.
    is_timed: npt.NDArray[np.bool_] | None = None
    # Turns that ended before the start, the last one last: slots still hold what they computed.
    ended: tuple[int, ...] = ()


class Simulated(msgspec.Struct, frozen=True, eq=False):
    """A row a request, in the order they were given, seconds: float64 [n]."""

    due: Array
    ttft: Array
    tpot: Array  # nan: an answer of one token
    e2e: Array  # of the whole answer
    cached: Array  # tokens of the prompt that were not computed again
    reasoning_share: float = 0.0  # of the time between first and last token, until the answer
    # Which requests had to wait for a slot, and which for room in the KV cache, or lost theirs to
    # others. None: of requests one at a time, which are not played.
    waited_for_slot: npt.NDArray[np.bool_] | None = None
    waited_for_kv: npt.NDArray[np.bool_] | None = None
    work: StepObservation | None = None  # the sums of all steps

    @property
    def ttfa(self) -> Array:
        """To the first token of the answer itself, behind all reasoning."""
        if not self.reasoning_share:
            return self.ttft
        times: Array = self.ttft + self.reasoning_share * (self.e2e - self.ttft)
        return times

    def good(
        self,
        ttft_seconds: float | None,
        tpot_seconds: float | None,
        *,
        ttfa_seconds: float | None = None,
        e2e_seconds: float | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Which requests kept all limits; None: no limit."""
        good = np.ones(len(self.due), dtype=bool)
        if ttft_seconds is not None:
            good &= self.ttft <= ttft_seconds
        if tpot_seconds is not None:
            good &= ~(self.tpot > tpot_seconds)
        if ttfa_seconds is not None:
            good &= self.ttfa <= ttfa_seconds
        if e2e_seconds is not None:
            good &= self.e2e <= e2e_seconds
        return good

    def meets(self, slo: Slo) -> npt.NDArray[np.bool_]:
        """Which requests meet the SLO."""
        return self.good(
            slo.ttft_seconds,
            slo.tpot_seconds,
            ttfa_seconds=slo.ttfa_seconds,
            e2e_seconds=slo.e2e_seconds,
        )

    def of(self, which: npt.NDArray[np.bool_]) -> Simulated:
        """Some of the requests; `work` stays that of all."""
        slot, kv = self.waited_for_slot, self.waited_for_kv
        return Simulated(
            due=self.due[which],
            ttft=self.ttft[which],
            tpot=self.tpot[which],
            e2e=self.e2e[which],
            cached=self.cached[which],
            reasoning_share=self.reasoning_share,
            waited_for_slot=None if slot is None else slot[which],
            waited_for_kv=None if kv is None else kv[which],
            work=self.work,
        )


def simulate(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    due: Numbers,
    prompt_tokens: Numbers,
    output_tokens: Numbers,
    cached_tokens: Numbers | None = None,
    *,
    turns: Turns | None = None,
) -> Simulated:
    """Play requests due at these times (ascending) with these lengths to their end.

    `cached_tokens`: of each prompt, not computed again; one token is computed in any case. `turns`:
    of conversations; only the times of their first turns are read, those of a session the same or
    later than those of the session before it, and what is computed again is simulated.
    """
    engine = _Engine(step_times, settings, due, prompt_tokens, output_tokens, cached_tokens, turns)
    engine.play()
    times, first, last = (np.array(one) for one in (engine.due, engine.first, engine.last))
    later = np.maximum(np.asarray(output_tokens, dtype=np.float64), 1.0) - 1.0
    last = np.where(np.isfinite(first), last, np.inf)  # of turns before the start, never
    between = np.where(np.isfinite(first), last, 0.0) - np.where(np.isfinite(first), first, 0.0)
    tpot = np.divide(between, later, out=np.full(len(times), np.nan), where=later > 0)
    return Simulated(
        due=times,
        ttft=first - times,
        tpot=tpot,
        e2e=last - times,
        cached=np.array(engine.cached, dtype=np.float64),
        waited_for_slot=engine.work.waited_for_slot(times, last, settings.slots),
        waited_for_kv=engine.work.waited_for_kv(times),
        work=engine.work.summed(),
    )


class _Work:
    """What the engine did: the sums of all its steps, and what kept requests waiting."""

    def __init__(self, count: int) -> None:
        self.admitted = [math.inf] * count
        self.preempted = np.zeros(count, dtype=bool)
        self.pool_full: list[float] = []  # moments at which a request found no room in the pool
        self._seconds = self._rows = self._prompt = self._context = self._passes = 0.0
        self._steps = 0

    def add_decodes(self, steps: int, rows: int, context: int, seconds: float) -> None:
        """Steps in a row that only decode; `context`: of the first."""
        self._steps += steps
        self._passes += steps
        self._rows += steps * rows
        self._context += steps * context + rows * steps * (steps - 1) / 2
        self._seconds += seconds

    def add_prefill(
        self, rows: int, prompt_tokens: int, context: int, passes: int, seconds: float
    ) -> None:
        """One step with prompts."""
        self._steps += 1
        self._passes += passes
        self._rows += rows
        self._prompt += prompt_tokens
        self._context += context
        self._seconds += seconds

    def waited_for_slot(self, due: Array, last: Array, slots: int) -> npt.NDArray[np.bool_]:
        """Those that came while all slots were taken."""
        admitted = np.sort(np.array(self.admitted))
        running = np.searchsorted(admitted, due, "right") - np.searchsorted(
            np.sort(last), due, "right"
        )
        waits: npt.NDArray[np.bool_] = running >= slots
        return waits

    def waited_for_kv(self, due: Array) -> npt.NDArray[np.bool_]:
        """Those that waited while the pool had no room for the next, and those that lost theirs."""
        full = np.array(self.pool_full)
        admitted = np.array(self.admitted)
        waits: npt.NDArray[np.bool_] = self.preempted | (
            np.searchsorted(full, admitted) > np.searchsorted(full, due)
        )
        return waits

    def summed(self) -> StepObservation:
        return StepObservation(
            seconds=self._seconds,
            rows=self._rows,
            prompt_tokens=self._prompt,
            context_tokens=self._context,
            passes=self._passes,
            steps=self._steps,
        )


class _Engine:
    """The engine on a simulated clock. Requests are their places in the order they were given."""

    def __init__(
        self,
        step_times: StepTimeModel,
        settings: SchedulerSettings,
        due: Numbers,
        prompt_tokens: Numbers,
        output_tokens: Numbers,
        cached_tokens: Numbers | None,
        turns: Turns | None,
    ) -> None:
        # StepTimeModel's numbers: a step is too short a work to look them up.
        self.prompt_seconds = step_times.prompt_token_seconds
        self.context_seconds = step_times.context_token_seconds
        self.pass_seconds = step_times.pass_seconds
        self.expert_seconds = step_times.expert_seconds if step_times.experts is not None else 0.0
        self.skip_probability = (
            step_times.experts.skip_probability if step_times.experts is not None else 1.0
        )
        self.shares_pass = step_times.shares_pass
        # Of a step that decodes so many rows, without their contexts.
        self.decode_seconds = [
            step_times.base_seconds
            + step_times.row_seconds * rows
            + self.expert_seconds * (1.0 - self.skip_probability**rows)
            for rows in range(settings.slots + 1)
        ]
        self.settings = settings
        count = len(due)
        prompts = np.maximum(np.asarray(prompt_tokens), 1).astype(np.int64)
        cached = np.zeros(count) if cached_tokens is None else np.nan_to_num(cached_tokens)
        left = np.maximum(prompts - np.asarray(cached, dtype=np.int64), 1)
        self.due: list[float] = np.asarray(due, dtype=np.float64).tolist()
        # Of one that was preempted, what it has made is part of its prompt.
        self.prompts: list[int] = prompts.tolist()
        self.outputs: list[int] = np.maximum(np.asarray(output_tokens), 1).astype(int).tolist()
        self.left: list[int] = left.tolist()  # prompt tokens still to compute
        self.cached: list[int] = (prompts - left).tolist()
        # Of each prompt token its share of a pass, where whole prompts fit in a step.
        mean = max(float(left.mean()), 1.0) if count else 1.0
        self.piece_seconds = step_times.pass_seconds + self.expert_seconds
        self.token_seconds = step_times.prompt_token_seconds + self.piece_seconds / mean
        self.first = [math.inf] * count
        self.last = [0.0] * count
        self.pool = math.inf if settings.kv_tokens is None else settings.kv_tokens
        self.now = 0.0
        self.step = 0  # decode steps so far
        self.context = 0  # tokens in the KV of the decoding requests
        self.held = 0  # tokens in the KV of all running requests
        self.promised = 0  # ... and those of their prompts that are still to come
        # Heap: (due, request) of those that were never admitted and whose time is known.
        self.coming: list[tuple[float, int]] = [(at, one) for one, at in enumerate(self.due)]
        self.think: list[float | None] = []  # of the request behind each, where it continues it
        self.slots: SimulatedSlots | None = None
        if turns is not None:
            think = turns.think_seconds.tolist()
            is_timed = turns.number == 0 if turns.is_timed is None else turns.is_timed
            timed = is_timed.tolist()
            self.coming = [pair for pair in self.coming if timed[pair[1]]]
            heapq.heapify(self.coming)
            same = (np.diff(turns.session) == 0).tolist()
            self.think = [
                seconds if is_next else None
                for seconds, is_next in zip(think[1:], same, strict=True)
            ] + [None]
            if turns.reuse != "none":
                self.slots = SimulatedSlots(turns, settings.slots)
                for request in turns.ended[-settings.slots :]:
                    tokens = self.prompts[request] + self.outputs[request] - 1
                    if self.slots.idle_tokens + tokens <= self.pool:
                        self.slots.hold(request, tokens)
        self.again: list[int] = []  # preempted, the oldest last: they go first
        self.filling: list[int] = []  # prompts under way, oldest first
        self.end_steps = [0] * count  # decode step of each last token, once it decodes
        self.ends: list[tuple[int, int]] = []  # heap: (decode step of the last token, request)
        self.work = _Work(count)

    def play(self) -> None:
        """All requests to their end."""
        coming, ends, slots = self.coming, self.ends, self.settings.slots
        decode_seconds, token = self.decode_seconds, self.context_seconds
        pool = self.pool
        while True:
            rows = len(ends)
            if self.again or (
                coming and coming[0][0] <= self.now and rows + len(self.filling) < slots
            ):
                self.admit()
            if self.filling:
                self.prefill_step()
            elif rows:
                # Only decode: to the next ending, till the KV pool is full, or until a request
                # comes that could be admitted.
                while self.occupied + len(ends) > pool and (
                    self.drop_oldest() or self.preempt_youngest() is not None
                ):
                    pass
                rows = len(ends)
                steps = ends[0][0] - self.step
                if self.occupied + rows * steps > pool:
                    steps = max(1, int(pool - self.occupied) // rows)
                each = decode_seconds[rows] + token * self.context
                growth = token * rows / 2
                seconds = steps * (each + growth * (steps - 1))
                if (
                    rows < slots
                    and coming
                    and not self.again
                    and self.now < coming[0][0] <= self.now + seconds
                ):
                    steps = _steps_until(coming[0][0] - self.now, each, growth, steps)
                    seconds = steps * (each + growth * (steps - 1))
                self.work.add_decodes(steps, rows, self.context, seconds)
                self.now += seconds
                self.step += steps
                self.leave(-rows * steps)
            elif coming:
                self.now = max(self.now, coming[0][0])
            else:
                return
            while ends and ends[0][0] <= self.step:
                self.end(heapq.heappop(ends)[1])

    def end(self, request: int) -> None:
        """Its last token is there: its slot is idle, and its user reads the answer."""
        tokens = self.prompts[request] + self.outputs[request] - 1
        self.last[request] = self.now
        self.leave(tokens)
        if self.slots is not None:
            self.slots.release(request, tokens, self.now)
        if self.think and (think := self.think[request]) is not None:
            self.due[request + 1] = self.now + think
            heapq.heappush(self.coming, (self.now + think, request + 1))

    @property
    def occupied(self) -> int:
        """Tokens in the KV, those of idle slots included."""
        return self.held if self.slots is None else self.held + self.slots.idle_tokens

    def drop_oldest(self) -> bool:
        """Free the KV of the slot idle for longest; False where no idle slot holds any."""
        return self.slots is not None and self.slots.drop_oldest()

    def leave(self, tokens: int) -> None:
        """So many tokens of decoding requests leave the KV."""
        self.context -= tokens
        self.held -= tokens
        self.promised -= tokens

    def admit(self) -> None:
        """Give waiting requests free slots while the KV pool has room."""
        running = len(self.filling) + len(self.ends)
        while running < self.settings.slots:
            if self.again:
                request = self.again[-1]
            elif self.coming and self.coming[0][0] <= self.now:
                request = self.coming[0][1]
            else:
                return
            prompt = self.prompts[request]
            # The last token of each that decodes is known, but not in the KV yet.
            if running and self.promised + len(self.ends) + prompt + running > self.pool:
                self.work.pool_full.append(self.now)
                return
            if self.again:
                self.again.pop()
            else:
                heapq.heappop(self.coming)
            self.work.admitted[request] = min(self.work.admitted[request], self.now)
            if self.slots is not None:
                reused = self.slots.take(request, prompt, self.computed)
                self.left[request] = prompt - reused
                if self.first[request] == math.inf:
                    self.cached[request] = reused
            self.filling.append(request)
            self.held += prompt - self.left[request]
            self.promised += prompt
            running += 1

    def computed(self, request: int) -> int:
        """Tokens in the KV of a running request."""
        if left := self.left[request]:
            return self.prompts[request] - left
        made = self.outputs[request] - 1 - (self.end_steps[request] - self.step)
        return self.prompts[request] + made

    def prefill_step(self) -> None:
        """One step: a token of each decoding request, then prompt tokens within the budget."""
        left = [self.left[request] for request in self.filling]
        slots = self.slots
        if slots is not None and slots.is_checkpointed:
            pairs = zip(self.filling, left, strict=True)
            left = [min(one, slots.until_mark(each, self.computed(each))) for each, one in pairs]
        planned = plan_step(left, len(self.ends), self.settings, self)
        pieces, taken = list(zip(self.filling, planned, strict=False)), sum(planned)
        while self.occupied + len(self.ends) + taken > self.pool:
            if self.drop_oldest():
                continue
            youngest = self.preempt_youngest()
            if youngest is None:
                break
            pieces = [one for one in pieces if one[0] != youngest]
            taken = sum(piece for _, piece in pieces)
        rows = len(self.ends)
        passes = len(pieces) + (rows > 0)
        began = self.now
        self.now += (
            self.decode_seconds[rows]
            + self.prompt_seconds * taken
            + self.context_seconds * self.context
            + self.pass_seconds * (passes - 1.0)
        )
        if self.expert_seconds:
            self.now += self.expert_seconds * self.prompt_expert_passes(pieces, rows)
        self.work.add_prefill(rows, taken, self.context, passes, self.now - began)
        self.step += rows > 0
        self.context += rows
        self.promised += rows
        self.held += rows + taken
        for request, piece in pieces:
            self.left[request] -= piece
            if slots is not None and slots.is_checkpointed:
                slots.save(request, self.prompts[request] - self.left[request])
            if not self.left[request]:
                self.filling.remove(request)
                self.first[request] = min(self.first[request], self.now)
                self.context += self.prompts[request]
                self.end_steps[request] = self.step + self.outputs[request] - 1
                heapq.heappush(self.ends, (self.end_steps[request], request))

    def prompt_expert_passes(self, pieces: Sequence[tuple[int, int]], rows: int) -> float:
        """Of the passes of these pieces of prompts the shares of the experts that they read, beside
        what the decode rows read."""
        skip = self.skip_probability
        if self.shares_pass:
            tokens = sum(piece for _, piece in pieces)
            return skip**rows - float(skip ** (rows + tokens))
        return sum(1.0 - skip**piece for _, piece in pieces)

    # What steps cost, for plan_step.

    def row_costs(self, rows: int) -> tuple[float, float]:
        slots, held = self.settings.slots, self.context_seconds * self.context
        return self.decode_seconds[rows] + held, (self.decode_seconds[slots] + held) / slots

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Be they whole prompts, each with its pass, or, where these are longer, a piece of one:
        what the scheduler learns of passes is taken for learnt."""
        if self.prompt_seconds <= 0:
            return None
        piece = (seconds - self.piece_seconds) / self.prompt_seconds
        return int(min(seconds / self.token_seconds, piece))

    def preempt_youngest(self) -> int | None:
        """The youngest of several that run goes back to the queue; None: one alone stays."""
        if len(self.filling) + len(self.ends) < 2:
            return None
        running = (*self.filling, *(each for _, each in self.ends))
        request = max(running, key=lambda each: (self.due[each], each))
        prompt = self.prompts[request]
        if request in self.filling:
            self.filling.remove(request)
            self.promised -= prompt
            self.held -= prompt - self.left[request]
        else:
            end = next(end for end, each in self.ends if each == request)
            self.ends.remove((end, request))
            heapq.heapify(self.ends)
            made = self.outputs[request] - (end - self.step)
            self.leave(prompt + made - 1)
            self.prompts[request] += made
            self.outputs[request] -= made
        self.left[request] = self.prompts[request]
        self.work.preempted[request] = True
        if self.slots is not None:
            self.slots.release(request, 0, self.now)
        self.again.append(request)
        return request


def _steps_until(seconds: float, each: float, growth: float, most: int) -> int:
    """The fewest decode steps, 1 to `most`, that last as long as `seconds`.

    n steps last n (each + growth (n - 1)).
    """
    first = each - growth
    if growth > 0:
        steps = (math.sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth)
    else:
        steps = seconds / each if each > 0 else most
    return min(max(1, math.ceil(steps)), most)


class _Kept(NamedTuple):
    """What the KV of a slot, or a checkpoint, begins with: so many tokens of a turn."""

    request: int  # -1: nothing
    tokens: int


_NOTHING = _Kept(-1, 0)


class SimulatedSlots:
    """The slots of the engine, and whose tokens each of them holds.

    Tokens are not played, only how many of them two turns have in common: of one session what the
    earlier one left, of two sessions the beginning that all share.
    """

    def __init__(self, turns: Turns, slots: int) -> None:
        self._session: list[int] = turns.session.tolist()
        self._history: list[int] = turns.history_tokens.tolist()
        self._shared = turns.shared_tokens
        self.is_checkpointed = turns.reuse == "checkpoints"
        self._kept = [_NOTHING] * slots  # of idle slots
        self._held = [0] * slots  # tokens of `_kept`
        self._free = list(range(slots))  # idle ones, ascending
        self._owner = [-1] * slots  # the request whose tokens a slot holds, idle or running
        self._shared_in_slots = [0] * slots
        # Of the running ones, whose KV has not all that sessions share, since it is computed anew.
        self._without_shared: set[int] = set()
        self._slots_of_session: dict[int, set[int]] = {}
        self._idle_since = [0.0] * slots
        self._running: dict[int, int] = {}  # slot -> request
        self._slot_of: dict[int, int] = {}
        self._checkpoints: list[_Kept] = []  # the last used one last
        self._marks: dict[int, tuple[int, ...]] = {}  # of each prompt under way
        self.idle_tokens = 0

    def hold(self, request: int, tokens: int) -> None:
        """Let an empty slot hold so many tokens of a turn that ended before the start."""
        slot = self._kept.index(_NOTHING)
        self._put(slot, request, tokens, min(self._shared, tokens))
        self._idle_since[slot] = slot - float(len(self._kept))

    def take(self, request: int, prompt_tokens: int, computed: Callable[[int], int]) -> int:
        """Give a request a slot; the tokens of its prompt that need not be computed again."""
        wanted = max(0, prompt_tokens - COMPUTED_TAIL)
        common = self._common_in_slots(request, wanted, computed)
        held, free = self._held, self._free
        if not self.is_checkpointed:
            slot, reused, _ = choose_slot(common, held, free, self._idle_since)
        else:
            checkpoint = self._longest_checkpoint(request, wanted, max(common))
            (slot, reused, _), is_restored, marks = choose_checkpointed_slot(
                common,
                held,
                free,
                self._idle_since,
                prompt_tokens=prompt_tokens,
                checkpoint_tokens=checkpoint.tokens,
            )
            if is_restored:
                self._checkpoints.remove(checkpoint)
                self._checkpoints.append(checkpoint)
            self._marks[request] = marks
        self._put(slot, request, 0, self._shared)
        self._running[slot] = request
        self._free.remove(slot)
        if reused < self._shared:
            self._without_shared.add(request)
        self._slot_of[request] = slot
        return reused

    def until_mark(self, request: int, computed: int) -> int:
        """Tokens of a prompt up to its next checkpoint, or very many."""
        marks = (mark - computed for mark in self._marks[request] if mark > computed)
        return next(marks, sys.maxsize)

    def save(self, request: int, computed: int) -> None:
        """Make a checkpoint where the prompt has one after so many tokens."""
        if computed not in self._marks[request]:
            return
        if not any(self._is_same(request, one, computed) for one in self._checkpoints):
            self._checkpoints.append(_Kept(request, computed))
            del self._checkpoints[: -max_checkpoints(len(self._kept))]

    def release(self, request: int, tokens: int, now: float) -> None:
        """Make its slot idle, with so many tokens in its KV."""
        slot = self._slot_of.pop(request)
        del self._running[slot]
        bisect.insort(self._free, slot)
        self._without_shared.discard(request)
        self._marks.pop(request, None)
        self._put(slot, request if tokens else -1, tokens, min(self._shared, tokens))
        if tokens:
            self._idle_since[slot] = now

    def drop_oldest(self) -> bool:
        """Free the KV of the slot idle for longest; False where no idle slot holds any."""
        held = [slot for slot, kept in enumerate(self._kept) if kept.tokens]
        if not held:
            return False
        oldest = min(held, key=lambda slot: self._idle_since[slot])
        self._put(oldest, -1, 0, 0)
        return True

    def common(self, request: int, kept: _Kept, wanted: int) -> int:
        """How many of the first `wanted` tokens of a request's prompt are those that are kept."""
        other, tokens = kept
        if other < 0 or not tokens:
            return 0
        if self._session[other] != self._session[request]:
            return min(self._shared, tokens, wanted)
        # Its own session: each turn in between may have left out the oldest turns.
        low, high = sorted((other, request))
        return min(tokens, wanted, *self._history[low + 1 : high + 1])

    def _common_in_slots(
        self, request: int, wanted: int, computed: Callable[[int], int]
    ) -> list[int]:
        """By slot, how many of the wanted tokens its KV begins with."""
        found = self._shared_in_slots.copy()
        if wanted < self._shared:
            found = [min(tokens, wanted) for tokens in found]
        for other in list(self._without_shared):
            tokens = computed(other)
            if tokens >= self._shared:
                self._without_shared.remove(other)
            found[self._slot_of[other]] = self.common(request, _Kept(other, tokens), wanted)
        for slot in self._slots_of_session.get(self._session[request], ()):
            kept = self._kept[slot]
            if slot in self._running:
                kept = _Kept(self._running[slot], computed(self._running[slot]))
            found[slot] = self.common(request, kept, wanted)
        return found

    def _put(self, slot: int, request: int, tokens: int, shared: int) -> None:
        """Note what a slot holds: so many idle tokens of a request (-1: of none), of which so many
        are shared by all sessions."""
        before = self._owner[slot]
        if before >= 0:
            self._slots_of_session[self._session[before]].discard(slot)
        if request >= 0:
            self._slots_of_session.setdefault(self._session[request], set()).add(slot)
        self._owner[slot] = request
        self.idle_tokens += tokens - self._held[slot]
        self._held[slot] = tokens
        self._kept[slot] = _Kept(request, tokens) if tokens else _NOTHING
        self._shared_in_slots[slot] = shared

    def _is_same(self, request: int, other: _Kept, tokens: int) -> bool:
        """Whether a checkpoint holds the first tokens of a request's prompt, as many as these."""
        return other.tokens == tokens == self.common(request, other, tokens)

    def _longest_checkpoint(self, request: int, wanted: int, most: int) -> _Kept:
        """The longest one that the prompt begins with, of at most as many tokens as some slot
        holds."""
        fitting = [
            one
            for one in self._checkpoints
            if one.tokens <= most and self.common(request, one, wanted) == one.tokens
        ]
        return max(fitting, key=lambda one: one.tokens, default=_NOTHING)
