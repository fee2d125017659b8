"""The families of dense models for which Crossover has its own graph and forward pass.

    FAMILIES["qwen2"].has_qkv_bias       # True

All of them have RMS norms before attention and before the MLP, grouped-query attention with rotary
embeddings, an MLP of gate, up and down with SiLU, and optionally a tied head. This is computed by
crossover.models.weights.convert_to_onnx, crossover.models.weights.rotated_weights and
crossover.serving.backends.torch.forward_pass. A family's record says what differs;
docs/adding-a-model-family.md shows how to add one.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """How one family differs from the others."""

    architecture: str  # the class of transformers that config.json names
    gguf: str  # llama.cpp's name of the architecture
    has_qkv_bias: bool = False  # query, key and value projections have biases
    has_qk_norm: bool = False  # queries and keys are normed, head by head, before the rotation
    is_windowed: bool = False  # a `sliding_window` in config.json applies to all layers
    # Values of keys that are missing in a config.json, if transformers has other defaults for this
    # family than for Llama.
    config_defaults: dict[str, Any] = {}
    # Additional values of keys that this family supports. Other values are refused, since they
    # change what is computed.
    known_values: dict[str, tuple[Any, ...]] = {}


# transformers' model_type -> family.
FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(architecture="LlamaForCausalLM", gguf="llama"),
    "mistral": ModelFamily(
        architecture="MistralForCausalLM",
        gguf="llama",
        is_windowed=True,
        config_defaults={"sliding_window": 4096},
    ),
    "qwen2": ModelFamily(architecture="Qwen2ForCausalLM", gguf="qwen2", has_qkv_bias=True),
    "qwen3": ModelFamily(
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        has_qk_norm=True,
        config_defaults={"head_dim": 128},
    ),
}
