"""How many prompt tokens the next step takes: one rule for scheduler and simulation. Pure.

    plan_step(pending=[100, 900], rows=0, settings=settings, costs=clock)
    # [100, 400]: the whole first prompt, and 400 tokens of the second

A step decodes one token of each sequence whose prompt is computed. Prompt tokens are added, from
the oldest prompt on. If no sequence decodes, prompts fill the step. Otherwise they get at most
`prefill_tokens`, and no more than fit in the target time of a step. Two lower bounds keep prompts
moving. If decoding takes most of the target time, prefill still gets PREFILL_SHARE times the time
of decoding. If few rows decode, each costs more than it would among many rows, so prefill gets at
least PREFILL_WORTH times that extra cost: finishing prompts sooner fills the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from crossover.serving.capacity.scheduler_settings import SchedulerSettings

PREFILL_MULTIPLE = 16  # prompts are cut at multiples of it, the tile size of matrix kernels
MIN_PREFILL_TOKENS = PREFILL_MULTIPLE + 1  # of a step, so that 17 tokens are not cut into 16 and 1
PREFILL_SHARE = 3.75  # prefill may always take this many times the decode time of the step
PREFILL_WORTH = 120.0  # and this many times what a row costs more among few rows than among many


class StepCosts(Protocol):
    """The costs of steps: the scheduler learns them from its steps, the simulation knows them."""

    def row_costs(self, rows: int) -> tuple[float, float]:
        """Return the seconds of a step that decodes `rows` rows, and the seconds of one row in the
        batch size with the cheapest rows. 0.0: unknown."""
        ...

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Return how many prompt tokens take this long; None: unknown, or prompts cost nothing."""
        ...


def plan_step(
    pending: Iterable[int], rows: int, settings: SchedulerSettings, costs: StepCosts
) -> list[int]:
    """Return how many tokens of each prompt the next step computes, beside `rows` sequences that
    decode. The result is shorter than `pending` if the last prompts get none.

    `pending`: the tokens that each prompt has still to compute, oldest prompt first.
    """
    remaining = settings.step_tokens - rows
    if rows and (budget := prefill_budget(rows, settings, costs)) < remaining:
        remaining = budget
    pieces: list[int] = []
    for tokens in pending:
        piece = tokens
        if piece > remaining:
            # Leave at least two tokens: ONNX's int8 rounds a piece of one differently.
            piece = min(remaining, max(1, tokens - 2))
            if pieces and piece < PREFILL_MULTIPLE:
                break  # not worth a piece of another prompt
            if piece > PREFILL_MULTIPLE:
                piece -= piece % PREFILL_MULTIPLE
            if piece <= 0:
                break
        pieces.append(piece)
        remaining -= piece
        if remaining <= 0:
            break
    return pieces


def prefill_budget(rows: int, settings: SchedulerSettings, costs: StepCosts) -> int:
    """Return the maximum prompt tokens of a step that decodes `rows` rows."""
    if settings.step_seconds_target is None:
        return settings.prefill_tokens
    decode_seconds, cheapest_row_seconds = costs.row_costs(rows)
    seconds = settings.step_seconds_target - decode_seconds
    if (share := PREFILL_SHARE * decode_seconds) > seconds:
        seconds = share
    if (worth := PREFILL_WORTH * (decode_seconds / rows - cheapest_row_seconds)) > seconds:
        seconds = worth
    tokens = costs.prompt_tokens_in(seconds)
    if tokens is None or tokens >= settings.prefill_tokens:
        return settings.prefill_tokens
    return min(settings.prefill_tokens, max(MIN_PREFILL_TOKENS, tokens))
