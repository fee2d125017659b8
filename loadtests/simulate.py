"""Simulation of continuous batching: arrivals, lengths, a step-time law and a policy -> TTFT and TPOT of every request, and the capacity.

    prediction = predict(law, Policy(slots=16), pairs, PROMISES["chat"], seed=1)
    prediction.rate                      # where a search should look first

The policy is the scheduler's (serving/scheduler.py): each step decodes every running sequence that is past its prompt, one token each,
then takes prompt tokens, oldest sequence first, up to a budget: the backend's whole step while nobody decodes, else `prefill_tokens`
and no more than is expected to fit in `step_seconds_target`, in PREFILL_SHARE times what the decoding rows take, or in PREFILL_WORTH
times what a row costs more than it would with every slot decoding; prompts are cut at multiples of PREFILL_MULTIPLE. Sequences are
admitted first come, first served, to a free slot while the KV pool has room. Left out: preemption (a pool that overflows in
mid-answer), prefix reuse, and time spent outside the step.

Steps that only decode are not played one by one: from one arrival or ending to the next the law sums them in closed form, so 10,000
requests take about a second.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.arrivals import Arrivals, Poisson, due_times
from loadtests.errors import LoadError
from loadtests.slo import Promise
from loadtests.steptime import StepLaw

Array = npt.NDArray[np.float64]

PREFILL_MULTIPLE, MIN_PREFILL_TOKENS, PREFILL_SHARE, PREFILL_WORTH = 16, 17, 3.75, 120.0  # as the scheduler's: a test holds them to it


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's settings that matter to latency; names and defaults as EngineConfig's."""

    slots: int = 16
    prefill_tokens: int = 256  # prompt tokens of a step while someone decodes, at most
    step_tokens: int = 2048  # most tokens of one step
    kv_tokens: int | None = None  # None: never the limit
    step_seconds_target: float | None = None  # what a step with prompt tokens should take while someone decodes; None: no such limit

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
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.output_tokens > 1, (self.last_token - self.first_token) / (self.output_tokens - 1), np.nan)

    def good(self, promise: Promise) -> npt.NDArray[np.bool_]:
        """Which requests kept the promise."""
        good = np.ones(len(self.due), dtype=bool)
        if promise.ttft_seconds is not None:
            good &= self.ttft_seconds <= promise.ttft_seconds
        if promise.tpot_seconds is not None:
            good &= ~(self.tpot_seconds > promise.tpot_seconds)
        return good


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which the simulated share of good requests is the target; 0.0 where even lone requests break the promise."""

    rate: float
    lone_share: float
    requests: int  # simulated per rate
    unseen: tuple[str, ...]  # what the law could not know (StepLaw.unseen)


class _Sequence:
    __slots__ = ("index", "prompt", "left", "output", "done")

    def __init__(self, index: int, prompt: int, output: int) -> None:
        self.index = index
        self.prompt = prompt
        self.left = prompt  # prompt tokens still to compute
        self.output = output


def simulate(law: StepLaw, policy: Policy, due_seconds: Sequence[float] | Array, pairs: npt.NDArray[np.int64]) -> Simulated:
    """Play the requests that are due at these times (ascending) with these (prompt, output) lengths, int64 [n, 2], to their end."""
    count = len(due_seconds)
    if len(pairs) != count:
        raise LoadError(f"{len(pairs)} pairs of lengths for {count} due times")
    due = [float(t) for t in due_seconds]
    prompts, outputs = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    first, last = [0.0] * count, [0.0] * count
    pool = policy.kv_tokens if policy.kv_tokens is not None else math.inf
    waiting: deque[_Sequence] = deque()
    filling: list[_Sequence] = []
    ends: list[tuple[int, int]] = []  # (decode step at which it has its last token, index)
    now, arrived, step = 0.0, 0, 0
    context = 0  # tokens in the KV of the decoding sequences
    held = 0  # tokens in the KV of all running ones
    while arrived < count or waiting or filling or ends:
        if not waiting and not filling and not ends:
            now = max(now, due[arrived])
        while arrived < count and due[arrived] <= now:
            waiting.append(_Sequence(arrived, prompts[arrived], outputs[arrived]))
            arrived += 1
        while waiting and len(filling) + len(ends) < policy.slots:
            running = len(filling) + len(ends)
            if running and held + waiting[0].prompt + running > pool:
                break
            sequence = waiting.popleft()
            filling.append(sequence)
        rows = len(ends)
        if not filling:
            # Nothing but decoding until the next ending, or until someone comes who could be let in.
            steps = ends[0][0] - step
            blocked = bool(waiting) or rows >= policy.slots
            if not blocked and arrived < count:
                steps = _steps_until(law, rows, context, steps, due[arrived] - now)
            now += law.stretch_seconds(rows, context, steps)
            step += steps
            context += rows * steps
            held += rows * steps
        else:
            budget = _budget(law, policy, rows, context)
            taken = 0
            for sequence in filling:
                piece = min(sequence.left, budget - taken)
                if piece < min(sequence.left, PREFILL_MULTIPLE) and taken:
                    break
                if PREFILL_MULTIPLE < piece < sequence.left:
                    piece -= piece % PREFILL_MULTIPLE
                if piece <= 0:
                    break
                sequence.left -= piece
                taken += piece
            now += law.seconds(rows, taken, context)
            step += 1
            context += rows
            held += rows + taken
            while filling and filling[0].left == 0:  # oldest first, so those that are done stand in front
                sequence = filling.pop(0)
                first[sequence.index] = now
                if sequence.output <= 1:
                    last[sequence.index] = now
                    held -= sequence.prompt
                else:
                    heapq.heappush(ends, (step + sequence.output - 1, sequence.index))
                    context += sequence.prompt
        while ends and ends[0][0] <= step:
            index = heapq.heappop(ends)[1]
            last[index] = now
            context -= prompts[index] + outputs[index] - 1
            held -= prompts[index] + outputs[index] - 1
    return Simulated(np.array(due), np.array(first), np.array(last), np.asarray(pairs[:, 1], dtype=np.int64))


def predict(
    law: StepLaw,
    policy: Policy,
    pairs: npt.NDArray[np.int64],
    promise: Promise,
    *,
    seed: int = 0,
    arrivals: Arrivals | None = None,
    precision: float = 0.01,
    max_rate: float = 1e4,
) -> Prediction:
    """The simulated capacity for a workload of these (prompt, output) lengths, in the order they are asked.

    The same lengths and the same random arrivals, only faster or slower, are played at every rate, so the share of good requests is
    nearly monotone in it and a bisection finds the target. The first tenth is warm-up. Raises LoadError for fewer than 50 lengths.
    """
    if len(pairs) < 50:
        raise LoadError(f"{len(pairs)} requests are too few to predict a capacity from: at least 50 are needed")
    process = arrivals if arrivals is not None else Poisson()
    unit = _unit_arrivals(process, len(pairs), seed)
    unit, pairs = unit[: len(pairs)], pairs[: len(unit)]

    def share(rate: float) -> float:
        return float(np.mean(simulate(law, policy, unit / rate, pairs).good(promise)[len(pairs) // 10 :]))

    lone = pairs[: min(len(pairs), 400)]
    slowest = max(1.0, float(np.sum(lone))) * max(law.seconds(1, 1, float(lone.sum(axis=1).max())), 1e-9) + 1.0
    lone_share = float(np.mean(simulate(law, policy, np.arange(len(lone), dtype=np.float64) * slowest, lone).good(promise)))
    if lone_share < promise.target:
        return Prediction(rate=0.0, lone_share=lone_share, requests=len(pairs), unseen=law.unseen)
    # A queue of only these requests needs a rate well above capacity to show; the ceiling is where they all come at once.
    low = 1e-6
    high = 1.0 / max(law.seconds(1, 0, 0) * float(np.mean(pairs[:, 1])), 1e-9)
    while high < max_rate and share(high) >= promise.target:
        low, high = high, high * 2
    while high / low > 1 + precision and high < max_rate * 2:
        middle = math.sqrt(low * high) if low > 1e-3 * high else high / 4
        if share(middle) >= promise.target:
            low = middle
        else:
            high = middle
    return Prediction(rate=low, lone_share=lone_share, requests=len(pairs), unseen=law.unseen)


def _unit_arrivals(process: Arrivals, count: int, seed: int) -> Array:
    times = due_times(process, 1.0, 1.2 * count + 50.0, seed)
    if len(times) < 2:
        raise LoadError(f"arrivals of kind {type(process).__name__} gave {len(times)} requests: too few to predict a capacity from")
    return times


def _budget(law: StepLaw, policy: Policy, rows: int, context: int) -> int:
    """Prompt tokens of the next step: as Scheduler._rows and _prefill_budget."""
    room = policy.step_tokens - rows
    if rows == 0:
        return room
    most = min(room, policy.prefill_tokens)
    if policy.step_seconds_target is None or law.prompt_token_seconds <= 0:
        return max(1, most)
    decode_seconds = law.seconds(rows, 0, context)
    lost_seconds = decode_seconds / rows - law.seconds(policy.slots, 0, context) / policy.slots
    left = max(policy.step_seconds_target - decode_seconds, PREFILL_SHARE * decode_seconds, PREFILL_WORTH * lost_seconds)
    return max(1, min(most, max(MIN_PREFILL_TOKENS, int(left / law.prompt_token_seconds))))


def _steps_until(law: StepLaw, rows: int, context: int, most: int, seconds: float) -> int:
    """The fewest decode steps, at least 1 and at most `most`, that last as long as `seconds`."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if law.stretch_seconds(rows, context, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low
