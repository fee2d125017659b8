"""Tensors and metadata of GGUF files with random weights: mixtures of experts, hybrids, and models
with sliding windows.

    shape = GgufShape(FAMILIES["qwen3moe"], Sizes(layers=48, ...))
    shape.tensors()                     # {"token_embd.weight": (151936, 2048), ...}
    shape.metadata()                    # {"qwen3moe.context_length": 40960, ...}
    shape.spec("qwen3-30b-a3b")         # the ModelSpec that the header of such a file gives

A family has one function that returns the tensors of a layer and one that returns the metadata,
with the names and shapes that llama.cpp's own converter writes. models/data/shapes.toml has the
sizes of published models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from crossover.models.gguf.header import spec_of_header
from crossover.models.shape.model_spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]  # tensor -> (experts, rows, columns), (rows, columns), (rows,)
Metadata = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model. The default values are those of a tiny one."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head: int = 32  # length of a head
    inner: int = 256  # width of the MLP
    experts: int = 8
    used: int = 2  # experts of a token
    expert_inner: int = 64  # width of an expert
    window: int = 256  # tokens of a layer with a sliding window
    state: int = 32  # of a recurrent head
    groups: int = 2  # of a recurrent layer
    context: int = 4096
    vocabulary: int = 2048
    tied: bool = False  # the embedding is the output matrix, too
    rope_theta: float = 1e4
    per_layer: int = 32  # width of Gemma 4's embedding of each layer; 0: it has none
    global_period: int = 5  # every so many layers of Gemma 4 attend to the whole context
    global_kv_heads: int = 0  # of those layers; 0: as the others
    shared_kv_layers: int = 0  # last layers that use the KV cache of earlier ones
    value_heads: int = 4  # of a gated delta net
    mamba_inner: int = 0  # width inside a Mamba layer; 0: twice the hidden size
    mamba_head: int = 0  # length of its heads; 0: as an attention head's
    shared_inner: int = 0  # width of the expert that every token uses; 0: as the others'
    type: str = "Q8_0"  # of matrices
    expert_type: str = ""  # of the experts' matrices; "": as the others

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head

    @property
    def wide(self) -> int:
        """Return the width inside a Mamba layer."""
        return self.mamba_inner or 2 * self.hidden

    @property
    def mamba_heads(self) -> int:
        return self.wide // (self.mamba_head or self.head)

    @property
    def shared(self) -> int:
        return self.shared_inner or self.expert_inner

    @property
    def delta_values(self) -> int:
        """Return the width of the values of a gated delta net."""
        return self.value_heads * self.state


@dataclass(frozen=True)
class Family:
    """The models of one architecture."""

    layer: Callable[[Sizes, int], Shapes]  # the tensors of layer number n
    # Keys that not all families have, without the architecture's name in front.
    metadata: Callable[[Sizes], Metadata]
    architecture: str  # llama.cpp's name
    output_norm: str = "output_norm"  # name of the last norm
    other_tensors: Callable[[Sizes], Shapes] | None = None  # outside the layers


@dataclass(frozen=True)
class GgufShape:
    """A family with sizes: everything that a GGUF file says beside weights and vocabulary."""

    family: Family
    sizes: Sizes
    formats: tuple[str, ...] = field(default=("Q4_0", "Q8_0"))  # the default format first

    def in_format(self, weight_format: str) -> GgufShape:
        """Return the shape with its matrices in this format. The experts of a shape that is
        published in MXFP4 stay in it, and its other matrices are Q8_0."""
        kind = "Q8_0" if weight_format == "MXFP4_MOE" else weight_format
        return replace(self, sizes=replace(self.sizes, type=kind))

    def tensors(self) -> Shapes:
        """Return the shape of every tensor, by its name, in the order of the file."""
        family, sizes = self.family, self.sizes
        outside: Shapes = {"token_embd": (sizes.vocabulary, sizes.hidden)}
        outside[family.output_norm] = (sizes.hidden,)
        if not sizes.tied:
            outside["output"] = (sizes.vocabulary, sizes.hidden)
        if family.other_tensors is not None:
            outside |= family.other_tensors(sizes)
        tensors = {_full_name(name): shape for name, shape in outside.items()}
        for layer in range(sizes.layers):
            for name, shape in family.layer(sizes, layer).items():
                tensors[f"blk.{layer}.{_full_name(name)}"] = shape
        return tensors

    def metadata(self) -> Metadata:
        """Return the keys of the architecture, with its name in front."""
        sizes = self.sizes
        common_keys = {
            "context_length": sizes.context,
            "embedding_length": sizes.hidden,
            "block_count": sizes.layers,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        keys = common_keys | self.family.metadata(sizes)
        return {f"{self.family.architecture}.{key}": value for key, value in keys.items()}

    def spec(self, name: str) -> ModelSpec:
        """Return the model's shape, as the header of its file gives it. The bytes of the experts
        are not known, since they depend on the format."""
        metadata = {"general.architecture": self.family.architecture, **self.metadata()}
        shapes = {tensor: shape[::-1] for tensor, shape in self.tensors().items()}
        return spec_of_header(metadata, shapes, name)

    def tensor_type(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor, as llama.cpp quantizes it: vectors, routers and small
        tensors of recurrent layers stay float32."""
        sizes = self.sizes
        not_quantized = r"bias$|gate_inp|conv\.weight|ssm_(a|d|conv1d|norm|ba|alpha|beta)\b"
        if len(shape) == 1 or shape[-1] % 32 or re.search(not_quantized, name):
            return "F32"
        return (sizes.expert_type or sizes.type) if "_exps" in name else sizes.type


def _full_name(name: str) -> str:
    """Return the name in the file: with ".weight", unless it contains a dot. A dot at the end, for
    names without any suffix, is removed."""
    return name.removesuffix(".") if "." in name else f"{name}.weight"


# --- parts of layers


def attention(
    s: Sizes, head: int | None = None, gated: bool = False, norms: bool = False
) -> Shapes:
    """Return the tensors of grouped-query attention. `head`: length of a head; None: that of the
    sizes. `gated`: the query matrix computes a gate too. `norms`: of queries and keys."""
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


def mlp(s: Sizes, norm: str = "ffn_norm") -> Shapes:
    """Return the tensors of a dense MLP. `norm`: the name of the norm before it."""
    gate = {"ffn_gate": (s.inner, s.hidden), "ffn_up": (s.inner, s.hidden)}
    return {norm: (s.hidden,), **gate, "ffn_down": (s.hidden, s.inner)}


def experts(s: Sizes, norm: str = "ffn_norm", shared: bool = False, gate: bool = True) -> Shapes:
    """Return the tensors of a mixture of experts. `norm`: the name of the norm before it. `shared`:
    it has an expert that every token uses. `gate`: experts have a gate matrix."""
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


def delta_net(s: Sizes, joined: bool = False) -> Shapes:
    """Return the tensors of Qwen's gated delta net. `joined`: alpha and beta are one matrix, as in
    Qwen3-Next."""
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


# --- metadata


def attention_metadata(s: Sizes) -> Metadata:
    """Return the keys of attention and of the MLP's width."""
    return {
        "feed_forward_length": s.inner,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head,
        "attention.value_length": s.head,
        "rope.freq_base": s.rope_theta,
        "rope.dimension_count": s.head,
    }


def experts_metadata(s: Sizes, shared: bool = False) -> Metadata:
    """Return the keys of experts. `shared`: there is an expert that every token uses."""
    keys = {
        "expert_count": s.experts,
        "expert_used_count": s.used,
        "expert_feed_forward_length": s.expert_inner,
    }
    if shared:
        keys["expert_shared_feed_forward_length"] = s.shared
    return keys


def recurrent_metadata(s: Sizes, inner: int, rank: int) -> Metadata:
    """Return the keys of recurrent layers. `inner`: their width; `rank`: of the time step."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": s.state,
        "ssm.group_count": s.groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": rank,
    }


def delta_net_metadata(s: Sizes) -> Metadata:
    """Return the keys of gated delta nets with attention in every fourth layer."""
    quarter, eighth = s.head // 4, s.head // 8
    return {
        **recurrent_metadata(s, s.delta_values, s.value_heads),
        "rope.dimension_sections": [quarter, eighth, eighth, 0],
        "full_attention_interval": 4,
    }


# --- families


def qwen_layer(s: Sizes, layer: int, block: Shapes, joined: bool = False) -> Shapes:
    """Return the tensors of a layer of Qwen3.5 or Qwen3-Next, with an MLP or experts in `block`.
    Every fourth layer has attention, the others are gated delta nets."""
    if layer % 4 == 3:
        return attention(s, gated=True, norms=True) | block
    return delta_net(s, joined) | block


def gpt_oss_layer(s: Sizes, layer: int) -> Shapes:
    """Return the tensors of a layer of gpt-oss, in which all matrices have biases."""
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


def _is_global(s: Sizes, layer: int) -> bool:
    """Return whether a layer of Gemma 4 attends to the whole context, with heads twice as long."""
    return layer % s.global_period == s.global_period - 1


def gemma4_layer(s: Sizes, layer: int) -> Shapes:
    """Return the tensors of a layer of Gemma 4.

    Models without experts (E2B, E4B) have an embedding of each layer. Those with experts (26B-A4B)
    have an MLP too, and their global layers use the keys as values.
    """
    sizes = s
    if _is_global(s, layer):
        sizes = replace(s, head=2 * s.head, kv_heads=s.global_kv_heads or s.kv_heads)
    shapes = attention(sizes, norms=True) | mlp(s)
    shapes |= {"post_attention_norm": (s.hidden,), "post_ffw_norm": (s.hidden,)}
    shapes["layer_output_scale"] = (1,)
    if not s.experts:
        return shapes | {
            "inp_gate": (s.per_layer, s.hidden),
            "proj": (s.hidden, s.per_layer),
            "post_norm": (s.hidden,),
        }
    if _is_global(s, layer):
        del shapes["attn_v"]
    for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        shapes[norm] = (s.hidden,)
    return shapes | {
        "ffn_gate_inp": (s.experts, s.hidden),
        "ffn_gate_inp.scale": (s.hidden,),
        "ffn_gate_up_exps": (s.experts, 2 * s.expert_inner, s.hidden),
        "ffn_down_exps": (s.experts, s.hidden, s.expert_inner),
        "ffn_down_exps.scale": (s.experts,),
    }


def gemma4_metadata(s: Sizes) -> Metadata:
    layers = range(s.layers)
    kv_heads: Metadata = {}
    if s.experts:
        global_heads = s.global_kv_heads or s.kv_heads
        counts = [global_heads if _is_global(s, layer) else s.kv_heads for layer in layers]
        kv_heads = {"attention.head_count_kv": counts} | experts_metadata(s)
    return {
        **attention_metadata(s),
        **kv_heads,
        "attention.key_length": 2 * s.head,
        "attention.value_length": 2 * s.head,
        "attention.key_length_swa": s.head,
        "attention.value_length_swa": s.head,
        "rope.dimension_count": 2 * s.head,
        "rope.dimension_count_swa": s.head,
        "attention.shared_kv_layers": s.shared_kv_layers,
        "embedding_length_per_layer_input": 0 if s.experts else s.per_layer,
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [not _is_global(s, layer) for layer in layers],
    }


def gemma4_other_tensors(s: Sizes) -> Shapes:
    """Return the tensors of Gemma 4 that are outside the layers."""
    shapes: Shapes = {"rope_freqs": (s.head,)}
    if not s.experts:
        shapes |= {
            "per_layer_token_embd": (s.vocabulary, s.per_layer * s.layers),
            "per_layer_model_proj": (s.per_layer * s.layers, s.hidden),
            "per_layer_proj_norm": (s.per_layer,),
        }
    return shapes


def qwen3_moe_layer(s: Sizes, _: int) -> Shapes:
    return attention(s, norms=True) | experts(s)


def qwen3_moe_metadata(s: Sizes) -> Metadata:
    return attention_metadata(s) | experts_metadata(s)


def gpt_oss_metadata(s: Sizes) -> Metadata:
    return qwen3_moe_metadata(s) | {"attention.sliding_window": s.window}


def qwen35_layer(s: Sizes, layer: int) -> Shapes:
    return qwen_layer(s, layer, mlp(s, "post_attention_norm"))


def qwen35_metadata(s: Sizes) -> Metadata:
    return attention_metadata(s) | delta_net_metadata(s)


# The families of published models in models/data/shapes.toml, by llama.cpp's name. Their functions
# have names, because a shape is sent to the process that makes its file.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(qwen3_moe_layer, qwen3_moe_metadata, "qwen3moe"),
        Family(gpt_oss_layer, gpt_oss_metadata, "gpt-oss"),
        Family(gemma4_layer, gemma4_metadata, "gemma4", other_tensors=gemma4_other_tensors),
        Family(qwen35_layer, qwen35_metadata, "qwen35"),
    )
}
