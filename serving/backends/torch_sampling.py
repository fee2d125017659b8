"""Drawing tokens on the device, so that a step sends a few integers to the host and not megabytes of logits.

The same draws as serving.sampling, number for number: Gumbel-max with noise that is a function of (seed, position, lane, token). A request
whose rows are sampled here in one step and on the host in the next (a ban for min_tokens, say) gets the tokens that it would have got on
either. What this sampler does not do (penalties, bias, bans, grammars, log-probabilities) is left to the host: see `drawable`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serving.backends.base import Row
from serving.sampling import GREEDY_BELOW, GROUP, MOST_CANDIDATES

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_GROUPS_LANE = 1


def drawable(row: Row) -> bool:
    """True where this sampler does all that the row asks for."""
    sampling = row.sampling
    return not row.banned and sampling.logprobs is None and not sampling.needs_logits_work


def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [n] and whether each is good, bool [n]; a row that is not good must be drawn by the host from the same logits.

    `logits` float32 [n, vocabulary] on any device; all rows `drawable`. A row is not good where its logits are no numbers or its top-p
    needs more candidates than are looked at.
    """
    tokens = logits.argmax(-1)
    good = ~torch.isnan(logits.amax(-1))
    random = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if not random:
        return tokens, good
    cut = [index for index in random if _truncates(rows[index])]
    whole = [index for index in random if not _truncates(rows[index])]
    if cut:
        at = _index(cut, logits)
        chosen, enough = _draw_cut(logits[at], [rows[index] for index in cut])
        tokens[at], good[at] = chosen, good[at] & enough
    if whole:
        at = _index(whole, logits)
        tokens[at] = _draw_whole(logits[at], [rows[index] for index in whole])
    return tokens, good


def _draw_cut(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Rows with top-k, top-p or min-p: candidates in descending order, cut, then Gumbel-max over what is left."""
    vocabulary = logits.shape[1]
    count = min(vocabulary, MOST_CANDIDATES)
    best, ids = logits.topk(count, dim=-1)
    temperature = _column([row.sampling.temperature for row in rows], logits)
    scaled = (best.double() - best[:, :1]) / temperature
    weights = scaled.exp()
    floor = _column([_log_floor(row.sampling.min_p) for row in rows], logits)
    k = _column([row.sampling.top_k if 0 < row.sampling.top_k < vocabulary else vocabulary for row in rows], logits)
    p = _column([row.sampling.top_p for row in rows], logits)
    rank = torch.arange(count, device=logits.device)
    allowed = (scaled >= floor) & (rank < k)
    # top-p is a share of what min-p and top-k left: of the candidates' own sum with a top-k, of the whole vocabulary's without one.
    everything = (logits.double() - best[:, :1].double()) / temperature
    all_mass = torch.where(everything >= floor, everything.exp(), 0.0).sum(-1, keepdim=True)
    mass = torch.where(k < vocabulary, torch.where(allowed, weights, 0.0).sum(-1, keepdim=True), all_mass)
    held = torch.where(allowed, weights, 0.0)
    before = held.cumsum(-1) - held
    allowed &= (before < p * mass) | (p >= 1.0)
    # Where the last candidate that was looked at is still wanted, there may be more of them.
    enough = (~allowed[:, -1]) | (count == vocabulary) | (k[:, 0] <= count)
    noise = gumbel(_seeds(rows, logits), _positions(rows, logits), torch.zeros_like(ids[:, :1]), ids)
    scores = torch.where(allowed, scaled + noise, float("-inf"))
    return ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0], enough


def _draw_whole(logits: Tensor, rows: list[Row]) -> Tensor:
    """Rows without truncation, in two levels: a group by its log-sum-exp, then a token of the group (serving.sampling._draw_whole)."""
    count, vocabulary = logits.shape
    groups = -(-vocabulary // GROUP)
    temperature = _column([row.sampling.temperature for row in rows], logits)
    inverse = (1.0 / temperature).float()
    padded = torch.zeros((count, groups * GROUP), dtype=torch.float32, device=logits.device)
    padded[:, :vocabulary] = ((logits - logits.amax(-1, keepdim=True)) * inverse).exp()
    sums = padded.view(count, GROUP, groups).sum(1).double()
    seeds, positions = _seeds(rows, logits), _positions(rows, logits)
    lane = torch.full((count, 1), _GROUPS_LANE, dtype=torch.int64, device=logits.device)
    everyone = torch.arange(groups, device=logits.device).expand(count, -1)
    chosen = (sums.log() + gumbel(seeds, positions, lane, everyone)).argmax(-1, keepdim=True)
    members = chosen + groups * torch.arange(GROUP, device=logits.device)
    inside = logits.gather(1, members.clamp(max=vocabulary - 1)).double()
    inside = torch.where(members < vocabulary, inside, float("-inf"))
    inside = (inside - inside.amax(-1, keepdim=True)) / temperature
    slots = torch.arange(GROUP, device=logits.device).expand(count, -1)
    scores = inside + gumbel(seeds, positions, lane + 1 + chosen, slots)
    return members.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def gumbel(seeds: Tensor, positions: Tensor, lanes: Tensor, indices: Tensor) -> Tensor:
    """serving.noise.gumbel_at on the device: float64 [n, m] for int64 seeds, positions, lanes [n, 1] and indices [n, m]."""
    counter = (indices >> 2, positions & _LOW, lanes & _LOW, (lanes >> 32) & _LOW)
    words = _philox(counter, (seeds & _LOW, (seeds >> 32) & _LOW))
    which = indices & 3
    word = torch.where(which < 2, torch.where(which == 0, words[0], words[1]), torch.where(which == 2, words[2], words[3]))
    return -(-((word.double() + 0.5) * 2.0**-32).log()).log()


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 on 32-bit words held in int64; products wrap around as two's complement, whose bits are those of uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1 = ((second >> 32) & _LOW) ^ c1 ^ k0, second & _LOW
        c2, c3 = ((first >> 32) & _LOW) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _truncates(row: Row) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1.0 or row.sampling.min_p > 0.0


def _log_floor(min_p: float) -> float:
    return math.log(min_p) if min_p > 0 else float("-inf")


def _column(values: list[float] | list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _index(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _seeds(rows: list[Row], like: Tensor) -> Tensor:
    wrapped = [(row.sampling.seed + 2**63) % 2**64 - 2**63 for row in rows]  # the 64 bits of an unsigned seed, as int64
    return _index(wrapped, like)[:, None]


def _positions(rows: list[Row], like: Tensor) -> Tensor:
    return _index([row.start + len(row.tokens) for row in rows], like)[:, None]
