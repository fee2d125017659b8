"""Seeded random weights of a published shape: GGUF files and Hugging Face folders.

    write_gguf(rung("3b").spec, Path("3b.gguf"), "Q4_0")  # streamed, 1.9 GB
    write_hf_folder(rung("135m").spec, Path("135m"), "bf16")  # for transformers 4 and 5

Tensors, types and bytes a token are a real file's (`models.formats`): so are time and memory; text
is noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import UnsupportedModel
from models.formats import BLOCKS, GgufTensor
from models.gguf_writer import write_file
from models.hf_config import ARCHITECTURES, FAMILIES
from models.manifest import (
    Manifest,
    Progress,
    atomic_file,
    atomic_folder,
    manifest_path,
    write_manifest,
)
from models.random_quant_blocks import Weights, as_bytes
from models.spec import ModelSpec, RopeScaling
from models.tokenizer import shipped_mark, write_shipped

# Part of the manifest: weights that another generator or another tokenizer made are made again.
GENERATOR = f"synthesis 2, tokenizer {shipped_mark()}"

# Name of a dtype: that of ggml and safetensors, torch's name.
DTYPES = {"fp32": ("F32", "float32"), "fp16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}


def write_gguf(
    spec: ModelSpec,
    path: Path,
    weight_format: str = "Q4_0",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file of `spec` with random weights and its manifest, atomically.

    Takes up to 300 MB of memory. Raises UnsupportedModel for an unknown family or format.
    """
    path = Path(path)
    _check_family(spec)
    weights = Weights(spec, seed)

    def data(tensor: GgufTensor) -> Iterable[memoryview]:
        if tensor.hf_name is not None:
            return weights.stream(tensor.hf_name, tensor.type)
        assert spec.rope_scaling is not None
        return [as_bytes(rope_factors(spec, spec.rope_scaling))]

    manifest_path(path).unlink(missing_ok=True)
    with atomic_file(path) as temporary:
        write_file(spec, weight_format, temporary, data, progress)
    write_manifest(path, Manifest("gguf", spec, weight_format, "synthetic", GENERATOR, seed))


def write_hf_folder(
    spec: ModelSpec,
    folder: Path,
    dtype: str = "bf16",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a folder that AutoModelForCausalLM loads, with its manifest, atomically.

    Raises UnsupportedModel for an unknown family or dtype.
    """
    _check_family(spec)
    if dtype not in DTYPES:
        raise UnsupportedModel(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    with atomic_folder(Path(folder)) as temporary:
        _write_safetensors(spec, temporary / "model.safetensors", dtype, seed, progress)
        write_texts(spec, temporary, dtype)
        write_manifest(temporary, Manifest("hf", spec, dtype, "synthetic", GENERATOR, seed))


def write_texts(spec: ModelSpec, folder: Path, dtype: str) -> None:
    """config.json and the shipped tokenizer's files."""
    config = json.dumps(hf_config(spec, dtype), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    write_shipped(folder, spec.vocabulary, spec.context)


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """config.json of `spec`, with RoPE as transformers 4 and as 5 reads it."""
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
        "architectures": [ARCHITECTURES[spec.family]],
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
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": DTYPES[dtype][1],
    }


def rope_factors(spec: ModelSpec, scaling: RopeScaling) -> npt.NDArray[np.float32]:
    """Llama 3's divisor of each rotary frequency, [head_dim / 2] (`rope_freqs.weight`)."""
    frequencies = 1.0 / spec.rope_theta ** (
        np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    )
    # Full turns within the original context.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    factors = 1.0 / ((1 - smooth) / scaling.factor + smooth)
    factors = np.where(
        turns < scaling.low_freq_factor,
        scaling.factor,
        np.where(turns > scaling.high_freq_factor, 1.0, factors),
    )
    return factors.astype(np.float32)


def _check_family(spec: ModelSpec) -> None:
    if spec.family not in FAMILIES:
        raise UnsupportedModel(
            f"model family {spec.family!r} is not supported; known: {', '.join(FAMILIES)}"
        )


def _write_safetensors(
    spec: ModelSpec, file: Path, dtype: str, seed: int, progress: Progress | None
) -> None:
    kind, weights = DTYPES[dtype][0], Weights(spec, seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in spec.tensors():
        begin, end = end, end + tensor.elements * BLOCKS[kind].bytes
        place = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[tensor.name] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in spec.tensors():
            for chunk in weights.stream(tensor.name, kind):
                out.write(chunk)
            if progress:
                progress(f"writing {file.name}", out.tell() / (8 + len(text) + end))
