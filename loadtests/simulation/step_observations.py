"""What answers say about an engine's steps, seen from the client: works against any endpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtests.metrics.request_metrics import outcome, tpot_seconds
from loadtests.records.schema import RequestRecord
from loadtests.simulation.step_time import StepObservation

LEAST_TOKENS = 4  # of each stream of a burst while all of them decode


def observations_of(records: Sequence[RequestRecord], concurrency: int) -> list[StepObservation]:
    """From a closed loop of `concurrency` streams.

    Each answer times a decode step of `concurrency` rows at its mean context; a single stream
    also a step with a whole prompt. More streams share steps with prompts: use short ones there.
    """
    found: list[StepObservation] = []
    for r in records:
        if outcome(r) != "ok" or r.prompt_tokens is None or r.output_tokens is None:
            continue
        tpot = tpot_seconds(r)
        if tpot is not None and tpot > 0:
            context = concurrency * (r.prompt_tokens + r.output_tokens / 2)
            found.append(StepObservation(concurrency, 0, context, tpot))
        if concurrency == 1 and r.first_content_seconds is not None and r.sent_seconds is not None:
            waited = r.first_content_seconds - r.sent_seconds
            if waited > 0:
                computed = r.prompt_tokens - (r.cached_tokens or 0)
                found.append(StepObservation(0, computed, 0, waited))
    return found


def observations_of_burst(records: Sequence[RequestRecord]) -> list[StepObservation]:
    """From streams sent at one moment: one step in which all of them decode, or none.

    Only chunks between the last stream's first and the first stream's last count: no prompt
    shares these steps. None where the streams never all decoded together, or too briefly.
    """
    streams = [
        r for r in records if outcome(r) == "ok" and r.output_tokens and len(r.content_seconds) > 1
    ]
    if not streams or len(streams) < len(records):
        return []
    start = max(r.content_seconds[0] for r in streams)
    end = min(r.content_seconds[-1] for r in streams)
    steps: list[float] = []
    context = 0.0
    for r in streams:
        inside = [at for at in r.content_seconds if start <= at <= end]
        per_chunk = (r.output_tokens or 0) / len(r.content_seconds)
        tokens = (len(inside) - 1) * per_chunk
        if len(inside) < 2 or tokens < LEAST_TOKENS:
            return []
        steps.append((inside[-1] - inside[0]) / tokens)
        before = sum(at < start for at in r.content_seconds) * per_chunk
        prompt = r.prompt_tokens or r.asked_prompt_tokens or 0
        context += prompt + before + len(inside) * per_chunk / 2
    if min(steps) <= 0:
        return []
    return [StepObservation(len(streams), 0, context, float(np.median(steps)))]


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
