"""Simulation of continuous batching and prefix reuse: TTFT and TPOT of each simulated request.

    simulated = simulate(step_times, SchedulerSettings(slots=8), due, prompt_tokens, output_tokens)
    slo.met_by(simulated).mean()     # SLO attainment

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
An engine with a prompt cache stores and restores sequences by the same rule; each copy holds up the
engine's next step.

Several engines may serve from one queue (`settings.engines`): `SharedQueue` gives each request to
the engine with the most free slots, or the next turn of a conversation to the engine that served
the one before it if that has a free slot. This is the rule of serving/supervisor.

The simulation advances from event to event, not from token to token: steps that only decode are
summed in closed form up to the next arrival or the next request's end.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.capacity.choose_slot import (
    COMPUTED_TAIL,
    StoredMatch,
    checkpoint_marks,
    checkpointed_tokens,
    choose_checkpointed_slot,
    choose_slot,
    is_worth_storing,
    max_checkpoints,
    oldest_slot,
)
from crossover.serving.capacity.plan_step import plan_step
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.step_time_model import StepObservation, StepTimeModel, pairs_of
from crossover.serving.capacity.stored_sequences import StoredSequences

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
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
    # Tokens at the start of the prompt that the previous turn left in the KV of its slot. For a
    # first turn, and for one whose oldest turns were left out: those that all sessions share.
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

    @property
    def ttfa(self) -> Array:
        """Return the time to the first answer token, which comes after all reasoning."""
        if not self.reasoning_share:
            return self.ttft
        times: Array = self.ttft + self.reasoning_share * (self.e2e - self.ttft)
        return times

    def of(self, mask: Flags) -> Self:
        """Return the requests that `mask`, [n], selects."""
        columns = msgspec.structs.asdict(self)
        selected = {name: c[mask] for name, c in columns.items() if isinstance(c, np.ndarray)}
        return msgspec.structs.replace(self, **selected)


class SimulatedLoad(Simulated, frozen=True, eq=False, kw_only=True):
    """Simulated requests of one load, and what each of them had to wait for."""

    waited_for_slot: Flags
    waited_for_kv: Flags  # for room in the KV cache, or it was preempted
    work: StepObservation  # the sums over all steps, of all requests that were played


def simulate(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    due: Numbers,
    prompt_tokens: Numbers,
    output_tokens: Numbers,
    cached_tokens: Numbers | None = None,
    *,
    turns: Turns | None = None,
) -> SimulatedLoad:
    """Simulate requests that are due at these times (seconds, ascending) to their ends.

    `prompt_tokens`, `output_tokens`: [n]. `cached_tokens`: prompt tokens that are not computed
    again; at least one token of each prompt is computed. `turns`: the conversations that the
    requests belong to. With them, only the due times of first turns are read, which must ascend
    from session to session, and the reuse of prefixes is simulated.
    """
    simulation = simulation_of(
        step_times, settings, due, prompt_tokens, output_tokens, cached_tokens, turns=turns
    )
    simulation.play()
    return simulation.results()


def simulation_of(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    due: Numbers,
    prompt_tokens: Numbers,
    output_tokens: Numbers,
    cached_tokens: Numbers | None = None,
    *,
    turns: Turns | None = None,
    reasoning_share: float = 0.0,
) -> Simulation | SharedQueue:
    """Return the simulation of the engines of these settings, of which nothing is played yet. The
    arguments are those of `Simulation`."""
    simulation = Simulation(
        step_times,
        settings,
        due,
        prompt_tokens,
        output_tokens,
        cached_tokens,
        turns=turns,
        reasoning_share=reasoning_share,
    )
    return simulation if settings.engines == 1 else SharedQueue(simulation, turns)


class _Work:
    """The sums over all steps of the engine, and what requests had to wait for."""

    def __init__(self, count: int) -> None:
        self.admitted_at = [math.inf] * count  # when each request first got a slot
        self.is_preempted = np.zeros(count, dtype=bool)
        self.pool_full_at: list[float] = []  # when a request found no room in the pool
        self.seconds = 0.0
        self.steps = 0
        self.rows = 0
        self.prompt_tokens = 0
        self.context_tokens = 0
        self.extra_passes = 0  # those after the first of each step
        self.token_pairs = 0.0  # counted where attention has a term of its own

    def waited_for_slot(self, due: Array, last_token_at: Array, slots: int) -> Flags:
        """Return which requests, [n], arrived while all slots were in use."""
        admitted_before = np.searchsorted(np.sort(self.admitted_at), due, "right")
        ended_before = np.searchsorted(np.sort(last_token_at), due, "right")
        waits: Flags = admitted_before - ended_before >= slots
        return waits

    def waited_for_kv(self, due: Array) -> Flags:
        """Return which requests, [n], waited while the KV pool was full, or were preempted."""
        full_before_due = np.searchsorted(self.pool_full_at, due)
        full_before_admission = np.searchsorted(self.pool_full_at, self.admitted_at)
        waits: Flags = self.is_preempted | (full_before_admission > full_before_due)
        return waits

    def summed(self) -> StepObservation:
        return StepObservation(
            seconds=self.seconds,
            rows=float(self.rows),
            prompt_tokens=float(self.prompt_tokens),
            context_tokens=float(self.context_tokens),
            passes=float(self.steps + self.extra_passes),
            steps=self.steps,
            token_pairs=self.token_pairs,
        )


class Simulation:
    """An engine on a simulated clock. A request is its index in the order they were given.

    The arguments are those of `simulate`, and `reasoning_share` is that of `Simulated`. `play` can
    stop before the end, to look at the requests that have ended so far, and go on when it is called
    again.
    """

    def __init__(
        self,
        step_times: StepTimeModel,
        settings: SchedulerSettings,
        due: Numbers,
        prompt_tokens: Numbers,
        output_tokens: Numbers,
        cached_tokens: Numbers | None = None,
        *,
        turns: Turns | None = None,
        reasoning_share: float = 0.0,
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
        self.pair_seconds = step_times.token_pair_seconds
        # By the tokens of a step; []: the model has no products.
        self.product_seconds: list[float] = []
        if step_times.has_products:
            self.expert_seconds = 0.0  # the products include the experts
            tokens = np.arange(settings.slots + settings.step_tokens + 1.0)
            self.product_seconds = step_times.product_seconds(tokens).tolist()
        # Seconds of a step without products and without the host, by its decode rows.
        self.row_seconds = [
            step_times.base_seconds + step_times.row_seconds * rows
            for rows in range(settings.slots + 1)
        ]
        self.host_seconds = [
            step_times.host_seconds + step_times.host_row_seconds * rows
            for rows in range(settings.slots + 1)
        ]
        # Seconds of a step by the number of rows that it decodes, without reading their contexts.
        self.decode_seconds = [
            max(self.device_seconds(rows, rows), self.host_seconds[rows])
            + self.expert_seconds * (1.0 - self.skip_probability**rows)
            for rows in range(settings.slots + 1)
        ]
        self.settings = settings
        self.slot_count = settings.slots
        count = len(due)
        prompts = np.maximum(np.asarray(prompt_tokens), 1).astype(np.int64)
        cached = np.zeros(count) if cached_tokens is None else np.nan_to_num(cached_tokens)
        uncached = np.maximum(prompts - np.asarray(cached, dtype=np.int64), 1)
        self.due: list[float] = np.asarray(due, dtype=np.float64).tolist()
        # After a preemption, the tokens generated so far are part of the request's prompt.
        self.prompt_tokens: list[int] = prompts.tolist()
        self.output_tokens: list[int] = (
            np.maximum(np.asarray(output_tokens), 1).astype(int).tolist()
        )
        self.pending: list[int] = uncached.tolist()  # prompt tokens still to compute
        self.reused: list[int] = (prompts - uncached).tolist()
        # Seconds of a prompt token with its share of a pass, if whole prompts fit in a step.
        mean = max(float(uncached.mean()), 1.0) if count else 1.0
        self.piece_seconds = step_times.pass_seconds + self.expert_seconds
        # A product takes at most the token's own time more, since the weights are read anyway.
        self.prompt_token_cost = self.prompt_seconds + step_times.product_token_seconds
        self.token_seconds = self.prompt_token_cost + self.piece_seconds / mean
        self.request_seconds = step_times.request_seconds or 0.0
        self.reasoning_share = reasoning_share
        # Tokens of each answer after the first. A preemption does not change them.
        self.later_tokens = np.maximum(np.asarray(output_tokens, dtype=np.float64), 1.0) - 1.0
        self.first_token_at = [math.inf] * count
        self.last_token_at = [math.inf] * count
        self.ended = 0  # requests
        self.pool_tokens = math.inf if settings.kv_tokens is None else settings.kv_tokens
        self.has_pool_limit = settings.kv_tokens is not None
        self.now = 0.0
        self.step = 0  # decode steps so far
        self.context_tokens = 0  # in the KV of the decoding requests
        self.kv_tokens = 0  # in the KV of all running requests
        self.reserved_tokens = 0  # the same, plus the prompt tokens that they have still to compute
        # Heap of (due time, request): those whose due time is known and that were never admitted.
        self.arrivals: list[tuple[float, int]] = [
            (at, request) for request, at in enumerate(self.due)
        ]
        # Think time before the next request, if that is the next turn of the same session.
        self.think_seconds: list[float | None] = [None] * count
        # Where the next turns of conversations arrive, and until when the engine may decode at most
        # before it looks for arrivals again. Both are its own arrivals if it is the only engine.
        self.next_arrivals = self.arrivals
        self.until_seconds = math.inf
        self.slots: SimulatedSlots | None = None  # None: nothing is reused
        self.is_checkpointed = turns is not None and turns.reuse == "checkpoints"
        if turns is not None:
            self._begin_conversations(turns)
        self.preempted: list[int] = []  # the oldest last; they are admitted before all others
        self.prefilling: list[int] = []  # requests whose prompts are being computed, oldest first
        # Heap of (decode step of the last token, request): the requests that decode.
        self.decoding: list[tuple[int, int]] = []
        self.last_step = [0] * count  # decode step of the last token, of requests that decode
        self.work = _Work(count)

    def device_seconds(self, rows: int, tokens: int) -> float:
        """Return the seconds of a step with so many decode rows and, with those of prompts, so many
        tokens, without its contexts."""
        products = self.product_seconds[tokens] if self.product_seconds else 0.0
        return self.row_seconds[rows] + products

    def _begin_conversations(self, turns: Turns) -> None:
        """Let only those turns arrive whose time is given, and fill slots with the KV of turns that
        ended before the start."""
        is_timed = turns.number == 0 if turns.is_timed is None else turns.is_timed
        timed_requests = set(np.flatnonzero(is_timed).tolist())
        self.arrivals = [arrival for arrival in self.arrivals if arrival[1] in timed_requests]
        heapq.heapify(self.arrivals)
        self.next_arrivals = self.arrivals
        think_seconds = turns.think_seconds.tolist()
        for request in np.flatnonzero(np.diff(turns.session) == 0).tolist():
            self.think_seconds[request] = think_seconds[request + 1]
        self.fill_slots(turns, turns.ended)

    def fill_slots(self, turns: Turns, ended: Sequence[int]) -> None:
        """Fill the slots, if they are reused, with the KV of turns that ended before the start."""
        if turns.reuse == "none":
            return
        self.slots = SimulatedSlots(turns, self.settings)
        for request in ended[: -self.settings.slots]:
            tokens = self.prompt_tokens[request] + self.output_tokens[request] - 1
            self.slots.store(request, tokens)
        self.slots.copied_tokens = 0  # these were copied before the start
        for request in ended[-self.settings.slots :]:
            tokens = self.prompt_tokens[request] + self.output_tokens[request] - 1
            if self.slots.idle_tokens + tokens <= self.pool_tokens:
                self.slots.hold(request, tokens)

    def play(self, until_ended: float = math.inf) -> None:
        """Run the engine until so many requests have ended, or all."""
        while self.ended < until_ended and self.advance():
            pass

    def advance(self) -> bool:
        """Run one step with prompts, or as many decode steps as pass until something else can
        happen; or wait for the next arrival. Return False if nothing is left to do."""
        arrivals, prefilling, decoding = self.arrivals, self.prefilling, self.decoding
        if self.preempted or (
            arrivals
            and arrivals[0][0] <= self.now
            and len(decoding) + len(prefilling) < self.slot_count
        ):
            self.admit()
        if prefilling:
            self.run_prefill_step()
        elif decoding:
            self.run_decode_steps()
        elif arrivals:
            self.now = max(self.now, arrivals[0][0])
        else:
            return False
        while decoding and decoding[0][0] <= self.step:
            self.end(heapq.heappop(decoding)[1])
        return True

    def results(self) -> SimulatedLoad:
        """Return the requests. Those that have not ended have infinite times."""
        times = self.times()
        last_token_at = np.array(self.last_token_at)
        return SimulatedLoad(
            **msgspec.structs.asdict(times),
            waited_for_slot=self.work.waited_for_slot(
                times.due, last_token_at, self.settings.slots * self.settings.engines
            ),
            waited_for_kv=self.work.waited_for_kv(times.due),
            work=self.work.summed(),
        )

    def times(self) -> Simulated:
        """Return the requests without what they waited for and the sums over all steps."""
        due = np.array(self.due)
        first, last = np.array(self.first_token_at), np.array(self.last_token_at)
        has_ended = np.isfinite(last)
        decode_seconds = np.where(has_ended, last, 0.0) - np.where(has_ended, first, 0.0)
        nan = np.full(len(due), np.nan)
        return Simulated(
            due=due,
            ttft=first - due + self.request_seconds,
            tpot=np.divide(decode_seconds, self.later_tokens, out=nan, where=self.later_tokens > 0),
            e2e=last - due + self.request_seconds,
            cached=np.array(self.reused, dtype=np.float64),
            reasoning_share=self.reasoning_share,
        )

    def admit(self) -> None:
        """Give waiting requests free slots while the KV pool has room."""
        running = len(self.prefilling) + len(self.decoding)
        while running < self.slot_count:
            if self.preempted:
                request = self.preempted[-1]
            elif self.arrivals and self.arrivals[0][0] <= self.now:
                request = self.arrivals[0][1]
            else:
                return
            prompt_tokens = self.prompt_tokens[request]
            # One more token for each row: it is generated, but not in the KV yet.
            reserved_tokens = self.reserved_tokens + len(self.decoding)
            if running and reserved_tokens + prompt_tokens + running > self.pool_tokens:
                self.work.pool_full_at.append(self.now)
                return
            if self.preempted:
                self.preempted.pop()
            else:
                heapq.heappop(self.arrivals)
            if self.work.admitted_at[request] == math.inf:
                self.work.admitted_at[request] = self.now
            if self.slots is not None:
                reused = self.slots.take(request, prompt_tokens, self.computed)
                self.wait_for_copies()
                self.pending[request] = prompt_tokens - reused
                if self.first_token_at[request] == math.inf:
                    self.reused[request] = reused
            self.prefilling.append(request)
            self.kv_tokens += prompt_tokens - self.pending[request]
            self.reserved_tokens += prompt_tokens
            running += 1

    def computed(self, request: int) -> int:
        """Return the tokens in the KV of a running request."""
        if pending := self.pending[request]:
            return self.prompt_tokens[request] - pending
        generated = self.output_tokens[request] - 1 - (self.last_step[request] - self.step)
        return self.prompt_tokens[request] + generated

    def run_decode_steps(self) -> None:
        """Decode until the next request ends, the KV pool is full, or a request arrives that could
        be admitted."""
        arrivals, decoding = self.arrivals, self.decoding
        if self.has_pool_limit and self.occupied_tokens + len(decoding) > self.pool_tokens:
            self.make_room([])
        rows = len(decoding)
        steps = decoding[0][0] - self.step
        if self.has_pool_limit and self.occupied_tokens + rows * steps > self.pool_tokens:
            steps = max(1, int(self.pool_tokens - self.occupied_tokens) // rows)
        # Step k of these lasts first_seconds + 2 * growth * k, because each step adds a token to
        # the context of each row.
        now, context_tokens = self.now, self.context_tokens
        first_seconds = self.decode_seconds[rows] + self.context_seconds * context_tokens
        growth = self.context_seconds * rows / 2
        seconds = steps * (first_seconds + growth * (steps - 1))
        if rows < self.slot_count and not self.preempted:
            next_arrival = self.until_seconds
            if arrivals and arrivals[0][0] < next_arrival:
                next_arrival = arrivals[0][0]
            if now < next_arrival <= now + seconds:
                steps = _steps_until(next_arrival - now, first_seconds, growth, steps)
                seconds = steps * (first_seconds + growth * (steps - 1))
        generated = rows * steps
        work = self.work
        work.steps += steps
        work.rows += generated
        work.context_tokens += steps * context_tokens + generated * (steps - 1) // 2
        work.seconds += seconds
        self.now = now + seconds
        self.step += steps
        self.context_tokens = context_tokens + generated
        self.kv_tokens += generated
        self.reserved_tokens += generated

    def run_prefill_step(self) -> None:
        """Run one step: a token of each decoding request, and prompt tokens within the budget."""
        prefilling, pending, decoding = self.prefilling, self.pending, self.decoding
        rows = len(decoding)
        computable: Iterator[int] = map(pending.__getitem__, prefilling)
        if self.is_checkpointed:
            computable = map(self.until_checkpoint, prefilling)
        piece_tokens = plan_step(computable, rows, self.settings, self)
        pieces = list(zip(prefilling, piece_tokens, strict=False))  # (request, prompt tokens)
        prompt_tokens = sum(piece_tokens)
        if self.has_pool_limit and self.occupied_tokens + rows + prompt_tokens > self.pool_tokens:
            pieces = self.make_room(pieces)
            prompt_tokens = sum(tokens for _, tokens in pieces)
            rows = len(decoding)
        extra_passes = len(pieces) - (rows == 0)
        began, context_tokens = self.now, self.context_tokens
        step_seconds = self.decode_seconds[rows]
        if self.product_seconds:
            device_seconds = self.device_seconds(rows, rows + prompt_tokens)
            step_seconds = max(device_seconds, self.host_seconds[rows])
        now = began + (
            step_seconds
            + self.prompt_seconds * prompt_tokens
            + self.context_seconds * context_tokens
            + self.pass_seconds * extra_passes
        )
        work = self.work
        if self.expert_seconds:
            now += self.expert_seconds * self.prompt_expert_passes(pieces, rows)
        if self.pair_seconds:
            token_pairs = 0.0
            for request, tokens in pieces:
                token_pairs += pairs_of(tokens, self.prompt_tokens[request] - pending[request])
            now += self.pair_seconds * token_pairs
            work.token_pairs += token_pairs
        work.steps += 1
        work.rows += rows
        work.prompt_tokens += prompt_tokens
        work.context_tokens += context_tokens
        work.extra_passes += extra_passes
        work.seconds += now - began
        self.now = now
        if rows:
            self.step += 1
            self.context_tokens = context_tokens + rows
            self.reserved_tokens += rows
        self.kv_tokens += rows + prompt_tokens
        for request, tokens in pieces:
            left = pending[request] = pending[request] - tokens
            if self.is_checkpointed:
                self.save_checkpoint(request)
            if not left:
                self.begin_decoding(request)

    def begin_decoding(self, request: int) -> None:
        """Go on with answer tokens after a prompt, whose last step has sampled the first one."""
        self.prefilling.remove(request)
        if self.first_token_at[request] == math.inf:
            self.first_token_at[request] = self.now
        self.context_tokens += self.prompt_tokens[request]
        last_step = self.step + self.output_tokens[request] - 1
        self.last_step[request] = last_step
        heapq.heappush(self.decoding, (last_step, request))

    def until_checkpoint(self, request: int) -> int:
        """Return the prompt tokens to compute up to the request's next checkpoint or its end."""
        assert self.slots is not None
        return min(self.pending[request], self.slots.until_mark(request, self.computed(request)))

    def save_checkpoint(self, request: int) -> None:
        """Make a checkpoint of a prompt if it is to have one at this length."""
        assert self.slots is not None
        self.slots.save(request, self.prompt_tokens[request] - self.pending[request])

    def end(self, request: int) -> None:
        """End a request after its last token: its slot becomes idle, and its user's think time
        begins."""
        tokens = self.prompt_tokens[request] + self.output_tokens[request] - 1
        self.last_token_at[request] = self.now
        self.ended += 1
        self.remove_from_kv(tokens)
        if self.slots is not None:
            self.slots.release(request, tokens, self.now)
        think_seconds = self.think_seconds[request]
        if think_seconds is not None:
            self.due[request + 1] = self.now + think_seconds
            heapq.heappush(self.next_arrivals, (self.now + think_seconds, request + 1))

    @property
    def occupied_tokens(self) -> int:
        """Return the tokens in the KV, including those of idle slots."""
        return self.kv_tokens if self.slots is None else self.kv_tokens + self.slots.idle_tokens

    def make_room(self, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Free KV for a token of each decoding request and for these pieces of prompts; return the
        pieces of requests that are still running.

        The KV of idle slots goes first, then that of the youngest requests.
        """
        while True:
            next_tokens = len(self.decoding) + sum(tokens for _, tokens in pieces)
            if self.occupied_tokens + next_tokens <= self.pool_tokens:
                return pieces
            if self.slots is not None and self.slots.drop_oldest():
                self.wait_for_copies()
                continue
            youngest = self.preempt_youngest()
            if youngest is None:
                return pieces
            pieces = [piece for piece in pieces if piece[0] != youngest]

    def wait_for_copies(self) -> None:
        """Let the time pass that copies to and from the prompt cache take."""
        if self.slots is not None:
            self.now += self.settings.copy_token_seconds * self.slots.copied_tokens
            self.slots.copied_tokens = 0

    def remove_from_kv(self, tokens: int) -> None:
        """Remove tokens of a decoding request from the KV."""
        self.context_tokens -= tokens
        self.kv_tokens -= tokens
        self.reserved_tokens -= tokens

    def preempt_youngest(self) -> int | None:
        """Return the youngest running request, which goes back to the queue; None if only one
        runs, which is never preempted."""
        if len(self.prefilling) + len(self.decoding) < 2:
            return None
        running = (*self.prefilling, *(request for _, request in self.decoding))
        youngest = max(running, key=lambda request: (self.due[request], request))
        if self.slots is not None:
            self.slots.store(youngest, self.computed(youngest))
            self.wait_for_copies()
        prompt_tokens = self.prompt_tokens[youngest]
        if youngest in self.prefilling:
            self.prefilling.remove(youngest)
            self.reserved_tokens -= prompt_tokens
            self.kv_tokens -= prompt_tokens - self.pending[youngest]
        else:
            last_step = self.last_step[youngest]
            self.decoding.remove((last_step, youngest))
            heapq.heapify(self.decoding)
            generated = self.output_tokens[youngest] - (last_step - self.step)
            self.remove_from_kv(prompt_tokens + generated - 1)
            self.prompt_tokens[youngest] += generated
            self.output_tokens[youngest] -= generated
        self.pending[youngest] = self.prompt_tokens[youngest]
        self.work.is_preempted[youngest] = True
        if self.slots is not None:
            self.slots.release(youngest, 0, self.now)
        self.preempted.append(youngest)
        return youngest

    def prompt_expert_passes(self, pieces: Sequence[tuple[int, int]], rows: int) -> float:
        """Return the shares of all experts that these pieces of prompts read, summed over their
        passes, beyond what the decode rows read."""
        skip = self.skip_probability
        if self.shares_pass:
            prompt_tokens = sum(tokens for _, tokens in pieces)
            return skip**rows - float(skip ** (rows + prompt_tokens))
        return sum(1.0 - skip**tokens for _, tokens in pieces)

    # The costs of steps, as plan_step asks for them (StepCosts).

    def row_costs(self, rows: int) -> tuple[float, float]:
        context_seconds = self.context_seconds * self.context_tokens
        full_step_seconds = self.decode_seconds[-1] + context_seconds
        return self.decode_seconds[rows] + context_seconds, full_step_seconds / self.slot_count

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Return the prompt tokens that take this long: as whole prompts of the mean length, each
        with its pass, or as one piece of a longer prompt, whichever is fewer. The scheduler learns
        the cost of passes from its steps; here it is known."""
        if self.prompt_token_cost <= 0:
            return None
        as_prompts = seconds / self.token_seconds
        as_piece = (seconds - self.piece_seconds) / self.prompt_token_cost
        return int(as_piece if as_piece < as_prompts else as_prompts)


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


class SharedQueue:
    """Equal engines that serve from one queue, on a simulated clock. It is played as a Simulation.

    The engines share everything that is known of requests. Each has a clock of its own, and the one
    that is the furthest behind takes the next step. Before that, all requests that are due by then
    are given to engines with free slots.
    """

    def __init__(self, first: Simulation, turns: Turns | None) -> None:
        """`first`: the simulation of one engine, of which nothing is played yet."""
        self.queue = first.arrivals
        self.due = first.due
        self.results = first.results
        self.times = first.times
        self.turns = turns
        count = first.settings.engines
        self.engines = [first, *(copy.copy(first) for _ in range(count - 1))]
        self.session: list[int] = [] if turns is None else turns.session.tolist()
        self.engine_of_session: dict[int, int] = {}
        # By engine: its slots in use until the end of the step that it took last.
        self.used_in_step = [0] * count
        for number, engine in enumerate(self.engines):
            engine.arrivals, engine.next_arrivals = [], self.queue
            engine.prefilling, engine.decoding, engine.preempted = [], [], []
            if turns is not None:
                ended = turns.ended[number::count]
                engine.fill_slots(turns, ended)
                for request in ended:
                    self.engine_of_session[self.session[request]] = number

    @property
    def ended(self) -> int:
        """Return the number of requests that have ended."""
        return sum(engine.ended for engine in self.engines)

    def play(self, until_ended: float = math.inf) -> None:
        """Run the engines until so many requests have ended, or all."""
        queue, engines = self.queue, self.engines
        while self.ended < until_ended:
            numbers = [number for number, engine in enumerate(engines) if self._has_work(engine)]
            behind = min(numbers, key=lambda number: engines[number].now, default=None)
            if queue and (behind is None or queue[0][0] <= engines[behind].now):
                due, request = queue[0]
                chosen = self._engine_for(request, due)
                if chosen is None:  # it waits until a step ends
                    ends = (engine.now for engine in engines if engine.now > due)
                    chosen = self._engine_for(request, min(ends, default=due))
                if chosen is not None:
                    heapq.heappush(engines[chosen].arrivals, heapq.heappop(queue))
                    self.used_in_step[chosen] += 1
                    continue
            if behind is None:
                return
            engine = engines[behind]
            engine.until_seconds = math.inf
            if queue and queue[0][0] > engine.now:
                engine.until_seconds = queue[0][0]
            if self.turns is not None:  # another engine may end a turn, and its user comes again
                others = (engines[other] for other in numbers if other != behind)
                next_end = min(map(_earliest_end, others), default=math.inf)
                just_after_now = math.nextafter(engine.now, math.inf)
                engine.until_seconds = min(engine.until_seconds, max(next_end, just_after_now))
            self.used_in_step[behind] = self._used(engine)
            engine.advance()

    def _engine_for(self, request: int, at: float) -> int | None:
        """Return which engine gets a request at this time; None: no slot is free."""
        free_slots = []
        for number, engine in enumerate(self.engines):
            used = self.used_in_step[number] if engine.now > at else self._used(engine)
            free_slots.append(engine.settings.slots - used)
        chosen = free_slots.index(max(free_slots))
        if not free_slots[chosen]:
            return None
        if self.turns is not None:
            session = self.session[request]
            last = self.engine_of_session.get(session)
            if last is not None and free_slots[last]:
                chosen = last
            self.engine_of_session[session] = chosen
        return chosen

    @staticmethod
    def _used(engine: Simulation) -> int:
        """Return the slots of an engine that are in use or promised to a request."""
        running = len(engine.prefilling) + len(engine.decoding)
        return running + len(engine.arrivals) + len(engine.preempted)

    @classmethod
    def _has_work(cls, engine: Simulation) -> bool:
        return cls._used(engine) > 0


def _earliest_end(engine: Simulation) -> float:
    """Return a time before which no request of an engine ends that is in the middle of its work."""
    if engine.prefilling or engine.arrivals or engine.preempted or not engine.decoding:
        return engine.now
    steps = engine.decoding[0][0] - engine.step
    context_seconds = engine.context_seconds * engine.context_tokens
    return engine.now + steps * (engine.decode_seconds[len(engine.decoding)] + context_seconds)


class _Prefix(NamedTuple):
    """The first `tokens` tokens of a turn: what a slot or a checkpoint has in its KV."""

    request: int  # -1: none
    tokens: int


_NOTHING = _Prefix(-1, 0)


class SimulatedSlots:
    """The slots of the engine, and whose tokens each of them holds.

    Token ids are not simulated, only how many leading tokens two turns have in common: turns of one
    session share what the earlier one left in its slot, turns of two sessions share only the prefix
    that all sessions have.

    The prompt cache keeps one sequence of a session, the latest that was stored.
    """

    def __init__(self, turns: Turns, settings: SchedulerSettings) -> None:
        slots = settings.slots
        self._session: list[int] = turns.session.tolist()
        self._history: list[int] = turns.history_tokens.tolist()
        self._shared = turns.shared_tokens
        self.is_checkpointed = turns.reuse == "checkpoints"
        self._owner = [-1] * slots  # the request whose tokens a slot holds, idle or running
        self._idle_tokens = [0] * slots  # in the KV of each idle slot
        self.idle_tokens = 0  # their sum
        self._free = list(range(slots))  # idle slots, ascending
        self._idle_since = [0.0] * slots
        # Heap of (idle since, slot) of the idle slots that are not empty, and of some that have
        # been taken or emptied since.
        self._idle_queue: list[tuple[float, int]] = []
        self._shared_in_slots = [0] * slots  # tokens of the prefix that all sessions share
        # Running requests that still compute that prefix, so that their slots have only part of it.
        self._without_shared: set[int] = set()
        self._slots_of_session: dict[int, set[int]] = {}
        self._slot_of: dict[int, int] = {}  # running request -> slot
        self._checkpoints: list[_Prefix] = []  # the most recently used last
        # Request -> the lengths of its prompt at which checkpoints are made.
        self._marks: dict[int, tuple[int, ...]] = {}
        self._stored = StoredSequences[int](settings.stored_tokens)
        self._sequence_tokens = settings.stored_sequence_tokens
        self._stored_prefix: dict[int, _Prefix] = {}  # by session
        self._stored_checkpoint: dict[int, int] = {}  # its tokens; 0: there is none
        self.copied_tokens = 0  # to and from the prompt cache, since the last wait for copies

    def hold(self, request: int, tokens: int) -> None:
        """Fill an empty slot with the tokens of a turn that ended before the start."""
        slot = self._idle_tokens.index(0)
        self._set(slot, request, tokens, min(self._shared, tokens))
        self._begin_idle(slot, slot - float(len(self._owner)))

    def take(self, request: int, prompt_tokens: int, computed: Callable[[int], int]) -> int:
        """Give a request a slot; return the tokens of its prompt that are reused.

        `computed`: returns the tokens in the KV of a running request.
        """
        reusable_tokens = max(0, prompt_tokens - COMPUTED_TAIL)
        common = self._common_in_slots(request, reusable_tokens, computed)
        slots = (common, self._idle_tokens, self._free, self._idle_since)
        checkpoint = None
        checkpoints: dict[int, _Prefix] = {}  # those that it begins with, by their tokens
        if self.is_checkpointed:
            checkpoints = self._checkpoints_of(request, reusable_tokens)
            longest = max((tokens for tokens in checkpoints if tokens <= max(common)), default=0)
            (slot, reused, source), is_restored = choose_checkpointed_slot(*slots, longest)
            checkpoint = checkpoints[longest] if is_restored else None
        else:
            slot, reused, source = choose_slot(*slots)
        session, match = self._longest_stored(request, reusable_tokens, checkpoints)
        if match.is_worth_restoring(reused):
            slot = oldest_slot(self._free, self._idle_tokens, self._idle_since)
            self._store_slot(slot, 0, session)
            self._restore(session, match)
            reused = match.reusable
            checkpoint = checkpoints.get(reused)
        else:
            self._store_slot(slot, reused if source == slot else 0)
        if checkpoint is not None:
            self._checkpoints.remove(checkpoint)
            self._checkpoints.append(checkpoint)
        if self.is_checkpointed:
            longest = max(*common, match.common, match.second)
            self._marks[request] = checkpoint_marks(prompt_tokens, reused, longest)
        self._set(slot, request, 0, self._shared)
        self._free.remove(slot)
        if reused < self._shared:
            self._without_shared.add(request)
        self._slot_of[request] = slot
        return reused

    def until_mark(self, request: int, computed: int) -> int:
        """Return the prompt tokens up to its next checkpoint; sys.maxsize if there is none."""
        for mark in self._marks[request]:
            if mark > computed:
                return mark - computed
        return sys.maxsize

    def save(self, request: int, computed: int) -> None:
        """Make a checkpoint if the prompt is to have one after `computed` tokens."""
        if computed not in self._marks[request]:
            return
        if not any(
            self._is_same(request, checkpoint, computed) for checkpoint in self._checkpoints
        ):
            self._checkpoints.append(_Prefix(request, computed))
            del self._checkpoints[: -max_checkpoints(len(self._owner))]

    def release(self, request: int, tokens: int, now: float) -> None:
        """Make the request's slot idle, with `tokens` tokens in its KV."""
        slot = self._slot_of.pop(request)
        bisect.insort(self._free, slot)
        self._without_shared.discard(request)
        self._marks.pop(request, None)
        self._set(slot, request if tokens else -1, tokens, min(self._shared, tokens))
        if tokens:
            self._begin_idle(slot, now)

    def drop_oldest(self) -> bool:
        """Free the KV of the longest idle slot; return False if all idle slots are empty."""
        while self._idle_queue:
            since, slot = heapq.heappop(self._idle_queue)
            if self._idle_tokens[slot] and self._idle_since[slot] == since:
                self._store_slot(slot, 0)
                self._set(slot, -1, 0, 0)
                return True
        return False

    def store(
        self, request: int, tokens: int, kept_tokens: int = 0, pinned: int | None = None
    ) -> None:
        """Store the tokens of a request whose slot is overwritten from `kept_tokens` tokens on.
        `pinned`: a session whose sequence is about to be restored."""
        session = self._session[request]
        checkpoints = self._checkpoints_of(request, tokens - 1) if self.is_checkpointed else {}
        longest = max(checkpoints, default=0)
        if longest > kept_tokens:  # it was for the next turn in this slot
            self._checkpoints.remove(checkpoints[longest])
            self._checkpoints.insert(0, checkpoints[longest])  # the first to be dropped
        if not self._stored.capacity or session == pinned:
            return
        if not is_worth_storing(tokens, kept_tokens):
            return
        if self._stored_prefix.pop(session, None) is not None:
            self._stored.remove(session)
        size = tokens + self._sequence_tokens
        self.copied_tokens += size
        dropped = self._stored.add(session, size, pinned)
        if dropped is None:
            return
        self._stored_prefix[session] = _Prefix(request, tokens)
        self._stored_checkpoint[session] = longest
        for other in dropped:
            del self._stored_prefix[other]

    def _store_slot(self, slot: int, kept_tokens: int, pinned: int | None = None) -> None:
        """Store what an idle slot holds before a prompt that keeps `kept_tokens` takes it."""
        if tokens := self._idle_tokens[slot]:
            self.store(self._owner[slot], tokens, kept_tokens, pinned)

    def _longest_stored(
        self, request: int, reusable_tokens: int, checkpoints: Iterable[int]
    ) -> tuple[int, StoredMatch]:
        """Return the session of whose stored sequence a prompt can reuse most, and how it matches.
        All sequences of other sessions have the shared prefix in common with it.

        `checkpoints`: the lengths of those that the prompt begins with.
        """
        session = self._session[request]
        own = self._stored_prefix.get(session, _NOTHING)
        own_common = self.common(request, own, reusable_tokens)
        own_reusable = self._reusable(session, own_common, checkpoints)
        others = len(self._stored) - (session in self._stored)
        if not others:
            return session, StoredMatch(own_reusable, own_common, own.tokens)
        shared = min(self._shared, reusable_tokens)
        other = next(key for key in self._stored if key != session)
        reusable = self._reusable(other, shared, checkpoints)
        if own_reusable > reusable:
            return session, StoredMatch(own_reusable, own_common, own.tokens, shared)
        second = shared if others > 1 else own_common
        return other, StoredMatch(reusable, shared, self._stored_prefix[other].tokens, second)

    def _reusable(self, session: int, common: int, checkpoints: Iterable[int]) -> int:
        """Return how many of the `common` tokens that a prompt has in common with the stored
        sequence of a session it can reuse."""
        if not self.is_checkpointed or not common:
            return common
        lengths = [self._stored_checkpoint[session], *checkpoints]
        return checkpointed_tokens(common, self._stored_prefix[session].tokens, lengths)

    def _restore(self, session: int, match: StoredMatch) -> None:
        """Copy the stored sequence of a session into a slot."""
        self.copied_tokens += match.tokens + self._sequence_tokens
        if match.is_continued:
            self._stored.remove(session)
            del self._stored_prefix[session]
        else:
            self._stored.use(session)

    def common(self, request: int, prefix: _Prefix, reusable_tokens: int) -> int:
        """Return how many of the first `reusable_tokens` tokens of a request's prompt `prefix`
        has."""
        other, tokens = prefix
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
        """Return, by slot, how many of the request's first `reusable_tokens` tokens the slot's KV
        has.

        Requests that have computed the shared prefix since the last call leave `_without_shared`.
        """
        common = self._shared_in_slots.copy()
        if reusable_tokens < self._shared:
            common = [min(tokens, reusable_tokens) for tokens in common]
        # `take` counts the shared prefix as there at once; a request that still computes it has
        # less.
        for other in list(self._without_shared):
            tokens = computed(other)
            if tokens >= self._shared:
                self._without_shared.remove(other)
            prefix = _Prefix(other, tokens)
            common[self._slot_of[other]] = self.common(request, prefix, reusable_tokens)
        for slot in self._slots_of_session.get(self._session[request], ()):
            owner = self._owner[slot]
            is_running = owner in self._slot_of
            tokens = computed(owner) if is_running else self._idle_tokens[slot]
            common[slot] = self.common(request, _Prefix(owner, tokens), reusable_tokens)
        return common

    def _begin_idle(self, slot: int, since: float) -> None:
        self._idle_since[slot] = since
        heapq.heappush(self._idle_queue, (since, slot))

    def _set(self, slot: int, request: int, idle_tokens: int, shared: int) -> None:
        """Record what a slot holds: `idle_tokens` tokens of a request that has ended (-1: none), or
        a running request's (0); `shared` of them belong to the prefix of all sessions."""
        previous_owner = self._owner[slot]
        if previous_owner >= 0:
            self._slots_of_session[self._session[previous_owner]].discard(slot)
        if request >= 0:
            self._slots_of_session.setdefault(self._session[request], set()).add(slot)
        self._owner[slot] = request
        self.idle_tokens += idle_tokens - self._idle_tokens[slot]
        self._idle_tokens[slot] = idle_tokens
        self._shared_in_slots[slot] = shared

    def _is_same(self, request: int, other: _Prefix, tokens: int) -> bool:
        """Return whether a checkpoint holds exactly the first `tokens` tokens of a prompt."""
        return other.tokens == tokens == self.common(request, other, tokens)

    def _checkpoints_of(self, request: int, tokens: int) -> dict[int, _Prefix]:
        """Return the checkpoints that a request's first tokens begin with, by their lengths."""
        return {
            checkpoint.tokens: checkpoint
            for checkpoint in self._checkpoints
            if self.common(request, checkpoint, tokens) == checkpoint.tokens
        }
