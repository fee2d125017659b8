"""Drawing tokens on the device: a step sends a few integers to the host, not megabytes of logits.

The same draws as serving.sampling.top_k_top_p, from the same uniform numbers. What it does not do
(penalties, bias, bans, grammars, log-probabilities, min-p) is left to the host: see `drawable`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serving.backends.torch.forward_pass import to_device
from serving.sampling.step_inputs import GREEDY_BELOW, Row
from serving.sampling.top_k_top_p import MEMBERS, ROUNDS, proposal_numbers, uniforms

MOST_CANDIDATES = 4096  # top-k and top-p look at so many tokens
_ROUNDS = ROUNDS[:2]  # of proposals; where none is taken, the host goes on


def drawable(row: Row) -> bool:
    """Whether this sampler does all that the row asks for."""
    sampling = row.sampling
    is_plain = not sampling.needs_logits_work and sampling.min_p <= 0 and not row.banned
    return is_plain and sampling.logprobs is None and sampling.top_k <= MOST_CANDIDATES


def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [n] and whether each is good, bool [n]; the host draws the others.

    `logits` float32 [n, vocabulary] on any device. A row is not good where its logits are NaN,
    top-p needs more candidates than it looks at, or no proposal is taken. Rows that are not
    `drawable` get their best token.
    """
    tokens = logits.argmax(-1)
    good = ~torch.isnan(logits.amax(-1))
    here = [at for at, row in enumerate(rows) if drawable(row)]
    here = [at for at in here if rows[at].sampling.temperature >= GREEDY_BELOW]
    best_k = [at for at in here if 0 < rows[at].sampling.top_k < logits.shape[1]]
    free = [at for at in here if at not in best_k]
    for chosen, numbers_of, drawing in (
        (best_k, _uniform_numbers, _draw_top_k),
        (free, _proposal_numbers, _draw_proposals),
    ):
        if chosen:
            asking = [rows[at] for at in chosen]
            wanted = [(row.sampling.temperature, row.sampling.top_p) for row in asking]
            cuts = to_device(np.array(wanted).T[:, :, None], logits.device)
            numbers = to_device(numbers_of(asking), logits.device)
            at = to_device(np.array(chosen), logits.device)
            part = logits if len(chosen) == len(logits) else logits[at]
            has_top_p = any(top_p < 1 for _, top_p in wanted)
            tokens[at], fine = drawing(part, numbers, cuts[0], cuts[1] if has_top_p else None)
            good[at] &= fine
    return tokens, good


# Of each row, on the device: logits [n, vocabulary], its random numbers, temperature and top-p
# double [n, 1] (None: no row has it) -> tokens and whether each is good.


def _draw_top_k(
    logits: Tensor, numbers: Tensor, temperature: Tensor, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the candidates, best first. `numbers` [n, 2]: a uniform one, and top-k."""
    uniform, top_k = numbers[:, :1], numbers[:, 1:]
    scaled, ids = _candidates(logits, temperature)
    is_best = torch.arange(ids.shape[1], device=logits.device) < top_k
    weights = torch.where(is_best, scaled.exp(), 0.0)
    sums = weights.cumsum(-1)
    if top_p is not None:
        is_kept = (sums - weights < top_p * sums[:, -1:]) | (top_p >= 1)
        weights = torch.where(is_kept, weights, 0.0)
        sums = weights.cumsum(-1)
    place = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    last = ((weights > 0).sum(-1, keepdim=True) - 1).clamp_(min=0)  # none: the logits are NaN
    return ids.gather(1, torch.minimum(place, last))[:, 0], torch.ones_like(is_best[:, 0])


def _draw_proposals(
    logits: Tensor, numbers: Tensor, temperature: Tensor, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The first proposal that is accepted and kept, as serving.sampling.top_k_top_p defines them.

    `numbers` [3, n, proposals]: for the group, the member and the acceptance.
    """
    count, vocabulary = logits.shape
    groups = vocabulary // MEMBERS
    whole = groups * MEMBERS
    maxima = torch.full((count, groups + 1), -math.inf, device=logits.device)
    maxima[:, :groups] = logits[:, :whole].view(count, MEMBERS, groups).amax(1)
    if whole < vocabulary:
        maxima[:, groups] = logits[:, whole:].amax(1)
    scale = 1 / temperature
    best = maxima.amax(1, keepdim=True)
    weights = ((maxima - best) * scale.float()).exp().double()
    sums = weights.cumsum(-1)
    which, where, acceptance = numbers
    group = torch.searchsorted(sums, which * sums[:, -1:], right=True).clamp(max=groups)
    member = (where * MEMBERS).long()
    token = torch.where(group < groups, member * groups + group, whole + member)
    exists = token < vocabulary
    token = token.clamp(max=vocabulary - 1)
    logit = logits.gather(1, token)
    taken = exists & (acceptance < ((logit - maxima.gather(1, group)) * scale).exp())
    enough = torch.ones_like(taken[:, 0])
    if top_p is not None:
        kept, enough = _least_kept(logits, temperature, top_p)
        taken &= logit >= kept
    first = taken.to(torch.int8).argmax(-1, keepdim=True)
    return token.gather(1, first)[:, 0], taken.any(-1) & enough


def _least_kept(logits: Tensor, temperature: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit [n, 1] that top-p keeps, and whether enough was looked at."""
    scaled, ids = _candidates(logits, temperature)
    best = logits.amax(-1, keepdim=True).double()
    whole = logits.double().sub_(best).div_(temperature)  # one double a logit, in place
    total = whole.exp_().sum(-1, keepdim=True)
    weights = scaled.exp()
    is_kept = weights.cumsum(-1) - weights < top_p * total
    last = (is_kept.sum(-1, keepdim=True) - 1).clamp_(min=0)  # none: the logits are NaN
    least = logits.gather(1, ids.gather(1, last))
    is_all = ids.shape[1] == logits.shape[1]
    enough = (last[:, 0] + 1 < ids.shape[1]) | (top_p[:, 0] >= 1) | is_all
    return torch.where(top_p < 1, least, -math.inf), enough


def _candidates(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """(logit - best) / temperature of the best tokens, descending, and their ids."""
    best, ids = logits.topk(min(logits.shape[1], MOST_CANDIDATES), dim=-1)
    return (best.double() - best[:, :1]) / temperature, ids


def _uniform_numbers(rows: list[Row]) -> Any:
    """[n, 2]: for the inverse CDF, and top-k."""
    found = [[*uniforms(row.sampling.seed, row.position, 1), row.sampling.top_k] for row in rows]
    return np.array(found)


def _proposal_numbers(rows: list[Row]) -> Any:
    """[3, n, proposals]: numbers for the group, the member and the acceptance."""
    rounds = [
        [proposal_numbers(row.sampling.seed, row.position, lane, count) for row in rows]
        for lane, count in enumerate(_ROUNDS)
    ]
    return np.concatenate([np.stack(each, axis=1) for each in rounds], axis=2)
