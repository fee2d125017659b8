"""The ladder: published model shapes from 135 million to 70 billion parameters.

    >>> rung("1b").spec.name
    'llama-3.2-1b'

Shapes are those of the published config.json; `published_parameters` is the model card's total, and
a test compares both. Weights are never fetched: `models.random_weights` makes random ones, which
take as long to read and to multiply.
"""

from __future__ import annotations

from typing import Any

import msgspec

from models.errors import UnknownModel
from models.spec import ModelSpec, RopeScaling


class Rung(msgspec.Struct, frozen=True):
    """One published model of the ladder."""

    spec: ModelSpec
    aliases: tuple[str, ...]
    published_parameters: int
    source: str  # where shape and count were published


_LLAMA3_ROPE: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context": 8192,
}
# What the models of a series share.
_SERIES: dict[str, dict[str, Any]] = {
    "smollm2": {"family": "llama", "vocabulary": 49152, "context": 8192, "tied": True},
    "llama-3": {
        "family": "llama",
        "kv_heads": 8,
        "vocabulary": 128256,
        "context": 131072,
        "rope_theta": 500_000.0,
    },
    "qwen2.5": {
        "family": "qwen2",
        "context": 32768,
        "rope_theta": 1_000_000.0,
        "norm_epsilon": 1e-6,
        "qkv_bias": True,
    },
    "qwen3": {
        "family": "qwen3",
        "vocabulary": 151936,
        "context": 40960,
        "rope_theta": 1_000_000.0,
        "norm_epsilon": 1e-6,
        "qk_norm": True,
    },
    "mistral": {
        "family": "mistral",
        "vocabulary": 32768,
        "context": 32768,
        "rope_theta": 1_000_000.0,
    },
}
_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")


def _rung(
    name: str, aliases: str, published: int, repository: str, shape: str, **more: Any
) -> Rung:
    """One row. `shape`: values of _COLUMNS; `more`: what the series does not share."""
    series = next(series for series in _SERIES if name.startswith(series))
    sizes = dict(zip(_COLUMNS, map(int, shape.split()), strict=True))
    if "rope_factor" in more:
        more["rope_scaling"] = RopeScaling(factor=more.pop("rope_factor"), **_LLAMA3_ROPE)
    spec = ModelSpec(name=name, **{**_SERIES[series], **sizes, **more})
    source = f"https://huggingface.co/{repository}/blob/main/config.json"
    return Rung(spec, tuple(aliases.split()), published, source)


LADDER: tuple[Rung, ...] = (
    _rung(
        *("smollm2-135m", "135m", 134_515_008, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        "30 576 9 3 64 1536",
        rope_theta=100_000.0,
    ),
    _rung(
        *("smollm2-360m", "360m", 361_821_120, "HuggingFaceTB/SmolLM2-360M-Instruct"),
        "32 960 15 5 64 2560",
        rope_theta=100_000.0,
    ),
    _rung(
        *("qwen2.5-0.5b", "0.5b 500m", 494_032_768, "Qwen/Qwen2.5-0.5B-Instruct"),
        "24 896 14 2 64 4864",
        tied=True,
        vocabulary=151936,
    ),
    _rung(
        *("llama-3.2-1b", "1b", 1_235_814_400, "meta-llama/Llama-3.2-1B-Instruct"),
        "16 2048 32 8 64 8192",
        tied=True,
        rope_factor=32.0,
    ),
    _rung(
        *("qwen2.5-1.5b", "1.5b", 1_543_714_304, "Qwen/Qwen2.5-1.5B-Instruct"),
        "28 1536 12 2 128 8960",
        tied=True,
        vocabulary=151936,
    ),
    _rung(
        *("smollm2-1.7b", "1.7b", 1_711_376_384, "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        "24 2048 32 32 64 8192",
        rope_theta=130_000.0,
    ),
    _rung(
        *("llama-3.2-3b", "3b", 3_212_749_824, "meta-llama/Llama-3.2-3B-Instruct"),
        "28 3072 24 8 128 8192",
        tied=True,
        rope_factor=32.0,
    ),
    _rung(
        *("qwen3-4b", "4b", 4_022_468_096, "Qwen/Qwen3-4B"),
        "36 2560 32 8 128 9728",
        tied=True,
    ),
    _rung(
        *("mistral-7b", "", 7_248_023_552, "mistralai/Mistral-7B-Instruct-v0.3"),
        "32 4096 32 8 128 14336",
        tied=False,
    ),
    _rung(
        *("qwen2.5-7b", "7b", 7_615_616_512, "Qwen/Qwen2.5-7B-Instruct"),
        "28 3584 28 4 128 18944",
        tied=False,
        vocabulary=152064,
    ),
    _rung(
        *("llama-3.1-8b", "8b", 8_030_261_248, "meta-llama/Llama-3.1-8B-Instruct"),
        "32 4096 32 8 128 14336",
        tied=False,
        rope_factor=8.0,
    ),
    _rung(
        *("qwen2.5-14b", "14b", 14_770_033_664, "Qwen/Qwen2.5-14B-Instruct"),
        "48 5120 40 8 128 13824",
        tied=False,
        vocabulary=152064,
    ),
    _rung(
        *("qwen2.5-32b", "32b", 32_763_876_352, "Qwen/Qwen2.5-32B-Instruct"),
        "64 5120 40 8 128 27648",
        tied=False,
        vocabulary=152064,
    ),
    _rung(
        *("llama-3.3-70b", "70b", 70_553_706_496, "meta-llama/Llama-3.3-70B-Instruct"),
        "80 8192 64 8 128 28672",
        tied=False,
        rope_factor=8.0,
    ),
)

_BY_NAME = {name: one for one in LADDER for name in (one.spec.name, *one.aliases)}


def is_rung(name: str) -> bool:
    """True where `rung(name)` would find something; letter case does not matter."""
    return name.lower() in _BY_NAME


def rung(name: str) -> Rung:
    """The rung of a name ("smollm2-135m") or alias ("135m"). Raises UnknownModel."""
    if not is_rung(name):
        known = ", ".join(" or ".join((one.spec.name, *one.aliases)) for one in LADDER)
        raise UnknownModel(f"{name!r} is no rung of the ladder; there are {known}")
    return _BY_NAME[name.lower()]
