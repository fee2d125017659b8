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
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from crossover.models.chat_template import CHATML
from crossover.models.tokenizer import SPECIAL_TOKENS, shipped

VOCABULARY = 2048
Shapes = dict[str, tuple[int, ...]]  # tensor -> (experts, rows, columns), (rows, columns), (rows,)
Metadata = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head: int = 32  # length of a head
    inner: int = 256  # of the MLP
    experts: int = 8
    used: int = 2  # experts of a token
    expert_inner: int = 64
    window: int = 256  # tokens of a layer with a sliding window
    state: int = 32  # of a recurrent head
    groups: int = 2  # of a recurrent layer
    context: int = 4096
    vocabulary: int = VOCABULARY
    mamba_inner: int = 0  # width inside a Mamba layer; 0: twice the hidden size
    mamba_head: int = 0  # length of a head of it; 0: as an attention head's
    value_heads: int = 4  # of a gated delta net
    shared_inner: int = 0  # of the expert that every token uses; 0: as the others'
    type: str = "Q8_0"  # of matrices
    expert_type: str = ""  # of the experts' matrices; "": as the others
    parts: int = 1  # files that the model is split into
    seed: int = 0

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head

    @property
    def wide(self) -> int:
        """Width inside a Mamba layer."""
        return self.mamba_inner or 2 * self.hidden

    @property
    def mamba_heads(self) -> int:
        return self.wide // (self.mamba_head or self.head)

    @property
    def shared(self) -> int:
        return self.shared_inner or self.expert_inner

    @property
    def delta_values(self) -> int:
        """Width of the values of a gated delta net."""
        return self.value_heads * self.state


# --- parts of layers


def attention(
    s: Sizes, head: int | None = None, gated: bool = False, norms: bool = False
) -> Shapes:
    queries, keys = s.heads * (head or s.head), s.kv_heads * (head or s.head)
    shapes: Shapes = {
        "attn_norm": (s.hidden,),
        "attn_q": (queries * (2 if gated else 1), s.hidden),
        "attn_k": (keys, s.hidden),
        "attn_v": (keys, s.hidden),
        "attn_output": (s.hidden, queries),
    }
    if norms:
        shapes |= {"attn_q_norm": (head or s.head,), "attn_k_norm": (head or s.head,)}
    return shapes


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


def mlp(s: Sizes, norm: str = "ffn_norm") -> Shapes:
    gate = {"ffn_gate": (s.inner, s.hidden), "ffn_up": (s.inner, s.hidden)}
    return {norm: (s.hidden,), **gate, "ffn_down": (s.hidden, s.inner)}


def experts(s: Sizes, norm: str = "ffn_norm", shared: bool = False, gate: bool = True) -> Shapes:
    inner, hidden, count = s.expert_inner, s.hidden, s.experts
    shapes: Shapes = {
        norm: (hidden,),
        "ffn_gate_inp": (count, hidden),
        "ffn_up_exps": (count, inner, hidden),
        "ffn_down_exps": (count, hidden, inner),
    }
    if gate:
        shapes["ffn_gate_exps"] = (count, inner, hidden)
    if shared:
        shapes |= {"ffn_up_shexp": (s.shared, hidden), "ffn_down_shexp": (hidden, s.shared)}
        shapes |= {"ffn_gate_shexp": (s.shared, hidden)} if gate else {}
    return shapes


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


def delta_net(s: Sizes, joined: bool = False) -> Shapes:
    """Qwen's gated delta net; `joined`: alpha and beta in one matrix, as Qwen3-Next has them."""
    both = 2 * s.groups * s.state + s.delta_values
    heads = s.value_heads
    gates: Shapes = {"ssm_ba": (2 * heads, s.hidden)}
    if not joined:
        gates = {"ssm_alpha": (heads, s.hidden), "ssm_beta": (heads, s.hidden)}
    return {
        "attn_norm": (s.hidden,),
        "attn_qkv": (both, s.hidden),
        "attn_gate": (s.delta_values, s.hidden),
        "ssm_conv1d": (both, 4),
        "ssm_dt.bias": (heads,),
        "ssm_a.": (heads,),
        "ssm_norm": (s.state,),
        "ssm_out": (s.hidden, s.delta_values),
        **gates,
    }


def short_convolution(s: Sizes) -> Shapes:
    return {
        "attn_norm": (s.hidden,),
        "shortconv.conv.weight": (s.hidden, 3),
        "shortconv.in_proj.weight": (3 * s.hidden, s.hidden),
        "shortconv.out_proj.weight": (s.hidden, s.hidden),
    }


# --- metadata


def attends(s: Sizes) -> Metadata:
    return {
        "feed_forward_length": s.inner,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head,
        "attention.value_length": s.head,
        "rope.freq_base": 1e4,
        "rope.dimension_count": s.head,
    }


def mixes(s: Sizes, shared: bool = False) -> Metadata:
    keys = {"expert_count": s.experts, "expert_used_count": s.used}
    shared_inner = {"expert_shared_feed_forward_length": s.shared} if shared else {}
    return keys | {"expert_feed_forward_length": s.expert_inner} | shared_inner


def has_state(s: Sizes, inner: int, rank: int) -> Metadata:
    sizes = {"ssm.conv_kernel": 4, "ssm.state_size": s.state, "ssm.group_count": s.groups}
    return sizes | {"ssm.inner_size": inner, "ssm.time_step_rank": rank}


def has_mamba(s: Sizes) -> Metadata:
    return has_state(s, s.wide, s.mamba_heads)


def has_delta_nets(s: Sizes) -> Metadata:
    quarter, eighth = s.head // 4, s.head // 8
    sections = {"rope.dimension_sections": [quarter, eighth, eighth, 0]}
    return has_state(s, s.delta_values, s.value_heads) | sections | {"full_attention_interval": 4}


# --- families: a layer's tensors, and the metadata


@dataclass(frozen=True)
class Family:
    layer: Callable[[Sizes, int], Shapes]
    metadata: Callable[[Sizes], Metadata]
    sizes: Mapping[str, Any] | None = None  # that differ from the usual ones
    architecture: str = ""  # where it is not the family's name
    is_tied: bool = False  # the embedding is the output matrix too
    more: Callable[[Sizes], Shapes] | None = None  # tensors outside the layers
    routes: bool = False  # routers or gates in float32: near ties can fall otherwise in a batch
    keeps_state: bool = False  # recurrent: no slot can be cut back


def qwen_layer(s: Sizes, layer: int, block: Shapes, joined: bool = False) -> Shapes:
    """Every fourth layer attends, the others are delta nets."""
    if layer % 4 == 3:
        return attention(s, gated=True, norms=True) | block
    return delta_net(s, joined) | block


def qwen_experts(s: Sizes) -> Shapes:
    return experts(s, "post_attention_norm", shared=True) | {"ffn_gate_inp_shexp": (s.hidden,)}


def gemma(s: Sizes, head: int | None = None) -> Shapes:
    norms: Shapes = {"post_attention_norm": (s.hidden,), "post_ffw_norm": (s.hidden,)}
    return attention(s, head, norms=True) | mlp(s) | norms


def gemma4_layer(s: Sizes, layer: int) -> Shapes:
    """As Gemma 4 E2B: every fifth layer is global, with heads twice as long."""
    shapes = gemma(s, 2 * s.head if layer % 5 == 4 else None)
    return shapes | {"inp_gate": (32, s.hidden), "proj": (s.hidden, 32), "post_norm": (s.hidden,)}


def gemma4_metadata(s: Sizes) -> Metadata:
    long = dict.fromkeys(("attention.key_length", "attention.value_length"), 2 * s.head)
    short = dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), s.head)
    return {
        **attends(s),
        **long,
        **short,
        "rope.dimension_count": 2 * s.head,
        "rope.dimension_count_swa": s.head,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 32,
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [layer % 5 != 4 for layer in range(s.layers)],
    }


def gemma4_more(s: Sizes) -> Shapes:
    return {
        "per_layer_token_embd": (s.vocabulary, 32 * s.layers),
        "per_layer_model_proj": (32 * s.layers, s.hidden),
        "per_layer_proj_norm": (32,),
        "rope_freqs": (s.head,),
    }


def gpt_oss_layer(s: Sizes, layer: int) -> Shapes:
    biases: Shapes = {
        "attn_q.bias": (s.queries,),
        "attn_k.bias": (s.keys,),
        "attn_v.bias": (s.keys,),
        "attn_output.bias": (s.hidden,),
        "ffn_gate_inp.bias": (s.experts,),
        "ffn_gate_exps.bias": (s.experts, s.expert_inner),
        "ffn_up_exps.bias": (s.experts, s.expert_inner),
        "ffn_down_exps.bias": (s.experts, s.hidden),
        "attn_sinks": (s.heads,),
    }
    return attention(s) | experts(s, "post_attention_norm") | biases


def deepseek_metadata(s: Sizes) -> Metadata:
    return {
        **attends(s),
        **mixes(s),
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


def granite_metadata(s: Sizes) -> Metadata:
    scales = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
    kv_heads = [s.kv_heads if layer % 4 == 3 else 0 for layer in range(s.layers)]
    more = {"feed_forward_length": s.expert_inner, "attention.head_count_kv": kv_heads}
    return attends(s) | has_mamba(s) | mixes(s, shared=True) | scales | more


def lfm2_metadata(s: Sizes) -> Metadata:
    kv_heads = [s.kv_heads if layer % 3 == 2 else 0 for layer in range(s.layers)]
    return attends(s) | {"shortconv.l_cache": 3, "attention.head_count_kv": kv_heads}


def nemotron_layer(s: Sizes, layer: int) -> Shapes:
    """Layers of one kind each: Mamba, experts, attention."""
    norm: Shapes = {"attn_norm": (s.hidden,)}
    if layer % 3 == 0:
        return mamba2(s)
    if layer % 3 == 1:
        blocks = experts(s, shared=True, gate=False) | {"exp_probs_b.bias": (s.experts,)}
        del blocks["ffn_norm"]
        return norm | blocks
    return attention(s)


def nemotron_metadata(s: Sizes) -> Metadata:
    kinds = range(s.layers)
    return {
        **attends(s),
        **has_mamba(s),
        **mixes(s, shared=True),
        "feed_forward_length": [s.inner if layer % 3 == 1 else 0 for layer in kinds],
        "attention.head_count_kv": [s.kv_heads if layer % 3 == 2 else 0 for layer in kinds],
        "expert_shared_count": 1,
        "attention.layer_norm_epsilon": 1e-5,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(lambda s, _: attention(s) | mlp(s), attends),
    "llama-split": Family(
        lambda s, _: attention(s) | mlp(s), attends, {"parts": 3}, architecture="llama"
    ),
    "qwen3": Family(lambda s, _: attention(s, norms=True) | mlp(s), attends, is_tied=True),
    "phi3": Family(
        lambda s, _: {
            "attn_norm": (s.hidden,),
            "attn_qkv": (s.queries + 2 * s.keys, s.hidden),
            "attn_output": (s.hidden, s.queries),
            "ffn_norm": (s.hidden,),
            "ffn_up": (2 * s.inner, s.hidden),
            "ffn_down": (s.hidden, s.inner),
        },
        attends,
    ),
    "gemma3": Family(
        lambda s, _: gemma(s),
        lambda s: attends(s) | {"attention.sliding_window": s.window},
        {"layers": 6},
    ),
    "gemma4": Family(gemma4_layer, gemma4_metadata, {"layers": 5}, more=gemma4_more),
    "qwen3moe": Family(
        lambda s, _: attention(s, norms=True) | experts(s),
        lambda s: attends(s) | mixes(s),
        routes=True,
    ),
    "gpt-oss": Family(
        gpt_oss_layer,
        lambda s: attends(s) | mixes(s) | {"attention.sliding_window": s.window},
        {"expert_type": "MXFP4"},
        routes=True,
    ),
    "deepseek2": Family(
        lambda s, layer: latent_attention(s) | (experts(s, shared=True) if layer else mlp(s)),
        deepseek_metadata,
        routes=True,
    ),
    "mamba2": Family(
        lambda s, _: mamba2(s),
        lambda s: has_mamba(s) | {"feed_forward_length": 0, "attention.head_count": 0},
        keeps_state=True,
    ),
    "falcon-h1": Family(
        lambda s, _: attention(s) | mamba2(s) | {"ffn_norm.": (s.hidden,)} | without_norm(mlp(s)),
        lambda s: attends(s) | has_mamba(s),
        keeps_state=True,
    ),
    "granitehybrid": Family(
        lambda s, layer: (attention(s) if layer % 4 == 3 else mamba2(s)) | experts(s, shared=True),
        granite_metadata,
        is_tied=True,
        routes=True,
        keeps_state=True,
    ),
    "lfm2": Family(
        lambda s, layer: (
            (attention(s, norms=True) if layer % 3 == 2 else short_convolution(s)) | mlp(s)
        ),
        lfm2_metadata,
        {"layers": 6},
        is_tied=True,
        more=lambda s: {"token_embd_norm": (s.hidden,)},
        keeps_state=True,
    ),
    "qwen35": Family(
        lambda s, layer: qwen_layer(s, layer, mlp(s, "post_attention_norm")),
        lambda s: attends(s) | has_delta_nets(s),
        routes=True,
        keeps_state=True,
    ),
    "qwen35moe": Family(
        lambda s, layer: qwen_layer(s, layer, qwen_experts(s)),
        lambda s: attends(s) | has_delta_nets(s) | mixes(s, shared=True),
        routes=True,
        keeps_state=True,
    ),
    "qwen3next": Family(
        lambda s, layer: qwen_layer(s, layer, qwen_experts(s), joined=True),
        lambda s: attends(s) | has_delta_nets(s) | mixes(s, shared=True),
        routes=True,
        keeps_state=True,
    ),
    "nemotron_h_moe": Family(  # with lists of more than 64 layers in its metadata
        nemotron_layer, nemotron_metadata, {"layers": 69}, routes=True, keeps_state=True
    ),
}


def without_norm(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name != "ffn_norm"}


# --- the file


def write_family(name: str, folder: Path, sizes: Sizes | None = None) -> Path:
    """Write the file of a family; the first part where it is split."""
    family = FAMILIES[name]
    return write_file(name, folder, family, sizes or replace(Sizes(), **dict(family.sizes or {})))


def write_file(
    name: str, folder: Path, family: Family, s: Sizes, *, has_weights: bool = True
) -> Path:
    """Write `name`.gguf of a family with these sizes; return the first part where it is split.

    Without weights the file has a whole header and, in place of weights and vocabulary, a hole as
    long as they are: enough for llama.cpp to size the model, in 100 kB of disk for 30 billion
    parameters.
    """
    architecture = family.architecture or name
    outside: Shapes = {"token_embd": (s.vocabulary, s.hidden)}
    if architecture != "lfm2":
        outside["output_norm"] = (s.hidden,)
    if not family.is_tied:
        outside["output"] = (s.vocabulary, s.hidden)
    outside |= family.more(s) if family.more is not None else {}
    tensors = {_full_name(one): shape for one, shape in outside.items()}
    for layer in range(s.layers):
        for one, shape in family.layer(s, layer).items():
            tensors[f"blk.{layer}.{_full_name(one)}"] = shape
    path = folder / f"{name}.gguf"
    most = -(-len(tensors) // s.parts) if s.parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    writer.add_type("model")
    writer.add_name("tiny")  # llama.cpp guesses at tokenizers by the name "phi3"
    kind = (s.expert_type or s.type).replace("MXFP4", "MXFP4_MOE")
    writer.add_file_type(gguf.LlamaFileType[f"ALL_{kind}" if kind == "F32" else f"MOSTLY_{kind}"])
    usual = {"context_length": s.context, "embedding_length": s.hidden, "block_count": s.layers}
    usual |= {"attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in (usual | family.metadata(s)).items():
        kinds = {bool: "bool", int: "uint32", float: "float32", list: "array", str: "string"}
        getattr(writer, f"add_{kinds[type(value)]}")(f"{architecture}.{key}", value)
    if has_weights:
        add_vocabulary(writer)
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(s.vocabulary)
    random = np.random.default_rng(s.seed)
    for tensor, shape in tensors.items():
        stored = _stored_type(tensor, shape, s)
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
    return folder / f"{name}-00001-of-{s.parts:05}.gguf" if s.parts > 1 else path


def _full_name(name: str) -> str:
    """ ".weight" is added to a name without a dot; a dot at the end stands for no suffix."""
    return name.removesuffix(".") if "." in name else f"{name}.weight"


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
        return drawn / 20 + np.float32("norm" in name)
    gain = 3.0 if name in ("output.weight", "token_embd.weight") else 1.0 + ("down" in name)
    return drawn * np.float32(gain / math.sqrt(shape[-1]))


def _stored_type(name: str, shape: tuple[int, ...], s: Sizes) -> gguf.GGMLQuantizationType:
    """As llama.cpp quantises: vectors, routers, and what is small and recurrent stay float32."""
    small = r"bias$|gate_inp|conv\.weight|ssm_(a|d|conv1d|norm|ba|alpha|beta)\b"
    kind = (s.expert_type or s.type) if "_exps" in name else s.type
    if len(shape) == 1 or shape[-1] % 32 or re.search(small, name):
        kind = "F32"
    return gguf.GGMLQuantizationType[kind]


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
