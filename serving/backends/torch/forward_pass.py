"""The forward pass of Llama, Qwen2, Qwen3 and Mistral models over a KV cache of fixed rows.

A step is one pass over the weights: the tokens of all decode rows and prompt pieces are laid end
to end, and only attention (varlen_attention.py) looks at them apart. The pass makes no decision on
the device: a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from models.model_spec import ModelSpec
from serving.backends.torch.torch_weights import Dense, Layer, Weights
from serving.backends.torch.varlen_attention import Block, FlashStep, KvCache, PlainStep, Step
from serving.sampling.step_inputs import Row


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
    rows = sorted(rows, key=lambda row: len(row.tokens) > 1)  # single tokens first
    counts = np.array([len(row.tokens) for row in rows])
    ends, held = counts.cumsum(), np.array([row.position for row in rows])
    wanted = np.array([row.wants_token for row in rows])
    firsts = np.array([row.slot for row in rows]) * model.width
    positions = np.repeat(held - ends, counts) + np.arange(ends[-1])
    ids = to_device(np.concatenate([row.tokens for row in rows]).astype(np.int64), model.device)
    at = to_device(positions + np.repeat(firsts, counts), model.device)
    there = to_device(positions, model.device)
    step: Step
    if model.is_flash:
        starts = np.append(0, ends), np.append(firsts, 0), held
        q, k, keys = (to_device(array.astype(np.int32), model.device) for array in starts)
        step = FlashStep(at, q, k, keys, int(counts.max()), int(held.max()))
    else:
        step = PlainStep(at, _blocks(model, rows, there), model.width)
    last = None if wanted.sum() == ends[-1] else to_device(ends[wanted] - 1, model.device)
    logits = model.forward(known(ids, drawn), there, step, last, out)
    return logits, [row for row in rows if row.wants_token]


def _blocks(model: SlotModel, rows: list[Row], positions: Tensor) -> list[tuple[Block, Tensor]]:
    """Neighbouring rows with equally many tokens, and the mask of each such block."""
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
    found = []
    for block in blocks:
        size = block.hi - block.lo
        asked = positions[block.first : block.first + size * block.piece]
        allowed = model.columns[: block.seen] <= asked.view(size, 1, block.piece, 1)
        mask = torch.zeros(allowed.shape, dtype=model.dtype, device=model.device)
        mask = mask.masked_fill_(~allowed, float("-inf"))
        found.append((block, mask.repeat(1, 1, model.spec.heads // model.spec.kv_heads, 1)))
    return found


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array there, by a copy that the host does not wait for: one from pageable memory, as
    `torch.tensor(values, device=...)` makes it, waits for all that the device was asked before."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def known(ids: Tensor, drawn: Tensor | None) -> Tensor:
    """Token ids where -1 - n stood for drawn[n]."""
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
