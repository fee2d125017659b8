"""Drawing tokens on the device: a step sends a few integers to the host, not megabytes of logits.

The same draws as serving.sampling.draw, from the same uniform numbers. What it does not do
(penalties, bias, bans, grammars, log-probabilities) is left to the host: see `drawable`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from serving.sampling.draw import MEMBERS, ROUNDS, proposal_numbers, uniforms
from serving.sampling.types import GREEDY_BELOW, Row

MOST_CANDIDATES = 4096  # top-k and top-p look at so many tokens
_ROUNDS = ROUNDS[:2]  # of proposals; where none is taken, the host goes on


def drawable(row: Row) -> bool:
    """Whether this sampler does all that the row asks for."""
    sampling = row.sampling
    return not row.banned and sampling.logprobs is None and not sampling.needs_logits_work


def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [n] and whether each is good, bool [n]; the host draws the others.

    `logits` float32 [n, vocabulary] on any device; all rows `drawable`. A row is not good where its
    logits are NaN, top-k or top-p needs more candidates than it looks at, or no proposal is taken.
    """
    tokens = logits.argmax(-1)
    good = ~torch.isnan(logits.amax(-1))
    random = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    best_k = [index for index in random if 0 < rows[index].sampling.top_k < logits.shape[1]]
    for chosen, method in (
        (best_k, _draw_top_k),
        ([index for index in random if index not in best_k], _draw_proposals),
    ):
        if chosen:
            at = torch.tensor(chosen, device=logits.device)
            drawn, fine = method(logits[at], [rows[index] for index in chosen])
            tokens[at] = drawn
            good[at] &= fine
    return tokens, good


def _draw_top_k(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the candidates, best first."""
    scaled, ids = _candidates(logits, rows)
    top_k = _column([row.sampling.top_k for row in rows], logits)
    weights = scaled.exp()
    weights = torch.where(
        (torch.arange(ids.shape[1], device=logits.device) < top_k)
        & (scaled >= _floor(rows, logits)),
        weights,
        0.0,
    )
    top_p = _column([row.sampling.top_p for row in rows], logits)
    sums = weights.cumsum(-1)
    weights = torch.where((sums - weights < top_p * sums[:, -1:]) | (top_p >= 1), weights, 0.0)
    sums = weights.cumsum(-1)
    numbers = [uniforms(row.sampling.seed, row.position, 1) for row in rows]
    uniform = torch.from_numpy(np.stack(numbers)).to(logits.device)
    place = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    last = (weights > 0).sum(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(place, last))[:, 0], top_k[:, 0] <= ids.shape[1]


def _draw_proposals(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The first proposal that is accepted and kept, as serving.sampling.draw defines them."""
    count, vocabulary = logits.shape
    groups = vocabulary // MEMBERS
    whole = groups * MEMBERS
    maxima = torch.full((count, groups + 1), -math.inf, device=logits.device)
    maxima[:, :groups] = logits[:, :whole].view(count, MEMBERS, groups).amax(1)
    if whole < vocabulary:
        maxima[:, groups] = logits[:, whole:].amax(1)
    scale = 1 / _column([row.sampling.temperature for row in rows], logits)
    best = maxima.amax(1, keepdim=True)
    weights = ((maxima - best) * scale.float()).exp().double()
    sums = weights.cumsum(-1)
    which, where, acceptance = _proposal_numbers(rows, logits)
    group = torch.searchsorted(sums, which * sums[:, -1:], right=True).clamp(max=groups)
    member = (where * MEMBERS).long()
    token = torch.where(group < groups, member * groups + group, whole + member)
    exists = token < vocabulary
    token = token.clamp(max=vocabulary - 1)
    logit = logits.gather(1, token)
    taken = exists & (acceptance < ((logit - maxima.gather(1, group)) * scale).exp())
    kept, enough = _least_kept(logits, rows)
    taken &= logit >= kept
    first = taken.to(torch.int8).argmax(-1, keepdim=True)
    return token.gather(1, first)[:, 0], taken.any(-1) & enough


def _least_kept(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The smallest logit [n, 1] that min-p and top-p keep, and whether enough was looked at."""
    everything = torch.ones(len(rows), dtype=torch.bool, device=logits.device)
    if all(row.sampling.min_p <= 0 and row.sampling.top_p >= 1 for row in rows):
        return torch.full((len(rows), 1), -math.inf, device=logits.device), everything
    scaled, ids = _candidates(logits, rows)
    floor = _floor(rows, logits)
    best = logits.amax(-1, keepdim=True).double()
    temperature = _column([row.sampling.temperature for row in rows], logits)
    whole = (logits.double() - best) / temperature
    total = torch.where(whole >= floor, whole.exp(), 0.0).sum(-1, keepdim=True)
    weights = torch.where(scaled >= floor, scaled.exp(), 0.0)
    top_p = _column([row.sampling.top_p for row in rows], logits)
    kept = (weights.cumsum(-1) - weights < top_p * total) & (scaled >= floor)
    last = kept.sum(-1, keepdim=True) - 1
    least = torch.where(
        top_p < 1, logits.gather(1, ids.gather(1, last)).double(), best + floor * temperature
    )
    return least, (last[:, 0] + 1 < ids.shape[1]) | (ids.shape[1] == logits.shape[1]) | (
        top_p[:, 0] >= 1
    )


def _candidates(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """(logit - best) / temperature of the best tokens, descending, and their ids."""
    best, ids = logits.topk(min(logits.shape[1], MOST_CANDIDATES), dim=-1)
    temperature = _column([row.sampling.temperature for row in rows], logits)
    return (best.double() - best[:, :1]) / temperature, ids


def _floor(rows: list[Row], like: Tensor) -> Tensor:
    """min-p as a bound of (logit - best) / temperature."""
    bounds = [math.log(row.sampling.min_p) if row.sampling.min_p > 0 else -math.inf for row in rows]
    return _column(bounds, like)


def _proposal_numbers(rows: list[Row], like: Tensor) -> Tensor:
    """[3, n, proposals]: numbers for the group, the member and the acceptance."""
    numbers = [
        np.concatenate(
            [
                proposal_numbers(row.sampling.seed, row.position, lane, count)
                for lane, count in enumerate(_ROUNDS)
            ],
            axis=1,
        )
        for row in rows
    ]
    return torch.from_numpy(np.stack(numbers, axis=1)).to(like.device)


def _column(values: list[float] | list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
