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
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from models.chat_template import CHATML
from models.errors import UnsupportedModel
from models.formats import BLOCKS, GgufTensor, check_made
from models.gguf_writer import Vocabulary, write_file
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
from models.random_quant_blocks import Weights, to_bf16
from models.spec import ModelSpec, RopeScaling, TensorShape
from models.tokenizer import SPECIAL_TOKENS, shipped, shipped_files, shipped_mark

# Part of the manifest: weights that another generator or another tokenizer made are made again.
GENERATOR = f"synthesis 1, tokenizer {shipped_mark()}"
SHARD_BYTES = 2 << 30
LOGIT_SPREAD = 3.0

# transformers' model_type -> its class name in config.json.
FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Name of a dtype: ggml's name, safetensors' name, torch's name.
DTYPES: dict[str, tuple[str, str, str]] = {
    "fp32": ("F32", "F32", "float32"),
    "fp16": ("F16", "F16", "float16"),
    "bf16": ("BF16", "BF16", "bfloat16"),
}


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
    _check(spec)
    check_made(weight_format)
    weights = Weights(seed, _largest(spec))
    manifest_path(path).unlink(missing_ok=True)
    with atomic_file(path) as temporary:
        data = partial(_gguf_data, spec, weights)
        label = f"writing {path.name}"
        facts = write_file(
            spec,
            weight_format,
            shipped_vocabulary(spec.vocabulary),
            temporary,
            data,
            progress,
            label,
        )
    manifest = Manifest(
        "gguf", spec, weight_format, "synthetic", {path.name: facts}, GENERATOR, seed
    )
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

    Matrices and biases: mean 0, standard deviation `initializer_range`; norms: [0.9, 1.1). Weights
    over 2 GiB are in shards. Raises UnsupportedModel for an unknown family or dtype.
    """
    folder = Path(folder)
    _check(spec)
    if dtype not in DTYPES:
        raise UnsupportedModel(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    with atomic_folder(folder) as temporary:
        weights = Weights(seed, _largest(spec))
        data = partial(_hf_data, DTYPES[dtype][0], weights, initializer_range)
        files = write_safetensors(spec, temporary, dtype, data, progress)
        texts = {
            "config.json": hf_config(spec, dtype, initializer_range),
            **shipped_files(spec.vocabulary, spec.context),
        }
        for name, content in texts.items():
            indent = None if name == "tokenizer.json" else 2
            (temporary / name).write_text(
                json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8"
            )
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
        "architectures": [FAMILIES[spec.family]],
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
        "dtype": DTYPES[dtype][2],
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


def _check(spec: ModelSpec) -> None:
    if spec.family not in FAMILIES:
        raise UnsupportedModel(
            f"model family {spec.family!r} is not supported; known: {', '.join(FAMILIES)}"
        )


def _largest(spec: ModelSpec) -> int:
    return max(tensor.elements for tensor in spec.tensors())


def _gguf_data(spec: ModelSpec, weights: Weights, tensor: GgufTensor) -> Iterator[memoryview]:
    if tensor.hf_name is None:
        assert spec.rope_scaling is not None
        yield _bytes(rope_factors(spec, spec.rope_scaling))
    elif len(tensor.shape) == 1:
        low, high = (0.9, 1.1) if "norm" in tensor.name else (-0.1, 0.1)
        yield _bytes(weights.vector(tensor.name, tensor.elements, low, high))
    else:
        yield from weights.stream(tensor.name, tensor.type, tensor.elements, _std(spec, tensor))


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return memoryview(values.view(np.uint8))  # type: ignore[arg-type]


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


class _Shard(NamedTuple):
    name: str
    tensors: list[TensorShape]


def write_safetensors(
    spec: ModelSpec,
    folder: Path,
    dtype: str,
    data: Callable[[TensorShape], Iterable[bytes | memoryview]],
    progress: Progress | None,
) -> dict[str, FileFacts]:
    """The shards, and their index where there are several. `data`: a tensor's bytes in chunks."""
    kind, stored_name, _ = DTYPES[dtype]
    width = BLOCKS[kind].bytes
    shards = _shards(spec.tensors(), width)
    files: dict[str, FileFacts] = {}
    total, done = spec.parameters * width, 0
    for shard in shards:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in shard.tensors:
            end = offset + tensor.elements * width
            header[tensor.name] = {
                "dtype": stored_name,
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        out = HashedFile(folder / shard.name)
        try:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in shard.tensors:
                for chunk in data(tensor):
                    out.write(chunk)
                    done += len(chunk)
                if progress:
                    progress(f"writing {shard.name}", done / total)
        except BaseException:
            out.abandon()
            raise
        files[shard.name] = out.close()
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {t.name: shard.name for shard in shards for t in shard.tensors},
        }
        name = "model.safetensors.index.json"
        (folder / name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files[name] = file_facts(folder / name)
    return files


def _shards(tensors: Iterable[TensorShape], width: int) -> list[_Shard]:
    groups: list[list[TensorShape]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.elements * width > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.elements * width
    if len(groups) == 1:
        return [_Shard("model.safetensors", groups[0])]
    return [
        _Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def _hf_data(kind: str, weights: Weights, std: float, tensor: TensorShape) -> Iterator[memoryview]:
    if "norm" in tensor.name:
        values = weights.vector(tensor.name, tensor.elements, 0.9, 1.1)
        if kind == "F16":
            yield _bytes(values.astype(np.float16))
        else:
            yield _bytes(to_bf16(values) if kind == "BF16" else values)
    else:
        yield from weights.stream(tensor.name, kind, tensor.elements, std)
