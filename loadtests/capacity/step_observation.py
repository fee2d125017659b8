"""Observes the engine's steps in the times at which a level's content chunks arrived. Works against
any endpoint.

    steps, covered_share = observed_steps(level, slots=8)
    level_factor(step_times, level, settings)      # 1.1: steps took 1.1 times what the model says

If a chunk is a token, the tokens of one step arrive together, at the step's end. A step begins
where the one before it ended, or, on an idle server, when its first request was sent. It is
observed only if all requests that had a token to come have got one.

While a prompt is processed over several steps, nothing shows how many of its tokens each step had.
So such steps are merged with those that follow, up to one with no prompt in progress: then the sums
are right, however the prompt was divided. A server that does not decode while it processes prompts
has steps with nothing but first tokens.

One rule thus observes steps in single streams, bursts and open-loop levels. If chunks have several
tokens, or a proxy collects them, steps cannot be observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossover.loadtests.levels.level_columns import Level
from crossover.models.shape.model_spec import Routing
from crossover.serving.capacity.batching_simulator import Simulated, simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.step_time_model import StepObservation, StepTimeModel

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_CHUNK_TOKENS = 1.05  # on average: with more, chunks are not steps
# Chunks closer than this share of a quick step (the 20 % quantile of gaps) belong to one step.
MAX_GAP_SHARE = 0.4
# Equal steps in a row are merged into one observation: at most MAX_MERGED_STEPS, and only as many
# that MIN_OBSERVED observations of a level are left.
MAX_MERGED_STEPS = 12
MIN_OBSERVED = 40
MIN_STEPS = 50  # fewer say little about the factor of a level
# The part of the busy time that observed steps must cover; otherwise the factor follows from TPOT,
# which is as good: on 58 recorded levels near the capacity both have an error of 0.069
# (docs/benchmarks.md). 57 of 62 levels cover more than 0.7; llama-server's do not.
MIN_COVERED_SHARE = 0.35
TPOT_FACTORS = (0.4, 2.5)  # range in which the factor is searched by TPOT
PART_SECONDS = 30.0  # of a level; parts are compared, to see whether the machine's speed changed
# The speed changed if the factors of two parts differ by more than this. In 40 recorded levels of
# undisturbed machines they differed by at most 1.35, or 1.28 if there were 6 to 8 parts; the
# step-time model's own error makes up to 1.12.
MIN_SPEED_RATIO = 1.4


class _Steps(NamedTuple):
    """The steps that the chunks of a level came from."""

    of_chunk: IntArray  # [chunks]: index of the chunk's step
    end: Array  # [steps]: seconds, when its last chunk arrived
    min_gap_seconds: float  # minimum time between the chunks of two steps


def observed_steps(
    level: Level, slots: int, experts: Routing | None = None
) -> tuple[list[StepObservation], float]:
    """Return the observed steps in order, engine by engine if the server has several, and the share
    of the busy time that they cover, 0..1.

    If the server does not count tokens, each chunk counts as one. [] if chunks are not tokens, or
    were collected by a proxy. `slots`: of an engine. A waiting prompt is counted to a step only if
    a slot is free.
    `experts`: of a mixture of experts; None: the share of experts that a step reads is not counted.
    """
    all_steps: list[StepObservation] = []
    covered_seconds = busy_seconds = 0.0
    for of_engine in level.by_engine:
        steps = _steps_of_engine(of_engine, slots, experts)
        all_steps += steps
        covered_seconds += sum(step.seconds for step in steps)
        sent = np.where(np.isnan(of_engine.sent), of_engine.due, of_engine.sent)
        busy_seconds += _busy_seconds(of_engine, sent)
    return all_steps, covered_seconds / max(busy_seconds, 1e-9)


def _steps_of_engine(level: Level, slots: int, experts: Routing | None) -> list[StepObservation]:
    """Return the observed steps of one engine in order."""
    counts = level.chunk_counts
    has_count = (counts > 0) & ~np.isnan(level.output_tokens)
    tokens = level.output_tokens[has_count].sum()
    has_several = tokens > MAX_CHUNK_TOKENS * counts[has_count].sum()
    if has_several or level.is_collected or counts.max() < 2:
        return []
    step_of_chunk, end, min_gap_seconds = _steps_of(level)
    request = np.repeat(np.arange(len(counts)), counts)  # [chunks]
    number = np.arange(len(request)) - level.chunk_offsets[request]  # [chunks], 0.. in its request
    step_count = len(end)

    def per_step(selected: npt.NDArray[np.bool_], value: Array | None = None) -> Array:
        """Return [steps]: the number of selected chunks, or the sum of their values."""
        weights = None if value is None else value[selected]
        sums = np.bincount(step_of_chunk[selected], weights, step_count)
        return sums.astype(np.float64)

    # [steps]: requests that get their first token, and that get a later one.
    is_first, has_more = number == 0, number + 1 < counts[request]
    first_tokens, decoding = per_step(is_first), per_step(~is_first)
    # [steps]: requests that have a token and more to come before the step.
    active_after = np.cumsum(per_step(is_first & has_more) - per_step(~is_first & ~has_more))
    active = np.concatenate([[0.0], active_after[:-1]])
    # A step is whole if all active requests get their next token, or none does, while prompts are
    # processed.
    decode_step = np.cumsum(decoding > 0)[step_of_chunk]
    previous_decode_step = np.concatenate([[-1], decode_step[:-1]])
    is_next_token = ~is_first & (decode_step == previous_decode_step + 1)
    all_decode = (decoding == active) & (per_step(is_next_token) == decoding)
    is_whole = all_decode | (decoding == 0)

    # When each step began: at the end of the one before it, or on an idle server when the earliest
    # of the requests without a first token was sent.
    sent = np.where(np.isnan(level.sent), level.due, level.sent)
    earliest_sent = np.full(step_count + 1, np.inf)
    np.minimum.at(earliest_sent, step_of_chunk[is_first], sent[request[is_first]])
    earliest_sent = np.minimum.accumulate(earliest_sent[::-1])[::-1][:step_count]
    is_idle = active == 0
    previous_end = np.concatenate([[-np.inf], end[:-1]])
    begin = np.where(is_idle, np.maximum(previous_end, earliest_sent), previous_end)
    begin[0] = earliest_sent[0]

    # Whether a prompt is in progress: a request was sent, has no first token yet, and has a slot.
    ended_without_token = level.ended[(counts == 0) & ~np.isnan(level.ended)]
    answered = np.sort(np.concatenate([level.chunks[is_first], ended_without_token]))
    sent_before = np.searchsorted(np.sort(sent), np.where(is_idle, end, begin))
    waiting = sent_before - np.searchsorted(answered, end + 1e-9)
    has_prompt = np.minimum(waiting, slots - decoding - first_tokens) > 0

    # [steps]: passes over the weights: one of the decode rows, and one of each prompt.
    passes = np.maximum((decoding > 0) + np.maximum(first_tokens, has_prompt), 1)
    prompt = np.where(
        np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
    )
    prompt = np.nan_to_num(prompt)
    computed_tokens = np.maximum(prompt - np.nan_to_num(level.cached_tokens), 1.0)
    expert_share = np.zeros(step_count)
    if experts is not None:
        skip = experts.skip_probability
        of_prompts = per_step(is_first, 1.0 - skip ** computed_tokens[request])
        # A part of a prompt that ends in a later step has some hundred tokens: they use all
        # experts.
        unfinished_prompts = np.maximum(passes - (decoding > 0) - first_tokens, 0.0)
        expert_share = (1.0 - skip**decoding) + of_prompts + unfinished_prompts
    columns = (  # in the order of StepObservation
        end - begin,
        decoding,
        per_step(is_first, computed_tokens[request]),
        per_step(~is_first, prompt[request] + number),
        passes,
        np.ones(step_count),
        expert_share,
        np.zeros(step_count),  # token pairs: the models that are fitted have no term for them
        np.zeros(step_count),  # taken seconds: the times are those of the level that is given
    )

    # Steps are merged from one after a step with no prompt in progress up to the next such step. If
    # a step seems to have taken less than the minimum gap, the chunks of the step before it arrived
    # late, and the two are merged.
    is_late = np.concatenate([end[1:] - begin[1:] < min_gap_seconds, [False]])
    is_last_of_run = ~(has_prompt | is_late)
    run = np.concatenate([[0], np.cumsum(is_last_of_run)[:-1]])
    sums = np.column_stack([np.bincount(run, column) for column in columns])
    is_observed = (np.bincount(run, ~is_whole) == 0) & (sums[:, 0] > 0)
    names = StepObservation.__struct_fields__
    return [
        StepObservation(**dict(zip(names, row, strict=True))) for row in sums[is_observed].tolist()
    ]


def _steps_of(level: Level) -> _Steps:
    """Return the steps that the chunks came from. A step begins after a gap without chunks, and
    whenever a request has a second chunk."""
    request = np.repeat(np.arange(len(level.chunk_counts)), level.chunk_counts)
    gaps = np.diff(level.chunks)[request[1:] == request[:-1]]
    min_gap_seconds = MAX_GAP_SHARE * float(np.quantile(gaps, 0.2))
    order = np.argsort(level.chunks, kind="stable")
    times = level.chunks[order]
    is_begin = np.concatenate([[True], np.diff(times) >= min_gap_seconds])
    step = np.cumsum(is_begin) - 1
    request_in_step = step * (len(level.chunk_counts) + 1) + request[order]
    _, chunk_counts = np.unique(request_in_step, return_counts=True)
    if chunk_counts.max() > 1:  # two steps of a request arrived without a gap
        seen: set[int] = set()
        pairs = zip(is_begin.tolist(), request[order].tolist(), strict=True)
        for index, (begins, request_index) in enumerate(pairs):
            if begins or request_index in seen:
                is_begin[index] = True
                seen = set()
            seen.add(request_index)
        step = np.cumsum(is_begin) - 1
    of_chunk = np.empty(len(order), dtype=np.int64)
    of_chunk[order] = step
    last_chunk = np.concatenate([np.flatnonzero(is_begin)[1:] - 1, [len(times) - 1]])
    return _Steps(of_chunk, times[last_chunk], min_gap_seconds)


def _busy_seconds(level: Level, sent: Array) -> float:
    """Return the seconds in which at least one request was in flight."""
    ended = np.where(np.isnan(level.last), level.ended, level.last)
    is_known = ~np.isnan(ended)
    order = np.argsort(sent[is_known])
    begin, end = sent[is_known][order], ended[is_known][order]
    latest_end_before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(0.0, end - np.maximum(begin, latest_end_before)).sum())


def _steps_to_compare(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> tuple[list[StepObservation], float]:
    """Return the observed steps and the covered share; [] for a level without answers."""
    if not len(level.chunks):
        return [], 0.0
    return observed_steps(level, settings.slots, step_times.experts)


def level_factor(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> float | None:
    """Return how much longer the level's steps took than the step-time model says, as a factor.

    If too few steps are observed, it is the factor with which the simulated level has the measured
    median TPOT. None: the level says nothing.
    """
    steps, covered_share = _steps_to_compare(step_times, level, settings)
    if sum(step.steps for step in steps) >= MIN_STEPS and covered_share >= MIN_COVERED_SHARE:
        measured_seconds = sum(step.seconds for step in steps)
        return measured_seconds / max(sum(map(step_times.of, steps)), 1e-12)
    return _factor_by_tpot(step_times, level, settings)


def two_speeds(step_times: StepTimeModel, level: Level, settings: SchedulerSettings) -> list[float]:
    """Return the factors (see level_factor) of the level's quickest and slowest half minute if the
    machine's speed changed between them; [] if it did not, or if too few steps are observed."""
    steps, covered_share = _steps_to_compare(step_times, level, settings)
    step_count = sum(step.steps for step in steps)
    parts = int(min(level.window_seconds / PART_SECONDS, step_count / MIN_STEPS))
    if parts < 2 or covered_share < MIN_COVERED_SHARE:
        return []
    seconds = np.array([step.seconds for step in steps])
    started_at = np.cumsum(seconds) - seconds
    part = (parts * started_at / seconds.sum()).astype(np.int64)
    modeled = np.bincount(part, list(map(step_times.of, steps)), parts)
    has_steps = modeled > 0
    factors = np.bincount(part, seconds, parts)[has_steps] / modeled[has_steps]
    quickest, slowest = float(factors.min()), float(factors.max())
    return [quickest, slowest] if slowest > MIN_SPEED_RATIO * quickest else []


def _factor_by_tpot(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> float | None:
    """Return the factor of all step times with which the simulated level has the measured median
    TPOT, found by bisection on a logarithmic scale; None: no request has a TPOT."""
    has_tpot = level.counted & ~level.failed & np.isfinite(level.tpot)
    if not has_tpot.any():
        return None
    measured_tpot = float(np.median(level.tpot[has_tpot]))
    low, high = map(math.log, TPOT_FACTORS)
    for _ in range(10):
        middle = (low + high) / 2
        tpot = replay(step_times.slower(math.exp(middle)), settings, level).tpot[has_tpot]
        if np.isnan(tpot).all():
            return None
        if float(np.nanmedian(tpot)) < measured_tpot:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def replay(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    level: Level,
    reasoning_share: float = 0.0,
) -> Simulated:
    """Simulate a level with its own arrivals and lengths, and with the cached tokens that the
    server reported. Times of requests whose lengths are not known are nan.

    `reasoning_share`: see ServerModel.
    """
    prompt = np.where(
        np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
    )
    output = np.where(
        np.isnan(level.output_tokens), level.requested_output_tokens, level.output_tokens
    )
    known = np.flatnonzero(~np.isnan(prompt) & ~np.isnan(output))
    known = known[np.argsort(level.due[known], kind="stable")]
    simulated = simulate(
        step_times,
        settings,
        level.due[known],
        prompt[known],
        output[known],
        np.nan_to_num(level.cached_tokens[known]),
    )
    columns = np.full((4, len(level.due)), np.nan)
    columns[:, known] = simulated.ttft, simulated.tpot, simulated.e2e, simulated.cached
    ttft, tpot, e2e, cached = columns
    return Simulated(
        due=level.due,
        ttft=ttft,
        tpot=tpot,
        e2e=e2e,
        cached=cached,
        reasoning_share=reasoning_share,
    )


def merged_steps(steps: Sequence[StepObservation]) -> list[StepObservation]:
    """Return the steps with pure decode steps in a row that have equally many rows merged into one
    observation. That averages their noise, so that the step-time model is fitted to mean steps,
    including stalls."""
    merged: list[StepObservation] = []
    max_steps = min(MAX_MERGED_STEPS, sum(step.steps for step in steps) / MIN_OBSERVED)
    previous_rows: float | None = None  # per step; None: not a pure decode step
    for step in steps:
        is_pure_decode = not step.prompt_tokens and step.passes == step.steps
        rows = step.rows / step.steps if is_pure_decode else None
        is_alike = rows is not None and rows == previous_rows
        if is_alike and merged[-1].steps + step.steps <= max_steps:
            step = _sum_of(merged.pop(), step)
        merged.append(step)
        previous_rows = rows
    return merged


def _sum_of(first: StepObservation, second: StepObservation) -> StepObservation:
    """Return both observations as one."""
    names = StepObservation.__struct_fields__
    return StepObservation(**{name: getattr(first, name) + getattr(second, name) for name in names})
