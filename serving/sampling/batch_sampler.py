"""Samples the tokens of a step on the host, for every backend whose logits come there.

    sample(logits, rows)      # logits float32 [n, vocabulary], n rows -> n Sampled

A step of greedy rows is one argmax. The operations, and their order, are vLLM's: logit_bias,
penalties, banned ids, grammar, temperature, min_p, top_k, top_p, then the draw
(crossover.serving.sampling.top_k_top_p). Presence and frequency penalties count generated tokens,
the repetition penalty also those of the prompt. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import numpy as np

from crossover.serving.sampling.step_inputs import (
    GREEDY_BELOW,
    NO_TOKEN,
    Logits,
    Row,
    Sampled,
    TokenDetail,
)
from crossover.serving.sampling.top_k_top_p import draw_tokens, top_ids


def sample(logits: Logits, rows: list[Row]) -> list[Sampled]:
    """Return a token for each row; NO_TOKEN if its logits are NaN. `logits` is not changed.

    The token of a row with a grammar advances the row's matcher.
    """
    if not rows:
        return []
    special = [
        index for index, row in enumerate(rows) if row.banned or not row.sampling.is_plain_greedy
    ]
    if not special:
        return [Sampled(token) for token in _argmax(logits)]
    samples: list[Sampled] = [Sampled(NO_TOKEN)] * len(rows)
    plain = np.setdiff1d(np.arange(len(rows)), special)
    if len(plain):
        for index, token in zip(plain.tolist(), _argmax(logits[plain]), strict=True):
            samples[index] = Sampled(token)
    adjusted = {index: _adjusted(logits[index], rows[index]) for index in special}
    random = [index for index in special if rows[index].sampling.temperature >= GREEDY_BELOW]
    tokens: dict[int, int] = {}  # by the index of the row
    if random:
        drawn = draw_tokens(
            [adjusted[index] for index in random], [rows[index] for index in random]
        )
        tokens = dict(zip(random, drawn, strict=True))
    for index in special:
        row = rows[index]
        token = tokens[index] if index in tokens else _argmax(adjusted[index][None])[0]
        if token != NO_TOKEN:
            alternatives = row.sampling.logprobs
            detail = None
            if alternatives is not None:
                detail = _logprobs(logits[index], token, alternatives)
            samples[index] = Sampled(token, detail)
            if row.sampling.is_constrained:
                row.state.accept(token)
    return samples


def _argmax(logits: Logits) -> list[int]:
    """Return the best token of each row of logits [n, vocabulary]; NO_TOKEN if any are NaN."""
    tokens = logits.argmax(axis=1)
    is_nan = np.isnan(logits[np.arange(len(tokens)), tokens])  # to argmax, NaN is the maximum
    best_tokens: list[int] = np.where(is_nan, NO_TOKEN, tokens).tolist()
    return best_tokens


def _adjusted(logits: Logits, row: Row) -> Logits:
    """Return the row's logits with bias, penalties, bans and grammar applied to a copy; the logits
    themselves if none of these apply."""
    sampling = row.sampling
    if not (sampling.needs_logits_work or row.banned):
        return logits
    adjusted = logits.copy()
    if sampling.logit_bias:
        ids = list(sampling.logit_bias)
        adjusted[ids] += np.fromiter(sampling.logit_bias.values(), np.float32)
    if sampling.has_penalties:
        _penalize(adjusted, row)
    if row.banned:
        adjusted[list(row.banned)] = -np.inf
    if sampling.is_constrained:
        row.state.mask(adjusted)
    return adjusted


def _penalize(logits: Logits, row: Row) -> None:
    """Apply the row's penalties to its logits, in place."""
    sampling = row.sampling
    assert row.history is not None, "the scheduler gives it"
    if sampling.repetition_penalty != 1.0:
        repeated = np.unique(row.history)
        values = logits[repeated]
        factor = np.float32(sampling.repetition_penalty)
        logits[repeated] = np.where(values > 0, values / factor, values * factor)
    if sampling.counts_generated:
        generated, times = np.unique(row.history[row.prompt_tokens :], return_counts=True)
        logits[generated] -= np.float32(sampling.presence_penalty)
        logits[generated] -= np.float32(sampling.frequency_penalty) * times.astype(np.float32)


def _logprobs(logits: Logits, token: int, alternatives: int) -> TokenDetail:
    """Return the log-softmax of the raw logits of one row, at `token` and at the best ids.

    `alternatives`: how many of the best ids.
    """
    best = logits.max()
    weights = logits - best
    with np.errstate(under="ignore"):
        np.exp(weights, out=weights)
    log_sum = float(best) + float(np.log(weights.sum()))  # log of the sum of exp(logits)
    ids = top_ids(logits, alternatives) if alternatives > 0 else np.empty(0, np.int64)
    values: list[float] = (logits[ids].astype(np.float64) - log_sum).tolist()
    return TokenDetail(token, float(logits[token]) - log_sum, ids.tolist(), values)
