"""What the content stamps of a level say of the engine's steps; works against any endpoint.

    seen, covered = observed_steps(level, slots=8)
    level_factor(step_times, level, settings)      # 1.1: steps took 1.1 times what it says

Where a chunk is a token, a moment at which chunks come together is the end of a step. A step counts
that began where the one before it ended (all who had more to come have a chunk) or, on an idle
server, when its first request was sent. Steps in which a prompt may be under way without a first
token yet are put together with those that follow, up to one with no prompt under way: sums are
right then, whatever the pieces were. A server that lets nobody decode while it computes a prompt
has steps of first tokens alone. So single streams, bursts and open-loop levels tell steps by
one rule. Where chunks carry several tokens, steps cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crossover.loadtests.levels.level_columns import Level
from crossover.models.model_spec import Routing
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.step_time_model import StepObservation, StepTimeModel

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

MAX_TOKENS = 1.05  # a chunk, on average: with more, chunks are not steps
APART = 0.4  # of a quick step (the quickest fifth of gaps): chunks closer than that share a step
MERGED = 12  # like steps in a row that are one observation, at most ...
MIN_OBSERVED = 40  # ... while so many observations of a level are left
MIN_STEPS = 50  # fewer say little
# Of the time with work, in steps that can be told; else TPOT tells the factor, which is as good:
# on 58 recorded levels near the limit both are 0.069 off (docs/benchmarks.md). 57 of 62 cover more
# than 0.7; llama-server's do not.
MIN_COVERED = 0.35
FACTORS = (0.4, 2.5)  # that TPOT is matched within
PART_SECONDS = 30.0
# Apart by more, two half minutes of a level had two speeds: at most 1.35 in 40 recorded levels of
# undisturbed machines, 1.28 where they had 6 to 8 half minutes, 1.12 by the step-time model's own
# error.
TWO_SPEEDS = 1.4


def observed_steps(
    level: Level, slots: int, experts: Routing | None = None
) -> tuple[list[StepObservation], float]:
    """The steps in order, and the share of the time with work that they cover.

    Without a token count a chunk stands for a token. [] where chunks are not tokens. `experts`: of
    a mixture; None: the share of the experts that steps read is not counted.
    """
    counts = level.chunk_counts
    told = (counts > 0) & ~np.isnan(level.output_tokens)
    if level.output_tokens[told].sum() > MAX_TOKENS * counts[told].sum() or counts.max() < 2:
        return [], 0.0
    group, end, apart = _steps_of(level)
    request = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(request)) - level.chunk_offsets[request]
    size = len(end)

    def per_step(which: npt.NDArray[np.bool_], value: Array | None = None) -> Array:
        weights = None if value is None else value[which]
        found: Array = np.bincount(group[which], weights, size).astype(np.float64)
        return found

    first, more = number == 0, number + 1 < counts[request]
    decoding, begun = per_step(~first), per_step(first)
    ended = np.cumsum(per_step(first & more) - per_step(~first & ~more))
    active = np.concatenate([[0.0], ended[:-1]])  # have a token and more to come
    # All who are active have their next token; or nobody, while prompts are computed.
    turn = np.cumsum(decoding > 0)[group]
    follows = ~first & (turn == np.concatenate([[-1], turn[:-1]]) + 1)
    is_idle = active == 0
    is_whole = (decoding == active) & (per_step(follows) == decoding) | (decoding == 0)
    sent = np.where(np.isnan(level.sent), level.due, level.sent)
    # Of those who have no first token before the step, when the earliest was sent.
    earliest = np.full(size + 1, np.inf)
    np.minimum.at(earliest, group[first], sent[request[first]])
    earliest = np.minimum.accumulate(earliest[::-1])[::-1][:size]
    before = np.concatenate([[-np.inf], end[:-1]])
    begin = np.where(is_idle, np.maximum(before, earliest), before)
    begin[0] = earliest[0]
    gone = level.ended[(counts == 0) & ~np.isnan(level.ended)]
    firsts = np.sort(np.concatenate([level.chunks[first], gone]))
    asked = np.searchsorted(np.sort(sent), np.where(is_idle, end, begin))
    waiting = asked - np.searchsorted(firsts, end + 1e-9)
    is_filling = np.minimum(waiting, slots - decoding - begun) > 0
    passes = np.maximum((decoding > 0) + np.maximum(begun, is_filling), 1)
    prompt = np.where(
        np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
    )
    prompt = np.nan_to_num(prompt)
    computed = np.maximum(prompt - np.nan_to_num(level.cached_tokens), 1.0)
    # From the step after one with no prompt under way to the next such step. A step that ended too
    # soon after the one before it was quick since that one's chunks came late.
    is_late = np.concatenate([end[1:] - begin[1:] < apart, [False]])
    run = np.concatenate([[0], np.cumsum(~(is_filling | is_late))[:-1]])
    columns = (
        end - begin,
        decoding,
        per_step(first, computed[request]),
        per_step(~first, prompt[request] + number),
        passes,
        np.ones(size),
        np.zeros(size),
    )
    if experts is not None:
        skip = experts.skip_probability
        whole = per_step(first, 1.0 - skip ** computed[request])
        # A piece of a prompt that ends in a later step has some hundred tokens: all experts.
        pieces = passes - (decoding > 0) - begun
        columns = (*columns[:-1], (1.0 - skip**decoding) + whole + np.maximum(pieces, 0.0))
    sums = np.column_stack([np.bincount(run, column) for column in columns])
    kept = (np.bincount(run, ~is_whole) == 0) & (sums[:, 0] > 0)
    names = StepObservation.__struct_fields__
    found = [StepObservation(**dict(zip(names, row, strict=True))) for row in sums[kept].tolist()]
    return found, float(sums[kept, 0].sum()) / max(_busy_seconds(level, sent), 1e-9)


def _steps_of(level: Level) -> tuple[Whole, Array, float]:
    """Of each chunk the step that it came from; of each step when its last chunk came; and how far
    apart, in seconds, chunks of two steps are at least.
    """
    request = np.repeat(np.arange(len(level.chunk_counts)), level.chunk_counts)
    gaps = np.diff(level.chunks)[request[1:] == request[:-1]]
    apart = APART * float(np.quantile(gaps, 0.2))
    order = np.argsort(level.chunks, kind="stable")
    stamps = level.chunks[order]
    begins = np.concatenate([[True], np.diff(stamps) >= apart])
    group = np.cumsum(begins) - 1
    # One who has two chunks in a group had two steps, that came together.
    key = group * (len(level.chunk_counts) + 1) + request[order]
    _, several = np.unique(key, return_counts=True)
    if several.max() > 1:
        seen: set[int] = set()
        for place, (is_first, who) in enumerate(
            zip(begins.tolist(), request[order].tolist(), strict=True)
        ):
            if is_first or who in seen:
                begins[place] = True
                seen = set()
            seen.add(who)
        group = np.cumsum(begins) - 1
    of_chunk = np.empty(len(order), dtype=np.int64)
    of_chunk[order] = group
    last = np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(stamps) - 1]])
    return of_chunk, stamps[last], apart


def _busy_seconds(level: Level, sent: Array) -> float:
    """In which a request was under way."""
    ended = np.where(np.isnan(level.last), level.ended, level.last)
    known = ~np.isnan(ended)
    order = np.argsort(sent[known])
    begin, end = sent[known][order], ended[known][order]
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(0.0, end - np.maximum(begin, reached)).sum())


def _steps_by(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> tuple[list[StepObservation], float]:
    """The steps to compare with the step-time model, and what they cover; [] of a level without
    answers."""
    if not len(level.chunks):
        return [], 0.0
    return observed_steps(level, settings.slots, step_times.experts)


def level_factor(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> float | None:
    """Seconds of the level's steps over those by the step-time model; None where the level tells
    nothing.

    Where too few steps can be told: the factor of all step times with which the simulated level has
    its median TPOT.
    """
    seen, covered = _steps_by(step_times, level, settings)
    if sum(one.steps for one in seen) >= MIN_STEPS and covered >= MIN_COVERED:
        return sum(one.seconds for one in seen) / max(sum(map(step_times.of, seen)), 1e-12)
    return _factor_by_tpot(step_times, level, settings)


def two_speeds(step_times: StepTimeModel, level: Level, settings: SchedulerSettings) -> list[float]:
    """The factors of the level's quickest and slowest half minute, where the speed of the machine
    changed between them; [] where it did not, or where steps do not tell.
    """
    seen, covered = _steps_by(step_times, level, settings)
    steps = sum(one.steps for one in seen)
    count = int(min(level.window_seconds / PART_SECONDS, steps / MIN_STEPS))
    if count < 2 or covered < MIN_COVERED:
        return []
    seconds = np.array([one.seconds for one in seen])
    part = (count * (np.cumsum(seconds) - seconds) / seconds.sum()).astype(np.int64)
    by_step_times = np.bincount(part, list(map(step_times.of, seen)), count)
    factors = (
        np.bincount(part, seconds, count)[by_step_times > 0] / by_step_times[by_step_times > 0]
    )
    ends = [float(factors.min()), float(factors.max())]
    return ends if ends[1] > TWO_SPEEDS * ends[0] else []


def _factor_by_tpot(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> float | None:
    counted = level.counted & ~level.failed & np.isfinite(level.tpot)
    if not counted.any():
        return None
    real = float(np.median(level.tpot[counted]))
    prompt = np.where(
        np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
    )
    output = np.where(
        np.isnan(level.output_tokens), level.requested_output_tokens, level.output_tokens
    )
    known = ~np.isnan(prompt) & ~np.isnan(output)
    low, high = map(math.log, FACTORS)
    for _ in range(10):
        middle = (low + high) / 2
        columns = (level.due[known], prompt[known], output[known], level.cached_tokens[known])
        played = simulate(step_times.slower(math.exp(middle)), settings, *columns)
        tpot = played.tpot[counted[known]]
        if np.isnan(tpot).all():
            return None
        low, high = (middle, high) if float(np.nanmedian(tpot)) < real else (low, middle)
    return math.exp((low + high) / 2)


def merged_steps(seen: Sequence[StepObservation]) -> list[StepObservation]:
    """Steps in a row that only decode, with as many rows each, as one: their noise is averaged, and
    a step-time model is fitted to the mean of steps, stalls among them.
    """
    found: list[StepObservation] = []
    most = min(MERGED, sum(one.steps for one in seen) / MIN_OBSERVED)
    alike = None
    for one in seen:
        only_decodes = not one.prompt_tokens and one.passes == one.steps
        decodes = one.rows / one.steps if only_decodes else None
        if decodes is not None and decodes == alike and found[-1].steps + one.steps <= most:
            last = found.pop()
            one = StepObservation(
                **{name: getattr(last, name) + getattr(one, name) for name in one.__struct_fields__}
            )
        found.append(one)
        alike = decodes
    return found
