"""Draws tokens from the softmax of logits / temperature, cut by top-k, min-p and top-p.

    draw_tokens([logits], [row])    # -> [token]

Random numbers depend on (seed, position) alone (crossover.serving.sampling.random_numbers): a row's
token never depends on its batch mates. Order of the cuts is vLLM's: min-p, top-k, top-p, each over
what the one before left.

- With top-k: the k best are sorted and one uniform number picks by inverse CDF.
- Without: exact rejection sampling. The vocabulary lies in groups of 64. A proposal is a group,
  drawn by the weight of its best token, then a member, accepted by its weight relative to the best.
  The first accepted token that min-p and top-p keep is the draw. At least 1 of 64 proposals is
  accepted. This takes exp of V / 64 numbers instead of V.
- top-p keeps a proposed token where the weight of all tokens above it is less than top-p of the
  whole. The groups whose best tokens weigh most give bounds of both weights, which decide nearly
  every token of a language model. Where they do not, as for nearly uniform logits, exp of V numbers
  decides. The margin of a bound is far above what sums round, so that both always decide alike.
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
ROUNDS = (64, 256, 1024, 4096)  # proposals of each round, until one is taken
_COUNTERS = [proposal_counters([(lane, count)]) for lane, count in enumerate(ROUNDS)]
# Groups whose best token weighs at least this share of the row's best are summed token by token,
# where they are at most so many; the others enter the bounds of top-p by their best token alone.
MIN_HEAVY_WEIGHT, MAX_HEAVY_GROUPS = 1e-3, 256
MAX_GROUPS_AHEAD = 32  # with a better token than a proposed one, to be summed for it alone
MARGIN = 1e-3  # of the bounds, relative: sums of V weights of 32 bits round by less than 1e-4


@lru_cache(maxsize=2)
def _scratch(vocabulary: int) -> tuple[Logits, Logits, Logits]:
    """Return arrays for weights, ones and a mask of a row. They are kept, because page faults of
    new ones cost more than the arithmetic."""
    ones = np.ones(vocabulary, np.float32)
    return np.empty_like(ones), ones, np.empty_like(ones)


class Groups(NamedTuple):
    """The groups of some rows. A token of logit l weighs exp((l - best) / temperature)."""

    maxima: Logits  # [rows, groups + 1], as group_maxima returns them
    weights: Logits  # of the maxima
    sums: npt.NDArray[np.float64]  # cumulative, of the weights

    def rows(self, places: list[int]) -> Groups:
        return Groups(self.maxima[places], self.weights[places], self.sums[places])

    def row(self, place: int) -> Groups:
        """Those of one row, without the dimension of rows."""
        return Groups(self.maxima[place], self.weights[place], self.sums[place])


def draw_tokens(logits_of_rows: list[Logits], rows: list[Row]) -> list[int]:
    """Return a token for each row, NO_TOKEN where its logits are NaN. Temperatures are above 0."""
    tokens = [NO_TOKEN] * len(rows)
    maxima = np.stack([group_maxima(logits) for logits in logits_of_rows])
    best = maxima.max(axis=1)
    left = []
    sorting = []  # rows that draw by inverse CDF, and their candidates
    for index, (logits, row) in enumerate(zip(logits_of_rows, rows, strict=True)):
        if np.isnan(best[index]):
            continue
        if not np.isfinite(best[index]):
            tokens[index] = int(logits.argmax())
        elif 0 < row.sampling.top_k < len(logits):
            sorting.append((index, top_ids(logits, row.sampling.top_k, maxima[index])))
        else:
            left.append(index)
    groups = weigh(maxima[left], [rows[index] for index in left])
    for counters in _COUNTERS:
        if not left:
            break
        some = [logits_of_rows[index] for index in left], [rows[index] for index in left]
        drawn = _propose(*some, groups, counters)
        for index, token in zip(left, drawn, strict=True):
            tokens[index] = token
        if places := [place for place, token in enumerate(drawn) if token < 0]:
            groups = groups.rows(places)
        left = [left[place] for place in places]
    # What is left then: hardly any proposal is taken.
    for index in left:
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
    """Return the ids of the `count` largest finite logits, best first, ties by lower id."""
    count = min(count, len(logits))
    if maxima is None:
        maxima = group_maxima(logits)
    least = np.finfo(np.float32).min
    if count * 4 < len(maxima):
        # At least `count` tokens reach the count-th largest maximum, all in groups that reach it.
        bound = max(np.partition(maxima, len(maxima) - count)[len(maxima) - count], least)
        count_of_groups = len(logits) // MEMBERS
        groups = np.flatnonzero(maxima >= bound)
        whole = groups[groups < count_of_groups]
        ids = np.append(
            np.arange(MEMBERS)[:, None] * count_of_groups + whole,
            np.arange(count_of_groups * MEMBERS, len(logits)),
        )
        ids = ids[logits[ids] >= bound]
    else:
        bound = max(np.partition(logits, len(logits) - count)[len(logits) - count], least)
        ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]


def _inverse_cdf(logits: Logits, ids: Ids, sampling: Sampling, uniform: float) -> int:
    """Return one of `ids`, best first, after min-p and top-p; the uniform number picks."""
    weights = np.exp((logits[ids] - np.float64(logits[ids[0]])) / sampling.temperature)
    weights = weights[weights >= sampling.min_p]
    sums = np.cumsum(weights)
    if sampling.top_p < 1:
        kept = np.searchsorted(sums - weights, sampling.top_p * sums[-1], side="left")
        sums = sums[: max(1, int(kept))]
    place = np.searchsorted(sums, uniform * sums[-1], side="right")
    return int(ids[min(int(place), len(sums) - 1)])


def weigh(maxima: Logits, rows: list[Row]) -> Groups:
    """The weights of the groups of rows without top-k."""
    scale = np.array([1 / row.sampling.temperature for row in rows], np.float32)[:, None]
    best = maxima.max(axis=1, keepdims=True, initial=-np.inf)
    # Far below the best at a tiny temperature: exp(-inf) = 0, as it should be.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((maxima - best) * scale)
    return Groups(maxima, weights, np.cumsum(weights.astype(np.float64), axis=1))


def _propose(
    logits_of_rows: list[Logits], rows: list[Row], groups: Groups, counters: npt.NDArray[np.int64]
) -> list[int]:
    """Return, for each row without top-k, the first of these proposals that is taken; -1: none."""
    vocabulary, count = len(logits_of_rows[0]), len(logits_of_rows[0]) // MEMBERS
    scale = np.array([1 / row.sampling.temperature for row in rows])[:, None]
    bits, member = proposal_bits(keys_of(rows), counters)
    which, acceptance = bits * FRACTION
    wanted = which * groups.sums[:, -1:]
    places = [np.searchsorted(s, w, side="right") for s, w in zip(groups.sums, wanted, strict=True)]
    group = np.minimum(np.stack(places), count)
    token = np.where(group < count, member * count + group, count * MEMBERS + member)
    exists = token < vocabulary
    np.minimum(token, vocabulary - 1, out=token)
    logit = np.stack([logits[ids] for logits, ids in zip(logits_of_rows, token, strict=True)])
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        share = np.exp((logit - np.take_along_axis(groups.maxima, group, axis=1)) * scale)
    taken = exists & (acceptance < share)
    by_row = zip(logits_of_rows, rows, token, taken, strict=True)
    return [
        _first(logits, row.sampling, groups.row(place), ids[fine].tolist())
        for place, (logits, row, ids, fine) in enumerate(by_row)
    ]


def _first(logits: Logits, sampling: Sampling, groups: Groups, tokens: list[int]) -> int:
    """Return the first of these tokens, accepted proposals, that min-p and top-p keep; -1: none.

    `groups`: of this row.
    """
    least = -math.inf  # logits below are cut
    if sampling.min_p > 0:
        least = float(groups.maxima.max()) + sampling.temperature * math.log(sampling.min_p)
        tokens = [token for token in tokens if logits[token] >= least]
    if not tokens or sampling.top_p >= 1:
        return tokens[0] if tokens else -1
    bounds: TopPBounds | None = None
    exact: TopP | None = None
    for token in tokens:
        logit = logits[token]
        if logit < least:  # not above the logit of one that top-p cut
            continue
        if is_surely_kept(logit, logits, sampling, groups):
            return token
        bounds = bounds or TopPBounds(logits, sampling, groups, least)
        is_kept = bounds.keeps(logit)
        if is_kept is None:
            exact = exact or TopP(logits, sampling, float(groups.maxima.max()), least)
            is_kept = exact.keeps(logit)
        if is_kept:
            return token
        least = float(logit)
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
    """Return whether top-p surely keeps a token of this logit: it would even if all tokens together
    weighed no more than the best ones of the groups. False: not known."""
    ahead = np.flatnonzero(groups.maxima > logit)
    if len(ahead) > MAX_GROUPS_AHEAD:
        return False
    above = _members(logits, ahead)
    weights = _weights(above[above > logit], sampling, groups.maxima.max())
    total = groups.sums[-1]  # at least so much
    if sampling.min_p > 0:
        total = groups.weights[groups.weights >= sampling.min_p].sum()
    return bool(weights.sum() < sampling.top_p * total * (1 - MARGIN))


class TopPBounds:
    """Whether top-p keeps a token, from the tokens of the heavy groups: light ones, above the token
    or not, weigh between nothing and their number times their group's best."""

    def __init__(self, logits: Logits, sampling: Sampling, groups: Groups, least: float) -> None:
        """`least`: logits below are cut by min-p."""
        self._top_p = sampling.top_p
        heavy = np.flatnonzero(groups.weights >= MIN_HEAVY_WEIGHT)
        self._can_tell = len(heavy) <= MAX_HEAVY_GROUPS
        if not self._can_tell:
            return
        self._logits = _members(logits, heavy)
        if sampling.min_p > 0:
            self._logits = self._logits[self._logits >= least]
        self._weights = _weights(self._logits, sampling, groups.maxima.max())
        self._total, self._light = float(self._weights.sum()), 0.0
        if sampling.min_p < MIN_HEAVY_WEIGHT:  # otherwise min-p cuts all that is light
            beside = groups.sums[-1] - groups.weights[heavy].sum(dtype=np.float64)
            self._light = MEMBERS * max(0.0, float(beside))

    def keeps(self, logit: np.float32) -> bool | None:
        """None where the bounds do not tell."""
        if not self._can_tell:
            return None
        ahead = float(np.dot(self._weights, self._logits > logit))
        # All that is light lies above the token, which speaks most against it ...
        most = self._top_p * (self._total + self._light)
        if ahead + self._light < most * (1 - MARGIN):
            return True
        # ... or not above it, which speaks most for it.
        return False if ahead > most * (1 + MARGIN) else None


class TopP:
    """Whether top-p keeps a token, from the weights of all tokens that min-p keeps."""

    def __init__(self, logits: Logits, sampling: Sampling, best: float, least: float) -> None:
        self._logits = logits
        self._weights, ones, self._mask = _scratch(len(logits))
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, np.float32(best), out=self._weights)
            np.multiply(self._weights, np.float32(1 / sampling.temperature), out=self._weights)
            np.exp(self._weights, out=self._weights)
        if sampling.min_p > 0:
            self._weights[logits < least] = 0
        self._allowed = sampling.top_p * float(np.dot(self._weights, ones))

    def keeps(self, logit: np.float32) -> bool:
        """Whether the tokens above this logit weigh less than top-p of all."""
        np.greater(self._logits, logit, out=self._mask)
        return float(np.dot(self._weights, self._mask)) < self._allowed
