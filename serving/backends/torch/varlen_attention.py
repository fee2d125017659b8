"""The KV cache, and attention of all tokens of a pass over it.

Attention has two forms with the same results:

- flash: one call of torch's FlashAttention-2 for all tokens, without a mask. The cache of a layer
  is [tokens, 2, kv_heads, head_dim], row by row and a spare place for dummy tokens, so that a pass
  writes keys and values in one copy. Where a sequence's keys begin is said by cu_seqlens_k, how
  many there are by seqused_k (flash-attention/csrc/flash_attn/src/block_info.h): nothing beyond a
  row's tokens is read, decode rows and prompt pieces share the call, and a graph of it serves any
  rows at any length.
- plain: torch's scaled_dot_product_attention, a call for each run of neighbouring decode rows and
  for each prompt piece, over a cache that lies head by head. The query heads that share a key head
  are its query length: keys are never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.spec import ModelSpec

Flash = Callable[..., tuple[Any, ...]]


@dataclass(slots=True)
class FlashStep:
    """What the call is told of a pass over `tokens` tokens of `n` sequences, laid end to end."""

    at: Tensor  # int64 [tokens]: row * width + position, where a token's key and value go
    starts_q: Tensor  # int32 [n + 1]: first token of each sequence in the pass, and their number
    starts_k: Tensor  # int32 [n + 1]: row * width of each sequence; the last one is not read
    held: Tensor  # int32 [n]: keys of each sequence, those of this pass included
    most_q: int  # tokens of the longest piece; 1: the kernel splits the keys among its blocks
    most_k: int  # at least max(held)

    def write(self, cache: Tensor, pairs: Tensor) -> None:
        """See Step."""
        cache.index_copy_(0, self.at, pairs)

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See Step."""
        keys, values = cache.unbind(1)
        # Causal is aligned at the end: the last query of a piece sees all of its row's keys.
        out: Tensor = flash_kernel()(
            *(queries, keys, values),
            *(self.starts_q, self.starts_k, self.most_q, self.most_k),
            *(0.0, True, False),  # dropout, causal, no debug mask
            scale=1.0 / math.sqrt(queries.shape[-1]),
            seqused_k=self.held,
        )[0]
        return out.flatten(1)


@dataclass(slots=True)
class PromptSpan:
    """`count` tokens of one row from position `start`: tokens first..first + count of the pass."""

    first: int
    count: int
    row: int
    start: int
    mask: Tensor | None  # additive [count, start + count]; None: causal from position 0


@dataclass(slots=True)
class PlainStep:
    """One token each of the first rows of the pass, then prompt pieces."""

    rows: Tensor  # int64 [tokens]: where each key and value goes
    columns: Tensor
    runs: list[tuple[int, int, int]]  # of neighbouring decode rows: first token, rows lo..hi
    mask: Tensor | None  # of all decode rows: additive [rows, 1, 1, seen]
    prompts: list[PromptSpan]

    def write(self, cache: Tensor, pairs: Tensor) -> None:
        """See Step."""
        cache[self.rows, self.columns] = pairs

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See Step."""
        keys, values = cache.unbind(2)
        kv_heads, outs = keys.shape[2], []
        for first, lo, hi in self.runs:
            assert self.mask is not None
            rows, seen = slice(first, first + hi - lo), self.mask.shape[-1]
            out = scaled_dot_product_attention(
                queries[rows].view(hi - lo, kv_heads, -1, queries.shape[-1]),
                keys[lo:hi, :seen].transpose(1, 2),
                values[lo:hi, :seen].transpose(1, 2),
                attn_mask=self.mask[rows],
            )
            outs.append(out.reshape(hi - lo, -1))
        for span in self.prompts:
            end = span.start + span.count
            asked = queries[span.first : span.first + span.count].transpose(0, 1)
            key, value = (one[span.row, :end].transpose(0, 1)[None] for one in (keys, values))
            if span.mask is None:
                is_grouped = len(asked) != kv_heads
                out = scaled_dot_product_attention(
                    asked[None], key, value, is_causal=True, enable_gqa=is_grouped
                )
            else:
                # On a GPU there is no kernel but the slowest for a mask and grouped heads together.
                grouped = asked.reshape(1, kv_heads, -1, queries.shape[-1])
                mask = span.mask.repeat(len(asked) // kv_heads, 1)
                out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
            outs.append(out.view(queries.shape[1], span.count, -1).transpose(0, 1).flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


# `write(cache, pairs)`: keys and values [tokens, 2, kv_heads, head_dim] to their places in a layer.
# `attend(queries, cache)`: attention of `queries` [tokens, heads, head_dim] over what is written:
# [tokens, heads * head_dim].
Step = FlashStep | PlainStep


class KvCache:
    """Keys and values of `rows` rows of `width` tokens, a tensor for each layer: [rows, width, 2,
    kv_heads, head_dim], in memory head by head, for plain attention; token by token for flash."""

    def __init__(
        self,
        spec: ModelSpec,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        is_flash: bool,
    ) -> None:
        self.width, self.is_flash = width, is_flash
        shape: tuple[int, ...] = (rows, 2, spec.kv_heads, width, spec.head_dim)
        if is_flash:
            shape = (rows * width + 1, 2, spec.kv_heads, spec.head_dim)
        # Plain attention multiplies entries that were never written with 0: they must not be NaN.
        made = [_zeros(shape, dtype, device) for _ in range(spec.layers)]
        self.layers = made if is_flash else [layer.permute(0, 3, 1, 2, 4) for layer in made]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of one row into another."""
        for cache in self.layers:
            if self.is_flash:
                begin, to = source * self.width, target * self.width
                cache[to : to + tokens] = cache[begin : begin + tokens]
            else:
                cache[target, :tokens] = cache[source, :tokens]


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
