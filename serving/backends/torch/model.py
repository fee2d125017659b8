"""The forward pass of Llama, Qwen2, Qwen3 and Mistral models over a KV cache of fixed rows.

A step is one pass over the weights: the tokens of all decode rows and prompt pieces are laid end
to end, and only attention looks at them apart. Keys and values are one tensor per layer, [rows,
kv_heads, width, head_dim] (torch.compile would copy all of one big tensor at each write).

The query heads that share a key head are the query length of attention, so keys and values are
never expanded. The pass makes no decision on the device: a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.spec import ModelSpec
from serving.backends.torch.weights import Layer, Weights

GRAIN = 64  # the cache's width, and what attention looks at, are multiples of this


@dataclass(slots=True)
class DecodeSpan:
    """One token each in rows lo..hi: tokens first..first + hi - lo of the step."""

    first: int
    lo: int
    hi: int
    mask: Tensor  # additive [hi - lo, 1, 1, width]
    index: Tensor  # arange(hi - lo)


@dataclass(slots=True)
class PromptSpan:
    """`count` tokens of one row from position `start`: tokens first..first + count of the step."""

    first: int
    count: int
    row: int
    start: int
    mask: Tensor | None  # additive [count, start + count]; None: causal


class SlotModel:
    """Weights, RoPE tables and KV cache on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        rows: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.width = cache_width(context_tokens)
        shape = (rows, spec.kv_heads, self.width, spec.head_dim)
        # Attention multiplies entries that were never written with 0: they must not be NaN.
        self.keys = [_zeros(shape, dtype, device) for _ in range(spec.layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(spec.layers)]
        self.cos, self.sin = (
            table.to(device=device, dtype=dtype) for table in rope_tables(spec, self.width)
        )
        self._queries = spec.heads * spec.head_dim
        self._scale = 1.0 / math.sqrt(spec.head_dim)

    @property
    def kv_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        spans: list[DecodeSpan | PromptSpan],
        wanted: Tensor | None,
    ) -> Tensor:
        """Logits float32 [n, vocabulary] of the tokens with index `wanted` (None: of all).

        `ids`, `positions`: int64 [tokens]. Each token is written to the cache, then attended to.
        """
        x = functional.embedding(ids, self.weights.embedding).to(self.dtype)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.weights.layers):
            x = self._block(index, layer, x, positions, cos, sin, spans)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self.weights.head(self._norm(x, self.weights.norm)).float()

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of one row into another."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :tokens] = cache[source, :, :tokens]

    def swap(self, a: int, b: int, held_a: int, held_b: int) -> None:
        """Exchange what two rows hold."""
        for cache in (*self.keys, *self.values):
            kept = cache[a, :, :held_a].clone()
            cache[a, :, :held_b] = cache[b, :, :held_b]
            cache[b, :, :held_a] = kept

    def _block(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        spans: list[DecodeSpan | PromptSpan],
    ) -> Tensor:
        spec = self.spec
        heads = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, spec.head_dim)
        if layer.query_norm is None or layer.key_norm is None:
            q, k = torch.split(
                _rotate(heads[:, : -spec.kv_heads], cos, sin), [spec.heads, spec.kv_heads], 1
            )
        else:
            q = _rotate(self._norm(heads[:, : spec.heads], layer.query_norm), cos, sin)
            k = _rotate(self._norm(heads[:, spec.heads : -spec.kv_heads], layer.key_norm), cos, sin)
        v = heads[:, -spec.kv_heads :]
        outs = [
            self._decode(index, span, q, k, v, positions)
            if isinstance(span, DecodeSpan)
            else self._prompt(index, span, q, k, v)
            for span in spans
        ]
        x = x + layer.out(outs[0] if len(outs) == 1 else torch.cat(outs))
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return x + layer.down(functional.silu(gate) * up)

    def _decode(
        self, index: int, span: DecodeSpan, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> Tensor:
        spec, count = self.spec, span.hi - span.lo
        part = slice(span.first, span.first + count)
        width = span.mask.shape[-1]
        keys, values = self.keys[index][span.lo : span.hi], self.values[index][span.lo : span.hi]
        keys[span.index, :, positions[part]] = k[part]
        values[span.index, :, positions[part]] = v[part]
        grouped = q[part].view(count, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        out = functional.scaled_dot_product_attention(
            grouped,
            keys[:, :, :width],
            values[:, :, :width],
            attn_mask=span.mask,
            scale=self._scale,
        )
        return out.reshape(count, self._queries)

    def _prompt(self, index: int, span: PromptSpan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part, end = slice(span.first, span.first + span.count), span.start + span.count
        keys, values = self.keys[index][span.row], self.values[index][span.row]
        keys[:, span.start : end] = k[part].transpose(0, 1)
        values[:, span.start : end] = v[part].transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            q[part].transpose(0, 1)[None],
            keys[None, :, :end],
            values[None, :, :end],
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=self._scale,
            enable_gqa=self.spec.heads != self.spec.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(span.count, self._queries)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_epsilon)


def cache_width(context_tokens: int) -> int:
    """Columns of the cache: the context, and one for a full row's dummy token, in GRAINs."""
    return -(-(context_tokens + 1) // GRAIN) * GRAIN


def seen_width(longest: int, width: int) -> int:
    """How many columns attention looks at when the longest row has `longest` tokens."""
    return min(width, -(-longest // GRAIN) * GRAIN)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )


def rope_tables(spec: ModelSpec, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim] float32, with Llama 3's scaling where the spec has it."""
    frequencies = 1.0 / (
        spec.rope_theta
        ** (torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim)
    )
    scaling = spec.rope_scaling
    if scaling is not None:
        wavelength = 2 * math.pi / frequencies
        low, high = (
            scaling.original_context / scaling.low_freq_factor,
            scaling.original_context / scaling.high_freq_factor,
        )
        slowed = frequencies / scaling.factor
        share = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - share) * slowed + share * frequencies
        frequencies = torch.where(
            wavelength > low, slowed, torch.where(wavelength < high, frequencies, between)
        )
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    whole = torch.cat((angles, angles), -1)
    return whole.cos(), whole.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU numpy's, whose pages cost no memory before they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
