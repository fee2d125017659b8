"""Read a Hugging Face config.json of either transformers version into a ModelSpec.

    spec = read_spec("SmolLM2-135M")  # UnsupportedModel names the key that is not supported
    v4_config(read_config("SmolLM2-135M"))    # the same config as transformers 4.x writes it

transformers 5 writes `rope_parameters` and `dtype`, 4.x wrote `rope_theta`, `rope_scaling` and
`torch_dtype`. A 4.x reader takes a 5.x folder with rope_theta 10,000: wrong tokens, no error. So
transformers only sees configs that went through `v4_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from models.spec import ModelSpec, RopeScaling

# model_type -> class. The families that are computed here.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
_MOST = {"num_hidden_layers": 10_000}


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json as it stands. Raises UnknownModel (none), BrokenWeights (no object)."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise UnknownModel(
            f"{Path(folder).name} holds no config.json: it is not a Hugging Face model folder"
        )
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except ValueError as problem:
        raise BrokenWeights(
            f"config.json of {Path(folder).name} is no object of JSON: {problem}"
        ) from problem


def read_spec(folder: str | Path, name: str | None = None) -> ModelSpec:
    """The folder's shape. Raises UnsupportedModel with key and value."""
    return spec_of(read_config(folder), name or Path(folder).name)


def spec_of(config: dict[str, Any], name: str) -> ModelSpec:
    """A ModelSpec of a config.json of either major version."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"{name} has model_type {family!r}; known: {', '.join(FAMILIES)}")
    # transformers' defaults of a missing key, where they differ by family.
    if family == "mistral":
        config = {"sliding_window": 4096, **config}
    if family == "qwen3":
        config = {"head_dim": 128, **config}
    _refuse_unknown_parts(config, name)
    theta, scaling = _rope(config, name)

    def count(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None and default is not None else config.get(key)
        # A config.json from anywhere must not make a reader count to a billion.
        most = _MOST.get(key, 1 << 31)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UnsupportedModel(
                f"{name} has {key} {value!r} in its config.json; it must be a whole number from 1 "
                f"to {most}"
            )
        return value

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    kv_heads = count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{name} has num_attention_heads {heads}, no multiple of num_key_value_heads {kv_heads}"
        )
    return ModelSpec(
        name=name,
        family=family,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=count("head_dim", hidden // heads),
        intermediate=count("intermediate_size"),
        vocabulary=count("vocab_size"),
        context=count("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings")),
        rope_theta=theta,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_scaling=scaling,
    )


def v4_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the words of transformers 4.x, which 5.x reads too.

    Private keys and `attn_implementation` are left out: they name code of the hub that transformers
    would fetch and run (CVE-2026-4372).
    """
    left_out = ("rope_parameters", "dtype", "attn_implementation")
    out = {key: value for key, value in config.items() if key not in left_out and key[:1] != "_"}
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        if "rope_theta" in parameters:
            out["rope_theta"] = parameters["rope_theta"]
        out["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if "dtype" in config:
        out["torch_dtype"] = config["dtype"]
    family = config.get("model_type")
    if not out.get("architectures") and family in ARCHITECTURES:
        out["architectures"] = [ARCHITECTURES[family]]
    return out


def _refuse_unknown_parts(config: dict[str, Any], name: str) -> None:
    window, context = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    is_windowed = config["model_type"] == "mistral" or bool(config.get("use_sliding_window"))
    is_short = window is not None and window < context
    kinds = {str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"}
    if kinds == {"sliding_attention"} and window is not None and not is_short:
        kinds = set()
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
    for is_wrong, said in (
        (
            config.get("hidden_act", "silu") != "silu",
            f"has hidden_act {config.get('hidden_act')!r}; only silu is known",
        ),
        *(
            (config.get(key), f"has {key} = true, which is not known for {config['model_type']}")
            for key in ("attention_bias", "mlp_bias")
        ),
        (
            is_windowed and is_short,
            f"attends through a sliding window (sliding_window {window}, max_position_embeddings "
            f"{context}), which is not known; with max_position_embeddings {window} or "
            "sliding_window null it is served up to that length",
        ),
        (kinds, f"has layer_types {', '.join(sorted(kinds))}; only full_attention is known"),
        (quantised, f"holds weights already quantised ({method}); give the original weights"),
    ):
        if is_wrong:
            raise UnsupportedModel(f"{name} {said}")


def _rope(config: dict[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """The base, and Llama 3's scaling."""

    def refuse(said: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name} {said}")

    parameters = config.get("rope_parameters")
    scaling, theta = config.get("rope_scaling") or {}, config.get("rope_theta")
    if isinstance(parameters, dict):
        scaling, theta = parameters, parameters.get("rope_theta", theta)
    if any(isinstance(value, dict) for value in scaling.values()):
        raise refuse("has rope_parameters for each kind of layer, which is not known")
    theta = 10_000.0 if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        raise refuse(f"has rope_theta {theta!r}; it must be a number above 0")
    if any((one.get("partial_rotary_factor") or 1.0) != 1.0 for one in (config, scaling)):
        raise refuse("rotates only a part of each head (partial_rotary_factor), which is not known")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise refuse(f"has rope_type {kind!r}; known: default, llama3")
    try:
        return float(theta), RopeScaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise refuse(f"has rope_type llama3 without {missing}") from missing
