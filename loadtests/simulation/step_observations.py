"""What answers say about an engine's steps, seen from the client: works against any endpoint."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.metrics.request_metrics import outcome, tpot_seconds
from loadtests.records.schema import RequestRecord
from loadtests.simulation.step_time import StepObservation

LEAST_STEPS = 3  # of each stream of a burst while the same streams decode
STALL = 2.5  # times the mean step


def observations_of(records: Sequence[RequestRecord]) -> list[StepObservation]:
    """From single-stream requests: each answer times a step with a whole prompt, and a decode step
    of one row at the answer's mean context.
    """
    found: list[StepObservation] = []
    for r in records:
        if outcome(r) != "ok" or r.prompt_tokens is None or r.output_tokens is None:
            continue
        tpot = tpot_seconds(r)
        if tpot is not None and tpot > 0:
            context = r.prompt_tokens + r.output_tokens / 2
            steps = _steps(r.content_seconds, _tokens_per_chunk(r)) or (tpot,)
            found.append(StepObservation(1, 0, context, typical_seconds(steps), steps))
        if r.first_content_seconds is not None and r.sent_seconds is not None:
            waited = r.first_content_seconds - r.sent_seconds
            if waited > 0:
                computed = r.prompt_tokens - (r.cached_tokens or 0)
                found.append(StepObservation(0, computed, 0, waited))
    return found


def observations_of_burst(
    records: Sequence[RequestRecord], burst: int | None = None
) -> list[StepObservation]:
    """From streams sent at one moment: one observation for each number of streams that decode, and
    one for each step with several prompts, or with prompts beside decode rows.

    For the former only chunks after the last stream's first count, so that no prompt shares these
    steps. Streams that end one after the other show fewer and fewer rows. None where the streams
    never all decoded together. `burst`: the number that the observations get.
    """
    streams = [
        r for r in records if outcome(r) == "ok" and r.output_tokens and len(r.content_seconds) > 1
    ]
    if not streams or len(streams) < len(records):
        return []
    start = max(r.content_seconds[0] for r in streams)
    ends = sorted({r.content_seconds[-1] for r in streams})
    if ends[0] <= start:
        return []
    found = _with_prompts(streams)
    for begin, end in zip([start, *ends], ends, strict=False):
        decoding = [r for r in streams if r.content_seconds[-1] >= end]
        seen = _decoding_together(decoding, begin, end)
        if seen is not None:
            found.append(seen)
    return [msgspec.structs.replace(one, burst=burst) for one in found]


def _with_prompts(streams: Sequence[RequestRecord]) -> list[StepObservation]:
    """Steps of several passes, by the moments at which streams had their first tokens.

    Streams whose first tokens come less than half a decode step apart shared a step. Not known is
    when a step began before which nobody decoded, but for the first, and where those that decode
    had more than one token since the step before.
    """
    each = [typical_seconds(_steps(r.content_seconds, _tokens_per_chunk(r))) for r in streams]
    apart = min(each) / 2
    if max(map(_tokens_per_chunk, streams)) > 1 or apart <= 0:
        return []
    groups: list[list[RequestRecord]] = []
    for r in sorted(streams, key=lambda one: one.content_seconds[0]):
        if groups and r.content_seconds[0] - groups[-1][0].content_seconds[0] < apart:
            groups[-1].append(r)
        else:
            groups.append([r])
    found = []
    begin = max(r.sent_seconds or 0.0 for r in groups[0])
    before: list[RequestRecord] = []
    for group in groups:
        end = group[-1].content_seconds[0]
        since = [[at for at in r.content_seconds if begin + apart < at] for r in before]
        decoding = [r for r, stamps in zip(before, since, strict=True) if stamps]
        alone = all(sum(at < end + apart for at in stamps) == 1 for stamps in since if stamps)
        passes = len(group) + bool(decoding)
        if passes > 1 and alone and bool(before) == bool(decoding):
            tokens = sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in group)
            context = sum(
                (r.prompt_tokens or 0) + sum(at < begin + apart for at in r.content_seconds)
                for r in decoding
            )
            seen = StepObservation(len(decoding), tokens, context, end - begin, passes=passes)
            found.append(seen)
        begin = end
        before += group
    return found


def _decoding_together(
    streams: Sequence[RequestRecord], begin: float, end: float
) -> StepObservation | None:
    """From [begin, end], in which just these streams decode; None where it is too short."""
    seconds: list[float] = []
    longest: tuple[float, ...] = ()
    context = 0.0
    for r in streams:
        inside = [at for at in r.content_seconds if begin <= at <= end]
        per_chunk = _tokens_per_chunk(r)
        steps = _steps(inside, per_chunk)
        if len(steps) * per_chunk < LEAST_STEPS:
            return None
        seconds.append(typical_seconds(steps))
        longest = max(longest, steps, key=len)
        before = sum(at < begin for at in r.content_seconds) * per_chunk
        prompt = r.prompt_tokens or r.asked_prompt_tokens or 0
        context += prompt + before + len(inside) * per_chunk / 2
    if min(seconds) <= 0:
        return None
    return StepObservation(len(streams), 0, context, float(np.median(seconds)), longest)


def typical_seconds(steps: Sequence[float]) -> float:
    """Mean without stalls: without steps of more than 2.5 times the mean of all.

    A mean, as a client may see two chunks at once, and then none for two steps.
    """
    seconds = np.asarray(steps)
    kept = seconds[seconds <= STALL * seconds.mean()]
    return float(kept.mean())


def _tokens_per_chunk(r: RequestRecord) -> float:
    return (r.output_tokens or 0) / max(1, len(r.content_seconds))


def _steps(stamps: Sequence[float], tokens_per_chunk: float) -> tuple[float, ...]:
    """Seconds of the steps between these chunks, by the microsecond."""
    gaps = np.diff(np.asarray(stamps)) / max(tokens_per_chunk, 1.0)
    return tuple(np.round(gaps, 6).tolist())


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """How many of the streams sent at one moment were served together.

    By the spans from first to last content; where answers are one chunk, by how many came within
    one and a half times the first's.
    """
    ended = [r for r in records if outcome(r) == "ok" and r.content_seconds]
    if ended and all(len(r.content_seconds) == 1 for r in ended):
        lasted = [r.content_seconds[0] - (r.sent_seconds or 0.0) for r in ended]
        return sum(seconds <= 1.5 * min(lasted) for seconds in lasted)
    spans = [(r.content_seconds[0], r.content_seconds[-1]) for r in ended]
    return max((sum(a <= at <= b for a, b in spans) for at, _ in spans), default=0)
