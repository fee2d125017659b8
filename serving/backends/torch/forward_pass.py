"""The forward pass of Llama, Qwen2, Qwen3 and Mistral models over a KV cache of fixed rows.

A step is one pass over the weights: the tokens of all decode rows and prompt pieces are laid end
to end, and only attention looks at them apart. It has two forms with the same results:

- plain: torch's scaled_dot_product_attention, a call for each span. Keys and values are two tensors
  per layer, [rows, kv_heads, width, head_dim] (torch.compile would copy all of one big tensor at
  each write). The query heads that share a key head are the query length of attention, so keys and
  values are never expanded.
- packed (packed.py): one call of torch's flash kernels for all tokens, on GPUs that have them.

The pass makes no decision on the device: a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.spec import ModelSpec
from serving.backends.kv_rows import RowMap
from serving.backends.torch.device_transfer import send
from serving.backends.torch.torch_weights import Dense, Layer, Linear, Weights
from serving.backends.torch.varlen_attention import Packed, PackedCache
from serving.sampling.step_rows import Row

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


Spans = list[DecodeSpan | PromptSpan]


class HeadCache:
    """Keys and values of `rows` rows of `width` tokens, head by head."""

    def __init__(
        self, spec: ModelSpec, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        shape = (rows, spec.kv_heads, width, spec.head_dim)
        # Attention multiplies entries that were never written with 0: they must not be NaN.
        self.keys = [_zeros(shape, dtype, device) for _ in range(spec.layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(spec.layers)]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of one row into another."""
        for cache in self.tensors:
            cache[target, :, :tokens] = cache[source, :, :tokens]

    def swap(self, a: int, b: int, held_a: int, held_b: int) -> None:
        """Exchange what two rows hold."""
        for cache in self.tensors:
            kept = cache[a, :, :held_a].clone()
            cache[a, :, :held_b] = cache[b, :, :held_b]
            cache[b, :, :held_a] = kept


class SlotModel:
    """Weights, RoPE tables and KV cache on one device, the cache's."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: PackedCache | HeadCache) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.width = cache.width
        self.dtype = cache.tensors[0].dtype
        self.device = cache.tensors[0].device
        self.is_packed = isinstance(cache, PackedCache)
        # Plain prompt attention has the query heads of a key head as rows, with a mask: on a GPU
        # SDPA has no kernel but the slowest for a mask and grouped heads together.
        self.groups_prompts = self.device.type != "cpu"
        self.cos, self.sin = (
            table.to(device=self.device, dtype=self.dtype)
            for table in rope_tables(spec, self.width)
        )
        self._turns = turn_table(self.cos, self.sin) if self.is_packed else None
        packed = weights.layers if self.is_packed else []
        self._head_scales = [head_scales(spec, layer) for layer in packed]
        self._queries = spec.heads * spec.head_dim
        self._scale = 1.0 / math.sqrt(spec.head_dim)

    @property
    def kv_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.cache.tensors)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        step: Spans | Packed,
        wanted: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits float32 [n, vocabulary] of the tokens with index `wanted` (None: of all).

        `ids`, `positions`: int64 [tokens]. Each token is written to the cache, then attended to.
        `out`: where the logits go, [at least n, vocabulary].
        """
        x = functional.embedding(ids, self.weights.embedding).to(self.dtype)
        x = self._through(x, positions, step)
        if wanted is not None:
            x = x.index_select(0, wanted)
        logits = self.weights.head(self._norm(x, self.weights.norm))
        return logits.float() if out is None else out[: len(x)].copy_(logits)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of one row into another."""
        self.cache.copy(source, target, tokens)

    def swap(self, a: int, b: int, held_a: int, held_b: int) -> None:
        """Exchange what two rows hold."""
        self.cache.swap(a, b, held_a, held_b)

    def _through(self, x: Tensor, positions: Tensor, step: Spans | Packed) -> Tensor:
        """x after all layers."""
        if isinstance(step, Packed):
            assert self._turns is not None, "a model with rows head by head takes spans"
            turns = self._turns[positions][:, None]
            for index, layer in enumerate(self.weights.layers):
                self._attend_packed(index, layer, x, turns, step)
                self._feed_forward(layer, x)
        else:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
            for index, layer in enumerate(self.weights.layers):
                x = self._block(index, layer, x, positions, cos, sin, step)
        return x

    def _attend_packed(
        self, index: int, layer: Layer, x: Tensor, turns: Tensor, step: Packed
    ) -> None:
        """Attention of a layer, added to x."""
        spec = self.spec
        assert isinstance(self.cache, PackedCache)
        heads = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, spec.head_dim)
        turned = heads[:, : -spec.kv_heads]
        source, scales = turned, self._head_scales[index]
        if scales is not None:
            shape, epsilon = (spec.head_dim,), spec.norm_epsilon
            source = functional.rms_norm(turned, shape, None, epsilon) * scales
        turn_into(turned, source, turns)
        self.cache.write(index, heads, step.at)
        _add_product(x, layer.out, self.cache.attend(index, heads, step, self._scale))

    def _feed_forward(self, layer: Layer, x: Tensor) -> None:
        """The feed-forward part of a layer, added to x."""
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        _add_product(x, layer.down, functional.silu(gate).mul_(up))

    def _block(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        spans: Spans,
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
        spec, count, cache = self.spec, span.hi - span.lo, self.cache
        assert isinstance(cache, HeadCache)
        part = slice(span.first, span.first + count)
        width = span.mask.shape[-1]
        keys, values = cache.keys[index][span.lo : span.hi], cache.values[index][span.lo : span.hi]
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
        cache = self.cache
        assert isinstance(cache, HeadCache)
        keys, values = cache.keys[index][span.row], cache.values[index][span.row]
        keys[:, span.start : end] = k[part].transpose(0, 1)
        values[:, span.start : end] = v[part].transpose(0, 1)
        if self.groups_prompts and span.mask is not None:
            return self._grouped(q[part], keys[:, :end], values[:, :end], span.mask)
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

    def _grouped(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention with the query heads of a key head as rows: [count, heads * head_dim]."""
        count, shared = len(q), self.spec.heads // self.spec.kv_heads
        groups = q.view(count, -1, shared, self.spec.head_dim)
        rows = groups.permute(1, 2, 0, 3).flatten(1, 2)
        out = functional.scaled_dot_product_attention(
            *(rows[None], keys[None], values[None]),
            attn_mask=mask.repeat(shared, 1),
            scale=self._scale,
        )
        by_head = out[0].view(-1, shared, count, self.spec.head_dim)
        return by_head.permute(2, 0, 1, 3).reshape(count, -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_epsilon)


class StepBatch:
    """Tokens of one pass, laid end to end. Adding rows moves their lengths in `rows`."""

    def __init__(self, model: SlotModel, rows: RowMap, columns: Tensor) -> None:
        self._model = model
        self._rows = rows
        self._columns = columns  # arange(model.width) on the device
        self._ids: list[Any] = []
        self._positions: list[Any] = []
        self._decoding: Sequence[int] = ()  # KV rows
        self._prompts: list[tuple[int, int, int, int]] = []  # first, count, row, start
        self._count = 0
        self.wanted: list[Row] = []  # rows that want a token, in the logits' order
        self._at: list[int] = []  # where in the pass their last token is

    def add_decode(self, rows: list[Row], places: Sequence[int]) -> None:
        """One token for each of the KV rows `places`, ascending; what is there of no row computes
        a dummy. Add it first. Plain attention takes rows that lie side by side."""
        count, index_of = len(places), {place: index for index, place in enumerate(places)}
        length = np.array([self._rows.length[place] for place in places], np.int64)
        tokens = np.zeros(count, np.int64)
        for row in sorted(rows, key=lambda row: self._rows.row_of[row.slot]):
            place = self._rows.row_of[row.slot]
            tokens[index_of[place]] = row.tokens[0]
            self._rows.length[place] += 1
            if row.wants_token:
                self.wanted.append(row)
                self._at.append(index_of[place])
        self._decoding = places
        self._ids.append(tokens)
        self._positions.append(length)
        self._count += count

    def add_prompt(self, row: Row, tokens: Any, start: int) -> None:
        """The piece `tokens` of a prompt from position `start` on."""
        place, count = self._rows.row_of[row.slot], len(tokens)
        self._prompts.append((self._count, count, place, start))
        self._ids.append(tokens.astype(np.int64))
        self._positions.append(np.arange(start, start + count))
        self._count += count
        self._rows.length[place] = start + count
        if row.wants_token:
            self.wanted.append(row)
            self._at.append(self._count - 1)

    def run(self, out: Tensor | None = None, drawn: Tensor | None = None) -> Tensor:
        """Logits float32 [n, vocabulary] of `wanted`, in `out` where there is one. `drawn`: see
        serving.backends.torch.flight.known."""
        model = self._model
        arrays = [np.concatenate(self._ids), np.concatenate(self._positions)]
        arrays.append(np.array(self._at, np.int64))
        packed = self._packed_arrays(arrays[1]) if model.is_packed else []
        ids, positions, at, *rest = send([*arrays, *packed], model.device)
        step: Spans | Packed
        if model.is_packed:
            counts, held = np.diff(packed[1]), packed[3]
            to_at, starts_q, starts_k, used = rest
            most = int(counts.max()), int(held.max())
            step = Packed(to_at, starts_q, starts_k, used, *most)
        else:
            step = self._spans(positions)
        everything = len(self._at) == self._count
        ids = known(ids, drawn)
        return model.forward(ids, positions, step, None if everything else at, out)

    def _packed_arrays(self, positions: Any) -> list[Any]:
        """`at`, `starts_q`, `starts_k` and `held` of varlen_attention.Packed."""
        places = list(self._decoding)
        counts = [1] * len(places)
        held: list[int] = (positions[: len(places)] + 1).tolist()
        for _, count, place, start in self._prompts:
            places.append(place)
            counts.append(count)
            held.append(start + count)
        width = self._model.width
        firsts = np.array(places, np.int64) * width
        return [
            np.repeat(firsts, counts) + positions,
            np.cumsum([0, *counts]).astype(np.int32),
            np.append(firsts, 0).astype(np.int32),
            np.array(held, np.int32),
        ]

    def _spans(self, positions: Tensor) -> Spans:
        """What plain attention is told."""
        model, columns = self._model, self._columns
        spans: Spans = []
        if self._decoding:
            lo, hi = self._decoding[0], self._decoding[-1] + 1
            width = seen_width(int(self._positions[0].max()) + 1, model.width)
            allowed = columns[None, :width] <= positions[: hi - lo, None]
            mask = additive_mask(allowed, model.dtype)[:, None, None]
            spans.append(DecodeSpan(0, lo, hi, mask, columns[: hi - lo]))
        for first, count, place, start in self._prompts:
            causal: Tensor | None = None
            if start or model.groups_prompts:
                allowed = columns[None, : start + count] <= columns[start : start + count, None]
                causal = additive_mask(allowed, model.dtype)
            spans.append(PromptSpan(first, count, place, start, causal))
        return spans


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


def known(ids: Tensor, drawn: Tensor | None) -> Tensor:
    """Token ids where -1 - n stood for drawn[n]."""
    if drawn is None or not len(drawn):
        return ids
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_(min=0)], ids)


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


def head_scales(spec: ModelSpec, layer: Layer) -> Tensor | None:
    """Norms of query and key heads as one tensor [heads + kv_heads, head_dim]; None: there are
    none."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    queries = layer.query_norm.expand(spec.heads, -1)
    return torch.cat((queries, layer.key_norm.expand(spec.kv_heads, -1)))


def turn_table(cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as 2 x 2 matrices over the halves of a head: [positions, 2, 2, head_dim / 2]."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    return torch.stack((torch.stack((cos, -sin), 1), torch.stack((sin, cos), 1)), 1)


def turn_into(out: Tensor, x: Tensor, turns: Tensor) -> None:
    """RoPE of x [tokens, heads, head_dim] into `out`, in two kernels, rounded as `_rotate` does.

    `turns`: `turn_table` at the tokens' positions, [tokens, 1, 2, 2, head_dim / 2].
    """
    tokens, heads, _ = x.shape
    product = x.view(tokens, heads, 1, 2, -1) * turns
    torch.sum(product, 3, out=out.view(tokens, heads, 2, -1))


def _add_product(x: Tensor, matrix: Linear, y: Tensor) -> None:
    """x += matrix(y), in one kernel where the matrix is dense: the product adds on its way."""
    if isinstance(matrix, Dense) and matrix.bias is None:
        x.addmm_(y, matrix.weight.t())
    else:
        x.add_(matrix(y))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU numpy's, whose pages cost no memory before they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
