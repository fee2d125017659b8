"""The forward pass of the families of crossover.models.model_families over a KV cache of fixed
rows.

A step is one pass over the weights: the tokens of all decode rows and prompt pieces are laid end
to end, and only attention (varlen_attention.py) looks at them apart. The pass makes no decision on
the device: a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from crossover.models.model_spec import ModelSpec
from crossover.serving.backends.torch.torch_weights import Dense, Layer, Weights
from crossover.serving.backends.torch.varlen_attention import (
    Block,
    FlashStep,
    KvCache,
    PlainStep,
    Sequences,
    Step,
)
from crossover.serving.sampling.step_inputs import Row


class SlotModel:
    """Weights, RoPE table and KV cache on one device, the cache's."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: KvCache, is_flash: bool) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.width, self.is_flash = cache.width, is_flash
        self.dtype, self.device = cache.layers[0].dtype, cache.layers[0].device
        self.columns = torch.arange(self.width, device=self.device)
        cos, sin = (table.to(self.dtype) for table in rope_tables(spec, self.width))
        # RoPE as 2 x 2 matrices over the halves of a head: [positions, 1, 2, 2, head_dim / 2].
        turns = torch.stack((torch.stack((cos, -sin), 1), torch.stack((sin, cos), 1)), 1)
        self._turns = turns[:, None].to(self.device)
        self._head_scales = [_head_scales(spec, layer) for layer in weights.layers]

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        step: Step,
        wanted: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits float32 [n, vocabulary] of the tokens with index `wanted` (None: of all).

        `ids`, `positions`: int64 [tokens]. Each token is written to the cache, then attended to.
        `out`: where the logits go, [at least n, vocabulary].
        """
        x = functional.embedding(ids, self.weights.embedding)
        turns = self._turns[positions]
        for index in range(len(self.weights.layers)):
            self._attend(index, x, turns, step)
            self._feed_forward(index, x)
        if wanted is not None:
            x = x.index_select(0, wanted)
        logits = self.weights.head(self._norm(x, self.weights.norm))
        return logits.float() if out is None else out[: len(x)].copy_(logits)

    # A function each: what one has made is freed before the next one begins.

    def _attend(self, index: int, x: Tensor, turns: Tensor, step: Step) -> None:
        """Attention of a layer, added to x."""
        spec, layer, cache = self.spec, self.weights.layers[index], self.cache.layers[index]
        heads = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, spec.head_dim)
        source = turned = heads[:, : -spec.kv_heads]
        scales = self._head_scales[index]
        if scales is not None:
            source = functional.rms_norm(turned, turned.shape[2:], None, spec.norm_epsilon) * scales
        _turn_into(turned, source, turns)
        queries, pairs = torch.split(heads, [spec.heads, 2 * spec.kv_heads], 1)
        cache.index_copy_(0, step.at, pairs.view(len(x), 2, spec.kv_heads, -1))
        _add_product(x, layer.out, step.attend(queries, cache))

    def _feed_forward(self, index: int, x: Tensor) -> None:
        """The feed-forward part of a layer, added to x."""
        layer = self.weights.layers[index]
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        _add_product(x, layer.down, functional.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_epsilon)


def run_pass(
    model: SlotModel,
    rows: Sequence[Row],
    out: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, list[Row]]:
    """Logits float32 [n, vocabulary] of the rows that want a token, and these rows in the logits'
    order. `out`: where the logits go. `drawn`: see `known`."""
    rows = in_pass_order(rows)
    wanting = [row for row in rows if row.wants_token]
    if model.is_flash:
        shape = PassShape.of(rows)
        longest = max(len(row.tokens) for row in rows), max(row.position for row in rows)
        numbers = to_device(packed(rows, shape, model.width, 0), model.device)
        ids, positions, wanted, flash = unpacked(numbers, shape, *longest)
        logits = model.forward(known(ids, drawn), positions, flash, wanted, out)
        return logits[: len(wanting)], wanting
    counts = np.array([len(row.tokens) for row in rows])
    ends, held = counts.cumsum(), np.array([row.position for row in rows])
    wants = np.array([row.wants_token for row in rows])
    firsts = np.array([row.slot for row in rows]) * model.width
    places = np.repeat(held - ends, counts) + np.arange(ends[-1])
    ids = to_device(np.concatenate([row.tokens for row in rows]).astype(np.int64), model.device)
    at = to_device(places + np.repeat(firsts, counts), model.device)
    positions = to_device(places, model.device)
    plain = PlainStep(at, _blocks(model, rows, positions), model.width)
    last = None if wants.sum() == ends[-1] else to_device(ends[wants] - 1, model.device)
    return model.forward(known(ids, drawn), positions, plain, last, out), wanting


def in_pass_order(rows: Sequence[Row]) -> list[Row]:
    """Rows as a pass lays them out: single tokens first, and of these the ones that want a token;
    neighbours stay neighbours."""
    return sorted(rows, key=lambda row: (len(row.tokens) > 1, not row.wants_token))


class PassShape(NamedTuple):
    """The sizes of a flash pass. Those of a graph are fixed: a step fills them or less."""

    tokens: int
    singles: int  # rows of one token, the first tokens of the pass; without pieces all of them
    pieces: int  # longer rows
    wanted: int  # logits, where there are pieces; else each token has its own

    @classmethod
    def of(cls, rows: Sequence[Row]) -> PassShape:
        """What these rows take."""
        counts = [len(row.tokens) for row in rows]
        singles = counts.count(1)
        pieces = len(rows) - singles
        wanted = sum(row.wants_token for row in rows) if pieces else 0
        return cls(sum(counts), singles, pieces, wanted)

    def holds(self, step: PassShape) -> bool:
        """Whether a step of this other shape fills it or less."""
        fits = all(mine >= theirs for mine, theirs in zip(self, step, strict=True))
        return fits and bool(self.pieces) == bool(step.pieces)

    @property
    def sizes(self) -> list[int]:
        """Lengths of the arrays that describe a step, in their order: ids, positions, places in the
        cache, tokens whose logits are wanted, then what the two calls of attention take."""
        singles = [self.singles + 1, self.singles + 1, self.singles] if self.singles else [0, 0, 0]
        # One sequence more than there are pieces: what fills the pass up.
        pieces = [self.pieces + 2, self.pieces + 2, self.pieces + 1] if self.pieces else [0, 0, 0]
        return [self.tokens, self.tokens, self.tokens, self.wanted, *singles, *pieces]


def packed(rows: Sequence[Row], shape: PassShape, width: int, spare: int) -> npt.NDArray[np.int64]:
    """The step of these rows, which are in the pass's order, as one array for one copy to the
    device. `spare`: the cache's place where tokens go that fill up the shape."""
    counts = np.array([len(row.tokens) for row in rows], np.int64)
    total, singles = int(counts.sum()), int((counts == 1).sum())
    ends, keys = counts.cumsum(), np.array([row.position for row in rows], np.int64)
    firsts = np.array([row.slot for row in rows], np.int64) * width
    numbers = np.zeros(sum(shape.sizes), np.int64)
    parts = np.split(numbers, np.cumsum(shape.sizes)[:-1])
    ids, positions, at, wanted = parts[:4]
    ids[:total] = np.concatenate([ids[:0], *(row.tokens for row in rows)])
    positions[:total] = np.repeat(keys - ends, counts) + np.arange(total)
    at[:total] = positions[:total] + np.repeat(firsts, counts)
    at[total:] = spare
    if shape.pieces:
        last = ends[np.array([row.wants_token for row in rows], np.bool_)] - 1
        wanted[: len(last)] = last
    if shape.singles:
        starts_q, starts_k, of_singles = parts[4:7]
        starts_q[:] = np.arange(shape.singles + 1)
        starts_k[:singles] = firsts[:singles]
        of_singles[:singles] = keys[:singles]
    if shape.pieces:
        starts_q, starts_k, of_pieces = parts[7:]
        pieces = len(rows) - singles
        starts_q[:] = total  # sequences without tokens
        starts_q[0] = singles
        starts_q[1 : pieces + 1] = ends[singles:]
        starts_q[-1] = shape.tokens
        starts_k[:pieces] = firsts[singles:]
        of_pieces[:pieces] = keys[singles:]
    return numbers


def unpacked(
    numbers: Tensor, shape: PassShape, max_q: int, max_k: int
) -> tuple[Tensor, Tensor, Tensor | None, FlashStep]:
    """What `packed` made, on the device: ids, positions and the tokens whose logits are wanted
    (None: all), and how they attend. `max_q`, `max_k`: see Sequences."""
    sizes = shape.sizes
    ids, positions, at, wanted, of_attention = torch.split(numbers, [*sizes[:4], sum(sizes[4:])])
    parts = torch.split(of_attention.int(), sizes[4:])
    singles = pieces = None
    if shape.singles:
        singles = Sequences(parts[0], parts[1], parts[2], 1, max_k)
    if shape.pieces:
        pieces = Sequences(parts[3], parts[4], parts[5], max_q, max_k)
    is_single = None
    if singles is not None and pieces is not None:
        is_single = (singles.keys > 0)[:, None, None]
    step = FlashStep(at, singles, pieces, is_single)
    return ids, positions, wanted if shape.pieces else None, step


def _blocks(model: SlotModel, rows: list[Row], positions: Tensor) -> list[tuple[Block, Tensor]]:
    """Return the blocks of neighboring rows with equally many tokens, each with its mask."""
    blocks: list[Block] = []
    end = 0
    for row in rows:
        count, last = len(row.tokens), blocks[-1] if blocks else None
        if last is not None and (last.piece, last.hi) == (count, row.slot):
            seen = max(last.seen, row.position)
            blocks[-1] = last._replace(hi=row.slot + 1, seen=seen)
        else:
            blocks.append(Block(end, count, row.slot, row.slot + 1, row.position))
        end += count
    masked_blocks = []
    for block in blocks:
        size = block.hi - block.lo
        own_positions = positions[block.first : block.first + size * block.piece]
        allowed = model.columns[: block.seen] <= own_positions.view(size, 1, block.piece, 1)
        mask = torch.zeros(allowed.shape, dtype=model.dtype, device=model.device)
        mask = mask.masked_fill_(~allowed, float("-inf"))
        mask = mask.repeat(1, 1, model.spec.heads // model.spec.kv_heads, 1)
        masked_blocks.append((block, mask))
    return masked_blocks


def pinned(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array in pinned memory of the host if the device is a GPU. A copy from pageable
    memory, such as `torch.tensor(values, device=...)`, waits for all earlier work of the device."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array on the device, by a copy that the host does not wait for."""
    return pinned(array, device).to(device, non_blocking=True)


def known(ids: Tensor, drawn: Tensor | None) -> Tensor:
    """Return the token ids with each -1 - n replaced by drawn[n]."""
    if drawn is None or not len(drawn):
        return ids
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_(min=0)], ids)


def rope_tables(spec: ModelSpec, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2], with Llama 3's scaling where the spec has it."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is not None:
        turns = scaling.original_context / (2 * math.pi / frequencies)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slowed, 1: as it is
        frequencies = (1 - share) * (frequencies / scaling.factor) + share * frequencies
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return angles.cos(), angles.sin()


def _head_scales(spec: ModelSpec, layer: Layer) -> Tensor | None:
    """Norms of query and key heads as one tensor [heads + kv_heads, head_dim]; None: there are
    none."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    queries = layer.query_norm.expand(spec.heads, -1)
    return torch.cat((queries, layer.key_norm.expand(spec.kv_heads, -1)))


def _turn_into(out: Tensor, x: Tensor, turns: Tensor) -> None:
    """RoPE of x [tokens, heads, head_dim] into `out`, in two kernels. `turns`: the table at the
    tokens' positions."""
    product = x.view(*x.shape[:2], 1, 2, -1) * turns
    torch.add(product[:, :, :, 0], product[:, :, :, 1], out=out.view(*out.shape[:2], 2, -1))


def _add_product(x: Tensor, matrix: Dense, y: Tensor) -> None:
    """x += matrix(y), in one kernel where it has no bias: the product adds on its way."""
    if matrix.bias is None:
        x.addmm_(y, matrix.weight.t())
    else:
        x.add_(matrix(y))
