"""The families of dense models whose graph and forward pass are written here: one record each.

    FAMILIES["qwen2"].has_qkv_bias       # True

What all of them have in common is computed by crossover.models.convert_to_onnx,
crossover.models.rotated_weights and crossover.serving.backends.torch.forward_pass: norms before
attention and before the MLP (RMS), grouped-query attention with rotary positions, an MLP of gate,
up and down with SiLU, an optional tied head. The record says what differs.
docs/adding-a-model-family.md adds one.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """What sets one family of models apart.

    `architecture`: the class of transformers that config.json names. `gguf`: the architecture's
    name in a GGUF file, as llama.cpp knows it. `config_defaults`: the defaults of transformers for
    keys that a config.json leaves out, where they are not those of Llama. `known_values`: values of
    keys that are refused of other families, since they change what is computed.
    """

    architecture: str
    gguf: str
    has_qkv_bias: bool = False  # query, key and value projections have biases
    has_qk_norm: bool = False  # each head of query and key is normed before it is rotated
    is_windowed: bool = False  # a sliding window that config.json names holds for all layers
    config_defaults: dict[str, Any] = {}
    known_values: dict[str, tuple[Any, ...]] = {}


# By transformers' model_type.
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
