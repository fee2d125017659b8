"""Checks with a few requests whether the SLO is missed unloaded, where the step-time model says so.

    burst = requests_to_check(server, demand, slo, seconds=20.0)     # sent one at a time
    checked = checked_speed(server, slo, level)                      # what they measured
    checked.factor, checked.words

By the model, too many requests miss the SLO even one at a time, which are those with the longest
prompts. The check begins with the request whose miss decides: if it and all shorter ones meet the
SLO, SLO attainment is the target. It goes on to the longest one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crossover.loadtests.levels.level_columns import Floats, Level
from crossover.loadtests.records.level_plan import Burst
from crossover.models import formatting
from crossover.serving.capacity.batching_simulator import Simulated
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    Demand,
    Lengths,
    Server,
    ServerModel,
)
from crossover.serving.capacity.slo import Slo

MAX_REQUESTS = 5
# Of an answer of which only the first token is in question. TPOT is known from the others.
FEW_OUTPUT_TOKENS = 8
BEYOND = 1.001  # a factor of step times just beyond the one at which a request meets the SLO


class CheckedSpeed(NamedTuple):
    """What requests measured that miss the SLO unloaded by the step-time model."""

    factor: float | None  # of all step times, by these requests; None: none was answered
    words: str  # "sent alone, 0 of 5 requests with prompts of 433 to 512 tokens met the SLO"


def requests_to_check(
    server: ServerModel, demand: Demand, slo: Slo, seconds: float
) -> Burst | None:
    """Return requests that miss the SLO unloaded by the step-time model, as many as are expected to
    be answered within `seconds`, at least one.

    None: the requests are turns of conversations, which no single request stands for.
    """
    simulated = server.slower(LOADED).simulated(demand)
    lengths, times = simulated.lengths, simulated.unloaded()
    if lengths.turns is not None or not slo.limits:
        return None
    by_severity = np.argsort(slo.largest_share(times), kind="stable")
    count = len(by_severity)
    decisive = min(int(np.ceil(slo.target * count)), count) - 1
    # Prompt tokens that the server finds in its cache are left out, since these requests share no
    # prefix with others. Every prompt has the tokens of the chat template.
    prompts = lengths.prompt - np.maximum(lengths.cached - server.template_tokens, 0)
    is_first_token = times.tpot <= (slo.tpot_seconds or np.inf)
    if slo.e2e_seconds is None and slo.ttfa_seconds is None:
        few = np.minimum(lengths.output, FEW_OUTPUT_TOKENS)
        outputs = np.where(is_first_token, few, lengths.output)
    else:
        outputs = lengths.output
    answer_seconds = times.ttft + np.nan_to_num(times.tpot) * (outputs - 1)
    for number in range(MAX_REQUESTS, 0, -1):
        chosen = by_severity[np.linspace(decisive, count - 1, number).astype(int)]
        if number == 1 or float(answer_seconds[chosen].sum()) <= seconds:
            break
    return Burst(tuple(prompts[chosen].tolist()), tuple(outputs[chosen].tolist()))


@functools.lru_cache(maxsize=64)  # a level is looked at again after each later one
def checked_speed(server: ServerModel, slo: Slo, level: Level) -> CheckedSpeed:
    """Return what a level of these requests says about the calibrated server; of a disturbed level,
    `level` is the undisturbed one.

    The factor is the median of measured over modeled times, of the time that is nearest to its
    limit. If all requests met the SLO, it is at most the one with which the model says so too, and
    if none did, it is above the one with which the model says that one does.
    """
    is_met = slo.met_by(level)
    modeled = _modeled(server, _prompts_of(level), level.requested_output_tokens)
    modeled_shares = slo.largest_share(modeled)
    ratios = slo.largest_share(level) / modeled_shares
    ratios = ratios[np.isfinite(ratios)]
    factor = float(np.median(ratios)) if len(ratios) else None
    if factor is not None and is_met.all():
        factor = min(factor, float((1 / modeled_shares).min()))
    elif factor is not None and not is_met.any():
        factor = max(factor, BEYOND * float((1 / modeled_shares).max()))
    words = unloaded_check_words(level, slo)
    if level.taken_share:
        words += ", without what other processes took"
    return CheckedSpeed(factor, words)


def _modeled(server: ServerModel, prompts: Floats, outputs: Floats) -> Simulated:
    """Return the times of single requests of these lengths by the step-time model."""
    prompt = prompts.astype(np.int64)
    cached = np.minimum(np.maximum(prompt - 1, 0), server.template_tokens)
    lengths = Lengths(
        prompt=prompt,
        output=outputs.astype(np.int64),
        cached=cached,
        reasoning_share=server.reasoning_share,
    )
    return Server(server.step_times, server.settings, lengths).unloaded()


def unloaded_check_words(level: Level, slo: Slo) -> str:
    """Return `sent alone, 0 of 5 requests with prompts of 433 to 512 tokens met the SLO (TTFT 2.1 s
    to 2.6 s)`."""
    count, met, prompts = len(level.due), int(slo.met_by(level).sum()), _prompts_of(level)
    requests = f"{met} of {count} requests" if count > 1 else f"{met} of 1 request"
    tokens = _span([f"{value:,.0f}" for value in (prompts.min(), prompts.max())])
    noun = "prompts" if count > 1 else "a prompt"
    answered = level.ttft[np.isfinite(level.ttft)]
    times = ""
    if len(answered):
        ends = [formatting.seconds(float(value)) for value in (answered.min(), answered.max())]
        times = f" (TTFT {_span(ends)})"
    return f"sent alone, {requests} with {noun} of {tokens} tokens met the SLO{times}"


def _prompts_of(level: Level) -> Floats:
    """Return the prompt tokens of each request: as the server counted them, else as requested."""
    counted = level.prompt_tokens
    return np.where(np.isfinite(counted), counted, level.requested_prompt_tokens)


def _span(ends: Sequence[str]) -> str:
    """Return `1 to 2`, or `1` if both ends are the same."""
    return " to ".join(dict.fromkeys(ends))
