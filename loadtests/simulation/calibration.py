"""Calibration: a few seconds of requests that tell the time of a step, and the capacity simulated.

    seen, slots = calibrate(ask, single_stream_records, workload, slots, seconds)
    made = prediction(seen, policy, workload, arrivals, slos, seed)

Prompts of two lengths alone tell what prefill costs. Then bursts of streams that are sent at one
moment and end one after the other: each tells a step's time at many numbers of decode rows (8, 6,
5, 4, 3, 2), so that no number of rows has to be told from its neighbours, and at its beginning what
several prompts in one step cost. As many as the time pays for, the second burst to tell chance from
cost. All is timed at the client. Where an endpoint does
not say its slots, bursts of 2, 4, 8 ... find them. The prediction aims the search; it is kept
beside the measured capacity with its error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.records.events import Capacity, PredictedRate
from loadtests.records.schema import RequestRecord
from loadtests.simulation.batching import Policy
from loadtests.simulation.old_simulated_capacity import SimulatedCapacity, predict
from loadtests.simulation.prediction_error import NORMAL, error_scale, packaged_pairs
from loadtests.simulation.step_observations import (
    most_at_once,
    observations_of,
    observations_of_burst,
)
from loadtests.simulation.step_replay import residuals_of
from loadtests.simulation.step_time import StepLaw, StepObservation, fit
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.request_lengths import Workload, draw

SHARE = 0.12  # of a cell's budget, at most
LEAST_SECONDS = 2.0  # less buys nothing
SHORT_PROMPT = 16
ALIKE = 1.3  # prompts within this factor tell nothing apart
SWEPT = 4.0  # single-stream prompts that differ by this factor need no sweep
SCALING = 0.8  # power of streams by which a step is expected to grow
MOST_STREAMS = 64
ROUNDS = 2  # staircases of rows
STEPS = (12, 6)  # at each number of rows: as many as there is time for
AHEAD = 4  # steps, and an eighth of the streams: that the first stream starts before the last
ALL_ROWS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
FEW_ROWS = (2, 3, 5, 8, 16, 32, 64)
UNKNOWN_SLOTS = 32  # where bursts up to this size are all served at once
SIMULATED = 20_000  # requests per simulated rate, over several seeds
P90 = 1.2816  # standard deviations


class Burst(msgspec.Struct, frozen=True):
    """Streams that are sent at one moment: prompts of one length, answers each of its own."""

    prompt_tokens: int
    output_tokens: tuple[int, ...]  # of each stream

    @property
    def streams(self) -> int:
        return len(self.output_tokens)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The detail of a `calibrated` event."""

    spent_seconds: float = 0.0
    observations: list[StepObservation] = []
    slots: int | None = None  # as served, or as found
    law: StepLaw | None = None
    policy: Policy | None = None
    rates: dict[str, PredictedRate] = {}  # by the SLO's name
    reason: str = ""  # why there is no law


Ask = Callable[[Burst], list[RequestRecord]]  # sends a burst; [] where its times tell nothing
Clock = Callable[[], float]


def time_box(budget_seconds: float, most_seconds: float) -> float:
    """Seconds to calibrate within a budget; 0.0: not at all."""
    seconds = min(most_seconds, SHARE * budget_seconds)
    return seconds if seconds >= LEAST_SECONDS else 0.0


def calibrate(
    ask: Ask,
    single_stream: Sequence[RequestRecord],
    workload: Workload,
    slots: int | None,
    seconds: float,
    clock: Clock = time.monotonic,
) -> tuple[list[StepObservation], int | None]:
    """Observations beside those of the single-stream requests, and the slots (given or found).

    No burst is begun that is expected to end after `seconds`. Slots None: no time to find out.
    """
    until = clock() + seconds
    plan = _Plan(ask, clock, until, observations_of(single_stream), _longest_prompt(workload))
    plan.sweep_prompts()
    if slots is None:
        slots = plan.find_slots()
    if slots is not None:
        for left in range(ROUNDS, 0, -1):
            plan.staircase(slots, (until - clock()) / left)
    return plan.found, slots


class _Plan:
    """What one calibration has asked and seen so far."""

    def __init__(
        self,
        ask: Ask,
        clock: Clock,
        until: float,
        alone: list[StepObservation],
        longest_prompt: int,
    ) -> None:
        self.found: list[StepObservation] = []
        self._ask = ask
        self._clock = clock
        self._until = until
        self._alone = alone
        self._longest = longest_prompt
        self._prompt = min(SHORT_PROMPT, longest_prompt)
        self._bursts = 0
        fills = [o.seconds / max(1.0, o.prefill_tokens) for o in alone if o.prefill_tokens]
        self._fill_seconds = min(fills, default=0.0)  # of the longest prompt: least of it is base
        steps = [o.seconds for o in alone if o.decode_rows]
        self._step_seconds = {1: float(np.median(steps))} if steps else {}  # by decode rows

    def sweep_prompts(self) -> None:
        """Prompts alone, of lengths that the single-stream requests lack."""
        for length in _lengths_to_sweep(self._alone, self._longest):
            waits = [o.seconds for o in self._alone if o.prefill_tokens >= length]
            expected = min(waits, default=self._fill_seconds * length) + 2 * self._expected(1)
            if self._clock() + expected < self._until:
                self.found += observations_of(self._ask(Burst(length, (2,))))

    def find_slots(self) -> int | None:
        """Streams that are served together, by bursts of 2, 4, 8 ...; None: no time to find out."""
        served: int | None = None
        for streams in (2**power for power in range(1, UNKNOWN_SLOTS.bit_length())):
            tokens = STEPS[1] + _ahead(streams)
            if 2 * self._cost((streams,), STEPS[1]) > self._until - self._clock():
                break
            records = self._burst((tokens,) * streams)
            if not records:
                break
            at_once = most_at_once(records)
            served = max(served or 1, at_once)
            if at_once < streams:
                break
        return served

    def staircase(self, slots: int, seconds: float) -> None:
        """One burst within so many seconds, its rows and steps as many as they pay for."""
        most = min(slots, MOST_STREAMS)
        for steps in STEPS:
            for ladder in _ladders(most):
                if self._cost(ladder, steps) <= seconds:
                    self._burst(_ending_in_turn(ladder, steps))
                    return

    def _burst(self, output_tokens: tuple[int, ...]) -> list[RequestRecord]:
        self._bursts += 1
        records = self._ask(Burst(self._prompt, output_tokens))
        for one in observations_of_burst(records, self._bursts):
            self.found.append(one)
            if not one.prefill_tokens:
                self._step_seconds[round(one.decode_rows)] = one.seconds
        return records

    def _cost(self, ladder: tuple[int, ...], steps: int) -> float:
        """Expected seconds of a burst."""
        filling = ladder[0] * max(self._prompt * self._fill_seconds, self._expected(1) / 8)
        ahead = _ahead(ladder[0]) * self._expected(ladder[0])
        return filling + ahead + steps * sum(self._expected(rows) for rows in ladder)

    def _expected(self, rows: int) -> float:
        """Seconds of a decode step, from the nearest smaller number of rows that was seen."""
        smaller = [seen for seen in self._step_seconds if seen <= rows]
        if not smaller:
            return max(self._step_seconds.values(), default=0.0)
        nearest = max(smaller)
        return float(self._step_seconds[nearest] * (rows / nearest) ** SCALING)


def prediction(
    observations: Sequence[StepObservation],
    policy: Policy,
    workload: Workload,
    arrivals: Arrivals,
    slos: Sequence[Slo],
    seed: int,
    known_error: float | None = None,
) -> Prediction:
    """The law, and the simulated capacity for each SLO with a latency limit; else the reason.

    `known_error`: standard deviation of ln(predicted / measured) before this one; None: that of the
    pairs that come with the package.
    """
    seen = [one for one in observations if one.seconds > 0]
    if len(seen) < len(observations) / 2:
        return Prediction(
            observations=list(observations),
            reason="the engine's steps take no time that the client can see",
        )
    before = error_scale(packaged_pairs()) if known_error is None else known_error
    try:
        law = fit(seen)
        asks = draw(workload, SIMULATED, seed)
        pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)
        residuals = residuals_of(seen, law)
        rates = {
            slo.name: _with_interval(
                predict(law, policy, pairs, slo, seed=seed, arrivals=arrivals, residuals=residuals),
                law,
                before,
            )
            for slo in slos
            if slo.ttft_seconds is not None or slo.tpot_seconds is not None
        }
    except LoadError as problem:
        return Prediction(observations=seen, reason=str(problem))
    return Prediction(observations=seen, law=law, policy=policy, rates=rates)


def _with_interval(found: SimulatedCapacity, law: StepLaw, known_error: float) -> PredictedRate:
    """With p10 and p90: ln(rate) is taken for normal, its variance for the sum of

    (sensitivity x the law's error where it had not seen the step, as a standard deviation)^2,
    (the simulation's error between seeds, of arrivals, lengths and residuals)^2,
    (the error known from earlier pairs of predicted and measured)^2.
    """
    if found.rate == 0.0:
        return PredictedRate(rate=0.0)  # the interval of an answer that is none is not known
    of_law = found.sensitivity * NORMAL * (law.error or 0.0)
    spread = math.exp(P90 * math.hypot(of_law, found.error or 0.0, known_error))
    return PredictedRate(rate=found.rate, low=found.rate / spread, high=found.rate * spread)


def prediction_ratio(
    predicted_rate: float | None, found: Capacity
) -> tuple[float, float, float] | None:
    """Predicted / measured capacity at the interval's high end, estimate and low end.

    Above 1: the prediction is too high. None where no level bounds the capacity, or it is 0.
    """
    if not predicted_rate or not found.low or not found.high or not found.estimate:
        return None
    return (
        predicted_rate / found.high,
        predicted_rate / found.estimate,
        predicted_rate / found.low,
    )


def _longest_prompt(workload: Workload) -> int:
    return int(np.quantile([ask.prompt_tokens for ask in draw(workload, 200, 1)], 0.95))


def _lengths_to_sweep(alone: Sequence[StepObservation], longest: int) -> list[int]:
    """Prompt lengths to add, where the single-stream requests' are too much alike."""
    prompts = [o.prefill_tokens for o in alone if o.prefill_tokens]
    lengths = [longest, SHORT_PROMPT]
    if not prompts:
        return lengths
    shortest = min(prompts)
    if max(prompts) >= SWEPT * shortest:
        return []
    return [length for length in lengths if not shortest / ALIKE < length < shortest * ALIKE]


def _ladders(most: int) -> list[tuple[int, ...]]:
    """Numbers of decode rows to visit, each from the largest down: the most telling ladder first.

    Where time is short, what many rows cost goes last: a slow model serves few at once.
    """
    if most < 2:
        return []
    ladders = [_ladder(ALL_ROWS, most), _ladder(FEW_ROWS, most)]
    ladders += [_ladder(FEW_ROWS, rows) for rows in reversed(FEW_ROWS) if rows < most]
    return list(dict.fromkeys(ladders))


def _ladder(rows: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(sorted({most, *(each for each in rows if each < most)}, reverse=True))


def _ahead(streams: int) -> int:
    """Steps that the first stream of a burst may be ahead of the last."""
    return AHEAD + streams // 8


def _ending_in_turn(ladder: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """Output tokens of the streams of a burst whose decode rows go down the ladder.

    The first stream, which starts first, ends last.
    """
    tokens: list[int] = []
    for stage, rows in enumerate(ladder, 1):
        fewer = ladder[stage] if stage < len(ladder) else 0
        tokens += [1 + _ahead(ladder[0]) + steps * stage] * (rows - fewer)
    return tuple(reversed(tokens))
