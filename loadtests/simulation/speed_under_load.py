"""How fast an engine's steps were while it was loaded, against a law that was calibrated before.

    speed_under_load(law, residuals, records_of_a_level)       # 0.8: steps took 1.25 x the time

A step ends where chunks of several streams come together, and has lasted since the chunks before
it, where all that had one then and were not done have another now: the engine did not rest. Prompt
tokens count where their request has its first chunk. Pieces of a long prompt are in steps before
that one, so single steps may be off; their sums are not. Where chunks carry several tokens there
are several steps between them, and no speed is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from loadtests.records.schema import RequestRecord
from loadtests.simulation.step_replay import Residuals, kind_of
from loadtests.simulation.step_time import StepLaw, StepObservation

LEAST_STEPS = 50  # fewer say little
MOST_TOKENS = 1.05  # a chunk, on average: with more, chunks are not steps
Chunk = tuple[float, int, RequestRecord]  # when, its number, of which request


def speed_under_load(
    law: StepLaw, residuals: Residuals, records: Sequence[RequestRecord]
) -> float | None:
    """Seconds by the law and its residuals over seconds seen; None for too few steps, and where
    chunks are not steps.
    """
    counted = [r for r in records if r.output_tokens is not None]
    chunks = sum(len(r.content_seconds) for r in counted)
    if sum(r.output_tokens or 0 for r in counted if r.content_seconds) > MOST_TOKENS * chunks:
        return None
    usual = [float(np.mean(kind)) for kind in residuals.kinds]
    said = seen = 0.0
    steps = 0
    for one in steps_under_load(records, apart=law.seconds(1, 0, 0) / 2):
        kind = kind_of(one.decode_rows, one.prefill_tokens)
        said += usual[kind] * law.seconds(
            one.decode_rows, one.prefill_tokens, one.kv_tokens, one.passes
        )
        seen += one.seconds
        steps += 1
    return said / seen if steps >= LEAST_STEPS else None


def usual_speed(
    law: StepLaw, residuals: Residuals, levels: Iterable[Sequence[RequestRecord]]
) -> float | None:
    """Mean of the levels that tell a speed, by their requests; None where none does."""
    each = [(speed_under_load(law, residuals, level), len(level)) for level in levels]
    told = [(speed, count) for speed, count in each if speed is not None]
    if not told:
        return None
    return sum(speed * count for speed, count in told) / sum(count for _, count in told)


def steps_under_load(records: Sequence[RequestRecord], apart: float) -> Iterator[StepObservation]:
    """Steps that follow another at once; chunks less than `apart` seconds apart share a step."""
    chunks = sorted(
        ((at, number, r) for r in records for number, at in enumerate(r.content_seconds)),
        key=lambda chunk: chunk[0],
    )
    before: list[Chunk] = []
    for now in _together(chunks, apart):
        decoding = [(number, r) for _, number, r in now if number]
        going_on = {id(r) for _, number, r in before if number + 1 < len(r.content_seconds)}
        if decoding and going_on == {id(r) for _, r in decoding} and len(decoding) == len(going_on):
            begun = [r for _, number, r in now if not number]
            yield StepObservation(
                len(decoding),
                sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in begun),
                sum((r.prompt_tokens or 0) + number for number, r in decoding),
                now[-1][0] - before[-1][0],
                passes=len(begun) + 1,
            )
        before = now


def _together(chunks: Sequence[Chunk], apart: float) -> Iterator[list[Chunk]]:
    group: list[Chunk] = []
    for chunk in chunks:
        if group and chunk[0] - group[-1][0] >= apart:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group
