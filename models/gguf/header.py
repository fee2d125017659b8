"""Reads the shape of a model from the metadata and the tensor shapes of a GGUF header.

    spec_of_header({"general.architecture": "llama", ...}, {"token_embd.weight": (576, 49152), ...},
                   "model").parameters                                      # 134515008

The header may be that of a file (reader.py), or one of which no file has been made (shapes.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.gguf.layers import Shapes, cached_layers, state_bytes
from crossover.models.shape.model_spec import Experts, ModelSpec, finite_number, whole_number

_MAXIMUMS = {"block_count": 10_000, "nextn_predict_layers": 100}  # published: 126 and 3
Metadata = Mapping[str, Any]


def spec_of_header(
    metadata: Metadata, shapes: Shapes, name: str, expert_bytes: int | None = None
) -> ModelSpec:
    """Return the model's shape, as far as it is needed to serve the model with llama.cpp. It does
    not tell whether llama.cpp can load the file; only trying it does.

    `expert_bytes`: of all experts in the file; None: there is no file.

    Raises UnsupportedModel if the model does not generate text, BrokenWeights.
    """
    family = str(metadata.get("general.architecture"))
    start = f"{family}."
    keys = {
        key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)
    }
    _check_generates_text(metadata, keys, name)

    def count(key: str, default: int | None = None, minimum: int = 1) -> int:
        value = keys.get(key, default)
        if isinstance(value, list):
            value = max(value, default=0)  # one for each layer
        return whole_number(value, name, f"{family}.{key}", _MAXIMUMS.get(key, 1 << 31), minimum)

    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise BrokenWeights(f"{name} has no embedding matrix token_embd.weight")
    all_layers, hidden = count("block_count"), count("embedding_length")
    # The last layers may only draft tokens for speculative decoding.
    layers = all_layers - min(all_layers - 1, count("nextn_predict_layers", 0, minimum=0))
    heads = count("attention.head_count", 0, minimum=0)  # 0: no attention (Mamba, RWKV)
    key_dim = count("attention.key_length", hidden // heads if heads else 0, minimum=0)
    value_dim = count("attention.value_length", key_dim, minimum=0)
    sizes = {key: value for key, value in keys.items() if _is_size(value)}
    is_tied = "output.weight" not in shapes
    elements = {tensor: math.prod(shape) for tensor, shape in shapes.items()}
    # Generating a token multiplies nothing with the layers that draft, nor with embeddings, which
    # are looked up row by row. If they are tied, the token embeddings are the output matrix too.
    idle_tensors = tuple(f"blk.{layer}." for layer in range(layers, all_layers))
    idle_tensors += ("per_layer_token_embd.weight", "position_embd.weight")
    idle_tensors += () if is_tied else ("token_embd.weight",)
    return ModelSpec(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads, minimum=0),
        head_dim=(key_dim + value_dim + 1) // 2,
        intermediate=count("feed_forward_length", 4 * hidden, minimum=0),
        vocabulary=embedding[1],
        context=count("context_length"),
        tied=is_tied,
        rope_theta=finite_number(
            keys.get("rope.freq_base", 10_000.0), name, f"{family}.rope.freq_base"
        ),
        counted_parameters=sum(elements.values()),
        idle_parameters=sum(
            size for tensor, size in elements.items() if tensor.startswith(idle_tensors)
        ),
        experts=_experts(
            count=count("expert_count", 0, minimum=0),
            used=count("expert_used_count", 0, minimum=0),
            parameters=sum(size for tensor, size in elements.items() if is_of_experts(tensor)),
            weight_bytes=expert_bytes,
        ),
        cached_layers=cached_layers(family, sizes, shapes, layers),
        state_bytes_per_slot=state_bytes(sizes, shapes, layers),
    )


def _is_size(value: Any) -> bool:
    """Return whether a value of the metadata is a count, or a list with one for each layer."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(size, int) and 0 <= size <= 1 << 31 for size in values)


def is_of_experts(tensor: str) -> bool:
    """Return whether this is the name of a tensor of experts."""
    return "_exps." in tensor or "_chexps." in tensor


def _experts(count: int, used: int, parameters: int, weight_bytes: int | None) -> Experts | None:
    """Return the experts; None: a dense model. The arguments are fields of Experts, from a file
    that may contradict itself."""
    if not (parameters and count and used):
        return None
    return Experts(count, min(used, count), parameters, weight_bytes)


def _check_generates_text(metadata: Metadata, keys: Metadata, name: str) -> None:
    """Raise UnsupportedModel for a file that is not a model which generates text. `keys`: those of
    the architecture, without its name in front.

    Converters write `general.type` "mmproj" and "adapter"; files from before 2025 lack it, and are
    known by the architecture "clip" and by the key "adapter.type".
    """
    family, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind == "mmproj" or family == "clip":
        raise UnsupportedModel(
            f"{name} is a multimodal projector (mmproj), which is only one part of a model. "
            "Give the GGUF file of the language model that it belongs to, which is then served "
            "without images and audio."
        )
    if kind == "adapter" or "adapter.type" in metadata:
        adapter = "LoRA" if metadata.get("adapter.type", "lora") == "lora" else "control"
        base = metadata.get("general.base_model.0.name")
        raise UnsupportedModel(
            f"{name} is a {adapter} adapter of the architecture {family!r}, not a model. Merge "
            f"it into its base model{f' {base}' if base else ''} with llama.cpp's "
            "llama-export-lora, and give the merged GGUF file."
        )
    if kind != "model":
        raise UnsupportedModel(f"{name} is a GGUF file of the type {kind!r}, not a model")
    if family is None:
        raise UnsupportedModel(f"{name} does not have general.architecture, so it is no model")
    if not keys.get("attention.causal", True):
        raise UnsupportedModel(
            f"{name} is a GGUF file of the architecture {family!r}, which generates no text"
        )
