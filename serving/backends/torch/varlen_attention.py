"""The KV cache, and attention of all tokens of a pass over it.

The cache of a layer is [entries, 2, kv_heads, head_dim], so that a pass writes keys and values in
one copy. An entry is one token of a slot; the entries of slot s are s * width to (s + 1) * width.
One more entry at the end takes the keys and values of dummy tokens. Attention has two forms with
the same results:

- flash: torch's FlashAttention-2 without a mask. cu_seqlens_k says where a sequence's keys begin,
  and seqused_k how many there are (flash-attention/csrc/flash_attn/src/block_info.h). So nothing
  beyond a slot's tokens is read, and a captured call serves any slots with any number of tokens.
  Rows of one token and longer pieces have a call each, because the kernel splits the keys among
  its thread blocks only if every sequence has one token.
- plain: torch's scaled_dot_product_attention with a mask, with one call for each block of
  neighboring slots whose rows have the same number of tokens. The query heads that share a key
  head are computed as further queries of that head, so that keys are never expanded.
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

from crossover.models.shape.model_spec import ModelSpec

Flash = Callable[..., tuple[Any, ...]]


@dataclass(slots=True)
class Sequences:
    """One flash call over `n` sequences of a pass. A sequence may have no tokens. If it has no
    keys, the result for its tokens is 0."""

    query_starts: Tensor  # int32 [n + 1]: first token of each sequence in the pass; end of the last
    key_starts: Tensor  # int32 [n + 1]: slot * width of each sequence; the last one is not read
    key_counts: Tensor  # int32 [n]: keys of each sequence, including those of this pass
    max_queries: int  # at least the tokens of the longest sequence; 1: the kernel splits the keys
    max_keys: int  # at least max(key_counts)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of queries [tokens, heads, head_dim], in the same shape. The result
        for tokens that belong to no sequence is undefined."""
        # The causal mask is aligned at the end: the last query of a piece attends to all keys.
        out: Tensor = flash_kernel()(
            queries,
            keys,
            values,
            self.query_starts,
            self.key_starts,
            self.max_queries,
            self.max_keys,
            0.0,  # dropout
            True,  # causal
            False,  # no debug mask
            scale=1.0 / math.sqrt(queries.shape[-1]),
            seqused_k=self.key_counts,
        )[0]
        return out


@dataclass(slots=True)
class FlashStep:
    """How the tokens of a pass attend with flash: first rows of one token (decode rows, where a
    graph may have room for more of them than there are), then longer pieces of prompts."""

    cache_indices: Tensor  # int64 [tokens]: slot * width + position, a token's entry in the cache
    decode_rows: Sequences | None  # one for each of the first tokens; None: there are pieces only
    pieces: Sequences | None  # None: there are decode rows only
    # If there are both, bool [decode rows, 1, 1]: whether each of the first tokens really is a
    # decode row. If a graph has room for more of them, the others belong to pieces.
    is_decode_row: Tensor | None = None

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See Step."""
        keys, values = cache.unbind(1)
        if self.decode_rows is None or self.pieces is None:
            sequences = self.decode_rows or self.pieces
            assert sequences is not None
            return sequences.attend(queries, keys, values).flatten(1)
        assert self.is_decode_row is not None
        out = self.pieces.attend(queries, keys, values)
        first_tokens = out[: len(self.is_decode_row)]
        decoded = self.decode_rows.attend(queries[: len(first_tokens)], keys, values)
        first_tokens.copy_(torch.where(self.is_decode_row, decoded, first_tokens))
        return out.flatten(1)


class SlotBlock(NamedTuple):
    """Neighboring slots whose rows have the same number of tokens in a pass."""

    first_token: int  # its index in the pass
    row_tokens: int  # of each row
    first_slot: int
    end_slot: int  # behind the last one
    max_keys: int  # keys of the longest row, including those of this pass


@dataclass(slots=True)
class PlainStep:
    """How the tokens of a pass attend without flash."""

    cache_indices: Tensor  # see FlashStep
    # Each block with its additive mask [slots, 1, query heads per key head * row_tokens, max_keys].
    blocks: list[tuple[SlotBlock, Tensor]]
    width: int  # entries of a slot in the cache

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See Step."""
        keys, values = cache[:-1].view(-1, self.width, *cache.shape[1:]).unbind(2)
        kv_heads, head_dim = keys.shape[2:]
        outs = []
        for block, mask in self.blocks:
            first_slot, end_slot, max_keys = block.first_slot, block.end_slot, block.max_keys
            slots = end_slot - first_slot
            tokens = slots * block.row_tokens
            own_queries = queries[block.first_token : block.first_token + tokens]
            # [slots, kv_heads, query heads per key head, row_tokens, head_dim]
            grouped = own_queries.view(slots, block.row_tokens, kv_heads, -1, head_dim)
            grouped = grouped.permute(0, 2, 3, 1, 4)
            out = scaled_dot_product_attention(
                grouped.reshape(slots, kv_heads, -1, head_dim),
                keys[first_slot:end_slot, :max_keys].transpose(1, 2),
                values[first_slot:end_slot, :max_keys].transpose(1, 2),
                attn_mask=mask,
            )
            outs.append(out.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(tokens, -1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


# `attend(queries, cache)` returns the attention of queries [tokens, heads, head_dim] over a layer's
# cache, to which the keys and values of the pass have been written: [tokens, heads * head_dim].
Step = FlashStep | PlainStep


class KvCache:
    """The keys and values of `slots` slots with up to `width` tokens each, one tensor per layer."""

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.width = width
        shape = (slots * width + 1, 2, spec.kv_heads, spec.head_dim)
        # Zeros, because plain attention multiplies entries that were never written by 0, and NaN
        # times 0 would be NaN.
        self.layers = [_zeros(shape, dtype, device) for _ in range(spec.layers)]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of slot `source` to slot `target`."""
        source_start, target_start = source * self.width, target * self.width
        for cache in self.layers:
            copied = cache[source_start : source_start + tokens]
            cache[target_start : target_start + tokens] = copied


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On the CPU numpy allocates it, because its pages take no memory
    before they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


def flash_kernel() -> Flash:
    """Return torch's flash attention for sequences of different lengths. It runs only in builds
    for CUDA."""
    kernel: Flash = torch.ops.aten._flash_attention_forward
    return kernel


def why_no_flash(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the flash kernels cannot be used; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return "torch has the flash kernels for CUDA only"
    if not hasattr(torch.ops.aten, "_flash_attention_forward"):
        return f"torch {torch.__version__} does not have the operator that Crossover calls"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch is without the flash kernels"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the flash kernels need sm_80 or newer"
    if dtype == torch.float32 or spec.head_dim % 8 or spec.head_dim > 256:
        return f"the flash kernels take no {dtype} with a head_dim of {spec.head_dim}"
    return None
