"""Tiny GGUF files of any architecture that llama.cpp knows, whose tensors llama.cpp names itself.

    path = write_architecture("jamba", folder)
    path = write_architecture("smallthinker", folder, with_experts=True)

llama.cpp makes a model of metadata alone (`llama_model_init_from_user`) and asks for the data of
each tensor: that gives names and shapes, and the file is written with random weights.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as bindings

from tests.gguf_families import VOCABULARY, add_vocabulary, random_values

Metadata = dict[str, Any]

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, INNER = 192, 6, 3, 32, 4, 320
# Layer 1 does not attend.
HYBRIDS = ("granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h", "plamo2")
LATENT = ("deepseek2", "deepseek32", "kimi-linear", "mistral4")
# Latent attention whose keys and values are cached as those of all heads.
DECOMPRESSED = ("minicpm3", "plm")
WINDOWS = (
    *("afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3n", "llama4"),
    *("mimo2", "olmo2", "plamo3", "smallthinker"),
)
# What stays float32 beside vectors, as llama.cpp quantizes.
WHOLE = re.compile(
    r"bias|conv|norm|gate_inp|ssm_(a|d|ba|alpha|beta|dt|x)\b|rope|altup|laurel|scale"
)


def write_architecture(
    architecture: str,
    folder: Path,
    *,
    with_experts: bool = False,
    weight_format: str = "Q5_0",
    parts: int = 1,
) -> Path:
    """Write the file; return its first part. Raises ValueError where llama.cpp refuses the
    metadata."""
    metadata = _metadata(architecture, with_experts)
    tensors = _tensors(architecture, metadata, folder)
    path = folder / f"{architecture}.gguf"
    most = -(-len(tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weight_format}"])
    _add(writer, architecture, metadata)
    add_vocabulary(writer)
    random = np.random.default_rng(5)
    for name, shape in tensors.items():
        stored = gguf.GGMLQuantizationType[weight_format]
        is_odd = shape[-1] % gguf.GGML_QUANT_SIZES[stored][0] != 0
        if len(shape) == 1 or is_odd or WHOLE.search(name):
            stored = gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(random_values(name, shape, random), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / f"{architecture}-00001-of-{parts:05}.gguf" if parts > 1 else path


def _metadata(architecture: str, with_experts: bool) -> Metadata:
    """Sizes for every architecture; each reads those that it knows."""
    heads: Any = HEADS
    kv_heads: Any = KV_HEADS
    if architecture in LATENT:
        kv_heads = 1
    if architecture in DECOMPRESSED:
        kv_heads = HEADS
    if architecture in HYBRIDS:
        heads = [0 if layer == 1 else HEADS for layer in range(LAYERS)]
        kv_heads = [0 if count == 0 else kv_heads for count in heads]
    inner: Any = INNER
    if architecture == "nemotron_h":
        inner = [0, 0, INNER, INNER]
    metadata: Metadata = {
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "leading_dense_block_count": 1,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 64,
        "attention.clamp_kqv": 1.0,
        "attention.max_alibi_bias": 8.0,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 4096,
        "rope.dimension_sections": [HEAD // 4] * 4,
        "full_attention_interval": 2,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "ssm.inner_size": 2 * HIDDEN,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 32,
        "ssm.time_step_rank": HEADS,
        "ssm.group_count": 0 if architecture == "plamo2" else 2,
        "kda.head_dim": 32,
        "shortconv.l_cache": 3,
        "embedding_length_per_layer_input": 32,
    }
    if architecture in LATENT:
        metadata |= {
            "attention.key_length": 96,
            "attention.value_length": 64,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
            "rope.dimension_count": 32,
        }
    if architecture in WINDOWS:
        metadata["attention.sliding_window"] = 64
    if architecture == "mimo2":  # which says of each layer whether it has a window
        metadata["attention.sliding_window_pattern"] = [layer % 2 for layer in range(LAYERS)]
    if with_experts:
        metadata |= {
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_feed_forward_length": INNER,
            "expert_shared_feed_forward_length": INNER // 2,
            "expert_gating_func": 2,
            "expert_group_scale": 1.0,
            "experts_per_group": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
            "interleave_moe_layer_step": 2,
        }
    return metadata


def _add(writer: gguf.GGUFWriter, architecture: str, metadata: Metadata) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", list: "array"}
    for key, value in metadata.items():
        getattr(writer, f"add_{kinds[type(value)]}")(f"{architecture}.{key}", value)


class _FileParameters(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def _tensors(architecture: str, metadata: Metadata, folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes, (experts, rows, columns), of the tensors that llama.cpp asks for."""
    path = folder / "metadata.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _add(writer, architecture, metadata)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    ggml.gguf_init_from_file.argtypes = (ctypes.c_char_p, _FileParameters)
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.ggml_get_name.argtypes = (ctypes.c_void_p,)
    ggml.ggml_get_name.restype = ctypes.c_char_p
    shapes: dict[str, tuple[int, ...]] = {}

    def take(tensor: int, _: Any) -> None:
        sizes = [int(size) for size in (ctypes.c_int64 * 4).from_address(tensor + 16)]  # its `ne`
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[ggml.ggml_get_name(tensor).decode()] = tuple(reversed(sizes))

    settings = bindings.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = bindings.llama_model_init_from_user(
        ggml.gguf_init_from_file(str(path).encode(), _FileParameters(True, None)),
        bindings.llama_model_set_tensor_data_t(take),
        None,
        settings,
    )
    path.unlink()
    if not model:
        raise ValueError(f"llama.cpp makes no model of architecture {architecture!r}")
    bindings.llama_model_free(model)
    return shapes
