"""Reads a Hugging Face config.json, of transformers 4 or 5, into a ModelSpec.

    spec = read_spec("SmolLM2-135M")  # UnsupportedModel names the key that is not supported

transformers 5 writes `rope_parameters`, 4.x wrote `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec, RopeScaling, finite_number, whole_number

# The files of a model folder besides its weights.
TEXTS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
]
# Keys of config.json that only mixtures of experts have, and starts of keys that only models with
# recurrent layers have.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = ("mamba_", "ssm_", "linear_num_", "conv_L_cache")
_GGUF = "its GGUF file, which llama_cpp serves (of the hub: org/name:file.gguf)"
# Keys whose other values change what the model computes, with the only supported value. A key that
# is missing or null has that value too.
_SUPPORTED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_out_bias": False,
    "partial_rotary_factor": 1.0,
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises UnknownModel if there is none, BrokenWeights if it
    is not a JSON object."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise UnknownModel(
            f"{Path(folder).name} is not a Hugging Face model folder: it has no config.json"
        )
    try:
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8)  # as some Windows tools write it
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as problem:
        raise BrokenWeights(
            f"The config.json of {Path(folder).name} is not a JSON object: {problem}"
        ) from problem


def read_spec(folder: str | Path, name: str | None = None) -> ModelSpec:
    """Return the folder's shape. Raises UnsupportedModel with key and value."""
    return spec_of_config(read_config(folder), name or Path(folder).name)


def v4_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the RoPE keys of transformers 4, which would compute other rotations
    from those of transformers 5.

    Keys that name code of the hub are left out, since transformers would fetch and run it
    (CVE-2026-4372).
    """
    out = {key: value for key, value in config.items() if key[:1] != "_"}
    out.pop("attn_implementation", None)
    rope = out.pop("rope_parameters", None)
    if rope:
        is_plain = rope.get("rope_type", "default") == "default"
        out["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
        out["rope_scaling"] = None if is_plain else rope
    return out


def check_dense(config: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModel for a model or a weight format that neither onnx nor torch serves. The
    message says what would do."""
    kind = _unsupported_kind(config)
    if kind:
        family = config.get("model_type")
        instead = "" if "encoder" in kind else f" Use {_GGUF}."
        raise UnsupportedModel(
            f"{name} is {kind} (model_type {family!r}), but onnx and torch serve only dense models "
            f"that generate text.{instead}"
        )
    if method := _quantization(config):
        raise UnsupportedModel(
            f"{name} has quantized weights ({method}, by config.json), which neither onnx nor "
            "torch reads. Use the folder of the same model in 16 bits, of which onnx makes 8 or 4 "
            f"bits, or {_GGUF}."
        )


def _quantization(config: dict[str, Any]) -> str:
    """Return the method with which the folder's weights are quantized (fp8, gptq, awq,
    bitsandbytes, compressed-tensors ...); "": they are not."""
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key)
        if isinstance(settings, dict) and settings:
            method = settings.get("quant_method")
            return method if isinstance(method, str) and method.isprintable() else key
        if settings:
            return key
    return ""


def _unsupported_kind(config: dict[str, Any]) -> str:
    """Return the kind of model that is not a dense text model, as a phrase; "": it is one."""
    text_config = config.get("text_config")
    is_multimodal = isinstance(text_config, dict)
    text = text_config if isinstance(text_config, dict) else config
    if any(isinstance(text.get(key), int) and text[key] > 1 for key in _EXPERT_COUNTS):
        return "a mixture of experts"
    has_linear_attention = "linear_attention" in _texts(text.get("layer_types"))
    if has_linear_attention or any(key.startswith(_RECURRENT) for key in text):
        return "a model with recurrent layers"
    if is_multimodal:
        return "a multimodal model"
    if text.get("is_encoder_decoder"):
        return "an encoder-decoder model"
    if _is_encoder(text.get("architectures")):
        return "an encoder, which generates no text"
    return ""


def _is_encoder(architectures: Any) -> bool:
    """Return whether `architectures`, names of classes of transformers, has names but none of a
    class that generates text."""
    class_names = _texts(architectures)
    generating = [name for name in class_names if "CausalLM" in name or "LMHeadModel" in name]
    return bool(class_names) and not generating


def _texts(value: Any) -> list[str]:
    """Return the texts in a list of config.json; [] if it has no list there."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def spec_of_config(config: dict[str, Any], name: str) -> ModelSpec:
    """Return the shape in a config.json of either major version. Raises UnsupportedModel."""
    family_name = config.get("model_type")
    check_dense(config, name)
    if not isinstance(family_name, str) or family_name not in FAMILIES:
        raise UnsupportedModel(
            f"{name} has model_type {family_name!r}, but torch supports only "
            f"{', '.join(FAMILIES)}. Use onnx, which exports other dense models, or {_GGUF}."
        )
    family = FAMILIES[family_name]
    config = {**family.config_defaults, **config}
    for key, value in _SUPPORTED_VALUES.items():
        if config.get(key) not in (None, value, *family.known_values.get(key, ())):
            raise UnsupportedModel(f"{name} has {key} {config[key]!r}, which is not supported")

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key)
        maximum = 10_000 if key == "num_hidden_layers" else 1 << 31
        return whole_number(default if value is None else value, name, key, maximum)

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    kv_heads = count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{name} has num_attention_heads {heads}, which is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    context = count("max_position_embeddings")
    theta, scaling = _rope(config, name)
    is_windowed = family.is_windowed or config.get("use_sliding_window")
    if is_windowed or "sliding_attention" in _texts(config.get("layer_types")):
        # Up to the window's length, attention with a window is the same as without.
        context = min(context, count("sliding_window", context))
    return ModelSpec(
        name=name,
        family=family_name,
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
        norm_epsilon=finite_number(config.get("rms_norm_eps", 1e-6), name, "rms_norm_eps"),
        qkv_bias=family.has_qkv_bias,
        qk_norm=family.has_qk_norm,
        rope_scaling=scaling,
    )


def _rope(config: dict[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """Return RoPE's base theta, and Llama 3's scaling or None. Raises UnsupportedModel."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"{name} has RoPE {rope!r:.80} in config.json, which is no object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    differs_by_layer = any(isinstance(value, dict) for value in rope.values())
    is_partial = (rope.get("partial_rotary_factor") or 1.0) != 1.0
    if kind not in ("default", "llama3") or differs_by_layer or is_partial:
        raise UnsupportedModel(f"{name} has RoPE of type {rope}; supported: default and llama3")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    try:
        base = finite_number(10_000.0 if theta is None else theta, name, "rope_theta")
        if kind == "default":
            return base, None
        return base, RopeScaling(
            factor=finite_number(rope["factor"], name, "factor"),
            low_freq_factor=finite_number(rope["low_freq_factor"], name, "low_freq_factor"),
            high_freq_factor=finite_number(rope["high_freq_factor"], name, "high_freq_factor"),
            original_context=int(
                finite_number(
                    rope["original_max_position_embeddings"],
                    name,
                    "original_max_position_embeddings",
                )
            ),
        )
    except KeyError as problem:
        text = f"{name} has an incomplete RoPE in config.json: {problem} is missing"
        raise UnsupportedModel(text) from problem
