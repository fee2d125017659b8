"""The Triton kernels of a layer. Each rounds where the plain pass rounds, and computes in float32.

Importing this needs triton. `fused.py` says what they are for and makes torch operators of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024
HEADS_BLOCK = 8  # heads that a program turns


@triton.jit
def rounded(value, kind: tl.constexpr):
    """In float32, as if it had been stored."""
    return value.to(kind).to(tl.float32)


@triton.jit
def add_norm_kernel(
    x, delta, weight, out, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """A program a token: x += delta, out = RMSNorm(x) * weight."""
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    inside = column < SIZE
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)
        value = rounded(value, x.dtype.element_ty)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + epsilon)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program a token and block: out = silu(gate) * up."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at = gate_up + token * 2 * SIZE + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = rounded(gate / (1.0 + tl.exp(-gate)), kind)
    tl.store(out + token * SIZE + column, (silu * up).to(kind), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["at"])  # a slice of what a step sends
def turn_and_store_kernel(
    heads,
    at,
    cos,
    sin,
    scales,
    cache,
    epsilon,
    width,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):
    """A program a token and block of heads: queries turned in place, keys turned and values into
    the cache [rows * width, 2, kv_heads, head_dim]."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    kind = heads.dtype.element_ty
    inside = (head < QUERIES + 2 * KEYS) & (lane < HALF)
    is_turned = head < QUERIES + KEYS
    source = heads + (token * (QUERIES + 2 * KEYS) + head) * DIM + lane
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(at + token)
    turn = (place % width) * DIM + lane
    cosine = tl.load(cos + turn, mask=lane < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + turn, mask=lane < HALF, other=0.0).to(tl.float32)
    first = low
    second = high
    if NORMS:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(squares / DIM + epsilon)[:, None]
        scale = scales + head * DIM + lane
        weight = tl.load(scale, mask=inside & is_turned, other=0.0).to(tl.float32)
        first = rounded(rounded(low * factor, kind) * weight, kind)
        weight = tl.load(scale + HALF, mask=inside & is_turned, other=0.0).to(tl.float32)
        second = rounded(rounded(high * factor, kind) * weight, kind)
    left = rounded(first * cosine, kind) - rounded(second * sine, kind)
    right = rounded(first * sine, kind) + rounded(second * cosine, kind)
    is_query = inside & (head < QUERIES)
    tl.store(source, left.to(kind), mask=is_query)
    tl.store(source + HALF, right.to(kind), mask=is_query)
    target = cache + (place * 2 * KEYS + head - QUERIES) * DIM + lane
    is_kept = inside & (head >= QUERIES)
    tl.store(target, tl.where(is_turned, left, low).to(kind), mask=is_kept)
    tl.store(target + HALF, tl.where(is_turned, right, high).to(kind), mask=is_kept)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """See fused.py."""
    size, out = x.shape[1], torch.empty_like(x)
    add_norm_kernel[(len(x),)](
        *(x, x if delta is None else delta, weight, out, epsilon),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ADDS=delta is not None,
        num_warps=4 if size <= 2048 else 8,
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See fused.py."""
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    grid = (tokens, triton.cdiv(size, SILU_BLOCK))
    silu_mul_kernel[grid](gate_up, out, SIZE=size, BLOCK=SILU_BLOCK)
    return out


def turn_and_store(
    heads: Tensor,
    at: Tensor,
    cos: Tensor,
    sin: Tensor,
    scales: Tensor | None,
    epsilon: float,
    cache: Tensor,
) -> None:
    """See fused.py."""
    tokens, count, dim = heads.shape
    keys = cache.shape[2]
    turn_and_store_kernel[(tokens, triton.cdiv(count, HEADS_BLOCK))](
        *(heads, at, cos, sin, cos if scales is None else scales, cache, epsilon, len(cos)),
        QUERIES=count - 2 * keys,
        KEYS=keys,
        DIM=dim,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        BLOCK=HEADS_BLOCK,
        NORMS=scales is not None,
    )
