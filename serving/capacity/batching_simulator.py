"""Simulation of continuous batching: TTFT and TPOT of each request on a simulated server.

    simulated = simulate(step_times, SchedulerSettings(slots=8), due, prompt_tokens, output_tokens)
    simulated.good(ttft_seconds=2.0, tpot_seconds=0.2).mean()     # SLO attainment

The settings are the scheduler's (serving/engine/scheduler.py), and so is the rule of a step
(serving/capacity/plan_step.py): it decodes one token of every sequence past its prompt, then
takes prompt tokens, oldest first, up to a budget. Requests are admitted in order of arrival to a
free slot while the KV pool has room for their prompts beside the prompts of all running requests.
When answers outgrow the pool, the youngest request returns to the queue, and all its tokens are
computed again later. What a request spends outside of steps is added to its TTFT; time between
steps is not simulated.

Requests may be the turns of conversations (`Turns`): a turn then comes when its user has read the
answer before it and thought. Where the engine reuses prefixes, the slots keep what they hold, and
each prompt gets the slot that the engine's own rule gives it (serving/capacity/choose_slot.py).

The simulation advances from event to event, not from token to token: steps that only decode are
summed in closed form up to the next arrival or the next request's end.
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
# Which prefixes an engine reuses: any common prefix; only those that end at a checkpoint, where its
# KV cannot be truncated (a recurrent state, sliding-window attention); none.
Reuse = Literal["any prefix", "checkpoints", "none"]
Numbers = Sequence[float] | npt.NDArray[np.float64] | npt.NDArray[np.int64]


class Turns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The conversations that n requests are the turns of. Arrays have the shape [n] and are ordered
    by session, then by turn."""

    session: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]  # 0.. within the session
    think_seconds: Array  # from the end of the previous answer to this turn
    # Tokens at the start of the prompt that the previous turn left in the KV of its slot; 0 for a
    # first turn.
    history_tokens: npt.NDArray[np.int64]
    shared_tokens: int = 0  # at the start of every prompt, the same in all sessions
    reuse: Reuse = "any prefix"
    # Turns whose due times are given; the others follow from think times. None: the first turns.
    # Differs from that if a session is under way at the start.
    is_timed: npt.NDArray[np.bool_] | None = None
    # Turns that ended before the start, in the order of their ends: slots still hold their KV.
    ended: tuple[int, ...] = ()


class Simulated(msgspec.Struct, frozen=True, eq=False):
    """The simulated requests: one row for each, in the order they were given. Times are seconds,
    as float64 of the shape [n]."""

    due: Array
    ttft: Array
    tpot: Array  # NaN for an answer of one token
    e2e: Array
    cached: Array  # prompt tokens that were reused from the KV cache
    # The part of the time between first and last token that is spent on reasoning.
    reasoning_share: float = 0.0
    # Which requests had to wait for a slot, and which had to wait for room in the KV cache or were
    # preempted. None for single-stream requests, whose times are computed in closed form.
    waited_for_slot: npt.NDArray[np.bool_] | None = None
    waited_for_kv: npt.NDArray[np.bool_] | None = None
    work: StepObservation | None = None  # the sums over all steps

    @property
    def ttfa(self) -> Array:
        """Return the time to the first answer token, which comes after all reasoning."""
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
        """Return which requests kept all limits. None: no limit of that kind."""
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
        """Return which requests meet the SLO."""
        return self.good(
            slo.ttft_seconds,
            slo.tpot_seconds,
            ttfa_seconds=slo.ttfa_seconds,
            e2e_seconds=slo.e2e_seconds,
        )

    def of(self, mask: npt.NDArray[np.bool_]) -> Simulated:
        """Return the requests that `mask` selects; `work` stays that of all requests."""
        slot, kv = self.waited_for_slot, self.waited_for_kv
        return Simulated(
            due=self.due[mask],
            ttft=self.ttft[mask],
            tpot=self.tpot[mask],
            e2e=self.e2e[mask],
            cached=self.cached[mask],
            reasoning_share=self.reasoning_share,
            waited_for_slot=None if slot is None else slot[mask],
            waited_for_kv=None if kv is None else kv[mask],
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
    """Simulate requests that are due at these times (seconds, ascending) to their ends.

    `prompt_tokens`, `output_tokens`: [n]. `cached_tokens`: prompt tokens that are not computed
    again; at least one token of each prompt is computed. `turns`: the conversations that the
    requests belong to. With them, only the due times of first turns are read, which must ascend
    from session to session, and the reuse of prefixes is simulated.
    """
    engine = _Engine(step_times, settings, due, prompt_tokens, output_tokens, cached_tokens, turns)
    engine.play()
    times = np.array(engine.due)
    first = np.array(engine.first)
    last = np.array(engine.last)
    was_simulated = np.isfinite(first)  # turns that ended before the start were not
    last = np.where(was_simulated, last, np.inf)
    decode_seconds = np.where(was_simulated, last, 0.0) - np.where(was_simulated, first, 0.0)
    later_tokens = np.maximum(np.asarray(output_tokens, dtype=np.float64), 1.0) - 1.0
    has_tpot = later_tokens > 0
    nan = np.full(len(times), np.nan)
    tpot = np.divide(decode_seconds, later_tokens, out=nan, where=has_tpot)
    outside_seconds = step_times.request_seconds or 0.0
    return Simulated(
        due=times,
        ttft=first - times + outside_seconds,
        tpot=tpot,
        e2e=last - times + outside_seconds,
        cached=np.array(engine.cached, dtype=np.float64),
        waited_for_slot=engine.work.waited_for_slot(times, last, settings.slots),
        waited_for_kv=engine.work.waited_for_kv(times),
        work=engine.work.summed(),
    )


class _Work:
    """The sums over all steps of the engine, and what requests had to wait for."""

    def __init__(self, count: int) -> None:
        self.admitted = [math.inf] * count
        self.preempted = np.zeros(count, dtype=bool)
        self.pool_full: list[float] = []  # moments at which a request found no room in the pool
        self._seconds = self._rows = self._prompt = self._context = self._passes = 0.0
        self._steps = 0

    def add_decodes(self, steps: int, rows: int, context: int, seconds: float) -> None:
        """Add consecutive steps that only decode. `context`: KV tokens read by the first one."""
        self._steps += steps
        self._passes += steps
        self._rows += steps * rows
        self._context += steps * context + rows * steps * (steps - 1) / 2
        self._seconds += seconds

    def add_prefill(
        self, rows: int, prompt_tokens: int, context: int, passes: int, seconds: float
    ) -> None:
        """Add one step that processes prompt tokens."""
        self._steps += 1
        self._passes += passes
        self._rows += rows
        self._prompt += prompt_tokens
        self._context += context
        self._seconds += seconds

    def waited_for_slot(self, due: Array, last: Array, slots: int) -> npt.NDArray[np.bool_]:
        """Return which requests arrived while all slots were in use."""
        admitted = np.sort(np.array(self.admitted))
        running = np.searchsorted(admitted, due, "right") - np.searchsorted(
            np.sort(last), due, "right"
        )
        waits: npt.NDArray[np.bool_] = running >= slots
        return waits

    def waited_for_kv(self, due: Array) -> npt.NDArray[np.bool_]:
        """Return which requests waited while the KV pool was full, or were preempted."""
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
    """The engine on a simulated clock. A request is its index in the order they were given."""

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
        # Coefficients of the StepTimeModel, copied because looking them up takes too long per step.
        self.prompt_seconds = step_times.prompt_token_seconds
        self.context_seconds = step_times.context_token_seconds
        self.pass_seconds = step_times.pass_seconds
        self.expert_seconds = step_times.expert_seconds if step_times.experts is not None else 0.0
        self.skip_probability = (
            step_times.experts.skip_probability if step_times.experts is not None else 1.0
        )
        self.shares_pass = step_times.shares_pass
        # Seconds of a step by the number of rows that it decodes, without reading their contexts.
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
        uncached = np.maximum(prompts - np.asarray(cached, dtype=np.int64), 1)
        self.due: list[float] = np.asarray(due, dtype=np.float64).tolist()
        # After a preemption, the tokens generated so far are part of the request's prompt.
        self.prompts: list[int] = prompts.tolist()
        self.outputs: list[int] = np.maximum(np.asarray(output_tokens), 1).astype(int).tolist()
        self.left: list[int] = uncached.tolist()  # prompt tokens still to compute
        self.cached: list[int] = (prompts - uncached).tolist()
        # Seconds of a prompt token with its share of a pass, if whole prompts fit in a step.
        mean = max(float(uncached.mean()), 1.0) if count else 1.0
        self.piece_seconds = step_times.pass_seconds + self.expert_seconds
        self.token_seconds = step_times.prompt_token_seconds + self.piece_seconds / mean
        self.first = [math.inf] * count
        self.last = [0.0] * count
        self.pool = math.inf if settings.kv_tokens is None else settings.kv_tokens
        self.now = 0.0
        self.step = 0  # decode steps so far
        self.context = 0  # tokens in the KV of the decoding requests
        self.held = 0  # tokens in the KV of all running requests
        self.promised = 0  # the same, plus the prompt tokens that they have still to compute
        # Heap of (due time, request): those whose due time is known and that were never admitted.
        self.coming: list[tuple[float, int]] = [
            (at, request) for request, at in enumerate(self.due)
        ]
        # Think time before the next request, if that is the next turn of the same session.
        self.think: list[float | None] = []
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
        self.preempted: list[int] = []  # the oldest last; they are admitted before all others
        self.filling: list[int] = []  # requests whose prompts are being computed, oldest first
        self.end_steps = [0] * count  # decode step of the last token, of requests that decode
        # Heap of (decode step of the last token, request): the requests that decode.
        self.ends: list[tuple[int, int]] = []
        self.work = _Work(count)

    def play(self) -> None:
        """Run the engine until all requests have ended. Each turn of the loop is one step with
        prompts, or as many decode steps as pass until something else can happen."""
        coming, ends, slots = self.coming, self.ends, self.settings.slots
        decode_seconds, context_seconds = self.decode_seconds, self.context_seconds
        pool = self.pool
        while True:
            rows = len(ends)
            if self.preempted or (
                coming and coming[0][0] <= self.now and rows + len(self.filling) < slots
            ):
                self.admit()
            if self.filling:
                self.prefill_step()
            elif rows:
                # Decode until the next request ends, the KV pool is full, or a request arrives that
                # could be admitted. Step k of these lasts first_seconds + 2 * growth * k, because
                # each step adds a token to the context of each row.
                while self.occupied + len(ends) > pool and (
                    self.drop_oldest() or self.preempt_youngest() is not None
                ):
                    pass
                rows = len(ends)
                steps = ends[0][0] - self.step
                if self.occupied + rows * steps > pool:
                    steps = max(1, int(pool - self.occupied) // rows)
                first_seconds = decode_seconds[rows] + context_seconds * self.context
                growth = context_seconds * rows / 2
                seconds = steps * (first_seconds + growth * (steps - 1))
                if (
                    rows < slots
                    and coming
                    and not self.preempted
                    and self.now < coming[0][0] <= self.now + seconds
                ):
                    steps = _steps_until(coming[0][0] - self.now, first_seconds, growth, steps)
                    seconds = steps * (first_seconds + growth * (steps - 1))
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
        """End a request after its last token: its slot becomes idle, and its user's think time
        begins."""
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
        """Return the tokens in the KV, including those of idle slots."""
        return self.held if self.slots is None else self.held + self.slots.idle_tokens

    def drop_oldest(self) -> bool:
        """Free the KV of the longest idle slot; return False if all idle slots are empty."""
        return self.slots is not None and self.slots.drop_oldest()

    def leave(self, tokens: int) -> None:
        """Remove tokens of decoding requests from the KV; a negative number adds them."""
        self.context -= tokens
        self.held -= tokens
        self.promised -= tokens

    def admit(self) -> None:
        """Give waiting requests free slots while the KV pool has room."""
        running = len(self.filling) + len(self.ends)
        while running < self.settings.slots:
            if self.preempted:
                request = self.preempted[-1]
            elif self.coming and self.coming[0][0] <= self.now:
                request = self.coming[0][1]
            else:
                return
            prompt = self.prompts[request]
            # One more token for each row: it is generated, but not in the KV yet.
            if running and self.promised + len(self.ends) + prompt + running > self.pool:
                self.work.pool_full.append(self.now)
                return
            if self.preempted:
                self.preempted.pop()
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
        """Return the tokens in the KV of a running request."""
        if left := self.left[request]:
            return self.prompts[request] - left
        generated = self.outputs[request] - 1 - (self.end_steps[request] - self.step)
        return self.prompts[request] + generated

    def prefill_step(self) -> None:
        """Run one step: a token of each decoding request, and prompt tokens within the budget."""
        pending = [self.left[request] for request in self.filling]
        slots = self.slots
        if slots is not None and slots.is_checkpointed:
            pairs = zip(self.filling, pending, strict=True)
            pending = [
                min(tokens, slots.until_mark(request, self.computed(request)))
                for request, tokens in pairs
            ]
        piece_tokens = plan_step(pending, len(self.ends), self.settings, self)
        pieces = list(zip(self.filling, piece_tokens, strict=False))  # (request, prompt tokens)
        prompt_tokens = sum(piece_tokens)
        while self.occupied + len(self.ends) + prompt_tokens > self.pool:
            if self.drop_oldest():
                continue
            youngest = self.preempt_youngest()
            if youngest is None:
                break
            pieces = [pair for pair in pieces if pair[0] != youngest]
            prompt_tokens = sum(piece for _, piece in pieces)
        rows = len(self.ends)
        passes = len(pieces) + (rows > 0)
        began = self.now
        self.now += (
            self.decode_seconds[rows]
            + self.prompt_seconds * prompt_tokens
            + self.context_seconds * self.context
            + self.pass_seconds * (passes - 1.0)
        )
        if self.expert_seconds:
            self.now += self.expert_seconds * self.prompt_expert_passes(pieces, rows)
        self.work.add_prefill(rows, prompt_tokens, self.context, passes, self.now - began)
        self.step += rows > 0
        self.context += rows
        self.promised += rows
        self.held += rows + prompt_tokens
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
        """Return the shares of all experts that these pieces of prompts read, summed over their
        passes, beyond what the decode rows read."""
        skip = self.skip_probability
        if self.shares_pass:
            tokens = sum(piece for _, piece in pieces)
            return skip**rows - float(skip ** (rows + tokens))
        return sum(1.0 - skip**piece for _, piece in pieces)

    # The costs of steps, as plan_step asks for them (StepCosts).

    def row_costs(self, rows: int) -> tuple[float, float]:
        slots, context_seconds = self.settings.slots, self.context_seconds * self.context
        full_step_seconds = self.decode_seconds[slots] + context_seconds
        return self.decode_seconds[rows] + context_seconds, full_step_seconds / slots

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Return the prompt tokens that take this long: as whole prompts of the mean length, each
        with its pass, or as one piece of a longer prompt, whichever is fewer. The scheduler learns
        the cost of passes from its steps; here it is known."""
        if self.prompt_seconds <= 0:
            return None
        piece = (seconds - self.piece_seconds) / self.prompt_seconds
        return int(min(seconds / self.token_seconds, piece))

    def preempt_youngest(self) -> int | None:
        """Return the youngest running request, which goes back to the queue; None if only one
        runs, which is never preempted."""
        if len(self.filling) + len(self.ends) < 2:
            return None
        running = (*self.filling, *(other for _, other in self.ends))
        request = max(running, key=lambda other: (self.due[other], other))
        prompt = self.prompts[request]
        if request in self.filling:
            self.filling.remove(request)
            self.promised -= prompt
            self.held -= prompt - self.left[request]
        else:
            end = next(end for end, other in self.ends if other == request)
            self.ends.remove((end, request))
            heapq.heapify(self.ends)
            generated = self.outputs[request] - (end - self.step)
            self.leave(prompt + generated - 1)
            self.prompts[request] += generated
            self.outputs[request] -= generated
        self.left[request] = self.prompts[request]
        self.work.preempted[request] = True
        if self.slots is not None:
            self.slots.release(request, 0, self.now)
        self.preempted.append(request)
        return request


def _steps_until(seconds: float, first_seconds: float, growth: float, max_steps: int) -> int:
    """Return the smallest number of decode steps, 1 to `max_steps`, that last `seconds` or longer.

    n steps last n * (first_seconds + growth * (n - 1)).
    """
    if growth > 0:  # solve growth * n**2 + linear * n = seconds
        linear = first_seconds - growth
        steps = (math.sqrt(linear * linear + 4 * growth * seconds) - linear) / (2 * growth)
    else:
        steps = seconds / first_seconds if first_seconds > 0 else max_steps
    return min(max(1, math.ceil(steps)), max_steps)


class _Kept(NamedTuple):
    """The KV of a slot or a checkpoint: the first `tokens` tokens of a turn."""

    request: int  # -1: none
    tokens: int


_NOTHING = _Kept(-1, 0)


class SimulatedSlots:
    """The slots of the engine, and whose tokens each of them holds.

    Token ids are not simulated, only how many leading tokens two turns have in common: turns of one
    session share what the earlier one left in its slot, turns of two sessions share only the prefix
    that all sessions have.
    """

    def __init__(self, turns: Turns, slots: int) -> None:
        self._session: list[int] = turns.session.tolist()
        self._history: list[int] = turns.history_tokens.tolist()
        self._shared = turns.shared_tokens
        self.is_checkpointed = turns.reuse == "checkpoints"
        self._kept = [_NOTHING] * slots  # the KV of idle slots
        self._held = [0] * slots  # the tokens of each entry of `_kept`
        self._free = list(range(slots))  # idle slots, ascending
        self._owner = [-1] * slots  # the request whose tokens a slot holds, idle or running
        self._shared_in_slots = [0] * slots  # tokens of the prefix that all sessions share
        # Running requests that still compute that prefix, so that their slots have only part of it.
        self._without_shared: set[int] = set()
        self._slots_of_session: dict[int, set[int]] = {}
        self._idle_since = [0.0] * slots
        self._running: dict[int, int] = {}  # slot -> request
        self._slot_of: dict[int, int] = {}  # request -> slot
        self._checkpoints: list[_Kept] = []  # the most recently used last
        # Request -> the lengths of its prompt at which checkpoints are made.
        self._marks: dict[int, tuple[int, ...]] = {}
        self.idle_tokens = 0

    def hold(self, request: int, tokens: int) -> None:
        """Fill an empty slot with the tokens of a turn that ended before the start."""
        slot = self._kept.index(_NOTHING)
        self._put(slot, request, tokens, min(self._shared, tokens))
        self._idle_since[slot] = slot - float(len(self._kept))

    def take(self, request: int, prompt_tokens: int, computed: Callable[[int], int]) -> int:
        """Give a request a slot; return the tokens of its prompt that are reused.

        `computed`: returns the tokens in the KV of a running request.
        """
        reusable_tokens = max(0, prompt_tokens - COMPUTED_TAIL)
        common = self._common_in_slots(request, reusable_tokens, computed)
        held_tokens, free = self._held, self._free
        if not self.is_checkpointed:
            slot, reused, _ = choose_slot(common, held_tokens, free, self._idle_since)
        else:
            checkpoint = self._longest_checkpoint(request, reusable_tokens, max(common))
            (slot, reused, _), is_restored, marks = choose_checkpointed_slot(
                common,
                held_tokens,
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
        """Return the prompt tokens up to its next checkpoint; sys.maxsize if there is none."""
        marks = (mark - computed for mark in self._marks[request] if mark > computed)
        return next(marks, sys.maxsize)

    def save(self, request: int, computed: int) -> None:
        """Make a checkpoint if the prompt is to have one after `computed` tokens."""
        if computed not in self._marks[request]:
            return
        if not any(
            self._is_same(request, checkpoint, computed) for checkpoint in self._checkpoints
        ):
            self._checkpoints.append(_Kept(request, computed))
            del self._checkpoints[: -max_checkpoints(len(self._kept))]

    def release(self, request: int, tokens: int, now: float) -> None:
        """Make the request's slot idle, with `tokens` tokens in its KV."""
        slot = self._slot_of.pop(request)
        del self._running[slot]
        bisect.insort(self._free, slot)
        self._without_shared.discard(request)
        self._marks.pop(request, None)
        self._put(slot, request if tokens else -1, tokens, min(self._shared, tokens))
        if tokens:
            self._idle_since[slot] = now

    def drop_oldest(self) -> bool:
        """Free the KV of the longest idle slot; return False if all idle slots are empty."""
        non_empty = [slot for slot, kept in enumerate(self._kept) if kept.tokens]
        if not non_empty:
            return False
        oldest = min(non_empty, key=lambda slot: self._idle_since[slot])
        self._put(oldest, -1, 0, 0)
        return True

    def common(self, request: int, entry: _Kept, reusable_tokens: int) -> int:
        """Return how many of the first `reusable_tokens` tokens of a request's prompt `entry`
        has."""
        other, tokens = entry
        if other < 0 or not tokens:
            return 0
        if self._session[other] != self._session[request]:
            return min(self._shared, tokens, reusable_tokens)
        # The same session. Each turn in between may have dropped the oldest turns of the history.
        low, high = sorted((other, request))
        return min(tokens, reusable_tokens, *self._history[low + 1 : high + 1])

    def _common_in_slots(
        self, request: int, reusable_tokens: int, computed: Callable[[int], int]
    ) -> list[int]:
        """Return, by slot, how many of the request's first `reusable_tokens` tokens its KV has."""
        common = self._shared_in_slots.copy()
        if reusable_tokens < self._shared:
            common = [min(tokens, reusable_tokens) for tokens in common]
        for other in list(self._without_shared):
            tokens = computed(other)
            if tokens >= self._shared:
                self._without_shared.remove(other)
            common[self._slot_of[other]] = self.common(
                request, _Kept(other, tokens), reusable_tokens
            )
        for slot in self._slots_of_session.get(self._session[request], ()):
            entry = self._kept[slot]
            if slot in self._running:
                entry = _Kept(self._running[slot], computed(self._running[slot]))
            common[slot] = self.common(request, entry, reusable_tokens)
        return common

    def _put(self, slot: int, request: int, tokens: int, shared: int) -> None:
        """Record what a slot holds: `tokens` idle tokens of a request (-1: none), of which `shared`
        belong to the prefix of all sessions."""
        previous_owner = self._owner[slot]
        if previous_owner >= 0:
            self._slots_of_session[self._session[previous_owner]].discard(slot)
        if request >= 0:
            self._slots_of_session.setdefault(self._session[request], set()).add(slot)
        self._owner[slot] = request
        self.idle_tokens += tokens - self._held[slot]
        self._held[slot] = tokens
        self._kept[slot] = _Kept(request, tokens) if tokens else _NOTHING
        self._shared_in_slots[slot] = shared

    def _is_same(self, request: int, other: _Kept, tokens: int) -> bool:
        """Return whether a checkpoint holds exactly the first `tokens` tokens of a prompt."""
        return other.tokens == tokens == self.common(request, other, tokens)

    def _longest_checkpoint(self, request: int, reusable_tokens: int, max_tokens: int) -> _Kept:
        """Return the longest checkpoint that the prompt begins with, of at most `max_tokens`, the
        most that some slot holds of the prompt."""
        fitting = [
            checkpoint
            for checkpoint in self._checkpoints
            if checkpoint.tokens <= max_tokens
            and self.common(request, checkpoint, reusable_tokens) == checkpoint.tokens
        ]
        return max(fitting, key=lambda checkpoint: checkpoint.tokens, default=_NOTHING)
