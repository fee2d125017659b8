"""Seeded random weights of a published shape: GGUF files and Hugging Face folders.

    write_gguf(ladder_model("3b").spec, Path("3b.gguf"), "Q4_0")  # streamed, 1.9 GB
    write_hf_folder(ladder_model("135m").spec, Path("135m"), "bf16")  # for transformers 4 and 5
    write_gguf_shape(model.shape, model.spec, Path("qwen3.5.gguf"), "Q4_0")  # a LadderModel's

The tensors and their types are those of a real file (weight_formats.py), so that
loading and computing take the same time and memory; the text is noise. The standard deviations are
chosen so that activations keep their size through any number of layers, and logits have the
standard deviation LOGIT_SPREAD.

To save time and memory, random numbers are drawn once, as a pool of normal floats, and quantized
once for each type and standard deviation, as a pool of blocks. A tensor repeats such a pool from
its own offset. The lengths of the pools are primes larger than the number of rows of any matrix, so
that no two rows of a matrix are equal: equal rows of an embedding would tie at every argmax.
"""

from __future__ import annotations

import ctypes
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from crossover.models.gguf.shapes import GgufShape
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec, RopeScaling
from crossover.models.text.gguf_vocabulary import llama_library
from crossover.models.text.tokenizer import write_shipped
from crossover.models.weights.gguf_writer import write_file, write_shape_file
from crossover.models.weights.safetensors_reader import EMBEDDING, HEAD, Floats
from crossover.models.weights.weight_formats import BLOCKS, GgufTensorLayout
from crossover.models.weights.weights_manifest import (
    GENERATOR,
    Manifest,
    Progress,
    atomic_file,
    atomic_folder,
    manifest_path,
    write_manifest,
)

# Weight format -> the name of the type in ggml and safetensors, and in torch.
DTYPES = {"fp32": ("F32", "float32"), "fp16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}

LOGIT_SPREAD = 3.0
_FLOATS = 1048573  # in the pool of floats
_LONGEST_SLICE = 1 << 21  # floats that are read at once
_POOL_BLOCKS = (4093, 65521, 262139)  # in a pool of blocks; the smallest that is long enough
_QUANTIZED = 4096  # blocks that are quantized; pools are drawn from them
_START_STEP = 7919  # distance of the offsets of two tensors in a pool; a prime

Bytes = npt.NDArray[np.uint8]


def write_gguf(
    spec: ModelSpec,
    path: Path,
    weight_format: str = "Q4_0",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file of `spec` with random weights and its manifest, atomically.

    Takes up to 300 MB of memory. Raises UnsupportedModel for an unknown format.
    """
    weights = RandomWeights(spec, seed)

    def data(tensor: GgufTensorLayout) -> Iterable[memoryview]:
        if tensor.hf_name is not None:
            return weights.stream(tensor.hf_name, tensor.type)
        assert spec.rope_scaling is not None
        return [as_bytes(rope_factors(spec, spec.rope_scaling))]

    manifest_path(path).unlink(missing_ok=True)
    with atomic_file(path) as temporary:
        write_file(spec, weight_format, temporary, data, progress)
    write_manifest(path, Manifest("gguf", spec, weight_format, "synthetic", GENERATOR, seed))


def write_gguf_shape(
    shape: GgufShape,
    spec: ModelSpec,
    path: Path,
    weight_format: str,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file of this shape and its manifest, as `write_gguf` does. `spec` goes into the
    manifest."""
    shape = shape.in_format(weight_format)
    weights = ShapeWeights(shape.tensors(), seed)
    manifest_path(path).unlink(missing_ok=True)
    with atomic_file(path) as temporary:
        write_shape_file(spec.name, shape, weight_format, temporary, weights.stream, progress)
    write_manifest(path, Manifest("gguf", spec, weight_format, "synthetic", GENERATOR, seed))


def write_hf_folder(
    spec: ModelSpec,
    folder: Path,
    dtype: str = "bf16",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a folder that AutoModelForCausalLM loads, with its manifest, atomically."""
    kind, weights = DTYPES[dtype][0], RandomWeights(spec, seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in spec.tensors():
        begin, end = end, end + tensor.elements * BLOCKS[kind].bytes
        entry = {"dtype": kind, "shape": tensor.shape, "data_offsets": [begin, end]}
        header[tensor.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_folder(folder) as temporary:
        with (temporary / "model.safetensors").open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in spec.tensors():
                if progress:
                    progress(f"writing {tensor.name}", out.tell() / end)
                out.writelines(weights.stream(tensor.name, kind))
        write_texts(spec, temporary, dtype)
        write_manifest(temporary, Manifest("hf", spec, dtype, "synthetic", GENERATOR, seed))


def write_texts(spec: ModelSpec, folder: Path, dtype: str) -> None:
    """Write config.json and the files of the shipped tokenizer."""
    config = json.dumps(hf_config(spec, dtype), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    write_shipped(folder, spec.vocabulary, spec.context)


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return a config.json with the RoPE keys of transformers 4 and of transformers 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_context,
        }
    return {
        "architectures": [FAMILIES[spec.family].architecture],
        "model_type": spec.family,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope if spec.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "sliding_window": None,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": DTYPES[dtype][1],
    }


def rope_factors(spec: ModelSpec, scaling: RopeScaling) -> npt.NDArray[np.float32]:
    """Return Llama 3's divisor of each rotary frequency, [head_dim / 2] (`rope_freqs.weight`).

    Frequencies with fewer than `low_freq_factor` full turns within the original context are divided
    by `factor`, and those with more than `high_freq_factor` are unchanged. Between the two, both
    are mixed.
    """
    frequencies = spec.rope_theta ** (-np.arange(0, spec.head_dim, 2) / spec.head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    unscaled_share = np.clip((turns - low) / (high - low), 0, 1)
    factors: Floats = (1 / ((1 - unscaled_share) / scaling.factor + unscaled_share)).astype(
        np.float32
    )
    return factors


class RandomTensors(ABC):
    """Random tensors by their names. The same seed gives the same bytes."""

    pool_blocks: ClassVar[tuple[int, ...]] = _POOL_BLOCKS

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """`shapes`: the shape of each tensor, in which the length of a row comes last."""
        self._seed = seed
        self._shapes = shapes
        self._starts = {name: _START_STEP * number for number, name in enumerate(self._shapes)}
        self._pools: dict[tuple[str, float], Bytes] = {}  # by type and standard deviation
        pool = np.random.default_rng(seed).standard_normal(_FLOATS, dtype=np.float32)
        self._floats = np.resize(pool, _FLOATS + _LONGEST_SLICE)

    def rows(self, name: str, first: int, last: int) -> Floats:
        """Return rows first..last-1 of a matrix, or elements of a vector, as
        crossover.models.weights.safetensors_reader.Rows does."""
        shape = self._shapes[name]
        row_elements = math.prod(shape[1:])
        start = (self._starts[name] + first * row_elements) % _FLOATS
        end = start + (last - first) * row_elements
        values = self._floats[start:end].reshape(-1, *shape[1:])
        if len(shape) == 1:
            return self.vector(name, values)
        return values * np.float32(self.std(name))

    def stream(self, name: str, kind: str) -> Iterator[memoryview]:
        """Yield the tensor's bytes in chunks. `kind`: a key of BLOCKS."""
        shape, block = self._shapes[name], BLOCKS[kind]
        if len(shape) == 1:
            yield as_bytes(stored_as(kind, self.rows(name, 0, shape[0])))
            return
        pool = self._pool(kind, self.std(name))
        remaining_bytes = math.prod(shape) // block.weights * block.bytes
        position = self._starts[name] * block.bytes % len(pool)
        while remaining_bytes:
            chunk = pool[position : position + remaining_bytes]
            yield as_bytes(chunk)
            remaining_bytes -= len(chunk)
            position = 0

    def vector(self, name: str, values: Floats) -> Floats:
        """Return the vector that is made of standard normal values: values near 1 for norms and
        scales, near 0 for biases."""
        return values / np.float32(20) + np.float32("norm" in name or "scale" in name)

    @abstractmethod
    def std(self, name: str) -> float:
        """Return the standard deviation of a matrix."""

    def _pool(self, kind: str, std: float) -> Bytes:
        """Return the bytes that tensors of a type and standard deviation repeat, [bytes]. They are
        made once."""
        if (kind, std) not in self._pools:
            if BLOCKS[kind].weights == 1:
                stored = stored_as(kind, self._floats[:_FLOATS] * np.float32(std))
            else:
                stored = self._blocks(kind, std)
            self._pools[kind, std] = stored.reshape(-1).view(np.uint8)
        return self._pools[kind, std]

    def _blocks(self, kind: str, std: float) -> Bytes:
        """Return random blocks of a quantized type, uint8 [blocks, bytes of a block]."""
        block = BLOCKS[kind]
        max_blocks = max(map(math.prod, self._shapes.values())) // block.weights
        lengths = self.pool_blocks
        length = next((length for length in lengths if length >= max_blocks), lengths[-1])
        values = self._floats[: _QUANTIZED * block.weights] * np.float32(std)
        blocks = np.empty((_QUANTIZED, block.bytes), np.uint8)
        quantize_chunk = llama_library().llama_cpp._lib.ggml_quantize_chunk
        quantize_chunk.argtypes = [
            ctypes.c_int,  # type
            ctypes.c_void_p,  # source
            ctypes.c_void_p,  # destination
            ctypes.c_int64,  # first value
            ctypes.c_int64,  # number of rows
            ctypes.c_int64,  # values of a row
            ctypes.c_void_p,  # importance matrix
        ]
        quantize_chunk(
            GGMLQuantizationType[kind],
            values.ctypes.data,
            blocks.ctypes.data,
            0,
            _QUANTIZED,
            block.weights,
            None,
        )
        return blocks[np.random.default_rng(self._seed).integers(0, _QUANTIZED, length)]


class RandomWeights(RandomTensors):
    """The tensors of a ladder model, by their Hugging Face names."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__({tensor.name: tensor.shape for tensor in spec.tensors()}, seed)
        self._spec = spec

    def rows(self, name: str, first: int, last: int) -> Floats:
        return super().rows(EMBEDDING if self._spec.tied and name == HEAD else name, first, last)

    def std(self, name: str) -> float:
        """Return gain / sqrt(inputs), which keeps the size of activations.

        The MLP adds twice as much as it reads, because otherwise a tied model repeats its last
        token forever.
        """
        is_head = name == HEAD or (self._spec.tied and name == EMBEDDING)
        if name == EMBEDDING and not is_head:
            return 1.0
        return _gain(is_head, name.endswith("down_proj.weight")) / math.sqrt(self._shapes[name][1])


class ShapeWeights(RandomTensors):
    """The tensors of a shape of crossover.models.gguf.shapes, by their GGUF names."""

    pool_blocks = (*_POOL_BLOCKS, 524287)  # for embeddings of 262,144 rows

    def vector(self, name: str, values: Floats) -> Floats:
        if name.endswith("ssm_a"):  # negative, so that a recurrent state decays
            return -np.abs(values) - np.float32(0.1)
        if name == "rope_freqs.weight":
            return np.ones_like(values)
        ones = super().vector(name, values)
        # Gemma multiplies embeddings by sqrt(hidden). Layers must add more than that, because
        # otherwise a tied model repeats its last token forever.
        return ones * np.float32(16) if name.endswith("post_ffw_norm.weight") else ones

    def std(self, name: str) -> float:
        is_head = name == "output.weight" or (
            name == "token_embd.weight" and "output.weight" not in self._shapes
        )
        if name == "token_embd.weight" and not is_head:
            return 1.0
        return _gain(is_head, "ffn_down" in name) / math.sqrt(self._shapes[name][-1])


def _gain(is_head: bool, is_mlp_output: bool) -> float:
    """Return the standard deviation of a product's outputs for inputs of standard deviation 1."""
    if is_head:
        return LOGIT_SPREAD
    return 2.0 if is_mlp_output else 1.0


def stored_as(kind: str, values: Floats) -> npt.NDArray[Any]:
    """Return floats as they are stored in a file: as F32, F16 or BF16."""
    stored: npt.NDArray[Any] = quants.quantize(values, GGMLQuantizationType[kind])
    return stored


def as_bytes(values: npt.NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers
