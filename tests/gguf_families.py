"""Tiny GGUF files of the model families that people run, 1 to 8 MB each, with random weights.

    path = write_family("qwen35", folder)                  # the first part where a file is split
    path = write_family("gpt-oss", folder, Sizes(layers=8, hidden=256))

llama.cpp loads and decodes these files as it does the real ones; their text is noise. A family is a
function that gives the tensors of a layer and the metadata, named and shaped as llama.cpp's own
converter writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from crossover.models.gguf.shapes import FAMILIES as PUBLISHED_FAMILIES
from crossover.models.gguf.shapes import (
    Family,
    GgufShape,
    Metadata,
    Shapes,
    Sizes,
    attention,
    attention_metadata,
    delta_net_metadata,
    experts,
    experts_metadata,
    mlp,
    qwen_layer,
    recurrent_metadata,
)
from crossover.models.text.chat_template import CHATML
from crossover.models.text.tokenizer import SPECIAL_TOKENS, shipped

VOCABULARY = 2048


# --- parts of layers


def latent_attention(s: Sizes) -> Shapes:
    """DeepSeek's: the cache has one vector of 64 elements, and 32 with RoPE, a token."""
    return {
        "attn_norm": (s.hidden,),
        "attn_q_a": (96, s.hidden),
        "attn_q_a_norm": (96,),
        "attn_q_b": (64 * s.heads, 96),
        "attn_kv_a_mqa": (96, s.hidden),
        "attn_kv_a_norm": (64,),
        "attn_k_b": (s.heads, 64, 32),
        "attn_v_b": (s.heads, 32, 64),
        "attn_output": (s.hidden, 32 * s.heads),
    }


def mamba2(s: Sizes) -> Shapes:
    heads, convolved = s.mamba_heads, s.wide + 2 * s.groups * s.state
    return {
        "attn_norm": (s.hidden,),
        "ssm_in": (s.wide + convolved + heads, s.hidden),
        "ssm_conv1d": (convolved, 4),
        "ssm_conv1d.bias": (convolved,),
        "ssm_dt.bias": (heads,),
        "ssm_a.": (heads, 1),
        "ssm_d.": (heads, 1),
        "ssm_norm": (s.groups, s.wide // s.groups),
        "ssm_out": (s.hidden, s.wide),
    }


def short_convolution(s: Sizes) -> Shapes:
    return {
        "attn_norm": (s.hidden,),
        "shortconv.conv.weight": (s.hidden, 3),
        "shortconv.in_proj.weight": (3 * s.hidden, s.hidden),
        "shortconv.out_proj.weight": (s.hidden, s.hidden),
    }


# --- metadata


def has_mamba(s: Sizes) -> Metadata:
    return recurrent_metadata(s, s.wide, s.mamba_heads)


# --- families: a layer's tensors, and the metadata


def qwen_experts(s: Sizes) -> Shapes:
    return experts(s, "post_attention_norm", shared=True) | {"ffn_gate_inp_shexp": (s.hidden,)}


def gemma(s: Sizes, head: int | None = None) -> Shapes:
    norms: Shapes = {"post_attention_norm": (s.hidden,), "post_ffw_norm": (s.hidden,)}
    return attention(s, head, norms=True) | mlp(s) | norms


def deepseek_metadata(s: Sizes) -> Metadata:
    return {
        **attention_metadata(s),
        **experts_metadata(s),
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "attention.q_lora_rank": 96,
        "attention.kv_lora_rank": 64,
        "attention.head_count_kv": 1,
        "attention.key_length": 96,
        "attention.value_length": 64,
        "attention.key_length_mla": 64,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 32,
    }


def granite(attends: Callable[[int], bool]) -> Family:
    """`attends`: whether a layer, by its number, has attention; the others are Mamba."""

    def layer(s: Sizes, number: int) -> Shapes:
        return (attention(s) if attends(number) else mamba2(s)) | experts(s, shared=True)

    def metadata(s: Sizes) -> Metadata:
        return {
            **attention_metadata(s),
            **has_mamba(s),
            **experts_metadata(s, shared=True),
            **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1.0),
            "feed_forward_length": s.expert_inner,
            "attention.head_count_kv": [
                s.kv_heads if attends(number) else 0 for number in range(s.layers)
            ],
        }

    return Family(layer, metadata, "granitehybrid")


def lfm2_metadata(s: Sizes) -> Metadata:
    kv_heads = [s.kv_heads if layer % 3 == 2 else 0 for layer in range(s.layers)]
    return attention_metadata(s) | {"shortconv.l_cache": 3, "attention.head_count_kv": kv_heads}


def nemotron(kind: Callable[[int], str]) -> Family:
    """`kind`: of a layer, by its number: "M" (Mamba), "E" (experts) or "*" (attention)."""

    def layer(s: Sizes, number: int) -> Shapes:
        if kind(number) == "M":
            return mamba2(s)
        if kind(number) == "*":
            return attention(s)
        blocks = without_norm(experts(s, shared=True, gate=False))
        return {"attn_norm": (s.hidden,)} | blocks | {"exp_probs_b.bias": (s.experts,)}

    def metadata(s: Sizes) -> Metadata:
        kinds = [kind(number) for number in range(s.layers)]
        return {
            **attention_metadata(s),
            **has_mamba(s),
            **experts_metadata(s, shared=True),
            "feed_forward_length": [s.inner if one == "E" else 0 for one in kinds],
            "attention.head_count_kv": [s.kv_heads if one == "*" else 0 for one in kinds],
            "expert_shared_count": 1,
            "attention.layer_norm_epsilon": 1e-5,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        }

    return Family(layer, metadata, "nemotron_h_moe")


FAMILIES: dict[str, Family] = {
    **PUBLISHED_FAMILIES,
    "llama": Family(lambda s, _: attention(s) | mlp(s), attention_metadata, "llama"),
    "llama-split": Family(lambda s, _: attention(s) | mlp(s), attention_metadata, "llama"),
    "qwen3": Family(lambda s, _: attention(s, norms=True) | mlp(s), attention_metadata, "qwen3"),
    "phi3": Family(
        lambda s, _: {
            "attn_norm": (s.hidden,),
            "attn_qkv": (s.queries + 2 * s.keys, s.hidden),
            "attn_output": (s.hidden, s.queries),
            "ffn_norm": (s.hidden,),
            "ffn_up": (2 * s.inner, s.hidden),
            "ffn_down": (s.hidden, s.inner),
        },
        attention_metadata,
        "phi3",
    ),
    "gemma3": Family(
        lambda s, _: gemma(s),
        lambda s: attention_metadata(s) | {"attention.sliding_window": s.window},
        "gemma3",
    ),
    "deepseek2": Family(
        lambda s, layer: latent_attention(s) | (experts(s, shared=True) if layer else mlp(s)),
        deepseek_metadata,
        "deepseek2",
    ),
    "mamba2": Family(
        lambda s, _: mamba2(s),
        lambda s: has_mamba(s) | {"feed_forward_length": 0, "attention.head_count": 0},
        "mamba2",
    ),
    "falcon-h1": Family(
        lambda s, _: attention(s) | mamba2(s) | {"ffn_norm.": (s.hidden,)} | without_norm(mlp(s)),
        lambda s: attention_metadata(s) | has_mamba(s),
        "falcon-h1",
    ),
    "granitehybrid": granite(lambda layer: layer % 4 == 3),
    "lfm2": Family(
        lambda s, layer: (
            (attention(s, norms=True) if layer % 3 == 2 else short_convolution(s)) | mlp(s)
        ),
        lfm2_metadata,
        "lfm2",
        output_norm="token_embd_norm",
    ),
    "qwen35moe": Family(
        lambda s, layer: qwen_layer(s, layer, qwen_experts(s)),
        lambda s: attention_metadata(s) | delta_net_metadata(s) | experts_metadata(s, shared=True),
        "qwen35moe",
    ),
    "qwen3next": Family(
        lambda s, layer: qwen_layer(s, layer, qwen_experts(s), joined=True),
        lambda s: attention_metadata(s) | delta_net_metadata(s) | experts_metadata(s, shared=True),
        "qwen3next",
    ),
    "nemotron_h_moe": nemotron(lambda layer: "ME*"[layer % 3]),
}
# The families whose tiny model differs from Sizes(). Nemotron has lists of more than 64 layers in
# its metadata.
SIZES: dict[str, Sizes] = {
    "gemma3": Sizes(layers=6),
    "gemma4": Sizes(layers=5, experts=0),
    "gpt-oss": Sizes(expert_type="MXFP4"),
    "granitehybrid": Sizes(tied=True),
    "lfm2": Sizes(layers=6, tied=True),
    "nemotron_h_moe": Sizes(layers=69),
    "qwen3": Sizes(tied=True),
}
PARTS = {"llama-split": 3}  # files that a family is split into
# With routers or gates in float32: near ties may fall differently in a batch.
ROUTED = frozenset(
    {
        "qwen3moe",
        "gpt-oss",
        "deepseek2",
        "granitehybrid",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "nemotron_h_moe",
    }
)


def without_norm(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name != "ffn_norm"}


# --- the file


def write_family(name: str, folder: Path, sizes: Sizes | None = None) -> Path:
    """Write the file of a family; the first part where it is split."""
    family = FAMILIES[name]
    return write_file(name, folder, family, sizes or SIZES.get(name, Sizes()))


def write_file(
    name: str, folder: Path, family: Family, s: Sizes, *, has_weights: bool = True
) -> Path:
    """Write `name`.gguf of a family with these sizes; return the first part where it is split.

    Without weights the file has a whole header and, in place of weights and vocabulary, a hole as
    long as they are: enough for llama.cpp to size the model, in 100 kB of disk for 30 billion
    parameters.
    """
    parts = PARTS.get(name, 1)
    shape_of_file = GgufShape(family, s)
    tensors = shape_of_file.tensors()
    path = folder / f"{name}.gguf"
    most = -(-len(tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, family.architecture, split_max_tensors=most)
    writer.add_type("model")
    writer.add_name("tiny")  # llama.cpp guesses at tokenizers by the name "phi3"
    kind = (s.expert_type or s.type).replace("MXFP4", "MXFP4_MOE")
    writer.add_file_type(gguf.LlamaFileType[f"ALL_{kind}" if kind == "F32" else f"MOSTLY_{kind}"])
    for key, value in shape_of_file.metadata().items():
        kinds = {bool: "bool", int: "uint32", float: "float32", list: "array", str: "string"}
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    if has_weights:
        add_vocabulary(writer)
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(s.vocabulary)
    random = np.random.default_rng(0)
    for tensor, shape in tensors.items():
        stored = gguf.GGMLQuantizationType[shape_of_file.tensor_type(tensor, shape)]
        if has_weights:
            data = gguf.quants.quantize(random_values(tensor, shape, random), stored)
            writer.add_tensor(tensor, data, raw_dtype=stored)
        else:
            size = math.prod(gguf.quants.quant_shape_to_byte_shape(shape, stored))
            writer.add_tensor_info(tensor, shape, np.dtype(np.float32), size, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if has_weights:
        writer.write_tensors_to_file()
    else:
        writer.write_ti_data_to_file()
        sizes = [
            writer.ggml_pad(one.nbytes, writer.data_alignment) for one in writer.tensors[0].values()
        ]
    writer.close()
    if not has_weights:
        begin = writer.ggml_pad(path.stat().st_size, writer.data_alignment)
        os.truncate(path, begin + sum(sizes))
    return folder / f"{name}-00001-of-{parts:05}.gguf" if parts > 1 else path


def random_values(
    name: str, shape: tuple[int, ...], random: np.random.Generator
) -> npt.NDArray[Any]:
    """Activations stay near a size of one, and a recurrent state decays."""
    drawn = random.standard_normal(shape, dtype=np.float32)
    if name.endswith("ssm_a"):
        return -np.abs(drawn) - np.float32(0.1)
    if name == "rope_freqs.weight":
        return np.ones(shape, np.float32)
    if len(shape) == 1:
        return drawn / 20 + np.float32("norm" in name or "scale" in name)
    gain = 3.0 if name in ("output.weight", "token_embd.weight") else 1.0 + ("down" in name)
    return drawn * np.float32(gain / math.sqrt(shape[-1]))


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """The shipped tokenizer."""
    model = shipped(VOCABULARY)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
