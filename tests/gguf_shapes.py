"""The published shapes of models that people run, as GGUF files without weights.

    path = write_shape("gpt-oss-20b", folder)       # 12 GB long, 100 kB of disk

llama.cpp sizes such a file as it does the real one (`no_alloc`). Shapes are those of the published
config.json and of headers that llama.cpp prints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crossover.models.gguf.shapes import Family, Sizes
from crossover.models.identity.model_ladder import PUBLISHED
from crossover.models.shape.model_spec import ModelSpec
from tests.gguf_families import FAMILIES, granite, nemotron, write_file

NEMOTRON_LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
GRANITE_ATTENTION = (5, 15, 25, 35)


SHAPES: dict[str, tuple[Family, Sizes]] = {
    **{
        model.spec.name: (model.shape.family, model.shape.sizes)
        for model in PUBLISHED
        if model.shape is not None
    },
    "llama-3.1-8b": (
        FAMILIES["llama"],
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
    "granite-4.0-h-tiny": (
        granite(lambda layer: layer in GRANITE_ATTENTION),
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
            tied=True,
        ),
    ),
    "falcon-h1-7b": (
        FAMILIES["falcon-h1"],
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
        nemotron(lambda layer: NEMOTRON_LAYERS[layer]),
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
    family = FAMILIES["qwen3" if spec.qk_norm else "llama"]
    sizes = Sizes(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head=spec.head_dim,
        inner=spec.intermediate,
        context=spec.context,
        vocabulary=spec.vocabulary,
        tied=spec.tied,
        type="Q4_0",
    )
    return write_file(spec.name, folder, family, sizes, has_weights=False)
