"""Simulation of continuous batching: arrivals, lengths, step times and a policy -> TTFT and TPOT.

    played = simulate(law, Policy(slots=16), due_seconds, pairs)
    played.good(SLO_PRESETS["chat"])     # by request

The policy is the scheduler's (serving/engine/scheduler.py): each step decodes one token of every
sequence past its prompt, then takes prompt tokens, oldest sequence first, up to a budget. Requests
are admitted first come, first served, to a free slot while the KV pool has room for their prompts
beside all that is promised to others. Where answers outgrow the pool, the youngest waits again,
and all its tokens are computed anew. Left out: prefix reuse, time outside the step.

Steps that only decode are summed in closed form up to the next arrival or ending: 10,000 requests
take 0.1 to 0.3 s.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.simulation.step_replay import LawSteps
from loadtests.simulation.step_time import StepLaw

Array = npt.NDArray[np.float64]
Pairs = npt.NDArray[np.int64]  # (prompt tokens, output tokens): [n, 2]

# As the scheduler's: a test holds them to it.
PREFILL_MULTIPLE = 16  # prompts are cut at multiples of it
MIN_PREFILL_TOKENS = 17
PREFILL_SHARE = 3.75  # prefill may always take so many times the decode time of the step
PREFILL_WORTH = 120.0  # ... or so many times what a row costs more than with all slots decoding


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's settings that matter to latency; names and defaults as EngineConfig's."""

    slots: int = 16
    prefill_tokens: int = 256  # most prompt tokens of a step while someone decodes
    step_tokens: int = 2048  # most tokens of one step
    kv_tokens: int | None = None  # None: never the limit
    step_seconds_target: float | None = None  # of a step with prompts while someone decodes

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Simulated(msgspec.Struct, frozen=True):
    """Per request, in order of due time, seconds on one clock: float64 [n]."""

    due: Array
    first_token: Array
    last_token: Array
    output_tokens: npt.NDArray[np.int64]

    @property
    def ttft_seconds(self) -> Array:
        return self.first_token - self.due

    @property
    def tpot_seconds(self) -> Array:
        """nan for answers of one token."""
        later = np.where(self.output_tokens > 1, self.output_tokens - 1.0, np.nan)
        return (self.last_token - self.first_token) / later

    def good(self, slo: Slo) -> npt.NDArray[np.bool_]:
        """Which requests met the SLO."""
        good = np.ones(len(self.due), dtype=bool)
        if slo.ttft_seconds is not None:
            good &= self.ttft_seconds <= slo.ttft_seconds
        if slo.tpot_seconds is not None:
            good &= ~(self.tpot_seconds > slo.tpot_seconds)
        return good


class _Engine:
    """The engine on a simulated clock. Requests are indices into `pairs`."""

    __slots__ = (
        *("law", "steps", "policy", "prompts", "outputs", "left", "first", "last", "pool"),
        *("now", "step", "context", "held", "promised", "waiting", "filling", "ends"),
        "token_seconds",
    )

    def __init__(self, steps: LawSteps, policy: Policy, pairs: Pairs) -> None:
        self.law = steps.law  # what the scheduler expects
        self.steps = steps  # what happens
        self.policy = policy
        # Of one that was preempted, what it has made is part of its prompt.
        self.prompts, self.outputs = np.maximum(pairs, 1).T.tolist()
        self.left = list(self.prompts)  # prompt tokens still to compute
        # Of each prompt token its share of a pass, where whole prompts fit in a step.
        mean = max(float(pairs[:, 0].mean()), 1.0) if len(pairs) else 1.0
        self.token_seconds = self.law.prompt_token_seconds + self.law.pass_seconds / mean
        self.first = [math.inf] * len(pairs)
        self.last = [0.0] * len(pairs)
        self.pool = math.inf if policy.kv_tokens is None else policy.kv_tokens
        self.now = 0.0
        self.step = 0
        self.context = 0  # tokens in the KV of the decoding requests
        self.held = 0  # tokens in the KV of all running requests
        self.promised = 0  # ... and those of their prompts that are still to come
        self.waiting: deque[int] = deque()
        self.filling: deque[int] = deque()  # prompts under way, oldest first
        self.ends: list[tuple[int, int]] = []  # heap: (step of the last token, request) decoding

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.filling or self.ends)

    def admit(self) -> None:
        """Give waiting requests free slots while the KV pool has room."""
        running = len(self.filling) + len(self.ends)
        while self.waiting and running < self.policy.slots:
            prompt = self.prompts[self.waiting[0]]
            # The last token of each that decodes is known, but not in the KV yet.
            known = self.promised + len(self.ends)
            if running and known + prompt + running > self.pool:
                return
            self.filling.append(self.waiting.popleft())
            self.promised += prompt
            running += 1

    def decode_until(self, next_due: float) -> None:
        """Only decode: to the next ending, till the KV pool is full, or until a request comes that
        could be admitted.
        """
        while self.held + len(self.ends) > self.pool and self._preempt_youngest() is not None:
            pass
        rows = len(self.ends)
        steps = self.steps.most(rows, self.ends[0][0] - self.step)
        if self.held + rows * steps > self.pool:
            steps = max(1, int(self.pool - self.held) // rows)
        seconds = self.steps.stretch(rows, self.context, steps)
        blocked = self.waiting or rows >= self.policy.slots
        if not blocked and self.now + seconds >= next_due:
            steps, seconds = self._until(rows, steps, next_due - self.now)
        self.steps.pass_by(rows, steps)
        self.now += seconds
        self.step += steps
        self.context += rows * steps
        self.held += rows * steps
        self.promised += rows * steps

    def prefill_step(self) -> None:
        """One step: a token of each decoding request, then prompt tokens within the budget."""
        pieces = self._pieces(self._budget())
        while self.held + len(self.ends) + sum(pieces.values()) > self.pool:
            preempted = self._preempt_youngest()
            if preempted is None:
                break
            pieces.pop(preempted, None)
        rows, taken = len(self.ends), sum(pieces.values())
        passes = len(pieces) + (rows > 0)
        self.now += self.steps.step(rows, taken, self.context, passes)
        self.step += 1
        self.context += rows
        self.held += rows + taken
        self.promised += rows
        for request, piece in pieces.items():
            self.left[request] -= piece
            if self.left[request]:
                continue
            self.filling.remove(request)
            self.first[request] = min(self.first[request], self.now)
            self.context += self.prompts[request]
            heapq.heappush(self.ends, (self.step + self.outputs[request] - 1, request))

    def _budget(self) -> int:
        """Prompt tokens of the next step: as Scheduler._schedule and PrefillBudget.

        What that learns of passes is taken for learnt: `left` seconds are what its tokens take, be
        they whole prompts or, where these are longer, a piece of one.
        """
        rows, law, policy = len(self.ends), self.law, self.policy
        room = policy.step_tokens - rows
        if rows == 0:
            return room
        most = min(room, policy.prefill_tokens)
        if policy.step_seconds_target is None or law.prompt_token_seconds <= 0:
            return max(1, most)
        decode_seconds = law.seconds(rows, 0, self.context)
        full_seconds = law.seconds(policy.slots, 0, self.context)
        left = max(
            policy.step_seconds_target - decode_seconds,
            PREFILL_SHARE * decode_seconds,
            PREFILL_WORTH * (decode_seconds / rows - full_seconds / policy.slots),
        )
        piece = (left - law.pass_seconds) / law.prompt_token_seconds
        tokens = int(min(left / self.token_seconds, piece))
        return max(1, min(most, max(MIN_PREFILL_TOKENS, tokens)))

    def _pieces(self, budget: int) -> dict[int, int]:
        """Prompt tokens of the next step by request, from the oldest prompts on."""
        pieces: dict[int, int] = {}
        taken = 0
        for request in self.filling:
            left = self.left[request]
            piece = min(left, budget - taken)
            if piece < min(left, PREFILL_MULTIPLE) and taken:
                break
            if PREFILL_MULTIPLE < piece < left:
                piece -= piece % PREFILL_MULTIPLE
            if piece <= 0:
                break
            pieces[request] = piece
            taken += piece
        return pieces

    def _preempt_youngest(self) -> int | None:
        """The youngest of several that run goes back to the queue; None: one alone stays."""
        if len(self.filling) + len(self.ends) < 2:
            return None
        request = max((*self.filling, *(each for _, each in self.ends)))
        prompt = self.prompts[request]
        if request in self.filling:
            self.filling.remove(request)
            computed = prompt - self.left[request]
            self.promised -= prompt
        else:
            end = next(end for end, each in self.ends if each == request)
            self.ends.remove((end, request))
            heapq.heapify(self.ends)
            made = self.outputs[request] - (end - self.step)
            computed = prompt + made - 1
            self.context -= computed
            self.promised -= computed
            self.prompts[request] += made
            self.outputs[request] -= made
        self.held -= computed
        self.left[request] = self.prompts[request]
        self.waiting.appendleft(request)
        return request

    def _until(self, rows: int, most: int, seconds: float) -> tuple[int, float]:
        """The fewest decode steps, 1 to `most`, that last as long as `seconds`, and their time."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.steps.stretch(rows, self.context, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low, self.steps.stretch(rows, self.context, low)

    def finish(self) -> None:
        """Free what the requests held that have their last token."""
        while self.ends and self.ends[0][0] <= self.step:
            request = heapq.heappop(self.ends)[1]
            self.last[request] = self.now
            tokens = self.prompts[request] + self.outputs[request] - 1
            self.context -= tokens
            self.held -= tokens
            self.promised -= tokens


def simulate(
    law: StepLaw | LawSteps, policy: Policy, due_seconds: Sequence[float] | Array, pairs: Pairs
) -> Simulated:
    """Play requests due at these times (ascending) with these lengths to their end."""
    count = len(due_seconds)
    if len(pairs) != count:
        raise LoadError(f"{len(pairs)} pairs of lengths for {count} due times")
    due = [float(t) for t in due_seconds]
    engine = _Engine(LawSteps(law) if isinstance(law, StepLaw) else law, policy, pairs)
    arrived = 0
    while True:
        if not engine.is_busy:
            if arrived == count:
                break
            engine.now = max(engine.now, due[arrived])
        while arrived < count and due[arrived] <= engine.now:
            engine.waiting.append(arrived)
            arrived += 1
        engine.admit()
        if engine.filling:
            engine.prefill_step()
        else:
            engine.decode_until(due[arrived] if arrived < count else math.inf)
        engine.finish()
    return Simulated(np.array(due), np.array(engine.first), np.array(engine.last), pairs[:, 1])
