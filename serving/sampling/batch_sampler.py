"""One sampler for every backend whose logits come to the host: rows in, one token each out.

    sample(logits, rows)      # logits float32 [n, vocabulary], n rows -> n Sampled

A step of greedy rows is one argmax. Order of operations and meaning are vLLM's: logit_bias,
penalties, banned ids, grammar, temperature, min_p, top_k, top_p, then the draw
(crossover.serving.sampling.top_k_top_p). Presence and frequency penalties count generated tokens,
the repetition penalty prompt and generated ones. Log-probabilities are those of the raw logits.
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
    """One token per row of `logits`, which is not written; NO_TOKEN for a row of NaN. `state`
    of a row with a grammar is its crossover.serving.sampling.grammar.Matcher."""
    if not rows:
        return []
    special = [
        index for index, row in enumerate(rows) if row.banned or not row.sampling.is_plain_greedy
    ]
    if not special:
        return [Sampled(token) for token in _argmax(logits)]
    out: list[Sampled] = [Sampled(NO_TOKEN)] * len(rows)
    plain = np.setdiff1d(np.arange(len(rows)), special)
    if len(plain):
        for index, token in zip(plain.tolist(), _argmax(logits[plain]), strict=True):
            out[index] = Sampled(token)
    works = {index: _adjusted(logits[index], rows[index]) for index in special}
    drawn = [i for i in special if rows[i].sampling.temperature >= GREEDY_BELOW]
    tokens: dict[int, int] = {}
    if drawn:
        found = draw_tokens([works[i] for i in drawn], [rows[i] for i in drawn])
        tokens = dict(zip(drawn, found, strict=True))
    for index in special:
        row, wanted = rows[index], rows[index].sampling.logprobs
        token = tokens[index] if index in tokens else _argmax(works[index][None])[0]
        if token != NO_TOKEN:
            report = None if wanted is None else _logprobs(logits[index], token, wanted)
            out[index] = Sampled(token, report)
            if row.sampling.is_constrained:
                row.state.accept(token)
    return out


def _argmax(logits: Logits) -> list[int]:
    tokens = logits.argmax(axis=1)
    is_nan = np.isnan(logits[np.arange(len(tokens)), tokens])  # argmax finds NaN first
    chosen: list[int] = np.where(is_nan, NO_TOKEN, tokens).tolist()
    return chosen


def _adjusted(logits: Logits, row: Row) -> Logits:
    """The row's logits with bias, penalties, bans and grammar: a copy where any of these apply."""
    sampling = row.sampling
    if not (sampling.needs_logits_work or row.banned):
        return logits
    work = logits.copy()
    if sampling.logit_bias:
        work[list(sampling.logit_bias)] += np.fromiter(sampling.logit_bias.values(), np.float32)
    if sampling.has_penalties:
        _penalise(work, row)
    if row.banned:
        work[list(row.banned)] = -np.inf
    if sampling.is_constrained:
        row.state.mask(work)
    return work


def _penalise(work: Logits, row: Row) -> None:
    sampling = row.sampling
    assert row.history is not None, "the scheduler gives it"
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(row.history)
        values = work[seen]
        factor = np.float32(sampling.repetition_penalty)
        work[seen] = np.where(values > 0, values / factor, values * factor)
    if sampling.counts_generated:
        generated, times = np.unique(row.history[row.prompt_tokens :], return_counts=True)
        work[generated] -= np.float32(sampling.presence_penalty)
        work[generated] -= np.float32(sampling.frequency_penalty) * times.astype(np.float32)


def _logprobs(logits: Logits, token: int, count: int) -> TokenDetail:
    """Log-softmax of the raw logits at `token`, and at the `count` best ids."""
    best = logits.max()
    weights = logits - best
    with np.errstate(under="ignore"):
        np.exp(weights, out=weights)
    log_sum = float(best) + float(np.log(weights.sum()))
    ids = top_ids(logits, count) if count > 0 else np.empty(0, np.int64)
    values: list[float] = (logits[ids].astype(np.float64) - log_sum).tolist()
    return TokenDetail(token, float(logits[token]) - log_sum, ids.tolist(), values)
