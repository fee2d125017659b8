"""The published shapes of models that people run, as GGUF files without weights.

    path = write_shape("gpt-oss-20b", folder)       # 12 GB long, 100 kB of disk

llama.cpp sizes such a file as it does the real one (`no_alloc`). Shapes are those of the published
config.json and of headers that llama.cpp prints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crossover.models.model_spec import ModelSpec
from tests.gguf_families import (
    FAMILIES,
    Family,
    Metadata,
    Shapes,
    Sizes,
    attends,
    attention,
    experts,
    mamba2,
    mixes,
    mlp,
    nemotron_metadata,
    without_norm,
    write_file,
)

NEMOTRON_LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
GRANITE_ATTENTION = (5, 15, 25, 35)
PER_LAYER = 256  # elements of Gemma 4's embedding of each layer


def _is_global(layer: int) -> bool:
    """Gemma 4: every sixth layer attends to the whole context."""
    return layer % 6 == 5


def _gemma4(s: Sizes, layer: int) -> Shapes:
    """A layer of 26B-A4B (whose global layers use keys as values) or of E4B."""
    is_mixture = s.experts > 0
    sizes = s
    if _is_global(layer):
        sizes = replace(s, head=2 * s.head, kv_heads=2)
    shapes = attention(sizes, norms=True) | mlp(s)
    if _is_global(layer) and is_mixture:
        del shapes["attn_v"]
    shapes |= {"post_attention_norm": (s.hidden,), "post_ffw_norm": (s.hidden,)}
    shapes["layer_output_scale"] = (1,)
    if is_mixture:
        for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            shapes[norm] = (s.hidden,)
        shapes |= {
            "ffn_gate_inp": (s.experts, s.hidden),
            "ffn_gate_inp.scale": (s.hidden,),
            "ffn_gate_up_exps": (s.experts, 2 * s.expert_inner, s.hidden),
            "ffn_down_exps": (s.experts, s.hidden, s.expert_inner),
            "ffn_down_exps.scale": (s.experts,),
        }
    else:
        shapes |= {"inp_gate": (PER_LAYER, s.hidden), "proj": (s.hidden, PER_LAYER)}
        shapes["post_norm"] = (s.hidden,)
    return shapes


def _gemma4_metadata(s: Sizes) -> Metadata:
    kv_heads: Metadata = {}
    if s.experts:
        counts = [2 if _is_global(layer) else s.kv_heads for layer in range(s.layers)]
        kv_heads = {"attention.head_count_kv": counts} | mixes(s)
    return {
        **attends(s),
        **kv_heads,
        **dict.fromkeys(("attention.key_length", "attention.value_length"), 2 * s.head),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), s.head),
        "rope.dimension_count": 2 * s.head,
        "rope.dimension_count_swa": s.head,
        "attention.shared_kv_layers": 0 if s.experts else 18,
        "embedding_length_per_layer_input": 0 if s.experts else PER_LAYER,
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [not _is_global(layer) for layer in range(s.layers)],
    }


def _gemma4_outside(s: Sizes) -> Shapes:
    shapes: Shapes = {"rope_freqs": (s.head,)}
    if not s.experts:
        shapes |= {
            "per_layer_token_embd": (s.vocabulary, PER_LAYER * s.layers),
            "per_layer_model_proj": (PER_LAYER * s.layers, s.hidden),
            "per_layer_proj_norm": (PER_LAYER,),
        }
    return shapes


def _granite(s: Sizes, layer: int) -> Shapes:
    attending = layer in GRANITE_ATTENTION
    return (attention(s) if attending else mamba2(s)) | experts(s, shared=True)


def _granite_metadata(s: Sizes) -> Metadata:
    counts = [s.kv_heads if layer in GRANITE_ATTENTION else 0 for layer in range(s.layers)]
    return FAMILIES["granitehybrid"].metadata(s) | {"attention.head_count_kv": counts}


def _nemotron(s: Sizes, layer: int) -> Shapes:
    kind = NEMOTRON_LAYERS[layer]
    if kind == "M":
        return mamba2(s)
    if kind == "*":
        return attention(s)
    blocks = without_norm(experts(s, shared=True, gate=False))
    return {"attn_norm": (s.hidden,)} | blocks | {"exp_probs_b.bias": (s.experts,)}


def _nemotron_metadata(s: Sizes) -> Metadata:
    kinds = NEMOTRON_LAYERS
    return nemotron_metadata(s) | {
        "feed_forward_length": [s.expert_inner if kind == "E" else 0 for kind in kinds],
        "attention.head_count_kv": [s.kv_heads if kind == "*" else 0 for kind in kinds],
    }


GEMMA4 = Family(
    _gemma4, _gemma4_metadata, architecture="gemma4", is_tied=True, more=_gemma4_outside
)

SHAPES: dict[str, tuple[Family, Sizes]] = {
    "llama-3.1-8b": (
        replace(FAMILIES["llama"], architecture="llama"),
        Sizes(
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head=128,
            inner=14336,
            context=131072,
            vocabulary=128256,
        ),
    ),
    "qwen3-30b-a3b": (
        replace(FAMILIES["qwen3moe"], architecture="qwen3moe"),
        Sizes(
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head=128,
            inner=6144,
            experts=128,
            used=8,
            expert_inner=768,
            context=40960,
            vocabulary=151936,
        ),
    ),
    "gpt-oss-20b": (
        replace(FAMILIES["gpt-oss"], architecture="gpt-oss"),
        Sizes(
            layers=24,
            hidden=2880,
            heads=64,
            kv_heads=8,
            head=64,
            inner=2880,
            experts=32,
            used=4,
            expert_inner=2880,
            window=128,
            context=131072,
            vocabulary=201088,
            expert_type="MXFP4",
        ),
    ),
    "gemma-4-26b-a4b": (
        GEMMA4,
        Sizes(
            layers=30,
            hidden=2816,
            heads=16,
            kv_heads=8,
            head=256,
            inner=2112,
            experts=128,
            used=8,
            expert_inner=704,
            window=1024,
            context=262144,
            vocabulary=262144,
        ),
    ),
    "gemma-4-e4b": (
        GEMMA4,
        Sizes(
            layers=42,
            hidden=2560,
            heads=8,
            kv_heads=2,
            head=256,
            inner=10240,
            experts=0,
            window=512,
            context=131072,
            vocabulary=262144,
        ),
    ),
    "qwen3.5-4b": (
        replace(FAMILIES["qwen35"], architecture="qwen35", is_tied=True),
        Sizes(
            layers=32,
            hidden=2560,
            heads=16,
            kv_heads=4,
            head=256,
            inner=9216,
            state=128,
            groups=16,
            value_heads=32,
            context=262144,
            vocabulary=248320,
        ),
    ),
    "granite-4.0-h-tiny": (
        Family(_granite, _granite_metadata, architecture="granitehybrid", is_tied=True),
        Sizes(
            layers=40,
            hidden=1536,
            heads=12,
            kv_heads=4,
            head=128,
            experts=64,
            used=6,
            expert_inner=512,
            shared_inner=1024,
            state=128,
            groups=1,
            mamba_inner=3072,
            mamba_head=64,
            context=131072,
            vocabulary=100352,
        ),
    ),
    "falcon-h1-7b": (
        replace(FAMILIES["falcon-h1"], architecture="falcon-h1"),
        Sizes(
            layers=44,
            hidden=3072,
            heads=12,
            kv_heads=2,
            head=128,
            inner=12288,
            state=256,
            groups=1,
            mamba_inner=3072,
            mamba_head=128,
            context=262144,
            vocabulary=130048,
        ),
    ),
    "nemotron-3-nano-30b-a3b": (
        Family(_nemotron, _nemotron_metadata, architecture="nemotron_h_moe"),
        Sizes(
            layers=52,
            hidden=2688,
            heads=32,
            kv_heads=2,
            head=128,
            inner=1856,
            experts=128,
            used=6,
            expert_inner=1856,
            shared_inner=3712,
            state=128,
            groups=8,
            mamba_inner=4096,
            mamba_head=64,
            context=262144,
            vocabulary=131072,
        ),
    ),
}


def write_shape(name: str, folder: Path) -> Path:
    """Write the header of a published shape, in Q4_0 or its own format; return its file."""
    family, sizes = SHAPES[name]
    kind = replace(sizes, type="Q8_0" if sizes.expert_type else "Q4_0")
    return write_file(name, folder, family, kind, has_weights=False)


def write_dense(spec: ModelSpec, folder: Path) -> Path:
    """Write the header of a shape of the ladder, in Q4_0; return its file."""
    family = replace(FAMILIES["qwen3" if spec.qk_norm else "llama"], is_tied=spec.tied)
    sizes = Sizes(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head=spec.head_dim,
        inner=spec.intermediate,
        context=spec.context,
        vocabulary=spec.vocabulary,
        type="Q4_0",
    )
    named = replace(family, architecture="qwen3" if spec.qk_norm else "llama")
    return write_file(spec.name, folder, named, sizes, has_weights=False)
