"""Draws tokens from the softmax of logits / temperature, cut by top-k, min-p and top-p.

    draw_tokens([work], [row])    # -> [token]

Random numbers depend on (seed, position) alone (serving.sampling.random_numbers): a row's token
never depends on its batch mates. Order of the cuts is vLLM's: min-p, top-k, top-p, each over what
the one before left.

- With top-k: the k best are sorted and one uniform number picks by inverse CDF.
- Without: exact rejection sampling. The vocabulary lies in groups of 64. A proposal is a group,
  drawn by the weight of its best token, then a member, accepted by its weight relative to the best.
  The first accepted token that min-p and top-p keep is the draw. At least 1 of 64 proposals is
  accepted. This takes exp of V / 64 numbers instead of V.
- top-p keeps a proposed token where the weight of all tokens above it is less than top-p of the
  whole: one exp of V numbers a row, with top-p only.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from serving.sampling.random_numbers import (
    CDF_COUNTER,
    FRACTION,
    keys_of,
    proposal_bits,
    proposal_counters,
)
from serving.sampling.step_inputs import NO_TOKEN, Logits, Row, Sampling

Ids = npt.NDArray[np.int64]

MEMBERS = 64  # tokens in a group
ROUNDS = (64, 256, 1024, 4096)  # proposals of each round, until one is taken
_COUNTERS = [proposal_counters([(lane, count)]) for lane, count in enumerate(ROUNDS)]


@lru_cache(maxsize=2)
def _scratch(vocabulary: int) -> tuple[Logits, Logits, npt.NDArray[np.bool_]]:
    """Weights, ones and a mask of a row: fresh ones cost more in page faults than the work."""
    ones = np.ones(vocabulary, np.float32)
    return np.empty_like(ones), ones, np.empty(vocabulary, np.bool_)


def draw_tokens(works: list[Logits], rows: list[Row]) -> list[int]:
    """One token a row, NO_TOKEN where its logits are NaN; temperatures are above 0."""
    tokens = [NO_TOKEN] * len(rows)
    maxima = np.stack([group_maxima(work) for work in works])
    best = maxima.max(axis=1)
    left = []
    sorting = []  # rows that draw by inverse CDF, and their candidates
    for index, (work, row) in enumerate(zip(works, rows, strict=True)):
        if np.isnan(best[index]):
            continue
        if not np.isfinite(best[index]):
            tokens[index] = int(work.argmax())
        elif 0 < row.sampling.top_k < len(work):
            sorting.append((index, top_ids(work, row.sampling.top_k, maxima[index])))
        else:
            left.append(index)
    for counters in _COUNTERS:
        if not left:
            break
        some = [works[index] for index in left], [rows[index] for index in left]
        for index, token in zip(left, _propose(*some, maxima[left], counters), strict=True):
            tokens[index] = token
        left = [index for index in left if tokens[index] < 0]
    # What is left then: hardly any proposal is taken.
    sorting += [(index, top_ids(works[index], len(works[index]))) for index in left]
    if sorting:
        bits, _ = proposal_bits(keys_of([rows[index] for index, _ in sorting]), CDF_COUNTER)
        uniforms: list[float] = (bits[0, :, 0] * FRACTION).tolist()
        for (index, ids), uniform in zip(sorting, uniforms, strict=True):
            tokens[index] = _inverse_cdf(works[index], ids, rows[index].sampling, uniform)
    return tokens


def group_maxima(work: Logits) -> Logits:
    """Maxima of the groups. Group g < G = V // 64 holds tokens g, g + G, g + 2G, ...; the last
    group holds the V % 64 tokens left over (-inf where there are none)."""
    groups = len(work) // MEMBERS
    maxima = np.full(groups + 1, -np.inf, np.float32)
    whole = groups * MEMBERS
    np.maximum.reduce(work[:whole].reshape(MEMBERS, groups), axis=0, out=maxima[:groups])
    if whole < len(work):
        maxima[groups] = work[whole:].max()
    return maxima


def top_ids(work: Logits, count: int, maxima: Logits | None = None) -> Ids:
    """Ids of the `count` largest finite logits, best first, ties by lower id."""
    count = min(count, len(work))
    if maxima is None:
        maxima = group_maxima(work)
    # The count-th largest group maximum is a bound that at least `count` tokens reach.
    values = maxima if count * 4 < len(maxima) else work
    bound = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(work >= max(bound, np.finfo(np.float32).min))
    return ids[np.argsort(-work[ids], kind="stable")[:count]]


def _inverse_cdf(work: Logits, ids: Ids, sampling: Sampling, uniform: float) -> int:
    """One of `ids`, best first, after min-p and top-p; the uniform number picks."""
    weights = np.exp((work[ids] - np.float64(work[ids[0]])) / sampling.temperature)
    weights = weights[weights >= sampling.min_p]
    sums = np.cumsum(weights)
    if sampling.top_p < 1:
        kept = np.searchsorted(sums - weights, sampling.top_p * sums[-1], side="left")
        sums = sums[: max(1, int(kept))]
    place = np.searchsorted(sums, uniform * sums[-1], side="right")
    return int(ids[min(int(place), len(sums) - 1)])


def _propose(
    works: list[Logits], rows: list[Row], maxima: Logits, counters: npt.NDArray[np.int64]
) -> list[int]:
    """For each row without top-k the first proposal of a round that is taken; -1: none is."""
    vocabulary, groups = len(works[0]), len(works[0]) // MEMBERS
    scale = np.array([1 / row.sampling.temperature for row in rows])[:, None]
    bits, member = proposal_bits(keys_of(rows), counters)
    which, acceptance = bits * FRACTION
    best = maxima.max(axis=1, keepdims=True)
    # Far below the best at a tiny temperature: exp(-inf) = 0, as it should be.
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        weights = np.exp((maxima - best) * scale.astype(np.float32))
        sums = np.cumsum(weights.astype(np.float64), axis=1)
        wanted = which * sums[:, -1:]
        places = [np.searchsorted(s, w, side="right") for s, w in zip(sums, wanted, strict=True)]
        group = np.minimum(np.stack(places), groups)
        token = np.where(group < groups, member * groups + group, groups * MEMBERS + member)
        exists = token < vocabulary
        np.minimum(token, vocabulary - 1, out=token)
        logit = np.stack([work[ids] for work, ids in zip(works, token, strict=True)])
        share = np.exp((logit - np.take_along_axis(maxima, group, axis=1)) * scale)
    taken = exists & (acceptance < share)
    return [
        _first(work, row.sampling, float(top[0]), ids[fine].tolist())
        for work, row, top, ids, fine in zip(works, rows, best, token, taken, strict=True)
    ]


def _first(work: Logits, sampling: Sampling, best: float, tokens: list[int]) -> int:
    """The first of the accepted proposals that min-p and top-p keep: the weight above it is less
    than top-p of the whole."""
    least = -math.inf  # logits below are cut
    if sampling.min_p > 0:
        least = best + sampling.temperature * math.log(sampling.min_p)
        tokens = [token for token in tokens if work[token] >= least]
    if not tokens or sampling.top_p >= 1:
        return tokens[0] if tokens else -1
    weights, ones, mask = _scratch(len(work))
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(work, np.float32(best), out=weights)
        np.multiply(weights, np.float32(1 / sampling.temperature), out=weights)
        np.exp(weights, out=weights)
    if sampling.min_p > 0:
        weights[work < least] = 0
    allowed = sampling.top_p * float(np.dot(weights, ones))
    for token in tokens:
        if work[token] >= least:
            ahead = np.flatnonzero(np.greater(work, work[token], out=mask))
            if float(weights[ahead].sum()) < allowed:
                return token
            least = float(work[token])
    return -1
