"""The shape of a model, and what follows from it: tensors, parameters, bytes of the KV cache.

>>> from crossover.models.model_ladder import ladder_model
>>> ladder_model("smollm2-135m").spec.parameters
134515008
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from crossover.models.errors import UnsupportedModel

# Bytes of one element of the KV cache.
KV_ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "q8_0": 1.0625, "q4_0": 0.5625}


def whole_number(value: Any, subject: str, maximum: int = 1 << 31, minimum: int = 1) -> int:
    """Return a size that a file names. Raises UnsupportedModel: a file from anywhere must not make
    a reader count to a billion."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        text = f"{subject} {value!r}, but it must be an integer from {minimum} to {maximum}"
        raise UnsupportedModel(text)
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


class CachedLayers(msgspec.Struct, frozen=True):
    """Layers that keep equally much of each token in the KV cache."""

    layers: int
    keys: int  # elements of a token's keys; with latent attention, of its one vector
    values: int  # 0 with latent attention
    window: int | None = None  # tokens that these layers attend to; None: the whole context


class Scratch(msgspec.Struct, frozen=True):
    """float32 elements that llama.cpp's compute buffer has for each token of a step, beside masks
    and the scores of attention, where they do not follow from the usual tensors. Read from
    llama.cpp (`no_alloc`)."""

    attention_elements: int  # while attention is computed
    largest_elements: int  # at most elsewhere


class Routing(msgspec.Struct, frozen=True):
    """How a mixture of experts routes: each token goes through `used` of `count` experts."""

    count: int  # E
    used: int  # k

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.count:
            text = f"{self.used} of {self.count} experts cannot be used; use 1 to {self.count}"
            raise ValueError(text)

    @property
    def skip_probability(self) -> float:
        """Of one expert, to be skipped by a token: 1 - k/E."""
        return 1.0 - self.used / self.count

    def expected_share(self, tokens: float) -> float:
        """Return the expected share of the experts that `tokens` tokens of one pass use, where each
        draws its experts independently: 1 - (1 - k/E)^tokens. Measured for decode rows of 8 of 128
        experts: 22.3, 39.9 and 64.3 % at 4, 8 and 16 rows, against 22.8, 40.3 and 64.4 %."""
        return float(1.0 - self.skip_probability**tokens)


class Experts(Routing, frozen=True):
    """The mixture of experts of a model, with what its experts hold."""

    parameters: int  # in the experts' matrices of all layers
    weight_bytes: int | None = None  # of these matrices in a file; None: no file says

    @property
    def routing(self) -> Routing:
        """Without what they hold."""
        return Routing(self.count, self.used)


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The published shape of a decoder-only model.

    `family`: transformers' `model_type` (a key of FAMILIES), or the architecture that a
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
    # Of these, those that no pass multiplies with: embeddings, of which a token reads one row, and
    # layers that only draft.
    idle_parameters: int = 0
    experts: Experts | None = None  # None: a dense model
    # Layers that attend, by what they cache of a token. None: all of them do, alike; (): none does.
    cached_layers: tuple[CachedLayers, ...] | None = None
    state_bytes_per_slot: int = 0  # of recurrent layers, the same for any context
    scratch: Scratch | None = None  # None: as its tensors make it

    def tensors(self) -> list[TensorShape]:
        """Return every weight tensor, by its Hugging Face name, in the order of the forward
        pass."""
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
        """Return parameters in matrices that some token multiplies with: all but the embedding."""
        if self.counted_parameters is not None:
            return self.counted_parameters - self.idle_parameters
        embedding = self.vocabulary * self.hidden
        matrices = sum(one.elements for one in self.tensors() if len(one.shape) == 2)
        return matrices - (not self.tied) * embedding

    @property
    def looked_up_parameters(self) -> int:
        """Return parameters of which a token reads a row, or nothing: the embedding of an untied
        head."""
        if self.counted_parameters is not None:
            return self.idle_parameters
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Return parameters that one token multiplies with: all but those it looks up and the
        experts that it is not routed to."""
        read = self.parameters - self.looked_up_parameters
        if self.experts is None:
            return read
        return read - round((1.0 - self.experts.expected_share(1)) * self.experts.parameters)

    def step_weight_bytes(self, tokens: float, weight_bytes: float) -> float:
        """Return bytes of weights that a pass of `tokens` tokens reads, in expectation.
        `weight_bytes`: of the whole model."""
        read = weight_bytes * (1 - self.looked_up_parameters / self.parameters)
        if self.experts is None:
            return read
        of_experts = weight_bytes * self.experts.parameters / self.parameters
        if self.experts.weight_bytes is not None:
            of_experts = min(read, self.experts.weight_bytes)
        return read - (1.0 - self.experts.expected_share(tokens)) * of_experts

    @property
    def experts_text(self) -> str:
        """Return what experts mean for whoever serves the model; "": it is dense."""
        if self.experts is None:
            return ""
        experts = self.experts
        return (
            f"each token goes through {experts.used} of {experts.count} experts and "
            f"{self.active_parameters:,} parameters, which is fast for one request; 16 requests "
            f"together use {experts.expected_share(16):.0%} of the experts in each step, so that "
            "they share little of it"
        )

    @property
    def cache_groups(self) -> tuple[CachedLayers, ...]:
        """Return the layers that attend, by what they cache of a token."""
        if self.cached_layers is not None:
            return self.cached_layers
        width = self.kv_heads * self.head_dim
        return (CachedLayers(self.layers, width, width),)

    def kv_bytes_per_token(self, kv_dtype: str = "fp16") -> int:
        """KV cache bytes of a token, while every layer keeps it: sum over the layers of
        (keys + values) x element."""
        elements = sum(one.layers * (one.keys + one.values) for one in self.cache_groups)
        return int(elements * KV_ELEMENT_BYTES[kv_dtype])

    @property
    def window_tokens(self) -> int | None:
        """Return the longest sliding window of its layers; None: no layer has one."""
        windows = [one.window for one in self.cache_groups if one.window is not None]
        return max(windows, default=None)

    @property
    def is_recurrent(self) -> bool:
        """Return whether a layer keeps a state that cannot be cut back to fewer tokens."""
        return self.state_bytes_per_slot > 0
