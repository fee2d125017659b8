"""Random weights of a shape: as floats, and as streams of bytes in their final form.

    >>> from models.ladder import rung
    >>> weights = Weights(rung("135m").spec, seed=0)
    >>> weights.rows("model.embed_tokens.weight", 0, 2).shape
    (2, 576)
    >>> sum(len(one) for one in weights.stream("model.layers.0.mlp.up_proj.weight", "Q8_0"))
    940032

One pool of normal floats, and one of blocks for each type and spread, quantised by ggml, is drawn
once; a tensor reads the pool round and round from its own offset. The pools' lengths are primes
above any number of rows: no two rows of a matrix are alike (twins in an embedding tie at every
argmax). Spreads keep the size of activations through any number of layers, with logits of standard
deviation LOGIT_SPREAD.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from models.formats import BLOCKS
from models.gguf_vocabulary import llama_library
from models.safetensors_reader import EMBEDDING, HEAD, Floats
from models.spec import ModelSpec

LOGIT_SPREAD = 3.0
_FLOATS = 1048573
_LONGEST_SLICE = 1 << 21
_POOL_BLOCKS = (4093, 65521, 262139)
_QUANTISED = 4096  # blocks that a pool is drawn from

Bytes = npt.NDArray[np.uint8]


class Weights:
    """A seeded source of a model's tensors, by their Hugging Face names: same seed, same bytes."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        self._starts = {name: 7919 * number for number, name in enumerate(self._shapes)}
        self._pools: dict[tuple[str, float], Bytes] = {}
        pool = np.random.default_rng(seed).standard_normal(_FLOATS, dtype=np.float32)
        self._floats = np.resize(pool, _FLOATS + _LONGEST_SLICE)

    def rows(self, name: str, first: int, last: int) -> Floats:
        """Rows of a matrix, elements of a vector: models.safetensors_reader.Rows."""
        name = EMBEDDING if self._spec.tied and name == HEAD else name
        shape = self._shapes[name]
        each = math.prod(shape[1:])
        at = (self._starts[name] + first * each) % _FLOATS
        values = self._floats[at : at + (last - first) * each].reshape(-1, *shape[1:])
        if len(shape) == 1:
            return values / np.float32(20) + np.float32("norm" in name)
        return values * np.float32(self._std(name))

    def stream(self, name: str, kind: str) -> Iterator[memoryview]:
        """The tensor's bytes in chunks. `kind`: a key of BLOCKS."""
        shape, unit = self._shapes[name], BLOCKS[kind]
        if len(shape) == 1:
            yield as_bytes(stored_as(kind, self.rows(name, 0, shape[0])))
            return
        pool = self._pool(kind, self._std(name))
        left = math.prod(shape) // unit.weights * unit.bytes
        position = self._starts[name] * unit.bytes % len(pool)
        while left:
            chunk = pool[position : position + left]
            yield as_bytes(chunk)
            left -= len(chunk)
            position = 0

    def _std(self, name: str) -> float:
        """Standard deviation of a matrix: gain / sqrt(inputs), which keeps the size of activations.

        The MLP adds twice as much as it reads: else a tied model repeats its last token for ever.
        """
        is_head = name == HEAD or (self._spec.tied and name == EMBEDDING)
        if name == EMBEDDING and not is_head:
            return 1.0
        gain = LOGIT_SPREAD if is_head else 2.0 if name.endswith("down_proj.weight") else 1.0
        return gain / math.sqrt(self._shapes[name][1])

    def _pool(self, kind: str, std: float) -> Bytes:
        key = (kind, std)
        if key not in self._pools:
            if kind in ("F32", "F16", "BF16"):
                values = self._floats[:_FLOATS] * np.float32(std)
                self._pools[key] = stored_as(kind, values).view(np.uint8)
            else:
                self._pools[key] = self._blocks(kind, std)
        return self._pools[key]

    def _blocks(self, kind: str, std: float) -> Bytes:
        unit = BLOCKS[kind]
        largest = max(map(math.prod, self._shapes.values())) // unit.weights
        length = next((one for one in _POOL_BLOCKS if one >= largest), _POOL_BLOCKS[-1])
        values = self._floats[: _QUANTISED * unit.weights] * np.float32(std)
        made = np.empty((_QUANTISED, unit.bytes), np.uint8)
        quantise = llama_library().llama_cpp._lib.ggml_quantize_chunk
        quantise.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
        quantise.argtypes += [ctypes.c_void_p]
        places = (values.ctypes.data, made.ctypes.data)
        quantise(GGMLQuantizationType[kind], *places, 0, _QUANTISED, unit.weights, None)
        chosen = np.random.default_rng(self._seed).integers(0, _QUANTISED, length)
        return made[chosen].reshape(-1)


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """bfloat16 bit patterns of finite float32 values, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def stored_as(kind: str, values: Floats) -> npt.NDArray[Any]:
    """Floats as a file of type F32, F16 or BF16 has them."""
    if kind == "BF16":
        return to_bf16(np.ascontiguousarray(values))
    return values.astype(np.float16) if kind == "F16" else values


def as_bytes(values: npt.NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers
