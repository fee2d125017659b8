"""Read a Hugging Face config.json of either transformers version into a ModelSpec.

    spec = read_spec("SmolLM2-135M")  # UnsupportedModel names the key that is not supported

transformers 5 writes `rope_parameters`, 4.x wrote `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from crossover.models.model_families import FAMILIES
from crossover.models.model_spec import ModelSpec, RopeScaling, whole_number

# What a folder holds beside its weights.
TEXTS = "config.json generation_config.json tokenizer.json tokenizer_config.json".split()
TEXTS += ["chat_template.jinja", "chat_template.json"]


# Keys of config.json that only mixtures of experts, or only recurrent layers, have.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = ("mamba_", "ssm_", "linear_num_", "conv_L_cache")
_GGUF = "its GGUF file, which llama_cpp serves (of the hub: org/name:file.gguf)"


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json as it stands. Raises UnknownModel (none), BrokenWeights (no object)."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise UnknownModel(
            f"{Path(folder).name} is not a Hugging Face model folder: it has no config.json"
        )
    try:
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8)  # as some Windows tools write it
        return msgspec.json.decode(text, type=dict[str, Any])
    except ValueError as problem:
        raise BrokenWeights(
            f"The config.json of {Path(folder).name} is not a JSON object: {problem}"
        ) from problem


def read_spec(folder: str | Path, name: str | None = None) -> ModelSpec:
    """Return the folder's shape. Raises UnsupportedModel with key and value."""
    return spec_of(read_config(folder), name or Path(folder).name)


def v4_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in the words of transformers 4.x, which takes one of 5.x for a model with
    other rotations; without keys that name code of the hub, which it would fetch and run
    (CVE-2026-4372)."""
    out = {key: value for key, value in config.items() if key[:1] != "_"}
    out.pop("attn_implementation", None)
    rope = out.pop("rope_parameters", None)
    if rope:
        is_plain = rope.get("rope_type", "default") == "default"
        out["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
        out["rope_scaling"] = None if is_plain else rope
    return out


def check_dense(config: dict[str, Any], name: str) -> None:
    """Refuse what neither onnx nor torch serves. Raises UnsupportedModel with what does."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    kinds = inner.get("layer_types") or ()
    kind = ""
    if any(isinstance(inner.get(key), int) and inner[key] > 1 for key in _EXPERT_COUNTS):
        kind = "a mixture of experts"
    elif "linear_attention" in kinds or any(key.startswith(_RECURRENT) for key in inner):
        kind = "a model with recurrent layers"
    elif inner is not config:
        kind = "a multimodal model"
    elif inner.get("is_encoder_decoder"):
        kind = "an encoder-decoder model"
    elif _is_encoder(inner.get("architectures")):
        kind = "an encoder, which generates no text"
    if kind:
        family = config.get("model_type")
        instead = "" if "encoder" in kind else f" Use {_GGUF}."
        raise UnsupportedModel(
            f"{name} is {kind} (model_type {family!r}), but onnx and torch serve only dense models "
            f"that generate text.{instead}"
        )


def _is_encoder(architectures: Any) -> bool:
    """Return whether classes of transformers are named and none of them generates text."""
    class_names = [str(class_name) for class_name in architectures or ()]
    return bool(class_names) and not any(
        "CausalLM" in class_name or "LMHeadModel" in class_name for class_name in class_names
    )


def spec_of(config: dict[str, Any], name: str) -> ModelSpec:
    """Return a ModelSpec of a config.json of either major version. Raises UnsupportedModel."""
    family = config.get("model_type")
    check_dense(config, name)
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"{name} has model_type {family!r}, but torch supports only {', '.join(FAMILIES)}. Use "
            f"onnx, which exports other dense models, or {_GGUF}."
        )
    own = FAMILIES[family]
    config = {**own.config_defaults, **config}
    known = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    known |= {"attention_out_bias": False}
    known |= {"quantization_config": None, "partial_rotary_factor": 1.0}
    for key, value in known.items():
        if config.get(key) not in (None, value, *own.known_values.get(key, ())):
            raise UnsupportedModel(f"{name} has {key} {config[key]!r}, which is not supported")

    def count(key: str, default: int | None = None) -> int:
        found = config.get(key)
        most = 10_000 if key == "num_hidden_layers" else 1 << 31
        return whole_number(default if found is None else found, name, key, most)

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    kv_heads = count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{name} has num_attention_heads {heads}, which is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    context, theta, scaling = count("max_position_embeddings"), *_rope(config, name)
    is_windowed = own.is_windowed or config.get("use_sliding_window")
    if is_windowed or "sliding_attention" in (config.get("layer_types") or ()):
        context = min(context, count("sliding_window", context))  # up to there it is not felt
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
        context=context,
        tied=bool(config.get("tie_word_embeddings")),
        rope_theta=theta,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=own.has_qkv_bias,
        qk_norm=own.has_qk_norm,
        rope_scaling=scaling,
    )


def _rope(config: dict[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """Return the base, and Llama 3's scaling. Raises UnsupportedModel."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta, kind = rope.get("rope_theta", config.get("rope_theta")), rope.get("rope_type")
    kind = kind or rope.get("type") or "default"
    is_one = not any(isinstance(value, dict) for value in rope.values())  # for all layers
    is_whole = (rope.get("partial_rotary_factor") or 1.0) == 1.0
    if kind not in ("default", "llama3") or not is_one or not is_whole:
        raise UnsupportedModel(f"{name} has RoPE of type {rope}; supported: default and llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    try:
        base = 10_000.0 if theta is None else float(theta)
        if kind == "default":
            return base, None
        factor, low, high, original = (float(rope[key]) for key in keys)
        return base, RopeScaling(factor, low, high, int(original))
    except (KeyError, TypeError, ValueError) as problem:
        text = f"{name} has an incomplete RoPE in config.json: {problem}"
        raise UnsupportedModel(text) from problem
