"""What the server found in its cache: of shared prefixes, and of the histories of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crossover.loadtests.levels.level_columns import Floats, Level
from crossover.serving.capacity.batching_simulator import Reuse
from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, PrefixReuse
from crossover.serving.workload.request_lengths import Workload, draw

MIN_SAVED_SHARE = 0.1  # of histories: less is a beginning that all conversations share
NEVER_ANSWERED = 10.0  # share of an answer's time, where it is nothing but reasoning


def measured_reuse(workload: Workload, levels: Sequence[Level]) -> float:
    """The `reused_share` of a simulation: of what prompts had in common with earlier ones, how
    much the server found in its cache. 0.0 where it does not say, and without shared prefixes.
    """
    if workload.has_sessions:
        return 0.0
    asks = draw(workload, QUICK_REQUESTS, 1)
    known = sum(ask.prefix_tokens for ask in asks)
    known_share = known / sum(ask.prompt_tokens for ask in asks)
    cached = prompts = 0.0
    for level in levels:
        told = ~np.isnan(level.cached_tokens) & ~np.isnan(level.prompt_tokens)
        cached += float(level.cached_tokens[told].sum())
        prompts += float(level.prompt_tokens[told].sum())
    return min(1.0, cached / prompts / known_share) if known and prompts else 0.0


def measured_history_reuse(levels: Sequence[Level], kind: Reuse = "any prefix") -> PrefixReuse:
    """What the server saved of the histories of conversations that it was asked one at a time, so
    that nothing was evicted between two turns.

    `kind`: how the engine says that it reuses prefixes. Counts are the server's own; of one that
    does not tell what it found in its cache, nothing is taken to be saved.
    """
    turns = [_Pairs.of(level) for level in levels]
    before, output, found, growth = (
        np.concatenate([getattr(one, name) for one in turns] or [np.empty(0)])
        for name in ("prompt_before", "output_before", "cached", "growth")
    )
    if not len(found) or found.sum() < MIN_SAVED_SHARE * before.sum():
        return PrefixReuse(kind="none", answer_growth=_growth(growth, output))
    share = float((found - before).sum() / max((output - 1).sum(), 1.0))
    shared = [tokens for level in levels for tokens in _shared_tokens(level)]
    return PrefixReuse(
        kind=kind,
        answer_share=round(min(share, 1.0), 4),
        answer_growth=_growth(growth, output),
        shared_tokens=int(np.median(shared)) if shared else None,
    )


def measured_reasoning_share(levels: Sequence[Level]) -> float:
    """Of the time between the first and the last token of an answer, the part until the first one
    behind all reasoning, in the mean; 0.0 of a model that does not reason.

    Above 1 where answers were mostly nothing but reasoning.
    """
    shares: list[float] = []
    for level in levels:
        ok = level.counted & ~level.failed & (level.chunk_counts > 1)
        if np.isfinite(level.first_answer).any():
            until = np.where(np.isnan(level.first_answer), np.inf, level.first_answer)
            part = (until - level.first) / np.maximum(level.last - level.first, 1e-9)
            shares += np.minimum(part[ok], NEVER_ANSWERED).tolist()
    return round(float(np.mean(shares)), 4) if shares else 0.0


class _Pairs(NamedTuple):
    """Each turn that went well beside the turn before it: tokens, float64 [pairs]."""

    prompt_before: Floats
    output_before: Floats
    cached: Floats
    growth: Floats  # of the prompt, beyond what the user added

    @classmethod
    def of(cls, level: Level) -> _Pairs:
        order = np.lexsort((level.turn, level.session))
        is_told = ~np.isnan(level.prompt_tokens) & ~np.isnan(level.output_tokens)
        ok = (is_told & ~level.failed)[order]
        session, turn = level.session[order], level.turn[order]
        follows = ok[1:] & ok[:-1] & (session[1:] == session[:-1]) & (turn[1:] == turn[:-1] + 1)
        prompt, output = level.prompt_tokens[order], level.output_tokens[order]
        growth = prompt[1:] - prompt[:-1] - level.added_tokens[order][1:]
        follows &= growth > 0  # else the oldest turns were left out
        cached = np.nan_to_num(level.cached_tokens[order])
        columns = (prompt[:-1], output[:-1], cached[1:], growth)
        return cls(*(column[follows] for column in columns))


def _growth(growth: Floats, output: Floats) -> float:
    """Tokens that answers took in the next prompts, over their own; 1.0: nothing tells."""
    return round(max(float(growth.sum() / output.sum()), 0.0), 4) if output.sum() else 1.0


def _shared_tokens(level: Level) -> list[float]:
    """What the first turns found in the cache, but that of the first conversation."""
    found = level.cached_tokens[(level.turn == 0) & (level.session > 0) & ~level.failed]
    return [float(tokens) for tokens in np.nan_to_num(found)]
