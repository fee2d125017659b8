"""Reads safetensors into the few fused matrices that the step multiplies with.

Tensors are read one at a time from memory-mapped files and checked against the shapes that
config.json implies. Query, key and value become one matrix, gate and up another. Peak memory is
the weights plus the largest fused matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from models.errors import BrokenWeights, UnsupportedModel
from models.manifest import Progress
from models.spec import ModelSpec

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True)
class Dense:
    """x @ weight.T + bias, weight [out, in] in the compute type."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 quickly (oneDNN's test: AVX-512, Arm with bf16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(weight_format: str, device: torch.device) -> torch.dtype:
    """Type of weights, activations and KV cache: the stored one, but float32 on a CPU that is slow
    with bf16."""
    if weight_format in ("fp32", "fp16"):
        return DTYPES[weight_format]
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32


@dataclass(slots=True)
class Layer:
    """One transformer block: fused matrices and its norms."""

    qkv: Dense
    out: Dense
    gate_up: Dense
    down: Dense
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(slots=True)
class Weights:
    """A whole model on its device."""

    embedding: Tensor
    head: Dense
    norm: Tensor
    layers: list[Layer]
    bytes: int


class Checkpoint:
    """The tensors of a folder's safetensors files, by name. Raises BrokenWeights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where: dict[str, Any] = {}
        # Not consolidated.safetensors, which some repositories have beside them.
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise BrokenWeights(f"{folder.name} holds no model*.safetensors file")
        for file in files:
            try:
                opened = safe_open(str(file), framework="pt")
                names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as problem:
                raise BrokenWeights(
                    f"{file.name} of {folder.name} cannot be read: {problem}; it may be cut off"
                ) from problem
            # What old versions of transformers wrote and the forward pass computes.
            self.where |= {name: opened for name in names if not name.endswith(".inv_freq")}

    def read(self, name: str) -> Tensor:
        """One tensor as stored, on the CPU."""
        if name not in self.where:
            raise BrokenWeights(f"{self.folder.name} lacks the tensor {name!r}")
        tensor: Tensor = self.where[name].get_tensor(name)
        return tensor

    @property
    def weight_format(self) -> str:
        """The format of the matrices: fp32, bf16 or fp16. Raises UnsupportedModel."""
        dtype = self.read(_EMBEDDING).dtype
        names = [name for name, known in DTYPES.items() if dtype == known]
        if not names:
            raise UnsupportedModel(
                f"{self.folder.name} holds weights of type {dtype}; known: {', '.join(DTYPES)}"
            )
        return names[0]


class _Loader:
    """Reads, fuses and counts the tensors of one checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.seen: set[str] = set()
        self.bytes = 0
        self._checkpoint = checkpoint
        self._shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        self._device = device
        self._dtype = dtype

    def linear(self, *modules: str) -> Dense:
        """One fused matrix of several modules with the same input."""
        bias: Tensor | None = None
        if f"{modules[0]}.bias" in self._shapes:
            bias = torch.cat([self.read(f"{module}.bias") for module in modules])
        parts = [self.read(f"{module}.weight") for module in modules]
        return Dense(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def layer(self, prefix: str) -> Layer:
        """A transformer block."""
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norms = [attention + "q_norm.weight", attention + "k_norm.weight"]
        query_norm, key_norm = (self.read(n) if n in self._shapes else None for n in norms)
        return Layer(
            qkv=self.linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            out=self.linear(attention + "o_proj"),
            gate_up=self.linear(mlp + "gate_proj", mlp + "up_proj"),
            down=self.linear(mlp + "down_proj"),
            attention_norm=self.read(prefix + "input_layernorm.weight"),
            mlp_norm=self.read(prefix + "post_attention_layernorm.weight"),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def read(self, name: str) -> Tensor:
        self.seen.add(name)
        tensor, shape = self._checkpoint.read(name), self._shapes[name]
        if tuple(tensor.shape) != shape:
            raise BrokenWeights(
                f"{name!r} of {self._checkpoint.folder.name} has the shape {list(tensor.shape)}; "
                f"config.json implies {list(shape)}"
            )
        tensor = tensor.to(device=self._device, dtype=self._dtype, copy=True)
        self.bytes += tensor.nbytes
        return tensor


def load(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Weights:
    """All weights, fused, on `device`. Raises BrokenWeights, UnsupportedModel."""
    loader = _Loader(checkpoint, spec, dtype, device)
    layers = []
    for index in range(spec.layers):
        progress("loading weights", index / spec.layers)
        layers.append(loader.layer(f"model.layers.{index}."))
    embedding = loader.read(_EMBEDDING)
    head = Dense(embedding) if spec.tied else loader.linear("lm_head")
    norm = loader.read("model.norm.weight")
    # Some tied checkpoints store the head as well.
    foreign = sorted(set(checkpoint.where) - loader.seen - ({_HEAD} if spec.tied else set()))
    if foreign:
        raise UnsupportedModel(
            f"{checkpoint.folder.name} holds tensors that a {spec.family} model of this kind does "
            f"not have: {', '.join(foreign[:3])} ({len(foreign)} in all)"
        )
    return Weights(embedding, head, norm, layers, loader.bytes)
