"""The ladder: published model shapes from 135 million to 70 billion parameters, as data, and which of them fit in a given memory.

    >>> rung("1b").spec.name
    'llama-3.2-1b'
    >>> [fit.rung.spec.name for fit in fits(2 * 2**30, "Q4_0") if fit.fits]
    ['smollm2-135m', 'smollm2-360m', 'qwen2.5-0.5b', 'llama-3.2-1b']

Shapes are those of the published `config.json`; `published_parameters` is the total the model card shows (the sum of the
safetensors headers). A test holds the one against the other. The weights of these models are not here and are never fetched:
`models.synthesis` fills the shapes with seeded random numbers, which take as long to read and to multiply as trained ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from models.errors import UnknownModel
from models.formats import weight_bytes
from models.spec import ModelSpec, RopeScaling

# What a serving process takes beside weights and KV: interpreter, libraries, activations of one step. Measured 150-350 MB for
# llama.cpp and onnxruntime on CPUs; a round upper figure, so that "fits" is kept.
OVERHEAD_BYTES = 400 << 20


class Rung(msgspec.Struct, frozen=True):
    """One published model of the ladder."""

    spec: ModelSpec
    aliases: tuple[str, ...]
    published_parameters: int
    source: str  # where shape and count were published


class Fit(msgspec.Struct, frozen=True):
    """The memory one rung takes and whether it fits. All sizes in bytes."""

    rung: Rung
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    memory_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.memory_bytes


def _hub(repository: str) -> str:
    return f"https://huggingface.co/{repository}/blob/main/config.json"


def _smollm2(name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, theta: float) -> ModelSpec:
    return ModelSpec(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=64,
        intermediate=intermediate, vocabulary=49152, context=8192, tied=True, rope_theta=theta,
    )  # fmt: skip


def _llama3(name: str, layers: int, hidden: int, heads: int, head_dim: int, intermediate: int, tied: bool, factor: float) -> ModelSpec:
    return ModelSpec(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=head_dim,
        intermediate=intermediate, vocabulary=128256, context=131072, tied=tied, rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
    )  # fmt: skip


def _qwen25(name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, tied: bool) -> ModelSpec:
    return ModelSpec(
        name=name, family="qwen2", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=128 if hidden > 896 else 64,
        intermediate=intermediate, vocabulary=vocabulary, context=32768, tied=tied, rope_theta=1_000_000.0, norm_epsilon=1e-6,
        qkv_bias=True,
    )  # fmt: skip


LADDER: tuple[Rung, ...] = (
    Rung(_smollm2("smollm2-135m", 30, 576, 9, 3, 1536, 100_000.0), ("135m",), 134_515_008, _hub("HuggingFaceTB/SmolLM2-135M-Instruct")),
    Rung(_smollm2("smollm2-360m", 32, 960, 15, 5, 2560, 100_000.0), ("360m",), 361_821_120, _hub("HuggingFaceTB/SmolLM2-360M-Instruct")),
    Rung(
        _qwen25("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, True),
        ("0.5b", "500m"),
        494_032_768,
        _hub("Qwen/Qwen2.5-0.5B-Instruct"),
    ),
    Rung(
        _llama3("llama-3.2-1b", 16, 2048, 32, 64, 8192, True, 32.0),
        ("1b",),
        1_235_814_400,
        _hub("meta-llama/Llama-3.2-1B-Instruct"),
    ),
    Rung(
        _qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, True),
        ("1.5b",),
        1_543_714_304,
        _hub("Qwen/Qwen2.5-1.5B-Instruct"),
    ),
    Rung(
        _smollm2("smollm2-1.7b", 24, 2048, 32, 32, 8192, 130_000.0),
        ("1.7b",),
        1_711_376_384,
        _hub("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ),
    Rung(
        _llama3("llama-3.2-3b", 28, 3072, 24, 128, 8192, True, 32.0),
        ("3b",),
        3_212_749_824,
        _hub("meta-llama/Llama-3.2-3B-Instruct"),
    ),
    Rung(
        ModelSpec(
            name="qwen3-4b", family="qwen3", layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, intermediate=9728,
            vocabulary=151936, context=40960, tied=True, rope_theta=1_000_000.0, norm_epsilon=1e-6, qk_norm=True,
        ),
        ("4b",),
        4_022_468_096,
        _hub("Qwen/Qwen3-4B"),
    ),
    Rung(
        ModelSpec(
            name="mistral-7b", family="mistral", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336,
            vocabulary=32768, context=32768, tied=False, rope_theta=1_000_000.0,
        ),
        (),
        7_248_023_552,
        _hub("mistralai/Mistral-7B-Instruct-v0.3"),
    ),
    Rung(_qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, False), ("7b",), 7_615_616_512, _hub("Qwen/Qwen2.5-7B-Instruct")),
    Rung(
        _llama3("llama-3.1-8b", 32, 4096, 32, 128, 14336, False, 8.0),
        ("8b",),
        8_030_261_248,
        _hub("meta-llama/Llama-3.1-8B-Instruct"),
    ),
    Rung(_qwen25("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, False), ("14b",), 14_770_033_664, _hub("Qwen/Qwen2.5-14B-Instruct")),
    Rung(_qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, False), ("32b",), 32_763_876_352, _hub("Qwen/Qwen2.5-32B-Instruct")),
    Rung(
        _llama3("llama-3.3-70b", 80, 8192, 64, 128, 28672, False, 8.0),
        ("70b",),
        70_553_706_496,
        _hub("meta-llama/Llama-3.3-70B-Instruct"),
    ),
)  # fmt: skip

_BY_NAME = {name: one for one in LADDER for name in (one.spec.name, *one.aliases)}


def is_rung(name: str) -> bool:
    """True where `rung(name)` would find something; letter case does not matter."""
    return name.lower() in _BY_NAME


def rung(name: str) -> Rung:
    """The rung of a canonical name ("smollm2-135m") or an alias ("135m"). Raises UnknownModel listing what there is."""
    if not is_rung(name):
        known = ", ".join(" or ".join((one.spec.name, *one.aliases)) for one in LADDER)
        raise UnknownModel(f"{name!r} is no rung of the ladder; there are {known}")
    return _BY_NAME[name.lower()]


def fits(
    memory_bytes: int,
    weight_format: str = "Q4_0",
    *,
    slots: int = 1,
    context_tokens: int = 2048,
    kv_dtype: str = "fp16",
    overhead_bytes: int = OVERHEAD_BYTES,
    rungs: Iterable[Rung] = LADDER,
) -> list[Fit]:
    """For each rung: weights + KV + overhead against `memory_bytes`.

    weights: the tensors in `weight_format` (see `models.formats.weight_bytes`); KV: `slots` x `context_tokens` x bytes a token
    (`ModelSpec.kv_bytes_per_token`); overhead: `overhead_bytes`. Raises KeyError for a format or dtype that does not exist.
    """
    return [
        Fit(
            rung=one,
            weight_bytes=weight_bytes(one.spec, weight_format),
            kv_bytes=slots * context_tokens * one.spec.kv_bytes_per_token(kv_dtype),
            overhead_bytes=overhead_bytes,
            memory_bytes=memory_bytes,
        )
        for one in rungs
    ]
