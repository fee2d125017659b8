"""The KV cache, and attention of all tokens of a pass over it.

The cache of a layer is [tokens, 2, kv_heads, head_dim], row by row and a spare place for dummy
tokens, so that a pass writes keys and values in one copy. Attention has two forms with the same
results:

- flash: torch's FlashAttention-2 without a mask. cu_seqlens_k says where a sequence's keys begin,
  seqused_k how many there are (flash-attention/csrc/flash_attn/src/block_info.h): nothing beyond a
  row's tokens is read, and a graph of a call serves any rows at any length. Rows of one token and
  longer pieces have a call each: for the former alone the kernel splits the keys among its blocks.
- plain: torch's scaled_dot_product_attention with a mask, a call for each block of neighbouring
  rows with equally many tokens. The query heads that share a key head are its query length: keys
  are never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from crossover.models.model_spec import ModelSpec

Flash = Callable[..., tuple[Any, ...]]


@dataclass(slots=True)
class Sequences:
    """One flash call over `n` sequences of a pass. A sequence may be without tokens, and without
    keys: then the result of its tokens is 0."""

    starts_q: Tensor  # int32 [n + 1]: first token of each sequence in the pass, and the last's end
    starts_k: Tensor  # int32 [n + 1]: row * width of each sequence; the last one is not read
    keys: Tensor  # int32 [n]: keys of each sequence, those of this pass included
    max_q: int  # at least the tokens of the longest; 1: the kernel splits the keys
    max_k: int  # at least max(keys)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries [tokens, heads, head_dim], in the same shape. Tokens of no sequence
        get no value."""
        # Causal is aligned at the end: the last query of a piece sees all of its row's keys.
        out: Tensor = flash_kernel()(
            queries,
            keys,
            values,
            self.starts_q,
            self.starts_k,
            self.max_q,
            self.max_k,
            0.0,  # dropout
            True,  # causal
            False,  # no debug mask
            scale=1.0 / math.sqrt(queries.shape[-1]),
            seqused_k=self.keys,
        )[0]
        return out


@dataclass(slots=True)
class FlashStep:
    """A pass whose first tokens are rows of one token, or may be; longer pieces follow."""

    at: Tensor  # int64 [tokens]: row * width + position, where a token's key and value go
    singles: Sequences | None  # one for each of the first tokens; None: the pass has pieces only
    pieces: Sequences | None  # None: every token is a row of its own
    is_single: Tensor | None = None  # bool [singles, 1, 1], where there are both; False: a piece's

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See Step."""
        keys, values = cache.unbind(1)
        if self.singles is None or self.pieces is None:
            sequences = self.singles or self.pieces
            assert sequences is not None
            return sequences.attend(queries, keys, values).flatten(1)
        assert self.is_single is not None
        out = self.pieces.attend(queries, keys, values)
        first = out[: len(self.is_single)]
        singles = self.singles.attend(queries[: len(first)], keys, values)
        first.copy_(torch.where(self.is_single, singles, first))
        return out.flatten(1)


class Block(NamedTuple):
    """`piece` tokens each of the neighbouring rows lo..hi, from token `first` of the pass on."""

    first: int
    piece: int
    lo: int
    hi: int
    seen: int  # keys of the longest row


@dataclass(slots=True)
class PlainStep:
    """The blocks of a pass, each with an additive mask [rows, 1, shared heads * piece, seen]."""

    at: Tensor  # see FlashStep
    blocks: list[tuple[Block, Tensor]]
    width: int  # tokens of a row of the cache

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See Step."""
        keys, values = cache[:-1].view(-1, self.width, *cache.shape[1:]).unbind(2)
        kv_heads, size = keys.shape[2:]
        outs = []
        for (first, piece, lo, hi, seen), mask in self.blocks:
            asked = queries[first : first + (hi - lo) * piece]
            asked = asked.view(hi - lo, piece, kv_heads, -1, size).permute(0, 2, 3, 1, 4)
            out = scaled_dot_product_attention(
                asked.reshape(hi - lo, kv_heads, -1, size),
                keys[lo:hi, :seen].transpose(1, 2),
                values[lo:hi, :seen].transpose(1, 2),
                attn_mask=mask,
            )
            outs.append(out.view(asked.shape).permute(0, 3, 1, 2, 4).reshape((hi - lo) * piece, -1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


# `attend(queries, cache)`: attention of `queries` [tokens, heads, head_dim] over what is written to
# a layer's cache: [tokens, heads * head_dim].
Step = FlashStep | PlainStep


class KvCache:
    """Keys and values of `rows` rows of `width` tokens, a tensor for each layer."""

    def __init__(
        self,
        spec: ModelSpec,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.width = width
        shape = (rows * width + 1, 2, spec.kv_heads, spec.head_dim)
        # Plain attention multiplies entries that were never written with 0: they must not be NaN.
        self.layers = [_zeros(shape, dtype, device) for _ in range(spec.layers)]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of one row into another."""
        begin, to = source * self.width, target * self.width
        for cache in self.layers:
            cache[to : to + tokens] = cache[begin : begin + tokens]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU numpy's, whose pages cost no memory before they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


def flash_kernel() -> Flash:
    """The call itself, which only builds of torch for CUDA carry out."""
    kernel: Flash = torch.ops.aten._flash_attention_forward
    return kernel


def flash_trouble(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the flash kernels cannot be used; None: they can."""
    if device.type != "cuda" or torch.version.hip:
        return "torch has the flash kernels for CUDA only"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch is without the flash kernels"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the flash kernels need sm_80 or newer"
    if dtype == torch.float32 or spec.head_dim % 8 or spec.head_dim > 256:
        return f"the flash kernels take no {dtype} with a head_dim of {spec.head_dim}"
    return None
