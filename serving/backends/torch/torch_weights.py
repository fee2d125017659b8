"""Reads safetensors into the few fused matrices that the step multiplies with.

Tensors are read one at a time from memory-mapped files and checked against the shapes that
config.json implies. Query, key and value become one matrix, gate and up another. Peak memory is
the weights plus the largest fused matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from models.errors import BrokenWeights, UnsupportedModel
from models.spec import ModelSpec
from serving.backends.torch.device_transfer import Uplink

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
WIDEN_ELEMENTS = 1 << 21  # 8 MB of float32: within the last-level cache of any server CPU
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True)
class Dense:
    """x @ weight.T + bias, weight [out, in] in the compute type."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Widened:
    """bfloat16 weights on a CPU without bfloat16 arithmetic, widened to float32 block by block.

    torch multiplies bfloat16 matrices there 5 to 50 times slower than float32, but one or two
    vectors quickly, reading half the bytes. All matrices share the scratch block.
    """

    weight: Tensor  # bf16 [out, in]
    scratch: Tensor  # float32, WIDEN_ELEMENTS long
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape
        if x.shape[0] <= 2:
            out = functional.linear(x.bfloat16(), self.weight).float()
        else:
            out = x.new_empty(x.shape[0], outputs)
            block = max(1, len(self.scratch) // inputs)
            for first in range(0, outputs, block):
                part = self.weight[first : first + block]
                wide = self.scratch[: part.numel()].view(part.shape)
                wide.copy_(part)
                out[:, first : first + block] = functional.linear(x, wide)
        return out if self.bias is None else out + self.bias


Linear = Dense | Widened


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 quickly (oneDNN's test: AVX-512, Arm with bf16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(weight_format: str, device: torch.device) -> torch.dtype:
    """Type of activations and KV cache: the weights', but float32 without bf16 arithmetic."""
    if weight_format in ("fp32", "fp16"):
        return DTYPES[weight_format]
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32


@dataclass(slots=True)
class Layer:
    """One transformer block: fused matrices and its norms."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(slots=True)
class Weights:
    """A whole model on its device."""

    embedding: Tensor
    head: Linear
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


def load(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    weight_format: str,
    device: torch.device,
    progress: Callable[[str, float | None], None],
) -> Weights:
    """All weights, fused, on `device`. Raises BrokenWeights, UnsupportedModel."""
    loader = _Loader(checkpoint, spec, weight_format, device)
    layers = []
    for index in range(spec.layers):
        progress("loading weights", index / spec.layers)
        layers.append(loader.layer(f"model.layers.{index}."))
    embedding = loader.matrix(_EMBEDDING)
    head = loader.wrap(embedding, None) if spec.tied else loader.linear("lm_head")
    norm = loader.vector("model.norm.weight")
    # Some tied checkpoints store the head as well.
    foreign = sorted(set(checkpoint.where) - loader.seen - ({_HEAD} if spec.tied else set()))
    if foreign:
        raise UnsupportedModel(
            f"{checkpoint.folder.name} holds tensors that a {spec.family} model of this kind does "
            f"not have: {', '.join(foreign[:3])} ({len(foreign)} in all)"
        )
    return Weights(embedding, head, norm, layers, loader.bytes)


class _Loader:
    """Reads, fuses and counts the tensors of one checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, weight_format: str, device: torch.device
    ) -> None:
        self.seen: set[str] = set()
        self.bytes = 0
        self._checkpoint = checkpoint
        self._shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        self._device = device
        self._uplink = Uplink(device) if device.type == "cuda" else None
        self._stored_dtype = DTYPES[weight_format]
        self._compute_dtype = compute_dtype(weight_format, device)
        is_widened = self._stored_dtype != self._compute_dtype
        self._scratch = torch.empty(WIDEN_ELEMENTS if is_widened else 0)

    def vector(self, name: str) -> Tensor:
        return self._read(name, self._compute_dtype)

    def matrix(self, name: str) -> Tensor:
        return self._read(name, self._stored_dtype)

    def wrap(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The matrix with what multiplies by it."""
        if self._stored_dtype == self._compute_dtype:
            return Dense(weight, bias)
        return Widened(weight, self._scratch, bias)

    def linear(self, *modules: str) -> Linear:
        """One fused matrix of several modules with the same input."""
        bias: Tensor | None = None
        if f"{modules[0]}.bias" in self._shapes:
            bias = torch.cat([self.vector(f"{module}.bias") for module in modules])
        parts = [self.matrix(f"{module}.weight") for module in modules]
        return self.wrap(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def layer(self, prefix: str) -> Layer:
        """A transformer block."""
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norms = [attention + "q_norm.weight", attention + "k_norm.weight"]
        query_norm, key_norm = (self.vector(n) if n in self._shapes else None for n in norms)
        return Layer(
            qkv=self.linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            out=self.linear(attention + "o_proj"),
            gate_up=self.linear(mlp + "gate_proj", mlp + "up_proj"),
            down=self.linear(mlp + "down_proj"),
            attention_norm=self.vector(prefix + "input_layernorm.weight"),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.seen.add(name)
        tensor, shape = self._checkpoint.read(name), self._shapes[name]
        if tuple(tensor.shape) != shape:
            raise BrokenWeights(
                f"{name!r} of {self._checkpoint.folder.name} has the shape {list(tensor.shape)}; "
                f"config.json implies {list(shape)}"
            )
        if self._uplink is not None:
            tensor = self._uplink(tensor).to(dtype)
        else:
            tensor = tensor.to(device=self._device, dtype=dtype, copy=True)
        self.bytes += tensor.nbytes
        return tensor
