"""The shape of a model, and what follows from it: parameters, bytes, FLOPs.

>>> from models.ladder import rung
>>> spec = rung("smollm2-135m").spec
>>> spec.parameters
134515008
>>> round(spec.weight_bytes("Q4_0") / 2**20)
72
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from models.errors import BrokenWeights

# Bits that one weight takes in each format, block scales counted in.
# GGUF types: ggml's block layouts (Q4_0: 32 weights in 18 bytes; Q8_0: 34 bytes; Q6_K: 256 weights
# in 210 bytes). int4 has one float32 scale for 32 weights (MatMulNBits), int8 one for an output.
BITS_PER_WEIGHT: dict[str, float] = {
    "fp32": 32.0,
    "fp16": 16.0,
    "bf16": 16.0,
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8_0": 8.5,
    "Q6_K": 6.5625,
    "Q5_K": 5.5,
    "Q4_K": 4.5,
    "Q4_K_M": 4.89,  # a mixture: as an 8B model has it; models.formats.weight_bytes is exact
    "Q4_1": 5.0,
    "Q4_0": 4.5,
    "int8": 8.0,
    "int4": 5.0,
}

# Bytes of one element of the KV cache.
KV_ELEMENT_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "q8_0": 1.0625,
    "q4_0": 0.5625,
}


class TensorShape(msgspec.Struct, frozen=True):
    """A weight tensor: Hugging Face name and shape, (rows, columns) or (length,)."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


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
    # Of a GGUF file whose tensors are not those of `tensors()`: only llama.cpp knows them.
    counted_parameters: int | None = None

    def tensors(self) -> list[TensorShape]:
        """Every weight tensor, by its Hugging Face name, in the order of the forward pass."""
        out = [TensorShape("model.embed_tokens.weight", (self.vocabulary, self.hidden))]
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            attention = prefix + "self_attn."
            out.append(TensorShape(prefix + "input_layernorm.weight", (self.hidden,)))
            for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                out.append(TensorShape(f"{attention}{name}.weight", (rows, self.hidden)))
                if self.qkv_bias:
                    out.append(TensorShape(f"{attention}{name}.bias", (rows,)))
            if self.qk_norm:
                out.append(TensorShape(attention + "q_norm.weight", (self.head_dim,)))
                out.append(TensorShape(attention + "k_norm.weight", (self.head_dim,)))
            out.append(TensorShape(attention + "o_proj.weight", (self.hidden, queries)))
            out.append(TensorShape(prefix + "post_attention_layernorm.weight", (self.hidden,)))
            for name in ("gate_proj", "up_proj"):
                shape = (self.intermediate, self.hidden)
                out.append(TensorShape(f"{prefix}mlp.{name}.weight", shape))
            shape = (self.hidden, self.intermediate)
            out.append(TensorShape(f"{prefix}mlp.down_proj.weight", shape))
        out.append(TensorShape("model.norm.weight", (self.hidden,)))
        if not self.tied:
            out.append(TensorShape("lm_head.weight", (self.vocabulary, self.hidden)))
        return out

    def check_shapes(
        self,
        found: Mapping[str, tuple[int, ...]],
        owner: str,
        called: Callable[[str], str] = str,
    ) -> None:
        """Raises BrokenWeights with the first tensor that is not there, or of another shape.

        `owner`: what asks for it; `called`: the name in `found` of a Hugging Face name.
        """
        for tensor in self.tensors():
            name = called(tensor.name)
            shape = found.get(name)
            if shape is None:
                raise BrokenWeights(f"{self.name} has no tensor {name}, which {owner} asks for")
            if shape != tensor.shape:
                raise BrokenWeights(
                    f"{self.name} has tensor {name} of shape {shape}, {owner} says {tensor.shape}"
                )

    @property
    def parameters(self) -> int:
        """Stored parameters; a tied head is counted once."""
        if self.counted_parameters is not None:
            return self.counted_parameters
        return sum(tensor.elements for tensor in self.tensors())

    @property
    def matrix_parameters(self) -> int:
        """Parameters a token multiplies with: matrices and head, no embedding."""
        if self.counted_parameters is not None:
            return self.counted_parameters - (not self.tied) * self.vocabulary * self.hidden
        body = sum(
            t.elements
            for t in self.tensors()
            if t.is_matrix and "embed_tokens" not in t.name and "lm_head" not in t.name
        )
        return body + self.vocabulary * self.hidden

    def weight_bytes(self, weight_format: str) -> int:
        """Bytes of the weights: matrices in `weight_format`, vectors in float32.

        Nominal: file types such as Q4_K_M are mixtures (models.formats is exact). Raises KeyError.
        """
        if weight_format not in BITS_PER_WEIGHT:
            raise KeyError(
                f"unknown weight format {weight_format!r}; known: {', '.join(BITS_PER_WEIGHT)}"
            )
        bits = BITS_PER_WEIGHT[weight_format]
        if self.counted_parameters is not None:
            return int(self.counted_parameters * bits / 8)
        matrices = sum(t.elements for t in self.tensors() if t.is_matrix)
        vectors = self.parameters - matrices
        return int(matrices * bits / 8) + vectors * 4

    def kv_bytes_per_token(self, kv_dtype: str = "fp16") -> int:
        """KV cache bytes a token: layers x 2 x kv_heads x head_dim x element."""
        if kv_dtype not in KV_ELEMENT_BYTES:
            raise KeyError(f"unknown KV dtype {kv_dtype!r}; known: {', '.join(KV_ELEMENT_BYTES)}")
        return int(self.layers * 2 * self.kv_heads * self.head_dim * KV_ELEMENT_BYTES[kv_dtype])
