"""The forward pass of Llama, Qwen2, Qwen3 and Mistral models over a KV cache of fixed rows.

A step is one pass over the weights: the tokens of all decode rows and prompt pieces are laid end
to end, and only attention (varlen_attention.py) looks at them apart. The pass makes no decision on
the device: a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.spec import ModelSpec
from serving.backends.torch.device_transfer import send
from serving.backends.torch.torch_weights import Dense, Layer, Weights
from serving.backends.torch.varlen_attention import FlashStep, KvCache, PlainStep, PromptSpan, Step
from serving.sampling.step_rows import Row, Tokens

GRAIN = 64  # what plain attention of decode rows looks at is a multiple of this
Piece = tuple[Row, Tokens, int]  # tokens of a row, and the position from which on they go


class SlotModel:
    """Weights, RoPE table and KV cache on one device, the cache's."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: KvCache) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.width, self.is_flash = cache.width, cache.is_flash
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
        step.write(cache, pairs.view(len(x), 2, spec.kv_heads, -1))
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
    pieces: Sequence[Piece],
    out: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, list[Row]]:
    """Logits float32 [n, vocabulary] of the rows that want a token, and these rows in the logits'
    order. `out`: where the logits go. `drawn`: see `known`."""
    pieces = sorted(pieces, key=lambda piece: len(piece[1]) > 1)  # single tokens first
    counts = np.array([len(tokens) for _, tokens, _ in pieces])
    ends = counts.cumsum()
    pairs = [(row, end - 1) for (row, *_), end in zip(pieces, ends, strict=True) if row.wants_token]
    wanted, at = [row for row, _ in pairs], np.array([place for _, place in pairs], np.int64)
    slots = np.array([row.slot for row, *_ in pieces])
    held = counts + [start for *_, start in pieces]
    positions = np.repeat(held - ends, counts) + np.arange(ends[-1])
    ids = np.concatenate([tokens for _, tokens, _ in pieces]).astype(np.int64)
    arrays = [ids, positions, at, np.repeat(slots, counts)]
    step: Step
    if model.is_flash:
        whole = np.append(0, ends), np.append(slots * model.width, 0), held
        arrays += [array.astype(np.int32) for array in whole]
        tokens_there, positions_there, at_there, rows, *rest = send(arrays, model.device)
        to = torch.add(positions_there, rows, alpha=model.width)
        step = FlashStep(to, rest[0], rest[1], rest[2], int(counts.max()), int(held.max()))
    else:
        tokens_there, positions_there, at_there, rows = send(arrays, model.device)
        spans = list(zip(slots.tolist(), counts.tolist(), held.tolist(), strict=True))
        step = _plain_step(model, rows, positions_there, spans)
    found = None if len(at) == len(positions) else at_there
    return model.forward(known(tokens_there, drawn), positions_there, step, found, out), wanted


def _plain_step(
    model: SlotModel, rows: Tensor, positions: Tensor, spans: list[tuple[int, int, int]]
) -> PlainStep:
    """`spans`: KV row, tokens and keys of each piece, single tokens first."""
    mask, prompts = None, []
    runs: list[tuple[int, int, int]] = []
    decoding = [held for _, count, held in spans if count == 1]
    if decoding:
        seen = min(model.width, -(-max(decoding) // GRAIN) * GRAIN)
        allowed = model.columns[None, :seen] <= positions[: len(decoding), None]
        mask = additive_mask(allowed, model.dtype)[:, None, None]
    first = 0
    for row, count, held in spans:
        if count == 1:
            begun, lo, hi = runs.pop() if runs and runs[-1][2] == row else (first, row, row)
            runs.append((begun, lo, hi + 1))
        else:
            start, causal = held - count, None
            if start or model.device.type != "cpu":
                allowed = model.columns[None, :held] <= model.columns[start:held, None]
                causal = additive_mask(allowed, model.dtype)
            prompts.append(PromptSpan(first, count, row, start, causal))
        first += count
    return PlainStep(rows, positions, runs, mask, prompts)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )


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
