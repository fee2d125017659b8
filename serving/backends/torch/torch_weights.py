"""Reads safetensors into the few fused matrices that a step multiplies with.

Tensors are read one at a time from memory-mapped files and checked against the shapes that
config.json implies. Query, key and value become one matrix, gate and up another. Peak memory is
the weights plus the largest fused matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.safetensors_reader import (
    EMBEDDING,
    FORMATS,
    HEAD,
    StoredTensor,
    read_tensors,
)
from crossover.models.weights.weights_manifest import Progress

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(slots=True)
class Dense:
    """A linear layer: x @ weight.T + bias, with a weight [outputs, inputs] in the compute type."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def compute_dtype(weight_format: str, device: torch.device) -> torch.dtype:
    """Return the type of weights, activations and KV cache: that of the stored weights, but float32
    for bf16 weights on a CPU that is slow with bf16 (one without AVX-512 or Arm's bf16, by oneDNN's
    own test)."""
    if weight_format in ("fp32", "fp16"):
        return DTYPES[weight_format]
    is_slow_cpu = device.type == "cpu" and not _has_fast_bf16()
    return torch.float32 if is_slow_cpu else torch.bfloat16


def _has_fast_bf16() -> bool:
    # A private operator; tests/serving/backends/torch/test_loading.py fails where it is gone.
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and is_supported()


@dataclass(slots=True)
class Layer:
    """One transformer block: its fused matrices, and the weights of its norms."""

    qkv: Dense  # outputs: queries, keys and values of all heads, one behind the other
    out: Dense
    gate_up: Dense  # outputs: gate, then up
    down: Dense
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None  # [head_dim]; None: heads are not normalized
    key_norm: Tensor | None


@dataclass(slots=True)
class ModelTensors:
    """A whole model on its device."""

    embedding: Tensor
    head: Dense  # to the logits
    norm: Tensor  # of the last hidden state
    layers: list[Layer]


class StoredTensors:
    """The tensors of a folder's model*.safetensors. Raises BrokenWeights, UnsupportedModel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Some repositories also have consolidated.safetensors, with the same weights under other
        # names. Old versions of transformers stored inv_freq, the frequencies of RoPE, which the
        # forward pass computes.
        self.stored = {
            name: tensor
            for name, tensor in read_tensors(folder).items()
            if tensor.file.name.startswith("model") and not name.endswith(".inv_freq")
        }
        self._opened: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the CPU."""
        file = self._stored(name).file
        if file not in self._opened:
            self._opened[file] = safe_open(str(file), framework="pt")
        tensor: Tensor = self._opened[file].get_tensor(name)
        return tensor

    @property
    def weight_format(self) -> str:
        """Return the format of the matrices: fp32, bf16 or fp16."""
        dtype = self._stored(EMBEDDING).dtype
        if dtype not in FORMATS:
            raise UnsupportedModel(
                f"{self.folder.name} holds weights of type {dtype}; known: {', '.join(FORMATS)}"
            )
        return FORMATS[dtype]

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.stored:
            raise BrokenWeights(f"{self.folder.name} lacks the tensor {name!r}")
        return self.stored[name]


def load(
    checkpoint: StoredTensors,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> ModelTensors:
    """Return all weights, fused, as `dtype` on `device`. Raises BrokenWeights, UnsupportedModel."""
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
    used: set[str] = set()

    def read(name: str) -> Tensor:
        """Return a copy of one tensor, after checking its shape."""
        tensor = checkpoint.read(name)
        if tuple(tensor.shape) != shapes[name]:
            raise BrokenWeights(
                f"{name!r} of {checkpoint.folder.name} has the shape {list(tensor.shape)}; "
                f"config.json implies {list(shapes[name])}"
            )
        used.add(name)
        return tensor.to(device=device, dtype=dtype, copy=True)

    def linear(*modules: str) -> Dense:
        """Return modules with the same input as one fused matrix."""
        bias: Tensor | None = None
        if f"{modules[0]}.bias" in shapes:
            bias = torch.cat([read(f"{module}.bias") for module in modules])
        weights = [read(f"{module}.weight") for module in modules]
        return Dense(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def optional(name: str) -> Tensor | None:
        return read(name) if name in shapes else None

    layers = []
    for index in range(spec.layers):
        progress("loading weights", index / spec.layers)
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query_norm = optional(attention + "q_norm.weight")
        key_norm = optional(attention + "k_norm.weight")
        layer = Layer(
            qkv=linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            out=linear(attention + "o_proj"),
            gate_up=linear(mlp + "gate_proj", mlp + "up_proj"),
            down=linear(mlp + "down_proj"),
            attention_norm=read(prefix + "input_layernorm.weight"),
            mlp_norm=read(prefix + "post_attention_layernorm.weight"),
            query_norm=query_norm,
            key_norm=key_norm,
        )
        layers.append(layer)
    embedding = read(EMBEDDING)
    head = Dense(embedding) if spec.tied else linear("lm_head")
    norm = read("model.norm.weight")
    unused = set(checkpoint.stored) - used
    if spec.tied:
        unused.discard(HEAD)  # a copy of the embedding, which some tied checkpoints store as well
    if unused:
        names = ", ".join(sorted(unused)[:3])
        raise UnsupportedModel(
            f"{checkpoint.folder.name} holds tensors that a {spec.family} model of this kind does "
            f"not have: {names} ({len(unused)} in all)"
        )
    return ModelTensors(embedding, head, norm, layers)
