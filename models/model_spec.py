"""The shape of a model, and what follows from it: tensors, parameters, bytes of the KV cache.

>>> from models.model_ladder import rung
>>> rung("smollm2-135m").spec.parameters
134515008
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from models.errors import UnsupportedModel

# Bytes of one element of the KV cache.
KV_ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "q8_0": 1.0625, "q4_0": 0.5625}


def whole_number(value: Any, said: str, most: int = 1 << 31) -> int:
    """A size that a file names. Raises UnsupportedModel: a file from anywhere must not make a
    reader count to a billion."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModel(f"{said} {value!r}; it must be a whole number from 1 to {most}")
    return value


class TensorShape(msgspec.Struct, frozen=True):
    """A weight tensor: Hugging Face name and shape, (rows, columns) or (length,)."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class RopeScaling(msgspec.Struct, frozen=True):
    """Llama 3's frequency-dependent RoPE scaling (transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The published shape of a decoder-only transformer.

    `family`: transformers' `model_type` (llama, qwen2, qwen3, mistral), or the architecture that a
    GGUF file names. `heads * head_dim` may differ from `hidden` (Llama-3.2-3B, Qwen3).
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool
    rope_theta: float
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    # Of a GGUF file, whose tensors may be other than those of `tensors()`: llama.cpp knows them.
    counted_parameters: int | None = None

    def tensors(self) -> list[TensorShape]:
        """Every weight tensor, by its Hugging Face name, in the order of the forward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: list[tuple[str, tuple[int, ...]]] = [("input_layernorm.weight", (self.hidden,))]
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            layer.append((f"self_attn.{name}.weight", (rows, self.hidden)))
            if self.qkv_bias:
                layer.append((f"self_attn.{name}.bias", (rows,)))
        if self.qk_norm:
            layer.append(("self_attn.q_norm.weight", (self.head_dim,)))
            layer.append(("self_attn.k_norm.weight", (self.head_dim,)))
        layer += [
            ("self_attn.o_proj.weight", (self.hidden, queries)),
            ("post_attention_layernorm.weight", (self.hidden,)),
            ("mlp.gate_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.up_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.down_proj.weight", (self.hidden, self.intermediate)),
        ]
        out = [TensorShape("model.embed_tokens.weight", (self.vocabulary, self.hidden))]
        for number in range(self.layers):
            out += [TensorShape(f"model.layers.{number}.{name}", shape) for name, shape in layer]
        out.append(TensorShape("model.norm.weight", (self.hidden,)))
        if not self.tied:
            out.append(TensorShape("lm_head.weight", (self.vocabulary, self.hidden)))
        return out

    @property
    def parameters(self) -> int:
        """Stored parameters; a tied head is counted once."""
        if self.counted_parameters is not None:
            return self.counted_parameters
        return sum(tensor.elements for tensor in self.tensors())

    @property
    def matrix_parameters(self) -> int:
        """Parameters a token multiplies with: matrices and head, no embedding."""
        embedding = self.vocabulary * self.hidden
        if self.counted_parameters is not None:
            return self.counted_parameters - (not self.tied) * embedding
        matrices = sum(one.elements for one in self.tensors() if len(one.shape) == 2)
        return matrices - (not self.tied) * embedding

    def kv_bytes_per_token(self, kv_dtype: str = "fp16") -> int:
        """KV cache bytes a token: layers x 2 x kv_heads x head_dim x element."""
        return int(self.layers * 2 * self.kv_heads * self.head_dim * KV_ELEMENT_BYTES[kv_dtype])
