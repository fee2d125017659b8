"""Calibration: a few seconds of requests that tell the time of a step, and the capacity simulated.

    seen, slots = calibrate(ask, single_stream_records, workload, slots, seconds)
    made = prediction(seen, policy, workload, arrivals, slos, seed)

The most telling sweeps first, as many as the time pays for: prompts of two lengths alone (prefill),
then bursts of streams sent at one moment that decode together, the largest first. All is timed at
the client. Where an endpoint does not say its slots, bursts of 2, 4, 8 ... find them. The
prediction aims the search; it is kept beside the measured capacity with its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.records.events import PredictedRate
from loadtests.records.schema import RequestRecord
from loadtests.simulation.batching import Policy, predict
from loadtests.simulation.step_observations import (
    most_at_once,
    observations_of,
    observations_of_burst,
)
from loadtests.simulation.step_time import StepLaw, StepObservation, fit
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.requests import Workload, draw
from models import formatting

SHARE = 0.12  # of a cell's budget, at most
LEAST_SECONDS = 2.0  # less buys nothing
SHORT_PROMPT = 16
ALIKE = 1.3  # prompts within this factor tell nothing apart
SWEPT = 4.0  # single-stream prompts that differ by this factor need no sweep
SCALING = 0.8  # power of streams by which a step is expected to grow
MOST_STREAMS = 64
MOST_TOKENS = 32
LEAST_TOKENS = 8  # of a burst's answers
UNKNOWN_SLOTS = 32  # where bursts up to this size are all served at once
SIMULATED = 800  # requests per simulated rate


class Burst(msgspec.Struct, frozen=True):
    """Streams that are sent at one moment, all of the same lengths."""

    streams: int
    prompt_tokens: int
    output_tokens: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The detail of a `calibrated` event."""

    spent_seconds: float = 0.0
    observations: list[StepObservation] = []
    slots: int | None = None  # as served, or as found
    law: StepLaw | None = None
    policy: Policy | None = None
    rates: dict[str, PredictedRate] = {}  # by the SLO's name
    reason: str = ""  # why there is no law


Ask = Callable[[Burst], list[RequestRecord]]  # sends a burst; returns once all have ended
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
    alone = observations_of(single_stream, 1)
    steps = [o.seconds for o in alone if o.decode_rows]
    fills = [o.seconds / max(1.0, o.prefill_tokens) for o in alone if o.prefill_tokens]
    step_seconds = float(np.median(steps)) if steps else 0.0
    fill_seconds = max(fills, default=0.0)
    longest = _longest_prompt(workload)
    found: list[StepObservation] = []
    for length in _lengths_to_sweep(alone, longest):
        waits = [o.seconds for o in alone if o.prefill_tokens >= length]
        expected = min(waits, default=fill_seconds * length) + 2 * step_seconds
        if clock() + expected < until:
            found += observations_of(ask(Burst(1, length, 2)), 1)
    prompt = min(SHORT_PROMPT, longest)
    served = slots
    for streams in _sizes(slots):
        filling = streams * prompt * fill_seconds
        expected = step_seconds * streams**SCALING
        tokens = _tokens((until - clock()) / 2 - filling, expected, streams)
        if tokens is None:
            continue
        records = ask(Burst(streams, prompt, tokens))
        seen = observations_of_burst(records)
        found += seen
        if seen:
            step_seconds = max(step_seconds, seen[0].seconds / streams**SCALING)
        if slots is None:
            at_once = most_at_once(records)
            served = max(served or 1, at_once)
            if at_once < streams:
                break
    return found, served


def prediction(
    observations: Sequence[StepObservation],
    policy: Policy,
    workload: Workload,
    arrivals: Arrivals,
    slos: Sequence[Slo],
    seed: int,
) -> Prediction:
    """The law, and the simulated capacity for each SLO with a latency limit; else the reason."""
    seen = list(observations)
    try:
        law = fit(seen)
        pairs = np.array(
            [(ask.prompt_tokens, ask.output_tokens) for ask in draw(workload, SIMULATED, seed)],
            dtype=np.int64,
        )
        rates = {
            slo.name: PredictedRate(
                rate=predict(
                    law, policy, pairs, slo, seed=seed, arrivals=arrivals, precision=0.03
                ).rate
            )
            for slo in slos
            if slo.ttft_seconds is not None or slo.tpot_seconds is not None
        }
    except LoadError as problem:
        return Prediction(observations=seen, reason=str(problem))
    return Prediction(observations=seen, law=law, policy=policy, rates=rates)


def in_words(predicted: PredictedRate) -> str:
    """`0.64 requests/s (0.46–0.86)`: the rate, with its p10 and p90 where they are known."""
    return formatting.rate_with_interval(predicted.rate, predicted.low, predicted.high)


def error_of(predicted_rate: float | None, measured_rate: float | None) -> float | None:
    """(predicted - measured) / measured: above 0 where the prediction is too high.

    None where either is missing, or the capacity is 0.
    """
    if predicted_rate is None or not measured_rate:
        return None
    return predicted_rate / measured_rate - 1.0


def error_in_words(error: float) -> str:
    """0.08 -> "8 % too high"."""
    if abs(error) < 0.005:
        return "right to the percent"
    return f"{abs(error) * 100:.0f} % too {'high' if error > 0 else 'low'}"


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


def _sizes(slots: int | None) -> list[int]:
    """Streams per burst. Known slots: all of them first, as extrapolation hurts most there."""
    if slots is None:
        return [2**power for power in range(1, UNKNOWN_SLOTS.bit_length())]
    most = min(slots, MOST_STREAMS)
    sizes = (most, max(2, most // 4), max(2, most // 2), 2)
    return list(dict.fromkeys(size for size in sizes if 2 <= size <= most))


def _tokens(seconds: float, step_seconds: float, streams: int) -> int | None:
    """Output tokens of a burst that decodes for at most `seconds`; None: fewer than eight."""
    fits = int(seconds / max(step_seconds, 1e-4))
    return None if fits < LEAST_TOKENS else min(MOST_TOKENS, fits, 16 + streams)
