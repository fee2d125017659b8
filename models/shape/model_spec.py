"""The shape of a model, and what follows from it: tensors, parameters, bytes of the KV cache.

>>> from crossover.models.identity.model_ladder import ladder_model
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


MAX_NUMBER = 1e12  # of a model's constants, such as the base of RoPE


def whole_number(value: Any, name: str, key: str, maximum: int = 1 << 31, minimum: int = 1) -> int:
    """Return a size from a file, after checking that it is an integer in these bounds, so that an
    untrusted file cannot make a reader count to a billion. None: the file does not have it.

    Raises UnsupportedModel, which names the model and the key.
    """
    bounds = f"must be an integer from {minimum} to {maximum}"
    if value is None:
        raise UnsupportedModel(f"{name} does not have {key}, which {bounds}")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise UnsupportedModel(f"{name} has {key} = {value!r:.80}, but it {bounds}")
    return value


def finite_number(value: Any, name: str, key: str) -> float:
    """Return a number from a file, after checking that it is one, above 0 and finite. Raises
    UnsupportedModel, which names the model and the key."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_NUMBER:
        shown = f"{value!r:.80}"
        bounds = f"must be a number above 0 and at most {MAX_NUMBER:g}"
        raise UnsupportedModel(f"{name} has {key} = {shown}, but it {bounds}")
    return float(value)


class TensorShape(msgspec.Struct, frozen=True):
    """The Hugging Face name and shape of a weight tensor: (rows, columns) or (length,)."""

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
    """A group of layers that cache the same number of elements per token."""

    layers: int  # how many
    keys: int  # elements of a token's keys; with latent attention, of its latent vector
    values: int  # elements of a token's values; 0 with latent attention
    window: int | None = None  # tokens that these layers attend to; None: the whole context


class Scratch(msgspec.Struct, frozen=True):
    """The size of llama.cpp's compute buffer for models in which it does not follow from the usual
    tensors, as llama.cpp reports it (`no_alloc`): float32 elements per token of a step, without
    attention masks and scores."""

    attention_elements: int  # while attention is computed
    largest_elements: int  # the maximum elsewhere


class Routing(msgspec.Struct, frozen=True):
    """The routing of a mixture of experts: each token passes through `used` of `count` experts."""

    count: int  # E
    used: int  # k

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.count:
            text = f"{self.used} of {self.count} experts cannot be used; use 1 to {self.count}"
            raise ValueError(text)

    @property
    def skip_probability(self) -> float:
        """The probability that a token does not use a given expert: 1 - k/E."""
        return 1.0 - self.used / self.count

    def expected_share(self, tokens: float) -> float:
        """Return the expected share of the experts that `tokens` tokens of one pass use together,
        if each token draws its k of E experts independently: 1 - (1 - k/E)^tokens.

        For decode steps with 8 of 128 experts, this gives 22.8, 40.3 and 64.4 % at 4, 8 and 16
        rows; measured were 22.3, 39.9 and 64.3 %.
        """
        return float(1.0 - self.skip_probability**tokens)


class Experts(Routing, frozen=True):
    """The mixture of experts of a model, with the size of its experts."""

    parameters: int  # of all experts in all layers
    weight_bytes: int | None = None  # of all experts in the model's file; None: there is no file

    @property
    def routing(self) -> Routing:
        """The routing without the size of the experts."""
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
    # Counted in a GGUF file, whose tensors may differ from `tensors()`. None: as in `tensors()`.
    counted_parameters: int | None = None
    # Those of `counted_parameters` that no pass multiplies with: embeddings, of which a token reads
    # one row, and layers for speculative decoding.
    idle_parameters: int = 0
    experts: Experts | None = None  # None: a dense model
    # The attention layers, grouped by what they cache per token. None: all layers attend and are
    # alike; (): none attends.
    cached_layers: tuple[CachedLayers, ...] | None = None
    state_bytes_per_slot: int = 0  # recurrent states; they do not depend on the context
    scratch: Scratch | None = None  # None: follows from `tensors()`

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
        tensors = [TensorShape("model.embed_tokens.weight", (self.vocabulary, self.hidden))]
        for number in range(self.layers):
            path = f"model.layers.{number}"
            tensors += [TensorShape(f"{path}.{name}", shape) for name, shape in layer]
        tensors.append(TensorShape("model.norm.weight", (self.hidden,)))
        if not self.tied:
            tensors.append(TensorShape("lm_head.weight", (self.vocabulary, self.hidden)))
        return tensors

    @property
    def parameters(self) -> int:
        """All stored parameters. A head that is tied to the embedding counts once."""
        if self.counted_parameters is not None:
            return self.counted_parameters
        return sum(tensor.elements for tensor in self.tensors())

    @property
    def matrix_parameters(self) -> int:
        """The parameters of all matrices that tokens are multiplied with, which excludes the
        embedding unless it is the head too."""
        if self.counted_parameters is not None:
            return self.counted_parameters - self.idle_parameters
        embedding = self.vocabulary * self.hidden
        matrices = sum(tensor.elements for tensor in self.tensors() if len(tensor.shape) == 2)
        return matrices - (not self.tied) * embedding

    @property
    def looked_up_parameters(self) -> int:
        """The parameters that no token is multiplied with: the embedding, unless it is the head
        too."""
        if self.counted_parameters is not None:
            return self.idle_parameters
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """The parameters that one token is multiplied with: all except `looked_up_parameters` and
        the experts that the token is not routed to."""
        read = self.parameters - self.looked_up_parameters
        if self.experts is None:
            return read
        return read - round((1.0 - self.experts.expected_share(1)) * self.experts.parameters)

    def step_weight_bytes(self, tokens: float, weight_bytes: float) -> float:
        """Return the expected bytes of weights that a pass of `tokens` tokens reads.
        `weight_bytes` is the size of the whole model."""
        read = weight_bytes * (1 - self.looked_up_parameters / self.parameters)
        if self.experts is None:
            return read
        expert_bytes = weight_bytes * self.experts.parameters / self.parameters
        if self.experts.weight_bytes is not None:
            expert_bytes = min(read, self.experts.weight_bytes)
        return read - (1.0 - self.experts.expected_share(tokens)) * expert_bytes

    @property
    def experts_text(self) -> str:
        """What the experts mean for serving the model, as text; "" for a dense model."""
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
        """The attention layers, grouped by what they cache per token."""
        if self.cached_layers is not None:
            return self.cached_layers
        width = self.kv_heads * self.head_dim
        return (CachedLayers(self.layers, width, width),)

    def kv_bytes_per_token(self, kv_dtype: str = "fp16") -> int:
        """Return the KV cache bytes of one token, while no sliding window has passed it: the sum
        over all attention layers of (keys + values) x bytes per element."""
        elements = sum(group.layers * (group.keys + group.values) for group in self.cache_groups)
        return int(elements * KV_ELEMENT_BYTES[kv_dtype])

    @property
    def window_tokens(self) -> int | None:
        """The longest sliding window of any layer, in tokens; None if no layer has one."""
        windows = [group.window for group in self.cache_groups if group.window is not None]
        return max(windows, default=None)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer is recurrent; its state cannot be truncated to fewer tokens."""
        return self.state_bytes_per_slot > 0
