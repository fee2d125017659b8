"""One sampler for every backend whose logits come back to the host: a step's rows in, one token per row out.

    sample(logits, rows)      # logits float32 [n, vocabulary], n rows -> n Sampled

A step of 32 greedy rows is one argmax. Everything else works on one row of logits at a time, with a handful of vectorised passes over it:

- Order of operations and meaning are vLLM's: logit_bias, penalties, banned ids, grammar, temperature, min_p, top_k, top_p, then the draw.
  Presence and frequency penalties count generated tokens, the repetition penalty prompt and generated ones.
- The draw is the Gumbel-max trick, argmax(logit / temperature + noise), noise keyed by (seed, position, token) as in serving.noise:
  a row's token never depends on its batch mates, and a change of the logits by 1e-5 changes the token with a chance of about 1e-5.
- Over a whole vocabulary it is done in two levels: the maximum over a group of tokens is itself Gumbel, around the group's
  log-sum-exp. So about vocabulary / 256 + 256 numbers are drawn and not 152,000, and the distribution is exact.
- Top-k of a row without sorting it: the k-th largest of strided group maxima is a threshold that at least k tokens reach.
- log-probabilities are those of the raw logits, whatever temperature, penalties and bias do to the draw (vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from serving.backends.base import Row, Sampled, Sampling, TokenLogprobs
from serving.errors import EngineFailed, Unsupported
from serving.noise import gumbel, gumbel_at

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5  # a temperature lower than this is greedy, as in vLLM
GROUP = 256  # tokens per group of the two-level draw
STRIDE = 64  # tokens per group whose maximum bounds the top-k
FIRST_CANDIDATES = 256  # top-p looks at so many tokens first
MOST_CANDIDATES = 4096  # where top-k, top-p and min-p leave more than these are drawn by the two-level draw over a masked row

# Lanes keep the noise of different uses apart. A group's members have lane _GROUPS + 1 + group.
_CANDIDATES, _GROUPS = 0, 1
_ATTEMPT = 1 << 32  # added to the lane of a second draw, after a grammar refused the first


@runtime_checkable
class Constraint(Protocol):
    """What may come next, kept in Row.state for requests with a grammar; serving.grammar has the one that llama.cpp makes."""

    end_token: int  # drawn where nothing else may come

    def allows(self, token: int) -> bool: ...

    def mask(self, logits: Logits) -> None:
        """Set the logits of all tokens that may not come next to -inf, in place."""
        ...

    def accept(self, token: int) -> None: ...


def sample(logits: Logits, rows: list[Row]) -> list[Sampled]:
    """One token per row of `logits`, which is read and not written. Raises EngineFailed where a row has no number in it (NaN),
    Unsupported where a row wants a grammar and its `state` is no Constraint."""
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    special = [index for index, row in enumerate(rows) if row.banned or row.target is not None or not row.sampling.is_plain_greedy]
    if not special:
        return [Sampled(token) for token in _argmax(logits)]
    out: list[Sampled] = [Sampled(-1)] * len(rows)
    plain = np.setdiff1d(np.arange(len(rows)), special)
    if len(plain):
        for index, token in zip(plain.tolist(), _argmax(logits[plain]), strict=True):
            out[index] = Sampled(token)
    scratch = np.empty(_padded(logits.shape[1]), np.float32)
    draws = []
    for index in special:
        target = rows[index].target
        if target is None:
            draws.append(_Draw(index, rows[index], logits[index]))
        else:
            _check(logits[index].max())
            out[index] = Sampled(target, _logprobs(logits[index], target, rows[index].sampling.logprobs or 0, scratch))
    _choose(draws, scratch, attempt=0)
    _constrain(draws, scratch)
    for draw in draws:
        wanted = draw.row.sampling.logprobs
        report = None if wanted is None else _logprobs(logits[draw.index], draw.token, wanted, scratch)
        out[draw.index] = Sampled(draw.token, report)
    return out


@dataclass(slots=True)
class _Draw:
    """One row on its way to a token: `work` is the row's logits, a copy once something had to change them."""

    index: int
    row: Row
    work: Logits
    token: int = -1
    constraint: Constraint | None = None
    masked: bool = False  # the constraint's mask is in `work`

    def __post_init__(self) -> None:
        sampling = self.row.sampling
        self.work = _adjusted(self.work, self.row)
        if sampling.grammar is not None or sampling.json_schema is not None:
            if not isinstance(self.row.state, Constraint):
                raise Unsupported("this backend cannot follow a grammar or a JSON schema", "grammar")
            self.constraint = self.row.state
            if _truncates(sampling) and not _greedy(sampling):  # what top-k and top-p keep depends on what is allowed
                self.mask()

    def mask(self) -> None:
        assert self.constraint is not None
        self.work = self.work.copy()
        self.constraint.mask(self.work)
        self.masked = True


def _constrain(draws: list[_Draw], scratch: Logits) -> None:
    """Hold drawn tokens against their grammars. A refused token is drawn again, from what is allowed and with fresh noise: the first
    draw accepted, or else one from the allowed, is distributed as one from the allowed. So most steps need no mask, which is dear."""
    bound = [(draw, draw.constraint) for draw in draws if draw.constraint is not None]
    refused = []
    for draw, constraint in bound:
        if not draw.masked and not constraint.allows(draw.token):
            draw.mask()
            refused.append(draw)
    _choose(refused, scratch, attempt=1)
    for draw, constraint in bound:
        if draw.masked and not np.isfinite(draw.work[draw.token]):
            draw.token = constraint.end_token
        else:
            constraint.accept(draw.token)


# --- from logits to tokens ----------------------------------------------------------------------------------------------


def _argmax(logits: Logits) -> list[int]:
    tokens = logits.argmax(axis=1)
    _check(logits[np.arange(len(tokens)), tokens])
    chosen: list[int] = tokens.tolist()
    return chosen


def _check(best: npt.NDArray[np.float32]) -> None:
    if np.isnan(best).any():
        raise EngineFailed("the model's logits are not numbers (NaN): its weights or its KV cache are broken")


def _choose(draws: list[_Draw], scratch: Logits, attempt: int) -> None:
    """Give each draw its token. Two vectorised draws at most: one over candidates, one over whole vocabularies."""
    few: list[tuple[_Draw, Ids, npt.NDArray[np.float64]]] = []
    whole: list[_Draw] = []
    for draw in draws:
        sampling = draw.row.sampling
        best = draw.work.max()
        _check(best)
        if _greedy(sampling) or not np.isfinite(best):  # nothing but -inf: a grammar's dead end, which _constrain sees
            draw.token = int(draw.work.argmax())
            continue
        if not _truncates(sampling):
            whole.append(draw)
            continue
        kept = _kept(draw.work, float(best), sampling, scratch)
        if len(kept) > MOST_CANDIDATES:
            masked = np.full_like(draw.work, -np.inf)
            masked[kept] = draw.work[kept]
            draw.work = masked
            whole.append(draw)
        else:
            few.append((draw, kept, (draw.work[kept] - np.float64(best)) / sampling.temperature))
    _draw_candidates(few, attempt)
    _draw_whole(whole, scratch, attempt)


def _keys(draws: list[_Draw]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    seeds = np.array([draw.row.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF for draw in draws], np.uint64)
    positions = np.array([draw.row.start + len(draw.row.tokens) for draw in draws], np.int64)
    return seeds, positions


def _draw_candidates(few: list[tuple[_Draw, Ids, npt.NDArray[np.float64]]], attempt: int) -> None:
    """Gumbel-max over each row's own few tokens, the noise being the token's, not its rank's."""
    if not few:
        return
    width = max(len(kept) for _, kept, _ in few)
    ids = np.zeros((len(few), width), np.int64)
    scores = np.full((len(few), width), -np.inf)
    for line, (_, kept, scaled) in enumerate(few):
        ids[line, : len(kept)] = kept
        scores[line, : len(kept)] = scaled
    seeds, positions = _keys([draw for draw, _, _ in few])
    lanes = np.full(len(few), _CANDIDATES + attempt * _ATTEMPT, np.int64)
    scores += gumbel_at(seeds, positions, lanes, ids)
    for line, best in enumerate(scores.argmax(axis=1)):
        few[line][0].token = int(ids[line, best])


def _draw_whole(draws: list[_Draw], scratch: Logits, attempt: int) -> None:
    """Gumbel-max over whole vocabularies in two levels: a group by its log-sum-exp, then a token of the group."""
    if not draws:
        return
    vocabulary = len(draws[0].work)
    groups = _padded(vocabulary) // GROUP
    seeds, positions = _keys(draws)
    lane = _GROUPS + attempt * _ATTEMPT
    sums = np.empty((len(draws), groups), np.float64)
    for line, draw in enumerate(draws):
        _exponentials(draw.work, draw.row.sampling.temperature, scratch)
        sums[line] = _group_sums(scratch)
    with np.errstate(divide="ignore"):
        scores = np.log(sums) + gumbel(seeds, positions, np.full(len(draws), lane, np.int64), groups)
    chosen = scores.argmax(axis=1)
    noise = gumbel(seeds, positions, lane + 1 + chosen.astype(np.int64), GROUP)
    for line, draw in enumerate(draws):
        members = np.arange(int(chosen[line]), vocabulary, groups)
        inside = draw.work[members].astype(np.float64)
        inside = (inside - inside.max()) / draw.row.sampling.temperature + noise[line, : len(members)]
        draw.token = int(members[inside.argmax()])


def _exponentials(work: Logits, temperature: float, scratch: Logits) -> float:
    """scratch[:vocabulary] = exp((work - max) / temperature), zeros behind it; returns max."""
    top = work.max()
    view = scratch[: len(work)]
    np.subtract(work, top, out=view)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # far below the best at a tiny temperature: -inf, whose exp is the 0 it should be
            np.multiply(view, np.float32(1.0 / temperature), out=view)
    with np.errstate(under="ignore"):
        np.exp(view, out=view)
    scratch[len(work) :] = 0
    return float(top)


def _group_sums(scratch: Logits) -> Logits:
    """Sums of the groups. Group g holds tokens g, g + groups, g + 2 groups, ...: whole rows add up, at full speed."""
    return np.asarray(scratch.reshape(GROUP, -1).sum(axis=0), np.float32)


def _total(scratch: Logits) -> float:
    return float(_group_sums(scratch).sum(dtype=np.float64))


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // GROUP) * GROUP


# --- what may be drawn --------------------------------------------------------------------------------------------------


def _greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _kept(work: Logits, best: float, sampling: Sampling, scratch: Logits) -> Ids:
    """Ids of the tokens that min_p, top_k and top_p leave, at least one."""
    vocabulary = len(work)
    floor = best + sampling.temperature * np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
    if sampling.top_k <= 0 and sampling.top_p >= 1.0:
        return np.flatnonzero(work >= floor)
    if 0 < sampling.top_k < vocabulary:
        kept = top_ids(work, sampling.top_k)
        kept = kept[work[kept] >= floor]
        return _nucleus(work, best, kept, sampling)
    if sampling.top_p >= 1.0:  # top_k is the whole vocabulary
        return np.flatnonzero(work >= floor)
    kept = top_ids(work, FIRST_CANDIDATES)
    kept = kept[work[kept] >= floor]
    held = np.exp((work[kept] - np.float64(best)) / sampling.temperature)
    below = vocabulary - FIRST_CANDIDATES if len(kept) == FIRST_CANDIDATES else 0  # how many more there may be, none of them better
    least, most = float(held.sum()), float(held.sum()) + below * float(held[-1])
    count = _head(held, sampling.top_p * least)
    if sampling.top_p * most <= least and count == _head(held, sampling.top_p * most):
        return kept[:count]  # whatever the others weigh, the nucleus ends here
    _exponentials(work, sampling.temperature, scratch)
    weights = scratch[:vocabulary]
    if sampling.min_p > 0:
        weights[work < floor] = 0
    wanted = sampling.top_p * _total(scratch)
    if least >= wanted:
        return kept[: _head(held, wanted)]
    return _wide_nucleus(weights, wanted)


def _nucleus(work: Logits, best: float, kept: Ids, sampling: Sampling) -> Ids:
    """The shortest head of `kept` (best first) that holds top_p of its sum."""
    if sampling.top_p >= 1.0:
        return kept
    weights = np.exp((work[kept] - np.float64(best)) / sampling.temperature)
    return kept[: _head(weights, sampling.top_p * float(weights.sum()))]


def _head(weights: npt.NDArray[np.float64], wanted: float) -> int:
    """How many of the descending weights it takes to hold `wanted`; at least one."""
    before = np.cumsum(weights) - weights
    return max(1, int(np.searchsorted(before, wanted, side="left")))


def _wide_nucleus(weights: Logits, wanted: float) -> Ids:
    """The fewest tokens that hold `wanted` of the weights, without sorting the vocabulary: the upper half of a positive float32's
    bits is a monotone key, so a histogram over it finds the one bin in which the nucleus ends, and only that bin is sorted."""
    keys = weights.view(np.int32) >> 16
    held = np.bincount(keys, weights=weights)
    above = np.cumsum(held[::-1])[::-1] - held  # what the bins above each one hold
    last = int(np.flatnonzero(above < wanted)[0])  # `above` falls with the key: the lowest bin that is still needed
    inside = np.flatnonzero(keys == last)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    inside = inside[: _head(weights[inside].astype(np.float64), wanted - float(above[last]))]
    return np.concatenate((np.flatnonzero(keys > last), inside))


def top_ids(work: Logits, count: int) -> Ids:
    """Ids of the `count` largest finite logits, best first, ties by lower id. Fewer where fewer are finite.

    The threshold is the count-th largest of strided groups' maxima: at least `count` tokens reach it, and rarely many more.
    """
    vocabulary = len(work)
    groups = vocabulary // STRIDE
    if count * 4 >= groups:
        order = np.argsort(-work, kind="stable")[:count]
        return order[np.isfinite(work[order])]
    maxima = work[: groups * STRIDE].reshape(STRIDE, groups).max(axis=0)
    threshold = np.partition(maxima, groups - count)[groups - count]
    ids = np.flatnonzero(work >= threshold) if np.isfinite(threshold) else np.flatnonzero(np.isfinite(work))
    best = np.argsort(-work[ids], kind="stable")[:count]
    return ids[best]


def _adjusted(logits: Logits, row: Row) -> Logits:
    """The row's logits with bias, penalties and bans: a copy where any of these apply."""
    sampling = row.sampling
    counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
    penalties = counts or sampling.repetition_penalty != 1.0
    if not (sampling.logit_bias or penalties or row.banned):
        return logits
    work = logits.copy()
    if sampling.logit_bias:
        work[_within(list(sampling.logit_bias), len(work), "logit_bias")] += np.fromiter(sampling.logit_bias.values(), np.float32)
    if penalties:
        if row.history is None:
            raise ValueError("a row with penalties came without its history")
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(row.history)
            values = work[seen]
            work[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        if counts:
            generated, times = np.unique(row.history[row.prompt_tokens :], return_counts=True)
            work[generated] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * times.astype(np.float32)
    if row.banned:
        work[_within(list(row.banned), len(work), "banned")] = -np.inf
    return work


def _within(ids: list[int], vocabulary: int, parameter: str) -> Ids:
    """The ids as an index. A negative one would hit another token in silence."""
    index = np.array(ids, np.int64)
    if index.min() < 0 or index.max() >= vocabulary:
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise Unsupported(f"{parameter} names token {wrong}, and the vocabulary has {vocabulary}", parameter)
    return index


def _logprobs(logits: Logits, token: int, count: int, scratch: Logits) -> TokenLogprobs:
    """Log-softmax of the raw logits at `token`, and at the `count` best ids."""
    top = _exponentials(logits, 1.0, scratch)
    log_sum = top + float(np.log(_total(scratch)))
    best = top_ids(logits, count) if count > 0 else np.empty(0, np.int64)
    values: list[float] = (logits[best].astype(np.float64) - log_sum).tolist()
    return TokenLogprobs(float(logits[token]) - log_sum, best.tolist(), values)
