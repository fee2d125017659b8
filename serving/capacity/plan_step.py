"""What the next step holds: one rule for the scheduler and for the simulation. Pure.

    plan_step(pending=[100, 900], rows=0, settings=settings, costs=clock)
    # [100, 400]: the whole first prompt, and 400 tokens of the second

A step decodes one token of each sequence past its prompt. Prompt tokens join, from the oldest
prompt on. While nobody decodes, prompts fill the step. Else they get `prefill_tokens` at most, and
what fits in the target time, with two bounds that keep prompts going. Where decoding takes most of
the target, prefill still gets PREFILL_SHARE times its time. Where few rows decode, each costs more
than it would beside more rows: that loss stays small against the time given to prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from crossover.serving.capacity.scheduler_settings import SchedulerSettings

PREFILL_MULTIPLE = 16  # prompts are cut at multiples: matrix kernels take so many tokens at a time
MIN_PREFILL_TOKENS = PREFILL_MULTIPLE + 1  # of every step: no piece leaves one token of 17
PREFILL_SHARE = 3.75  # prefill may always take this many times the decode time of the step
PREFILL_WORTH = 120.0  # and this many times what a row costs more among few rows than among many


class StepCosts(Protocol):
    """What steps cost: learnt by the scheduler from its steps, known to the simulation."""

    def row_costs(self, rows: int) -> tuple[float, float]:
        """Seconds of a step that decodes so many rows, and of one row among as many as make it
        cheapest; 0.0: not known."""
        ...

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Prompt tokens that take so long; None: not known, or no number takes so long."""
        ...


def plan_step(
    pending: Iterable[int], rows: int, settings: SchedulerSettings, costs: StepCosts
) -> list[int]:
    """The prompt tokens that the next step takes of each prompt, in their order, beside `rows`
    sequences that decode. Prompts at the end of `pending` that get none are left out.

    `pending`: tokens still to compute of each prompt, oldest first.
    """
    left = settings.step_tokens - rows
    if rows:
        left = min(left, prefill_budget(rows, settings, costs))
    pieces: list[int] = []
    for tokens in pending:
        piece = tokens
        if piece > left:  # no last piece of one token: ONNX's int8 rounds that otherwise
            piece = min(left, max(1, piece - 2))
            if pieces and piece < PREFILL_MULTIPLE:
                break  # too little is left for a piece of another prompt
            if piece > PREFILL_MULTIPLE:
                piece -= piece % PREFILL_MULTIPLE
            if piece <= 0:
                break
        pieces.append(piece)
        left -= piece
        if left <= 0:
            break
    return pieces


def prefill_budget(rows: int, settings: SchedulerSettings, costs: StepCosts) -> int:
    """Prompt tokens of a step in which so many rows decode."""
    if settings.step_seconds_target is None:
        return settings.prefill_tokens
    decode_seconds, cheapest_row_seconds = costs.row_costs(rows)
    seconds = max(
        settings.step_seconds_target - decode_seconds,
        PREFILL_SHARE * decode_seconds,
        PREFILL_WORTH * (decode_seconds / rows - cheapest_row_seconds),
    )
    tokens = costs.prompt_tokens_in(seconds)
    if tokens is None:
        return settings.prefill_tokens
    return min(settings.prefill_tokens, max(MIN_PREFILL_TOKENS, tokens))
