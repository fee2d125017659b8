"""Draws tokens on the device: the host gets a few integers of a step, not megabytes of logits.

The draws are those of crossover.serving.sampling.top_k_top_p, from the same random numbers. Rows
that need more (penalties, bias, bans, grammars, log-probabilities, min-p) are left to the host's
sampler: see `can_draw`.

A draw takes about a hundred small kernels. Their shapes are fixed, so that they can be captured as
a CUDA graph, one for each kind of draw and each batch bucket. A kind computes a token for every row
of the bucket, and writes it only for the rows of its kind. Both rounds of proposals are computed
at once, because finding out whether the first round was enough would mean to wait for the device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

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
    GeneratorConstants,
    keys_of,
    proposal_bits,
    proposal_counters,
)
from crossover.serving.sampling.step_inputs import GREEDY_BELOW, Row
from crossover.serving.sampling.top_k_top_p import MEMBERS, ROUNDS

MAX_CANDIDATES = 4096  # top-k and top-p consider so many of the best tokens
SHORT_TOP_K = 64  # most requests with top-k use less, and few candidates are sorted much faster
# (lane of the random numbers, proposals) of each round. If all are rejected, the host draws.
_ROUNDS = list(enumerate(ROUNDS[:2]))


class Kind(IntEnum):
    """How a row's token is drawn."""

    BEST = 0
    FREE = 1  # neither top-k nor top-p
    NUCLEUS = 2  # top-p
    SHORT_TOP_K = 3  # with top-p or without
    LONG_TOP_K = 4


# The parameters of a draw are int64 [8, rows], one line for each of these. Temperature and top-p
# are float64, stored as their bits. ZERO is the last word of the random numbers' key (keys_of).
SEED_LOW, SEED_HIGH, POSITION, ZERO, TEMPERATURE, TOP_P, TOP_K, KIND = range(8)
PARAMETERS = KIND + 1


class DrawBuffers(NamedTuple):
    """What a draw reads and writes, on the device."""

    logits: Tensor  # float32 [rows, vocabulary]
    parameters: Tensor  # int64 [PARAMETERS, rows]
    tokens: Tensor  # int64 [rows]: the result
    is_valid: Tensor  # bool [rows]: the result; False: the host must draw this row's token


def can_draw(row: Row) -> bool:
    """Return whether this sampler supports everything that the row needs."""
    sampling = row.sampling
    if sampling.needs_logits_work or row.banned or sampling.logprobs is not None:
        return False
    return sampling.min_p <= 0 and sampling.top_k <= MAX_CANDIDATES


def kind_of(row: Row, vocabulary: int) -> Kind:
    """Return how the row's token is drawn here: BEST also for rows that the host draws again."""
    sampling = row.sampling
    if not can_draw(row) or sampling.temperature < GREEDY_BELOW:
        return Kind.BEST
    if 0 < sampling.top_k < vocabulary:
        return Kind.SHORT_TOP_K if sampling.top_k <= SHORT_TOP_K else Kind.LONG_TOP_K
    return Kind.NUCLEUS if sampling.top_p < 1 else Kind.FREE


class DeviceSampler:
    """Draws the tokens of rows on a device.

    `logits`: float32 [rows, vocabulary], the buffer to which captured steps write. With `graphs`,
    draws from this buffer are captured too. Draws from other logits run kernel by kernel.
    """

    def __init__(
        self,
        device: torch.device,
        logits: Tensor | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._device = device
        constants = [torch.from_numpy(array).to(device) for array in CONSTANTS]
        self._constants = GeneratorConstants(*constants)
        self._proposal_counters = torch.from_numpy(proposal_counters(_ROUNDS)).to(device)
        self._cdf_counter = torch.from_numpy(CDF_COUNTER).to(device)
        self._replays: dict[tuple[Kind, int], Callable[[], object]] = {}  # by kind and bucket
        self._buckets: list[int] = []  # ascending; []: no draws are captured
        if logits is None or graphs is None:
            return
        rows = len(logits)
        self._logits = logits
        self._parameters = torch.zeros(PARAMETERS * rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._is_valid = torch.zeros(rows, dtype=torch.bool, device=device)
        try:
            for bucket in reversed(decode_buckets(rows)):
                for kind in (Kind.NUCLEUS, Kind.SHORT_TOP_K, Kind.FREE, Kind.BEST):
                    draw = partial(self._draw_kind, kind, self._captured_buffers(bucket))
                    self._replays[kind, bucket] = graphs.captured(draw)
        except RuntimeError as problem:
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            print(f"torch: draws cannot be captured: {why}", file=sys.stderr, flush=True)
            return
        self._buckets = decode_buckets(rows)

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Return a token for each row, int64 [n], and whether it is valid, bool [n]. The next draw
        may overwrite them.

        `logits`: float32 [n, vocabulary]. A token is not valid, and the host must draw it, if the
        row's logits are NaN, if top-p needs more than MAX_CANDIDATES, or if all proposals are
        rejected. The host must also draw the rows that this sampler does not support (`can_draw`):
        they get their best token here.
        """
        count, vocabulary = logits.shape
        kinds = [kind_of(row, vocabulary) for row in rows]
        is_captured = bool(self._buckets) and logits.data_ptr() == self._logits.data_ptr()
        if is_captured:
            size = next(bucket for bucket in self._buckets if bucket >= count)
            buffers = self._captured_buffers(size)
        else:
            size = count
            buffers = self._new_buffers(logits)
        host = pinned(_parameters_of(rows, kinds, size), self._device)
        buffers.parameters.copy_(host, non_blocking=True)
        # BEST is the lowest kind and writes every row. The other kinds overwrite their own rows.
        for kind in sorted({Kind.BEST, *kinds}):
            replay = self._replays.get((kind, size)) if is_captured else None
            if replay is not None:
                replay()
            else:
                self._draw_kind(kind, buffers)
        return buffers.tokens[:count], buffers.is_valid[:count]

    def _captured_buffers(self, rows: int) -> DrawBuffers:
        """Return the buffers that captured draws of so many rows use."""
        parameters = self._parameters[: PARAMETERS * rows].view(PARAMETERS, rows)
        return DrawBuffers(
            self._logits[:rows], parameters, self._tokens[:rows], self._is_valid[:rows]
        )

    def _new_buffers(self, logits: Tensor) -> DrawBuffers:
        """Return new buffers for a draw from these logits."""
        rows, device = len(logits), self._device
        return DrawBuffers(
            logits,
            parameters=torch.empty((PARAMETERS, rows), dtype=torch.int64, device=device),
            tokens=torch.empty(rows, dtype=torch.int64, device=device),
            is_valid=torch.empty(rows, dtype=torch.bool, device=device),
        )

    def _draw_kind(self, kind: Kind, buffers: DrawBuffers) -> None:
        """Write the tokens of the rows of a kind, and whether they are valid. BEST writes those of
        all rows."""
        logits, parameters, tokens, is_valid = buffers
        if kind == Kind.BEST:
            best, ids = logits.max(-1)
            tokens.copy_(ids)
            is_valid.copy_(best.isnan().logical_not_())
            return
        temperature, top_p = parameters[TEMPERATURE : TOP_P + 1].view(torch.float64)[:, :, None]
        keys = parameters[: ZERO + 1, :, None]
        if kind in (Kind.SHORT_TOP_K, Kind.LONG_TOP_K):
            bits, _ = proposal_bits(keys, self._cdf_counter, self._constants)
            # Of equal logits, those with the lowest ids are kept. topk takes any of them at its
            # end, so it has to find more candidates than are kept.
            candidates = 2 * (SHORT_TOP_K if kind == Kind.SHORT_TOP_K else MAX_CANDIDATES)
            top_k = parameters[TOP_K, :, None]
            drawn = _draw_top_k(logits, bits[0], temperature, top_p, top_k, candidates)
            drawn_is_valid = torch.ones_like(is_valid)
        else:
            bits, members = proposal_bits(keys, self._proposal_counters, self._constants)
            cut = top_p if kind == Kind.NUCLEUS else None
            drawn, drawn_is_valid = _draw_proposals(logits, bits, members, temperature, cut)
        is_of_kind = parameters[KIND] == kind
        tokens.copy_(torch.where(is_of_kind, drawn, tokens))
        is_valid.logical_and_(drawn_is_valid | ~is_of_kind)


def _parameters_of(rows: Sequence[Row], kinds: Sequence[Kind], size: int) -> npt.NDArray[np.int64]:
    """Return the parameters of a draw, int64 [PARAMETERS, size], of which the rows use the first
    columns."""
    parameters = np.zeros((PARAMETERS, size), np.int64)
    count = len(rows)
    parameters[KIND, :count] = kinds
    if any(kinds):  # not all BEST, which is 0 and needs no other parameters
        parameters[: ZERO + 1, :count] = keys_of(rows)[:, :, 0]
        parameters[TOP_K, :count] = [row.sampling.top_k for row in rows]
    temperature_and_top_p = parameters[TEMPERATURE : TOP_P + 1].view(np.float64)
    temperature_and_top_p[:] = 1.0
    for index, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        if kind != Kind.BEST:
            temperature_and_top_p[:, index] = row.sampling.temperature, row.sampling.top_p
    return parameters


# The functions below draw a token for each of n rows, on the device. They take logits
# [n, vocabulary], and temperature and top-p as float64 [n, 1]. The weight of a token is
# exp((logit - best logit) / temperature).


def _draw_top_k(
    logits: Tensor,
    bits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    max_candidates: int,
) -> Tensor:
    """Return tokens drawn by inverse CDF from the `top_k` [n, 1] best tokens, best first and ties
    by lower id. `bits` [n, 1]: random bits. `max_candidates`: at least top_k."""
    best, ids = logits.topk(min(logits.shape[1], max_candidates), dim=-1, sorted=False)
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = ((best.double() - best[:, :1]) / temperature).exp_()
    is_in_top_k = torch.arange(ids.shape[1], device=logits.device) < top_k
    weights = torch.where(is_in_top_k, weights, 0.0)
    sums = weights.cumsum(-1)
    is_in_top_p = (sums - weights < top_p * sums[:, -1:]) | (top_p >= 1)
    weights = torch.where(is_in_top_p, weights, 0.0)
    sums = weights.cumsum(-1)
    index = torch.searchsorted(sums, bits * FRACTION * sums[:, -1:], right=True)
    last = ((weights > 0).sum(-1, keepdim=True) - 1).clamp_(min=0)  # -1 if the logits are NaN
    return ids.gather(1, torch.minimum(index, last))[:, 0]


def _draw_proposals(
    logits: Tensor, bits: Tensor, members: Tensor, temperature: Tensor, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return tokens drawn by rejection sampling, and whether each is valid, bool [n].

    crossover.serving.sampling.top_k_top_p defines groups, members and proposals. The token is the
    first proposal that is accepted and in top-p (None: any). It is not valid if there is none, or
    if top-p could not be decided. `bits`, `members`: see proposal_bits.
    """
    count, vocabulary = logits.shape
    groups = vocabulary // MEMBERS
    grouped = groups * MEMBERS  # the tokens behind these are one more, smaller group
    maxima = torch.full((count, groups + 1), -math.inf, device=logits.device)
    maxima[:, :groups] = logits[:, :grouped].view(count, MEMBERS, groups).amax(1)
    if grouped < vocabulary:
        maxima[:, groups] = logits[:, grouped:].amax(1)
    inverse_temperature = 1 / temperature
    best = maxima.amax(1, keepdim=True)
    weights = ((maxima - best) * inverse_temperature.float()).exp().double()
    sums = weights.cumsum(-1)
    group_uniforms, acceptance_uniforms = (bits.double() * FRACTION).unbind()
    group = torch.searchsorted(sums, group_uniforms * sums[:, -1:], right=True).clamp_(max=groups)
    token = torch.where(group < groups, members * groups + group, grouped + members)
    exists = token < vocabulary
    token = token.clamp_(max=vocabulary - 1)
    logit = logits.gather(1, token)
    relative_weight = ((logit - maxima.gather(1, group)) * inverse_temperature).exp()
    is_accepted = exists & (acceptance_uniforms < relative_weight)
    is_decided = torch.ones_like(is_accepted[:, 0])
    if top_p is not None:
        lowest_logit, is_decided = _lowest_in_top_p(logits, inverse_temperature, top_p)
        is_accepted &= logit >= lowest_logit
    first = is_accepted.to(torch.int8).argmax(-1, keepdim=True)
    return token.gather(1, first)[:, 0], is_accepted.any(-1) & is_decided


def _lowest_in_top_p(
    logits: Tensor, inverse_temperature: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the lowest logit in top-p, [n, 1], and whether it lies among the MAX_CANDIDATES best,
    bool [n]; otherwise it is unknown."""
    weights = torch.softmax(logits * inverse_temperature.float(), -1)
    best, ids = logits.topk(min(logits.shape[1], MAX_CANDIDATES), dim=-1)
    candidates = weights.gather(1, ids).double()
    is_in_top_p = candidates.cumsum(-1) - candidates < top_p
    last = (is_in_top_p.sum(-1, keepdim=True) - 1).clamp_(min=0)  # -1 if the logits are NaN
    has_all_tokens = ids.shape[1] == logits.shape[1]
    is_decided = (last[:, 0] + 1 < ids.shape[1]) | (top_p[:, 0] >= 1) | has_all_tokens
    return torch.where(top_p < 1, best.gather(1, last), -math.inf), is_decided
