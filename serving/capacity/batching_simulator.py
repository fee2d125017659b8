"""Simulation of continuous batching: a step-time model, settings, due times and lengths -> TTFT and
TPOT.

    played = simulate(law, SchedulerSettings(slots=8), due, prompt_tokens, output_tokens)
    played.good(ttft_seconds=2.0, tpot_seconds=0.2).mean()

The settings are the scheduler's (serving/engine/scheduler.py), and so is the rule of a step
(serving/capacity/plan_step.py): it decodes one token of every sequence past its prompt, then
takes prompt tokens, oldest first, up to a budget. Requests are admitted in order of arrival to a
free slot while the KV pool has room for their prompts beside all that is promised to others. Where
answers outgrow the pool, the youngest waits again, and all its tokens are computed anew. Time
outside of steps is left out.

Events are played, not tokens: steps that only decode are summed in closed form up to the next
arrival or ending.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from serving.capacity.plan_step import plan_step
from serving.capacity.scheduler_settings import SchedulerSettings
from serving.capacity.step_time_model import StepObservation, StepTimeModel

Array = npt.NDArray[np.float64]
Numbers = Sequence[float] | npt.NDArray[np.float64] | npt.NDArray[np.int64]


class Simulated(msgspec.Struct, frozen=True, eq=False):
    """A row a request, in order of due time, seconds: float64 [n]."""

    due: Array
    ttft: Array
    tpot: Array  # nan: an answer of one token
    # Which requests had to wait for a slot, and which for room in the KV cache, or lost theirs to
    # others. None: of requests one at a time, which are not played.
    waited_for_slot: npt.NDArray[np.bool_] | None = None
    waited_for_kv: npt.NDArray[np.bool_] | None = None
    work: StepObservation | None = None  # the sums of all steps

    def good(self, ttft_seconds: float | None, tpot_seconds: float | None) -> npt.NDArray[np.bool_]:
        """Which requests were within both limits; None: no limit."""
        good = np.ones(len(self.due), dtype=bool)
        if ttft_seconds is not None:
            good &= self.ttft <= ttft_seconds
        if tpot_seconds is not None:
            good &= ~(self.tpot > tpot_seconds)
        return good

    def of(self, which: npt.NDArray[np.bool_]) -> Simulated:
        """Some of the requests; `work` stays that of all."""
        slot, kv = self.waited_for_slot, self.waited_for_kv
        return Simulated(
            self.due[which],
            self.ttft[which],
            self.tpot[which],
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
) -> Simulated:
    """Play requests due at these times (ascending) with these lengths to their end.

    `cached_tokens`: of each prompt, not computed again; one token is computed in any case.
    """
    count = len(due)
    engine = _Engine(step_times, settings, due, prompt_tokens, output_tokens, cached_tokens)
    engine.play()
    due = np.asarray(due, dtype=np.float64)
    first, last = np.array(engine.first), np.array(engine.last)
    later = np.maximum(np.asarray(output_tokens, dtype=np.float64), 1.0) - 1.0
    tpot = np.divide(last - first, later, out=np.full(count, np.nan), where=later > 0)
    return Simulated(
        due,
        first - due,
        tpot,
        waited_for_slot=engine.work.waited_for_slot(due, last, settings.slots),
        waited_for_kv=engine.work.waited_for_kv(due),
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
    """The engine on a simulated clock. Requests are their places in the order of due times."""

    def __init__(
        self,
        step_times: StepTimeModel,
        settings: SchedulerSettings,
        due: Numbers,
        prompt_tokens: Numbers,
        output_tokens: Numbers,
        cached_tokens: Numbers | None,
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
        self.next = 0  # the first request that was never admitted
        self.again: list[int] = []  # preempted, the oldest last: they go first
        self.filling: list[int] = []  # prompts under way, oldest first
        self.ends: list[tuple[int, int]] = []  # heap: (decode step of the last token, request)
        self.work = _Work(count)

    def play(self) -> None:
        """All requests to their end."""
        due, ends, slots = self.due, self.ends, self.settings.slots
        decode_seconds, token = self.decode_seconds, self.context_seconds
        count, pool = len(due), self.pool
        while True:
            rows = len(ends)
            if self.again or (
                self.next < count
                and due[self.next] <= self.now
                and rows + len(self.filling) < slots
            ):
                self.admit()
            if self.filling:
                self.prefill_step()
            elif rows:
                # Only decode: to the next ending, till the KV pool is full, or until a request
                # comes that could be admitted.
                while self.held + len(ends) > pool and self.preempt_youngest() is not None:
                    pass
                rows = len(ends)
                steps = ends[0][0] - self.step
                if self.held + rows * steps > pool:
                    steps = max(1, int(pool - self.held) // rows)
                each = decode_seconds[rows] + token * self.context
                growth = token * rows / 2
                seconds = steps * (each + growth * (steps - 1))
                if (
                    rows < slots
                    and self.next < count
                    and not self.again
                    and self.now < due[self.next] <= self.now + seconds
                ):
                    steps = _steps_until(due[self.next] - self.now, each, growth, steps)
                    seconds = steps * (each + growth * (steps - 1))
                self.work.add_decodes(steps, rows, self.context, seconds)
                self.now += seconds
                self.step += steps
                self.leave(-rows * steps)
            elif self.next < count:
                self.now = max(self.now, due[self.next])
            else:
                return
            while ends and ends[0][0] <= self.step:
                request = heapq.heappop(ends)[1]
                self.last[request] = self.now
                self.leave(self.prompts[request] + self.outputs[request] - 1)

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
            elif self.next < len(self.due) and self.due[self.next] <= self.now:
                request = self.next
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
                self.next += 1
            self.work.admitted[request] = min(self.work.admitted[request], self.now)
            self.filling.append(request)
            self.held += prompt - self.left[request]
            self.promised += prompt
            running += 1

    def prefill_step(self) -> None:
        """One step: a token of each decoding request, then prompt tokens within the budget."""
        left = [self.left[request] for request in self.filling]
        planned = plan_step(left, len(self.ends), self.settings, self)
        pieces, taken = list(zip(self.filling, planned, strict=False)), sum(planned)
        while self.held + len(self.ends) + taken > self.pool:
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
            if not self.left[request]:
                self.filling.remove(request)
                self.first[request] = min(self.first[request], self.now)
                self.context += self.prompts[request]
                heapq.heappush(self.ends, (self.step + self.outputs[request] - 1, request))

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
        request = max((*self.filling, *(each for _, each in self.ends)))
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
