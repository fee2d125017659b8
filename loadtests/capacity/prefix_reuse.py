"""Measures prefix reuse: how much of shared prefixes and of conversations' histories the server
found in its cache; and how much of an answer is reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crossover.loadtests.levels.level_columns import Floats, Level
from crossover.serving.capacity.batching_simulator import Reuse
from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, PrefixReuse
from crossover.serving.workload.request_lengths import Workload, draw

# If less of the histories was found in the cache, it is only a beginning that all conversations
# share, and the server does not reuse histories.
MIN_REUSED_SHARE = 0.1
# Fewer requests do not tell the tokens that all prompts begin with; of more, this quantile of what
# was found in the cache is taken.
MIN_TEMPLATE_REQUESTS = 4
TEMPLATE_QUANTILE = 0.25
# The reasoning share that an answer without answer tokens counts with; an answer that ends with
# reasoning would have a share just below 1.
ONLY_REASONING_SHARE = 10.0


def measured_reuse(workload: Workload, levels: Sequence[Level]) -> float:
    """Return the `reused_share` of a simulation: how much of the prefixes that prompts share with
    earlier ones the server found in its cache, 0..1.

    0.0 if the server does not report it, and for workloads without shared prefixes.
    """
    if workload.has_sessions:
        return 0.0
    requests = draw(workload, QUICK_REQUESTS, 1)
    prefix_tokens = sum(request.prefix_tokens for request in requests)
    shared_share = prefix_tokens / sum(request.prompt_tokens for request in requests)
    share = cached_share(levels)
    if not prefix_tokens or share is None:
        return 0.0
    return min(1.0, share / shared_share)


def cached_share(levels: Sequence[Level]) -> float | None:
    """Return the share of all prompt tokens that the server found in its cache; None: it does not
    report it."""
    cached_tokens = prompt_tokens = 0.0
    for level in levels:
        has_counts = ~np.isnan(level.cached_tokens) & ~np.isnan(level.prompt_tokens)
        cached_tokens += float(level.cached_tokens[has_counts].sum())
        prompt_tokens += float(level.prompt_tokens[has_counts].sum())
    return cached_tokens / prompt_tokens if prompt_tokens else None


def measured_template_tokens(workload: Workload, levels: Sequence[Level]) -> int:
    """Return how many tokens at the start of every prompt the server found in its cache, beyond the
    workload's own shared prefixes: the chat template's, such as its default system prompt.

    0 if the server does not report what it found, and for conversations (PrefixReuse).
    """
    if workload.has_sessions:
        return 0
    # The first request of a level finds what was sent before it, not what it shares with the next.
    cached = np.concatenate([np.zeros(0), *(level.cached_tokens[1:] for level in levels)])
    cached = cached[~np.isnan(cached)]
    if len(cached) < MIN_TEMPLATE_REQUESTS:
        return 0
    # Prompts that are repeated word for word are found whole, so not the median.
    return max(0, int(np.quantile(cached, TEMPLATE_QUANTILE)) - workload.prefix_tokens)


def measured_history_reuse(levels: Sequence[Level], kind: Reuse = "any prefix") -> PrefixReuse:
    """Return how much of the histories of conversations the server found in its cache.

    The conversations were sent one at a time, so that nothing was evicted between two turns.
    `kind`: in which way the engine reports that it reuses prefixes. Counts are the server's own; if
    it does not report what it found in its cache, nothing counts as reused.
    """
    turns = _following_turns(levels)
    answer_growth = _answer_growth(turns)
    if not len(turns.cached) or turns.cached.sum() < MIN_REUSED_SHARE * turns.previous_prompt.sum():
        return PrefixReuse(kind="none", answer_growth=answer_growth)
    # What was found beyond the previous prompt is of the previous answer. Its last token was never
    # processed, so it cannot be in the cache.
    cached_answer_tokens = (turns.cached - turns.previous_prompt).sum()
    answer_share = float(cached_answer_tokens / max((turns.previous_output - 1).sum(), 1.0))
    shared_tokens = np.concatenate([_cached_in_first_turns(level) for level in levels])
    return PrefixReuse(
        kind=kind,
        answer_share=round(min(answer_share, 1.0), 4),
        answer_growth=answer_growth,
        shared_tokens=int(np.median(shared_tokens)) if len(shared_tokens) else None,
    )


def measured_reasoning_share(levels: Sequence[Level]) -> float:
    """Return the mean share of the time from the first to the last token of an answer that passes
    before its first answer token, which is the first after all reasoning.

    0.0 for a model that does not reason; above 1 if most answers had only reasoning.
    """
    shares: list[float] = []
    for level in levels:
        if not np.isfinite(level.first_answer).any():
            continue
        is_ok = level.counted & ~level.failed & (level.chunk_counts > 1)
        first_answer = np.where(np.isnan(level.first_answer), np.inf, level.first_answer)
        share = (first_answer - level.first) / np.maximum(level.last - level.first, 1e-9)
        shares += np.minimum(share[is_ok], ONLY_REASONING_SHARE).tolist()
    return round(float(np.mean(shares)), 4) if shares else 0.0


class _FollowingTurns(NamedTuple):
    """Turns that follow another turn of their conversation: tokens of both, float64 [turns]."""

    previous_prompt: Floats
    previous_output: Floats
    cached: Floats  # found in the cache
    growth: Floats  # by which the prompt grew, without what the user added


def _following_turns(levels: Sequence[Level]) -> _FollowingTurns:
    """Return the turns of all levels that succeeded, as did the turn before them."""
    columns: list[tuple[Floats, Floats, Floats, Floats]] = []
    for level in levels:
        order = np.lexsort((level.turn, level.session))  # by conversation, then by turn
        has_counts = ~np.isnan(level.prompt_tokens) & ~np.isnan(level.output_tokens)
        is_ok = (has_counts & ~level.failed)[order]
        session, turn = level.session[order], level.turn[order]
        is_same_session = session[1:] == session[:-1]
        follows = is_ok[1:] & is_ok[:-1] & is_same_session & (turn[1:] == turn[:-1] + 1)
        prompt, output = level.prompt_tokens[order], level.output_tokens[order]
        growth = prompt[1:] - prompt[:-1] - level.added_tokens[order][1:]
        follows &= growth > 0  # otherwise the oldest turns were dropped from the history
        cached = np.nan_to_num(level.cached_tokens[order])
        columns.append(
            (prompt[:-1][follows], output[:-1][follows], cached[1:][follows], growth[follows])
        )
    if not columns:
        return _FollowingTurns(*[np.empty(0)] * 4)
    return _FollowingTurns(*map(np.concatenate, zip(*columns, strict=True)))


def _answer_growth(turns: _FollowingTurns) -> float:
    """Return the tokens that answers take in the next prompt, divided by their output tokens; 1.0:
    not known."""
    output_tokens = turns.previous_output.sum()
    return round(max(float(turns.growth.sum() / output_tokens), 0.0), 4) if output_tokens else 1.0


def _cached_in_first_turns(level: Level) -> Floats:
    """Return the tokens that the first turn of each conversation, except the first, found in the
    cache, [conversations]."""
    is_later_first_turn = (level.turn == 0) & (level.session > 0) & ~level.failed
    cached_tokens: Floats = np.nan_to_num(level.cached_tokens[is_later_first_turn])
    return cached_tokens
