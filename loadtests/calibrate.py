"""Calibration: a few seconds of requests that say how long a step takes, and the capacity that simulation makes of it.

    seen = observations_of(lone_records, 1) + calibrate(ask, waves, budget_seconds)       # measured, time-boxed
    prediction = predicted(seen, policy, campaign, slots)                                  # where the search looks first

Three sweeps, the most telling first and as many as the time-box pays for: prompts of two lengths alone (prefill), then waves of streams
that are sent at one moment and decode together (batch), the largest first; a single stream is what the lone level measured. All of it is
timed at the client, so it works on any endpoint; of one that does not say how many requests it serves at a time, waves of 2, 4, 8 ...
find out. A prediction only aims the search: the capacity that is reported is measured, and the prediction is kept beside it with its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from loadtests import workload as workloads
from loadtests.arrivals import Arrivals
from loadtests.errors import LoadError
from loadtests.records import RequestRecord
from loadtests.simulate import Policy, predict
from loadtests.slo import Promise
from loadtests.steptime import StepLaw, StepObservation, fit, most_at_once, observations_of, observations_of_wave
from loadtests.workload import Workload

SHARE = 0.12  # of a cell's budget, at most
LEAST_SECONDS = 2.0  # less buys nothing
SHORT_PROMPT = 16
MOST_STREAMS = 64
UNKNOWN_SLOTS = 32  # where waves up to this size are all served at once
SIMULATED = 800  # requests per simulated rate


class Wave(msgspec.Struct, frozen=True):
    """Streams that are sent at one moment, all of the same lengths."""

    streams: int
    prompt_tokens: int
    output_tokens: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The detail of a `calibrated` event: what was seen, the law, and per promise the rate at which the simulation crosses its target.

    `rates` maps a promise's name to requests/s; 0.0: not even lone requests keep it. `reason` says why there is no law; "" where there is.
    """

    spent_seconds: float
    observations: list[StepObservation] = []
    slots: int | None = None  # as served, or as found
    law: StepLaw | None = None
    policy: Policy | None = None
    rates: dict[str, float] = {}
    reason: str = ""


Ask = Callable[[Wave], list[RequestRecord]]  # sends a wave, returns its records once all have ended


def time_box(budget_seconds: float, most_seconds: float) -> float:
    """How long to calibrate within a budget, in seconds; 0.0: not at all."""
    seconds = min(most_seconds, SHARE * budget_seconds)
    return seconds if seconds >= LEAST_SECONDS else 0.0


def calibrate(ask: Ask, lone: Sequence[RequestRecord], workload: Workload, slots: int | None, seconds: float) -> tuple[
    list[StepObservation], int | None
]:  # fmt: skip
    """Observations beside those of the lone requests, and how many requests are served at a time; `slots` where that is known already.

    No wave is begun that is expected to end after `seconds`; None for slots where there was no time to find out.
    """
    until = time.monotonic() + seconds
    found: list[StepObservation] = []
    alone = observations_of(lone, 1)
    step_seconds = float(np.median([o.seconds for o in alone if o.decode_rows])) if any(o.decode_rows for o in alone) else 0.0
    fill_seconds = max((o.seconds / max(1.0, o.prefill_tokens) for o in alone if o.prefill_tokens), default=0.0)
    longest = _longest_prompt(workload)
    prompts = [o.prefill_tokens for o in alone if o.prefill_tokens]
    lengths = [n for n in (longest, SHORT_PROMPT) if not prompts or not min(prompts) * 1.3 > n > min(prompts) / 1.3]
    if not prompts or max(prompts) < 4 * min(prompts):
        for length in lengths:
            known_waits = [o.seconds for o in alone if o.prefill_tokens >= length]
            if time.monotonic() + min(known_waits, default=fill_seconds * length) + 2 * step_seconds < until:
                found += observations_of(ask(Wave(1, length, 2)), 1)
    prompt = min(SHORT_PROMPT, longest)
    known, served = slots, slots
    sizes = _sizes(known)
    while sizes:
        streams = sizes.pop(0)
        filling, step = streams * prompt * fill_seconds, step_seconds * streams**0.8
        tokens = _tokens((until - time.monotonic()) / 2 - filling, step, streams)
        if tokens is None:
            continue
        records = ask(Wave(streams, prompt, tokens))
        seen = observations_of_wave(records)
        found += seen
        if seen:
            step_seconds = max(step_seconds, seen[0].seconds / streams**0.8)
        if known is None:
            at_once = most_at_once(records)
            served = max(served or 1, at_once)
            if at_once < streams:
                break
    return found, served


def predicted(
    observations: Sequence[StepObservation], policy: Policy, workload: Workload, arrivals: Arrivals, promises: Sequence[Promise], seed: int
) -> tuple[StepLaw, dict[str, float]]:
    """The law and the capacity under each promise, requests/s by the promise's name. Raises LoadError for too few observations."""
    law = fit(observations)
    asks = workloads.draw(workload, SIMULATED, seed)
    pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)
    rates = {
        promise.name: predict(law, policy, pairs, promise, seed=seed, arrivals=arrivals, precision=0.03).rate
        for promise in promises
        if promise.ttft_seconds is not None or promise.tpot_seconds is not None
    }
    return law, {name: rate for name, rate in rates.items() if np.isfinite(rate)}


def prediction(
    observations: Sequence[StepObservation], policy: Policy, workload: Workload, arrivals: Arrivals, promises: Sequence[Promise], seed: int,
    *, slots: int | None, spent_seconds: float,
) -> Prediction:  # fmt: skip
    """`predicted`, with a reason in place of an error."""
    try:
        law, rates = predicted(observations, policy, workload, arrivals, promises, seed)
    except LoadError as problem:
        return Prediction(spent_seconds=spent_seconds, observations=list(observations), slots=slots, reason=str(problem))
    return Prediction(spent_seconds=spent_seconds, observations=list(observations), slots=slots, law=law, policy=policy, rates=rates)


def error_of(predicted_rate: float | None, measured_rate: float | None) -> float | None:
    """(predicted - measured) / measured: above 0 where the prediction was too hopeful. None where either is missing, or nothing held."""
    if predicted_rate is None or not measured_rate:
        return None
    return predicted_rate / measured_rate - 1.0


def error_in_words(error: float) -> str:
    """0.08 -> "8 % too high"."""
    if abs(error) < 0.005:
        return "right to the percent"
    return f"{abs(error) * 100:.0f} % too {'high' if error > 0 else 'low'}"


def _longest_prompt(workload: Workload) -> int:
    asks = workloads.draw(workload, 200, 1)
    return int(np.quantile([ask.prompt_tokens for ask in asks], 0.95))


def _sizes(slots: int | None) -> list[int]:
    """Streams per wave. Known slots: all of them first, since that is where extrapolation would hurt most. Unknown: doubling."""
    if slots is None:
        return [2**power for power in range(1, UNKNOWN_SLOTS.bit_length())]
    most = min(slots, MOST_STREAMS)
    return list(dict.fromkeys(size for size in (most, max(2, most // 4), max(2, most // 2), 2) if 2 <= size <= most))


def _tokens(seconds: float, step_seconds: float, streams: int) -> int | None:
    """Output tokens of a wave whose decoding is to last no longer than `seconds`; None where that does not pay for eight."""
    fits = int(seconds / max(step_seconds, 1e-4))
    return None if fits < 8 else min(32, max(8, fits), 16 + streams)
