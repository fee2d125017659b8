"""Drawing tokens on the device: a step sends a few integers to the host, not megabytes of logits.

The same draws as crossover.serving.sampling.top_k_top_p, from the same random numbers, computed
here. What it does not do (penalties, bias, bans, grammars, log-probabilities, min-p) is left to the
host: see `drawable`.

Some hundred small kernels make a draw. They have fixed shapes, so that a CUDA graph can hold them,
one for each kind of draw and batch bucket: a kind computes a token for every row of the bucket, and
gives it to the rows that are of its kind. Both rounds of proposals are computed at once, since the
device cannot be asked whether the first was enough without waiting for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossover.serving.backends.torch.cuda_graphs import Graphs
from crossover.serving.backends.torch.forward_pass import pinned
from crossover.serving.backends.torch.memory_overhead import decode_buckets
from crossover.serving.sampling.random_numbers import (
    CDF_COUNTER,
    CONSTANTS,
    FRACTION,
    Constants,
    keys_of,
    proposal_bits,
    proposal_counters,
)
from crossover.serving.sampling.step_inputs import GREEDY_BELOW, Row
from crossover.serving.sampling.top_k_top_p import MEMBERS, ROUNDS

MAX_CANDIDATES = 4096  # top-k and top-p look at so many tokens
SHORT_TOP_K = 64  # what most requests with top-k ask for: few candidates are sorted far faster
_ROUNDS = list(enumerate(ROUNDS[:2]))  # of proposals; where none is taken, the host goes on


class Kind(IntEnum):
    """How a row's token is drawn."""

    BEST = 0
    FREE = 1  # neither top-k nor top-p
    NUCLEUS = 2  # top-p
    SHORT_TOP_K = 3  # with top-p or without
    LONG_TOP_K = 4


# Of each row, int64 [8, rows]; temperature and top-p are the bits of doubles.
SEED_LOW, SEED_HIGH, POSITION, ZERO, TEMPERATURE, TOP_P, TOP_K, KIND = range(8)


def drawable(row: Row) -> bool:
    """Whether this sampler does all that the row asks for."""
    sampling = row.sampling
    is_plain = not sampling.needs_logits_work and sampling.min_p <= 0 and not row.banned
    return is_plain and sampling.logprobs is None and sampling.top_k <= MAX_CANDIDATES


def kind_of(row: Row, vocabulary: int) -> Kind:
    """How its token is drawn here; rows that are not `drawable` get their best token."""
    sampling = row.sampling
    if not drawable(row) or sampling.temperature < GREEDY_BELOW:
        return Kind.BEST
    if 0 < sampling.top_k < vocabulary:
        return Kind.SHORT_TOP_K if sampling.top_k <= SHORT_TOP_K else Kind.LONG_TOP_K
    return Kind.NUCLEUS if sampling.top_p < 1 else Kind.FREE


class DeviceSampler:
    """Draws the tokens of rows on a device.

    `logits`: float32 [rows, vocabulary], the buffer where captured steps leave them; with `graphs`,
    draws from it are captured too. Other logits are drawn from kernel by kernel.
    """

    def __init__(
        self,
        device: torch.device,
        logits: Tensor | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._device = device
        self._constants = Constants(*(torch.from_numpy(one).to(device) for one in CONSTANTS))
        self._proposals = torch.from_numpy(proposal_counters(_ROUNDS)).to(device)
        self._cdf = torch.from_numpy(CDF_COUNTER).to(device)
        self._replays: dict[tuple[Kind, int], Callable[[], object]] = {}
        self._buckets: list[int] = []
        if logits is None or graphs is None:
            return
        rows = len(logits)
        self._logits = logits
        self._inputs = torch.zeros(8 * rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._good = torch.zeros(rows, dtype=torch.bool, device=device)
        try:
            for bucket in reversed(decode_buckets(rows)):
                for kind in (Kind.NUCLEUS, Kind.SHORT_TOP_K, Kind.FREE, Kind.BEST):
                    draw = partial(self._draw_kind, kind, *self._buffers(bucket))
                    self._replays[kind, bucket] = graphs.captured(draw)
        except RuntimeError as problem:
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            print(f"torch: draws cannot be captured: {why}", file=sys.stderr, flush=True)
            return
        self._buckets = decode_buckets(rows)

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n] and whether each is good, bool [n]; the host draws the others. The next
        draw may overwrite them.

        `logits` float32 [n, vocabulary]. A row is not good where its logits are NaN, top-p needs
        more candidates than it looks at, or no proposal is taken. Rows that are not `drawable` get
        their best token.
        """
        count, vocabulary = logits.shape
        kinds = [kind_of(row, vocabulary) for row in rows]
        if self._buckets and logits.data_ptr() == self._logits.data_ptr():
            size = next(bucket for bucket in self._buckets if bucket >= count)
            buffers = self._buffers(size)
            inputs = buffers[1]
        else:
            size = count
            inputs = torch.empty((8, size), dtype=torch.int64, device=self._device)
            tokens = torch.empty(size, dtype=torch.int64, device=self._device)
            good = torch.empty(size, dtype=torch.bool, device=self._device)
            buffers = logits, inputs, tokens, good
        host = pinned(_inputs_of(rows, kinds, size), self._device)
        inputs.copy_(host, non_blocking=True)
        for kind in sorted({Kind.BEST, *kinds}):  # the best token first: others go over it
            replay = self._replays.get((kind, size)) if buffers[0] is not logits else None
            if replay is not None:
                replay()
            else:
                self._draw_kind(kind, *buffers)
        return buffers[2][:count], buffers[3][:count]

    def _buffers(self, bucket: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the captured draws of so many rows read and write."""
        inputs = self._inputs[: 8 * bucket].view(8, bucket)
        return self._logits[:bucket], inputs, self._tokens[:bucket], self._good[:bucket]

    def _draw_kind(
        self, kind: Kind, logits: Tensor, inputs: Tensor, tokens: Tensor, good: Tensor
    ) -> None:
        """Write the tokens of the rows of a kind and whether they are good; of BEST, of all."""
        if kind == Kind.BEST:
            best, ids = logits.max(-1)
            tokens.copy_(ids)
            good.copy_(best.isnan().logical_not_())
            return
        temperature, top_p = inputs[TEMPERATURE : TOP_P + 1].view(torch.float64)[:, :, None]
        keys = inputs[: ZERO + 1, :, None]
        if kind in (Kind.SHORT_TOP_K, Kind.LONG_TOP_K):
            bits, _ = proposal_bits(keys, self._cdf, self._constants)
            # More than are kept: of equal logits the lowest ids are, and which of them topk finds
            # at its end is chance.
            candidates = 2 * (SHORT_TOP_K if kind == Kind.SHORT_TOP_K else MAX_CANDIDATES)
            top_k = inputs[TOP_K, :, None]
            drawn = _draw_top_k(logits, bits[0], temperature, top_p, top_k, candidates)
            fine = torch.ones_like(good)
        else:
            bits, member = proposal_bits(keys, self._proposals, self._constants)
            cut = top_p if kind == Kind.NUCLEUS else None
            drawn, fine = _draw_proposals(logits, bits, member, temperature, cut)
        is_kind = inputs[KIND] == kind
        tokens.copy_(torch.where(is_kind, drawn, tokens))
        good.logical_and_(fine | ~is_kind)


def _inputs_of(rows: Sequence[Row], kinds: Sequence[Kind], size: int) -> npt.NDArray[np.int64]:
    """What the draws of the rows take, [8, size]."""
    inputs = np.zeros((8, size), np.int64)
    count = len(rows)
    inputs[KIND, :count] = kinds
    if any(kinds):
        inputs[: ZERO + 1, :count] = keys_of(rows)[:, :, 0]
        inputs[TOP_K, :count] = [row.sampling.top_k for row in rows]
    cuts = inputs[TEMPERATURE : TOP_P + 1].view(np.float64)
    cuts[:] = 1.0
    for at, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        if kind != Kind.BEST:
            cuts[:, at] = row.sampling.temperature, row.sampling.top_p
    return inputs


# Of each row, on the device: logits [n, vocabulary], random bits, temperature and top-p double
# [n, 1] -> tokens.


def _draw_top_k(
    logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, most: int
) -> Tensor:
    """Inverse CDF over `most` candidates, best first and ties by lower id. `bits` [n, 1]."""
    best, ids = logits.topk(min(logits.shape[1], most), dim=-1, sorted=False)
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = ((best.double() - best[:, :1]) / temperature).exp_()
    is_candidate = torch.arange(ids.shape[1], device=logits.device) < top_k
    weights = torch.where(is_candidate, weights, 0.0)
    sums = weights.cumsum(-1)
    is_kept = (sums - weights < top_p * sums[:, -1:]) | (top_p >= 1)
    weights = torch.where(is_kept, weights, 0.0)
    sums = weights.cumsum(-1)
    place = torch.searchsorted(sums, bits * FRACTION * sums[:, -1:], right=True)
    last = ((weights > 0).sum(-1, keepdim=True) - 1).clamp_(min=0)  # none: the logits are NaN
    return ids.gather(1, torch.minimum(place, last))[:, 0]


def _draw_proposals(
    logits: Tensor, bits: Tensor, member: Tensor, temperature: Tensor, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The first proposal that is accepted and kept, as crossover.serving.sampling.top_k_top_p
    defines them, and whether there is one. `bits`, `member`: see proposal_bits."""
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
    which, acceptance = (bits.double() * FRACTION).unbind()
    group = torch.searchsorted(sums, which * sums[:, -1:], right=True).clamp_(max=groups)
    token = torch.where(group < groups, member * groups + group, whole + member)
    exists = token < vocabulary
    token = token.clamp_(max=vocabulary - 1)
    logit = logits.gather(1, token)
    taken = exists & (acceptance < ((logit - maxima.gather(1, group)) * scale).exp())
    enough = torch.ones_like(taken[:, 0])
    if top_p is not None:
        kept, enough = _least_kept(logits, scale, top_p)
        taken &= logit >= kept
    first = taken.to(torch.int8).argmax(-1, keepdim=True)
    return token.gather(1, first)[:, 0], taken.any(-1) & enough


def _least_kept(logits: Tensor, scale: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit [n, 1] that top-p keeps, and whether enough candidates were looked at."""
    weights = torch.softmax(logits * scale.float(), -1)
    best, ids = logits.topk(min(logits.shape[1], MAX_CANDIDATES), dim=-1)
    candidates = weights.gather(1, ids).double()
    is_kept = candidates.cumsum(-1) - candidates < top_p
    last = (is_kept.sum(-1, keepdim=True) - 1).clamp_(min=0)  # none: the logits are NaN
    is_all = ids.shape[1] == logits.shape[1]
    enough = (last[:, 0] + 1 < ids.shape[1]) | (top_p[:, 0] >= 1) | is_all
    return torch.where(top_p < 1, best.gather(1, last), -math.inf), enough
