"""Seeded random weights of a published shape: GGUF files and Hugging Face folders.

    write_gguf(rung("3b").spec, Path("3b.gguf"), "Q4_0")  # streamed, 1.9 GB
    write_hf_folder(rung("135m").spec, Path("135m"), dtype="bf16")  # for transformers 4 and 5

Tensors, types and bytes a token are a real file's (`models.formats`): so are time and memory; text
is noise. Spreads keep the size of activations through any number of layers, with logits of
standard deviation 3; the HF folder takes transformers' `initializer_range`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from models.chat_template import CHATML
from models.errors import UnsupportedModel
from models.formats import BLOCKS, GgufTensor, check_made
from models.gguf_writer import Vocabulary, write_file
from models.hf_config import ARCHITECTURES, FAMILIES
from models.manifest import (
    FileFacts,
    HashedFile,
    Manifest,
    Progress,
    atomic_file,
    atomic_folder,
    file_facts,
    manifest_path,
    write_manifest,
)
from models.random_quant_blocks import Weights, as_bytes, stored_as
from models.spec import ModelSpec, RopeScaling, TensorShape
from models.tokenizer import SPECIAL_TOKENS, shipped, shipped_files, shipped_mark

# Part of the manifest: weights that another generator or another tokenizer made are made again.
GENERATOR = f"synthesis 1, tokenizer {shipped_mark()}"
LOGIT_SPREAD = 3.0

# Name of a dtype: that of ggml and safetensors, torch's name.
DTYPES = {"fp32": ("F32", "float32"), "fp16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}


def write_gguf(
    spec: ModelSpec,
    path: Path,
    weight_format: str = "Q4_0",
    seed: int = 0,
    progress: Progress | None = None,
) -> Manifest:
    """Write a GGUF file of `spec` with random weights and its manifest, atomically.

    Takes up to 300 MB of memory. Raises UnsupportedModel for an unknown family or format.
    """
    path = Path(path)
    weights = _weights(spec, seed)
    check_made(weight_format)
    vocabulary = shipped_vocabulary(spec.vocabulary)
    manifest_path(path).unlink(missing_ok=True)
    with atomic_file(path) as temporary:
        data = partial(_gguf_data, spec, weights)
        label = f"writing {path.name}"
        facts = write_file(spec, weight_format, vocabulary, temporary, data, progress, label)
    files = {path.name: facts}
    manifest = Manifest("gguf", spec, weight_format, "synthetic", files, GENERATOR, seed)
    write_manifest(path, manifest)
    return manifest


def write_hf_folder(
    spec: ModelSpec,
    folder: Path,
    dtype: str = "bf16",
    seed: int = 0,
    progress: Progress | None = None,
    initializer_range: float = 0.02,
) -> Manifest:
    """Write a folder that AutoModelForCausalLM loads, with its manifest, atomically.

    Matrices and biases: mean 0, standard deviation `initializer_range`; norms: [0.9, 1.1). Raises
    UnsupportedModel for an unknown family or dtype.
    """
    weights = _weights(spec, seed)
    if dtype not in DTYPES:
        raise UnsupportedModel(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    kind = DTYPES[dtype][0]

    def data(tensor: TensorShape) -> Iterator[memoryview]:
        if "norm" not in tensor.name:
            yield from weights.stream(tensor.name, kind, tensor.elements, initializer_range)
            return
        values = weights.vector(tensor.name, tensor.elements, 0.9, 1.1)
        yield as_bytes(stored_as(kind, values))

    with atomic_folder(Path(folder)) as temporary:
        files = write_safetensors(spec, temporary, dtype, data, progress)
        texts = {
            "config.json": hf_config(spec, dtype, initializer_range),
            **shipped_files(spec.vocabulary, spec.context),
        }
        for name, content in texts.items():
            indent = None if name == "tokenizer.json" else 2
            text = json.dumps(content, ensure_ascii=False, indent=indent) + "\n"
            (temporary / name).write_text(text, encoding="utf-8")
            files[name] = file_facts(temporary / name)
        manifest = Manifest("hf", spec, dtype, "synthetic", files, GENERATOR, seed)
        write_manifest(temporary, manifest)
    return manifest


def hf_config(spec: ModelSpec, dtype: str, initializer_range: float = 0.02) -> dict[str, Any]:
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
        "initializer_range": initializer_range,
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


def shipped_vocabulary(size: int) -> Vocabulary:
    """The shipped tokenizer, cut or padded to `size`, as GGUF stores it."""
    model = shipped(size)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    return Vocabulary(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        types=[control] * len(SPECIAL_TOKENS) + [normal] * (len(tokens) - len(SPECIAL_TOKENS)),
        merges=[f"{left} {right}" for left, right in model["merges"]],
        bos_id=0,
        eos_id=2,
        pad_id=0,
        chat_template=CHATML,
    )


def _weights(spec: ModelSpec, seed: int) -> Weights:
    if spec.family not in FAMILIES:
        raise UnsupportedModel(
            f"model family {spec.family!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    return Weights(seed, max(tensor.elements for tensor in spec.tensors()))


def _gguf_data(spec: ModelSpec, weights: Weights, tensor: GgufTensor) -> Iterator[memoryview]:
    if tensor.hf_name is None:
        assert spec.rope_scaling is not None
        yield as_bytes(rope_factors(spec, spec.rope_scaling))
    elif len(tensor.shape) == 1:
        low, high = (0.9, 1.1) if "norm" in tensor.name else (-0.1, 0.1)
        yield as_bytes(weights.vector(tensor.name, tensor.elements, low, high))
    else:
        yield from weights.stream(tensor.name, tensor.type, tensor.elements, _std(spec, tensor))


def _std(spec: ModelSpec, tensor: GgufTensor) -> float:
    """Standard deviation of a matrix: gain / sqrt(inputs), which keeps the size of activations.

    The head (or tied embedding) makes logits of LOGIT_SPREAD. The MLP adds twice as much as it
    reads: else a tied model repeats its last token for ever.
    """
    is_head = tensor.name == "output.weight" or (spec.tied and tensor.name == "token_embd.weight")
    if tensor.name == "token_embd.weight" and not is_head:
        return 1.0
    gain = 2.0 if tensor.name.endswith("ffn_down.weight") else 1.0
    if is_head:
        gain = LOGIT_SPREAD
    return gain / math.sqrt(tensor.shape[-1])


def write_safetensors(
    spec: ModelSpec,
    folder: Path,
    dtype: str,
    data: Callable[[TensorShape], Iterable[bytes | memoryview]],
    progress: Progress | None,
) -> dict[str, FileFacts]:
    """model.safetensors, by name. `data`: a tensor's bytes in chunks."""
    kind = DTYPES[dtype][0]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in spec.tensors():
        begin, end = end, end + tensor.elements * BLOCKS[kind].bytes
        place = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[tensor.name] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    name = "model.safetensors"
    out = HashedFile(folder / name)
    try:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in spec.tensors():
            for chunk in data(tensor):
                out.write(chunk)
            if progress:
                progress(f"writing {name}", out.bytes / (8 + len(text) + end))
    finally:
        facts = out.close()
    return {name: facts}
