"""Streams of random weights in their final form: ggml blocks and floats.

    >>> weights = Weights(seed=0, largest_elements=1 << 20)
    >>> stream = weights.stream("blk.0.attn_q.weight", "Q4_0", 1 << 20, std=0.04)
    >>> sum(len(chunk) for chunk in stream)
    589824

A pool of blocks is drawn once a type and spread; a tensor reads the pool round and round from its
own offset. The pool's length is a prime above any number of rows: no two rows of a matrix are
alike (twins in an embedding tie at every argmax). Mean 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from models.formats import BLOCKS

# Lengths of pools, in blocks; all prime.
_POOL_BLOCKS = (4093, 65521, 262139)
_POOL_ELEMENTS = (65521, 1048573, 8388593)
_PLAIN = ("F32", "F16", "BF16")

Bytes = npt.NDArray[np.uint8]


class Weights:
    """A seeded source of tensors: same seed, name, type and spread, same bytes."""

    def __init__(self, seed: int, largest_elements: int) -> None:
        """`largest_elements`: of the largest tensor; small models get small pools."""
        self._seed = seed
        self._largest = largest_elements
        self._pools: dict[tuple[str, float], Bytes] = {}

    def stream(self, name: str, kind: str, elements: int, std: float) -> Iterator[memoryview]:
        """The tensor's bytes in chunks. `kind`: a key of BLOCKS."""
        unit = BLOCKS[kind]
        pool = self._pool(kind, std)
        left = elements // unit.weights * unit.bytes
        units = len(pool) // unit.bytes
        position = int(self._generator(name).integers(units)) * unit.bytes
        while left:
            chunk = pool[position : position + left]
            yield memoryview(chunk)  # type: ignore[arg-type]  # numpy arrays are buffers
            left -= len(chunk)
            position = 0

    def vector(self, name: str, length: int, low: float, high: float) -> npt.NDArray[np.float32]:
        """A small float32 vector, uniform in [low, high): norms and biases."""
        return self._generator(name).uniform(low, high, length).astype(np.float32)

    def _pool(self, kind: str, std: float) -> Bytes:
        key = (kind, std)
        if key not in self._pools:
            generator = self._generator(kind)
            lengths = _POOL_ELEMENTS if kind in _PLAIN else _POOL_BLOCKS
            wanted = self._largest // BLOCKS[kind].weights
            length = next((one for one in lengths if one >= wanted), lengths[-1])
            if kind in _PLAIN:
                values = generator.standard_normal(length, dtype=np.float32) * np.float32(std)
                self._pools[key] = stored_as(kind, values).view(np.uint8)
            else:
                self._pools[key] = _blocks(generator, kind, length, std)
        return self._pools[key]

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16 bit patterns of finite float32 values, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def stored_as(kind: str, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Floats as a file of type F32, F16 or BF16 has them."""
    if kind == "BF16":
        return to_bf16(np.ascontiguousarray(values))
    return values.astype(np.float16) if kind == "F16" else values


def as_bytes(values: npt.NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers


# Standard deviation of the quantised integers, uniform over their whole range: sqrt((levels^2 - 1)
# / 12).
def _spread(levels: int) -> float:
    return math.sqrt((levels**2 - 1) / 12)


def _blocks(generator: np.random.Generator, kind: str, length: int, std: float) -> Bytes:
    """`length` random blocks of `kind` (ggml-common.h): mean 0, standard deviation `std`."""
    out = generator.integers(0, 256, (length, BLOCKS[kind].bytes), dtype=np.uint8)
    match kind:
        case "Q4_0":  # fp16 d, 16 bytes of nibbles: d * (q - 8)
            out[:, 0:2] = _scales(generator, length, std / _spread(16))
        case "Q5_0":  # fp16 d, 4 bytes of high bits, nibbles: d * (q - 16)
            out[:, 0:2] = _scales(generator, length, std / _spread(32))
        case "Q8_0":  # fp16 d, 32 int8: d * q
            out[:, 0:2] = _scales(generator, length, std / _spread(256))
        case "Q5_1":  # fp16 d, fp16 m, high bits, nibbles: d * q + m, m = -15.5 d
            scales = _scales(generator, length, std / _spread(32))
            out[:, 0:2], out[:, 2:4] = scales, _half(scales, -15.5)
        case "Q4_K" | "Q5_K":
            # fp16 d, fp16 dmin, 8 pairs of 6 bits: d * scale * q - dmin * min,
            # with min = scale and dmin = mean(q) * d
            levels = 16 if kind == "Q4_K" else 32
            sixes = generator.integers(24, 64, (length, 8), dtype=np.uint8)
            root_mean_square = math.sqrt(float(np.mean(sixes.astype(np.float64) ** 2)))
            scales = _scales(generator, length, std / _spread(levels) / root_mean_square)
            out[:, 0:2], out[:, 2:4] = scales, _half(scales, (levels - 1) / 2)
            out[:, 4:16] = _packed_sixes(sixes)
        case "Q6_K":  # 128 low nibbles, 64 high pairs, 16 int8 scales, fp16 d: d * scale * (q - 32)
            signs = generator.choice(np.array([-1, 1], np.int8), (length, 16))
            bytes16 = generator.integers(48, 128, (length, 16)).astype(np.int8) * signs
            root_mean_square = math.sqrt(float(np.mean(bytes16.astype(np.float64) ** 2)))
            out[:, 192:208] = bytes16.view(np.uint8)
            out[:, 208:210] = _scales(generator, length, std / _spread(64) / root_mean_square)
        case _:
            raise KeyError(f"no random blocks of type {kind!r}")
    return out.reshape(-1)


def _scales(generator: np.random.Generator, length: int, size: float) -> Bytes:
    """fp16 scales of both signs with root mean square `size`; [length, 2] bytes."""
    values = generator.uniform(0.75, 1.25, length) * generator.choice([-1.0, 1.0], length)
    values *= size / math.sqrt(float(np.mean(values**2)))
    stored: Bytes = values.astype(np.float16).view(np.uint8).reshape(length, 2)
    return stored


def _half(scales: Bytes, factor: float) -> Bytes:
    values = np.ascontiguousarray(scales).view(np.float16).astype(np.float32) * factor
    return values.astype(np.float16).view(np.uint8).reshape(len(scales), 2)


def _packed_sixes(sixes: Bytes) -> Bytes:
    """Eight 6-bit scales and mins (get_scale_min_k4), min = scale; [length, 12] bytes."""
    low, high = sixes[:, :4], sixes[:, 4:]
    first = low | ((high >> 4) << 6)
    return np.concatenate([first, first, (high & 15) | ((high & 15) << 4)], axis=1)
