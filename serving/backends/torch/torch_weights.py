"""Reads safetensors into the few fused matrices that the step multiplies with.

Tensors are read one at a time from memory-mapped files and checked against the shapes that
config.json implies. Query, key and value become one matrix, gate and up another. Peak memory is
the weights plus the largest fused matrix.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
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
            block = max(1, WIDEN_ELEMENTS // inputs)
            out = torch.empty((x.shape[0], outputs), dtype=torch.float32)
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


_IGNORED = ("rotary_emb.inv_freq",)  # written by old versions of transformers, computed here


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
        self._folder = folder
        self._where: dict[str, Any] = {}
        files = _files(folder)
        for file in files:
            try:
                opened = safe_open(str(file), framework="pt")
                names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as problem:
                raise BrokenWeights(
                    f"{file.name} of {folder.name} cannot be read: {problem}; it may be cut off"
                ) from problem
            for name in names:
                if not name.endswith(_IGNORED):
                    self._where[name] = opened

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One tensor as stored, on the CPU."""
        if name not in self._where:
            raise BrokenWeights(f"{self._folder.name} lacks the tensor {name!r}")
        tensor: Tensor = self._where[name].get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise BrokenWeights(
                f"{name!r} of {self._folder.name} has the shape {list(tensor.shape)}; config.json "
                f"implies {list(shape)}"
            )
        return tensor


def stored_format(folder: Path) -> str:
    """The format of the folder's matrices: fp32, bf16 or fp16."""
    dtype = Checkpoint(folder).read("model.embed_tokens.weight").dtype
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise UnsupportedModel(
        f"{folder.name} holds weights of type {dtype}; known: {', '.join(DTYPES)}"
    )


def load(
    folder: Path,
    spec: ModelSpec,
    weight_format: str,
    device: torch.device,
    progress: Callable[[str, float | None], None],
    uplink: Uplink | None = None,
) -> Weights:
    """All weights, fused, as `weight_format` on `device`. `uplink`: what moves them there; None:
    torch does. Raises BrokenWeights, UnsupportedModel."""
    checkpoint = Checkpoint(folder)
    loader = _Loader(checkpoint, spec, weight_format, device, uplink)
    layers = []
    for index in range(spec.layers):
        progress("loading weights", index / spec.layers)
        layers.append(loader.layer(f"model.layers.{index}."))
    embedding = loader.matrix("model.embed_tokens.weight")
    head: Linear = loader.wrap(embedding, None)
    if not spec.tied:
        head = loader.linear(["lm_head"])
    elif "lm_head.weight" in checkpoint.names:  # some tied checkpoints store the head as well
        loader.seen.add("lm_head.weight")
    weights = Weights(embedding, head, loader.tensor("model.norm.weight"), layers, 0)
    foreign = sorted(checkpoint.names - loader.seen)
    if foreign:
        raise UnsupportedModel(
            f"{folder.name} holds tensors that a {spec.family} model of this kind does not have: "
            + ", ".join(foreign[:3])
            + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        )
    weights.bytes = resident_bytes(weights)
    return weights


def resident_bytes(weights: Weights) -> int:
    """Bytes of all distinct tensors."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.data_ptr()] = value.numel() * value.element_size()
        elif isinstance(value, Widened):
            add((value.weight, value.bias))  # the scratch block is working memory
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif is_dataclass(value):
            add([getattr(value, field.name) for field in fields(value)])

    add(weights)
    return sum(found.values())


def predicted_bytes(spec: ModelSpec, weight_format: str) -> int:
    """What `resident_bytes` will be."""
    return spec.parameters * DTYPES[weight_format].itemsize


class _Loader:
    """Reads, fuses and counts the tensors of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        weight_format: str,
        device: torch.device,
        uplink: Uplink | None = None,
    ) -> None:
        self._uplink = uplink
        self.seen: set[str] = set()
        self._checkpoint = checkpoint
        self._shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        self._device = device
        self._stored_dtype = DTYPES[weight_format]
        self._compute_dtype = compute_dtype(weight_format, device)
        is_widened = self._stored_dtype != self._compute_dtype
        self._scratch = torch.empty(WIDEN_ELEMENTS if is_widened else 0)

    def tensor(self, name: str) -> Tensor:
        """A vector, in the compute type."""
        return self._read(name, self._compute_dtype)

    def matrix(self, name: str) -> Tensor:
        """A matrix, in the type that weights are kept in."""
        return self._read(name, self._stored_dtype)

    def wrap(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The matrix with what multiplies by it."""
        if self._stored_dtype == self._compute_dtype:
            return Dense(weight, bias)
        return Widened(weight, self._scratch, bias)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.seen.add(name)
        tensor = self._checkpoint.read(name, self._shapes[name])
        if self._uplink is not None:
            return self._uplink(tensor).to(dtype)
        return tensor.to(device=self._device, dtype=dtype, copy=True)

    def linear(self, modules: list[str]) -> Linear:
        """One fused matrix of several modules with the same input."""
        bias: Tensor | None = None
        if f"{modules[0]}.bias" in self._shapes:
            bias = torch.cat([self.tensor(f"{module}.bias") for module in modules])
        parts = [self.matrix(f"{module}.weight") for module in modules]
        return self.wrap(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def layer(self, prefix: str) -> Layer:
        """A transformer block."""
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norms = [attention + "q_norm.weight", attention + "k_norm.weight"]
        query_norm, key_norm = (self.tensor(n) if n in self._shapes else None for n in norms)
        return Layer(
            qkv=self.linear([attention + "q_proj", attention + "k_proj", attention + "v_proj"]),
            out=self.linear([attention + "o_proj"]),
            gate_up=self.linear([mlp + "gate_proj", mlp + "up_proj"]),
            down=self.linear([mlp + "down_proj"]),
            attention_norm=self.tensor(prefix + "input_layernorm.weight"),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight"),
            query_norm=query_norm,
            key_norm=key_norm,
        )


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise BrokenWeights(
                f"{index.name} of {folder.name} is no weight index: {problem}"
            ) from problem
        missing = [
            name for name in names if not (folder / name).is_file() or Path(name).name != name
        ]
        if missing:
            raise BrokenWeights(f"{folder.name} lacks {missing[0]}, which its index names")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BrokenWeights(f"{folder.name} holds no *.safetensors file")
    return files
