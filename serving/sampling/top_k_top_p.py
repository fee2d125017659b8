"""Draws tokens from the softmax of logits / temperature, cut by top-k, min-p and top-p.

    draw_tokens([logits], [row])    # -> [token]

Random numbers depend on (seed, position) alone (crossover.serving.sampling.random_numbers): a row's
token never depends on its batch mates. Order of the cuts is vLLM's: min-p, top-k, top-p, each over
what the one before left.

- With top-k, the k best tokens are sorted, and one uniform number picks by inverse CDF.
- Without top-k, tokens are drawn by exact rejection sampling, which takes exp of V / 64 numbers
  instead of V. The vocabulary is divided into groups of 64. A proposal is a group, drawn with the
  weight of its best token, and one of its members. It is accepted with the member's weight relative
  to the best one. The first accepted token that min-p and top-p keep is drawn. At least 1 of 64
  proposals is accepted on average.
- top-p keeps a proposed token if all better tokens together weigh less than top-p of the whole.
  The groups with the heaviest best tokens give bounds of both sums, which decide nearly every token
  of a language model. Where they cannot, as with nearly uniform logits, exp of V numbers decides.
  The margin of the bounds is far above the rounding of the sums, so that both always agree.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossover.serving.sampling.random_numbers import (
    CDF_COUNTER,
    FRACTION,
    keys_of,
    proposal_bits,
    proposal_counters,
)
from crossover.serving.sampling.step_inputs import NO_TOKEN, Logits, Row, Sampling

Ids = npt.NDArray[np.int64]

MEMBERS = 64  # tokens in a group
ROUNDS = (64, 256, 1024, 4096)  # proposals of each round; the first accepted one ends the draw
_COUNTERS = [proposal_counters([(lane, count)]) for lane, count in enumerate(ROUNDS)]
# A group is heavy if its best token weighs at least this share of the row's best token. The bounds
# of top-p sum the heavy groups token by token; of the other groups they use the best token only.
# With more heavy groups than this, the sum over the whole vocabulary is as quick.
MIN_HEAVY_WEIGHT, MAX_HEAVY_GROUPS = 1e-3, 256
MAX_BETTER_GROUPS = 32  # the quick test of top-p gives up if more groups have a better token
MARGIN = 1e-3  # relative, of the bounds; float32 sums over a vocabulary round by less than 1e-4


@lru_cache(maxsize=2)
def _scratch(vocabulary: int) -> tuple[Logits, Logits, Logits]:
    """Return arrays for the weights, ones and a mask of a row. They are reused, because the page
    faults of new arrays cost more than the arithmetic."""
    ones = np.ones(vocabulary, np.float32)
    return np.empty_like(ones), ones, np.empty_like(ones)


class Groups(NamedTuple):
    """The groups of several rows, or of one. A token weighs exp((logit - best) / temperature),
    where best is the largest logit of its row."""

    maxima: Logits  # [rows, groups + 1], see group_maxima; of one row [groups + 1]
    weights: Logits  # of the maxima
    cumulative_weights: npt.NDArray[np.float64]

    def of_rows(self, indices: list[int]) -> Groups:
        return Groups(self.maxima[indices], self.weights[indices], self.cumulative_weights[indices])

    def of_row(self, index: int) -> Groups:
        """Return the groups of one row, without the dimension of rows."""
        return Groups(self.maxima[index], self.weights[index], self.cumulative_weights[index])


def draw_tokens(logits_of_rows: list[Logits], rows: list[Row]) -> list[int]:
    """Return a token for each row, NO_TOKEN where its logits are NaN. Temperatures are above 0."""
    tokens = [NO_TOKEN] * len(rows)
    maxima = np.stack([group_maxima(logits) for logits in logits_of_rows])
    best = maxima.max(axis=1)
    proposing: list[int] = []  # indices of the rows that draw by rejection sampling
    sorting: list[tuple[int, Ids]] = []  # of those that draw by inverse CDF, with candidates
    for index, (logits, row) in enumerate(zip(logits_of_rows, rows, strict=True)):
        if np.isnan(best[index]):
            continue
        if not np.isfinite(best[index]):
            tokens[index] = int(logits.argmax())
        elif 0 < row.sampling.top_k < len(logits):
            sorting.append((index, top_ids(logits, row.sampling.top_k, maxima[index])))
        else:
            proposing.append(index)
    groups = weigh(maxima[proposing], [rows[index] for index in proposing])
    for counters in _COUNTERS:
        if not proposing:
            break
        proposed = _propose(
            [logits_of_rows[index] for index in proposing],
            [rows[index] for index in proposing],
            groups,
            counters,
        )
        for index, token in zip(proposing, proposed, strict=True):
            tokens[index] = token
        if undecided := [i for i, token in enumerate(proposed) if token < 0]:
            groups = groups.of_rows(undecided)
        proposing = [proposing[i] for i in undecided]
    # These rows accept hardly any proposal, so all their tokens are sorted.
    for index in proposing:
        logits = logits_of_rows[index]
        sorting.append((index, top_ids(logits, len(logits))))
    if sorting:
        bits, _ = proposal_bits(keys_of([rows[index] for index, _ in sorting]), CDF_COUNTER)
        uniforms: list[float] = (bits[0, :, 0] * FRACTION).tolist()
        for (index, ids), uniform in zip(sorting, uniforms, strict=True):
            tokens[index] = _inverse_cdf(logits_of_rows[index], ids, rows[index].sampling, uniform)
    return tokens


def group_maxima(logits: Logits) -> Logits:
    """Return the largest logit of each group, [G + 1]: of the G = V // 64 whole groups, of which
    group g holds tokens g, g + G, g + 2G, ..., and of the remainder group, the V % 64 tokens at the
    end (-inf if there are none)."""
    groups = len(logits) // MEMBERS
    maxima = np.full(groups + 1, -np.inf, np.float32)
    whole = groups * MEMBERS
    np.maximum.reduce(logits[:whole].reshape(MEMBERS, groups), axis=0, out=maxima[:groups])
    if whole < len(logits):
        maxima[groups] = logits[whole:].max()
    return maxima


def top_ids(logits: Logits, count: int, maxima: Logits | None = None) -> Ids:
    """Return the ids of the `count` largest finite logits, best first, ties by lower id.

    `maxima`: of the groups, if the caller has them.
    """
    count = min(count, len(logits))
    if maxima is None:
        maxima = group_maxima(logits)
    smallest = np.finfo(np.float32).min
    if count * 4 < len(maxima):
        # At least `count` tokens reach the count-th largest maximum, all in groups that reach it.
        bound = max(np.partition(maxima, len(maxima) - count)[len(maxima) - count], smallest)
        group_count = len(logits) // MEMBERS
        groups = np.flatnonzero(maxima >= bound)
        whole_groups = groups[groups < group_count]
        ids = np.append(
            np.arange(MEMBERS)[:, None] * group_count + whole_groups,
            np.arange(group_count * MEMBERS, len(logits)),
        )
        ids = ids[logits[ids] >= bound]
    else:
        bound = max(np.partition(logits, len(logits) - count)[len(logits) - count], smallest)
        ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]


def _inverse_cdf(logits: Logits, ids: Ids, sampling: Sampling, uniform: float) -> int:
    """Return the one of `ids`, best first, that the number `uniform` in [0, 1) picks after min-p
    and top-p."""
    weights = np.exp((logits[ids] - np.float64(logits[ids[0]])) / sampling.temperature)
    weights = weights[weights >= sampling.min_p]
    sums = np.cumsum(weights)
    if sampling.top_p < 1:
        sums_before = sums - weights  # of each token: the weight of all better ones
        kept = np.searchsorted(sums_before, sampling.top_p * sums[-1], side="left")
        sums = sums[: max(1, int(kept))]
    picked = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(ids[min(picked, len(sums) - 1)])


def weigh(maxima: Logits, rows: list[Row]) -> Groups:
    """Return the groups of the rows with their weights."""
    scale = np.array([1 / row.sampling.temperature for row in rows], np.float32)[:, None]
    best = maxima.max(axis=1, keepdims=True, initial=-np.inf)
    # At a tiny temperature the exponent may overflow to -inf: exp gives 0, as it should be.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((maxima - best) * scale)
    return Groups(maxima, weights, np.cumsum(weights.astype(np.float64), axis=1))


def _propose(
    logits_of_rows: list[Logits], rows: list[Row], groups: Groups, counters: npt.NDArray[np.int64]
) -> list[int]:
    """Return the first accepted proposal of each row, -1 where it accepts none.

    `counters`: of the proposals, see `proposal_counters`. The rows have no top-k.
    """
    vocabulary, group_count = len(logits_of_rows[0]), len(logits_of_rows[0]) // MEMBERS
    scale = np.array([1 / row.sampling.temperature for row in rows])[:, None]
    bits, member = proposal_bits(keys_of(rows), counters)
    group_uniform, acceptance_uniform = bits * FRACTION
    # The group by inverse CDF over the weights of the groups' best tokens ...
    thresholds = group_uniform * groups.cumulative_weights[:, -1:]
    group = np.stack(
        [
            np.searchsorted(sums, threshold, side="right")
            for sums, threshold in zip(groups.cumulative_weights, thresholds, strict=True)
        ]
    )
    group = np.minimum(group, group_count)
    # ... and of it one member. The last group, the remainder, may not have so many.
    token = np.where(
        group < group_count, member * group_count + group, group_count * MEMBERS + member
    )
    exists = token < vocabulary
    np.minimum(token, vocabulary - 1, out=token)
    logit = np.stack([logits[ids] for logits, ids in zip(logits_of_rows, token, strict=True)])
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        relative_weight = np.exp((logit - np.take_along_axis(groups.maxima, group, axis=1)) * scale)
    is_accepted = exists & (acceptance_uniform < relative_weight)
    return [
        _first_kept(
            logits_of_rows[index], row.sampling, groups.of_row(index), ids[accepted].tolist()
        )
        for index, (row, ids, accepted) in enumerate(zip(rows, token, is_accepted, strict=True))
    ]


def _first_kept(logits: Logits, sampling: Sampling, groups: Groups, tokens: list[int]) -> int:
    """Return the first of the accepted proposals `tokens` that min-p and top-p keep, -1 if they
    keep none. `groups`: of this row."""
    min_logit = -math.inf  # tokens below it are cut
    if sampling.min_p > 0:
        min_logit = float(groups.maxima.max()) + sampling.temperature * math.log(sampling.min_p)
        tokens = [token for token in tokens if logits[token] >= min_logit]
    if not tokens or sampling.top_p >= 1:
        return tokens[0] if tokens else -1
    bounds: TopPBounds | None = None
    exact: TopP | None = None
    for token in tokens:
        logit = logits[token]
        if logit < min_logit:
            continue
        if is_surely_kept(logit, logits, sampling, groups):
            return token
        bounds = bounds or TopPBounds(logits, sampling, groups, min_logit)
        is_kept = bounds.keeps(logit)
        if is_kept is None:
            exact = exact or TopP(logits, sampling, float(groups.maxima.max()), min_logit)
            is_kept = exact.keeps(logit)
        if is_kept:
            return token
        min_logit = float(logit)  # top-p cuts whatever is below a token that it cuts
    return -1


def _members(logits: Logits, groups: Ids) -> Logits:
    """Return the logits of all tokens of these groups, which are given in ascending order.

    A whole group is a column of the logits reshaped to [MEMBERS, G]. The last id may be the
    remainder group G, whose tokens are at the end (`group_maxima`).
    """
    count = len(logits) // MEMBERS
    by_member = logits[: count * MEMBERS].reshape(MEMBERS, count)
    if not len(groups) or groups[-1] < count:
        return by_member.take(groups, axis=1).ravel()
    return np.append(by_member.take(groups[:-1], axis=1), logits[count * MEMBERS :])


def _weights(logits: Logits, sampling: Sampling, best: float) -> Logits:
    """Return the weights exp((logit - best) / temperature) of tokens with these logits."""
    weights = logits - np.float32(best)
    weights *= np.float32(1 / sampling.temperature)
    with np.errstate(over="ignore", under="ignore"):
        np.exp(weights, out=weights)
    return weights


def is_surely_kept(logit: np.float32, logits: Logits, sampling: Sampling, groups: Groups) -> bool:
    """Return whether top-p surely keeps a token of this logit: it does even if the best tokens of
    the groups were the whole vocabulary. False means that this test cannot tell."""
    better_groups = np.flatnonzero(groups.maxima > logit)
    if len(better_groups) > MAX_BETTER_GROUPS:
        return False
    members = _members(logits, better_groups)
    better_weights = _weights(members[members > logit], sampling, groups.maxima.max())
    min_total = groups.cumulative_weights[-1]
    if sampling.min_p > 0:
        min_total = groups.weights[groups.weights >= sampling.min_p].sum()
    return bool(better_weights.sum() < sampling.top_p * min_total * (1 - MARGIN))


class TopPBounds:
    """Decides whether top-p keeps a token, from the tokens of the heavy groups alone. The tokens of
    each light group together weigh between 0 and MEMBERS times its best token."""

    def __init__(
        self, logits: Logits, sampling: Sampling, groups: Groups, min_logit: float
    ) -> None:
        """`min_logit`: tokens below it are cut by min-p. `groups`: of this row."""
        self._top_p = sampling.top_p
        heavy_groups = np.flatnonzero(groups.weights >= MIN_HEAVY_WEIGHT)
        self._can_tell = len(heavy_groups) <= MAX_HEAVY_GROUPS
        if not self._can_tell:
            return
        self._heavy_logits = _members(logits, heavy_groups)
        if sampling.min_p > 0:
            self._heavy_logits = self._heavy_logits[self._heavy_logits >= min_logit]
        self._heavy_weights = _weights(self._heavy_logits, sampling, groups.maxima.max())
        self._heavy_total = float(self._heavy_weights.sum())
        self._max_light_total = 0.0
        if sampling.min_p < MIN_HEAVY_WEIGHT:  # otherwise min-p cuts all light tokens
            heavy_maxima = groups.weights[heavy_groups].sum(dtype=np.float64)
            light_maxima = max(0.0, float(groups.cumulative_weights[-1] - heavy_maxima))
            self._max_light_total = MEMBERS * light_maxima

    def keeps(self, logit: np.float32) -> bool | None:
        """Return whether top-p keeps a token of this logit; None if the bounds cannot tell."""
        if not self._can_tell:
            return None
        better_heavy = float(np.dot(self._heavy_weights, self._heavy_logits > logit))
        max_allowed = self._top_p * (self._heavy_total + self._max_light_total)
        # The worst case for the token: all light tokens are better than it.
        if better_heavy + self._max_light_total < max_allowed * (1 - MARGIN):
            return True
        # The best case for it: no light token is better.
        return False if better_heavy > max_allowed * (1 + MARGIN) else None


class TopP:
    """Decides whether top-p keeps a token, from the weights of all tokens that min-p keeps."""

    def __init__(self, logits: Logits, sampling: Sampling, best: float, min_logit: float) -> None:
        """`best`: the row's largest logit. `min_logit`: tokens below it are cut by min-p."""
        self._logits = logits
        self._weights, ones, self._mask = _scratch(len(logits))
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, np.float32(best), out=self._weights)
            np.multiply(self._weights, np.float32(1 / sampling.temperature), out=self._weights)
            np.exp(self._weights, out=self._weights)
        if sampling.min_p > 0:
            self._weights[logits < min_logit] = 0
        self._allowed = sampling.top_p * float(np.dot(self._weights, ones))

    def keeps(self, logit: np.float32) -> bool:
        """Return whether the tokens above this logit weigh less than top-p of all tokens."""
        np.greater(self._logits, logit, out=self._mask)
        return float(np.dot(self._weights, self._mask)) < self._allowed
