"""Attention of all tokens of a pass in one call of torch's FlashAttention-2, without a mask.

Keys and values of a layer are one tensor [rows * width, 2, kv_heads, head_dim], so that a pass
writes both in one copy and the kernel sees a row as `width` tokens one after the other. Where a
sequence's keys begin is said by cu_seqlens_k, how many there are by seqused_k
(flash-attention/csrc/flash_attn/src/block_info.h): nothing beyond a row's tokens is read, decode
rows and prompt pieces share the call, and a graph of it serves contexts of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.spec import ModelSpec

Flash = Callable[..., tuple[Any, ...]]


@dataclass(slots=True)
class Packed:
    """What the call is told of a pass over `tokens` tokens of `n` sequences, laid end to end."""

    at: Tensor  # int64 [tokens]: row * width + position, where a token's key and value go
    starts_q: Tensor  # int32 [n + 1]: first token of each sequence in the pass, and their number
    starts_k: Tensor  # int32 [n + 1]: row * width of each sequence; the last one is not read
    held: Tensor  # int32 [n]: keys of each sequence, those of this pass included
    most_q: int  # tokens of the longest piece; 1: the kernel splits the keys among its blocks
    most_k: int  # at least max(held)


class PackedCache:
    """Keys and values of `rows` rows of `width` tokens, token by token."""

    def __init__(
        self, spec: ModelSpec, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self.width = width
        shape = (rows * width, 2, spec.kv_heads, spec.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]

    @property
    def tensors(self) -> list[Tensor]:
        return self.layers

    def write(self, index: int, heads: Tensor, at: Tensor) -> None:
        """Keys and values of a layer to their places.

        `heads`: [tokens, heads + 2 * kv_heads, head_dim], queries and keys turned.
        """
        kv_heads = self._spec.kv_heads
        pairs = heads[:, -2 * kv_heads :].view(len(heads), 2, kv_heads, -1)
        self.layers[index].index_copy_(0, at, pairs)

    def attend(self, index: int, heads: Tensor, step: Packed, scale: float) -> Tensor:
        """Attention of the queries of `heads` over what is written: [tokens, heads * head_dim]."""
        kv_heads, cache = self._spec.kv_heads, self.layers[index]
        # Causal is aligned at the end: the last query of a piece sees all of its row's keys.
        out: Tensor = flash_kernel()(
            *(heads[:, : -2 * kv_heads], cache[:, 0], cache[:, 1]),
            *(step.starts_q, step.starts_k, step.most_q, step.most_k),
            *(0.0, True, False),  # dropout, causal, no debug mask
            scale=scale,
            seqused_k=step.held,
        )[0]
        return out.flatten(1)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of one row into another."""
        for cache in self.layers:
            self._row(cache, target, tokens).copy_(self._row(cache, source, tokens))

    def swap(self, a: int, b: int, held_a: int, held_b: int) -> None:
        """Exchange what two rows hold."""
        for cache in self.layers:
            kept = self._row(cache, a, held_a).clone()
            self._row(cache, a, held_b).copy_(self._row(cache, b, held_b))
            self._row(cache, b, held_a).copy_(kept)

    def _row(self, cache: Tensor, row: int, tokens: int) -> Tensor:
        return cache[row * self.width : row * self.width + tokens]


def flash_kernel() -> Flash:
    """The call itself, which only builds of torch for CUDA carry out."""
    kernel: Flash = torch.ops.aten._flash_attention_forward
    return kernel


def flash_trouble(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the flash kernels cannot be used; None: they can."""
    if device.type != "cuda":
        return "torch has the flash kernels for GPUs only"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch is without them"
    if torch.version.hip:
        return "ROCm's kernels read the rows in another way"
    if dtype == torch.float32:
        return "the flash kernels compute in bf16 and fp16 only"
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"the flash kernels take no head_dim of {spec.head_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the flash kernels need sm_80 or newer, and this GPU is sm_{major}{minor}"
    return None
