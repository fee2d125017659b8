"""Reads safetensors into the few fused matrices that the step multiplies with.

Tensors are read one at a time from memory-mapped files and checked against the shapes that
config.json implies. Query, key and value become one matrix, gate and up another. Peak memory is
the weights plus the largest fused matrix. Folders that models/convert/torch.py packed (int8,
dynamic-int8, int4) are loaded as they are.
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

from models.errors import BrokenWeights, UnsupportedModel
from models.formats import PACKED_FORMATS
from models.spec import ModelSpec
from serving.backends.torch.matrices import (
    DTYPES,
    WIDEN_ELEMENTS,
    Dense,
    DynamicInt8,
    Int4,
    Int8,
    Linear,
    Widened,
    compute_dtype,
    dynamic_int8,
)
from serving.backends.torch.transfer import Uplink

_IGNORED = ("rotary_emb.inv_freq",)  # written by old versions of transformers, computed here
_INT4_GROUP = 32  # weights with a scale of their own: models/convert/torch.py


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
        self.metadata: dict[str, str] = (
            (next(iter(self._where.values())).metadata() or {}) if self._where else {}
        )

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
    """The format of the folder's matrices: fp32, bf16, fp16, or a packed one."""
    checkpoint = Checkpoint(folder)
    packed = checkpoint.metadata.get("crossover_format")
    if packed:
        return packed
    dtype = checkpoint.read("model.embed_tokens.weight").dtype
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise UnsupportedModel(
        f"{folder.name} holds weights of type {dtype}; known: "
        f"{', '.join([*DTYPES, *PACKED_FORMATS])}"
    )


def load(
    folder: Path,
    spec: ModelSpec,
    weight_format: str,
    device: torch.device,
    progress: Callable[[str, float | None], None],
    uplink: Uplink | None = None,
) -> Weights:
    """All weights, fused, as `weight_format` on `device`; packed ones stay packed (CPU only).

    `uplink`: what moves them there; None: torch does.
    """
    checkpoint = Checkpoint(folder)
    loader = _Loader(checkpoint, spec, weight_format, device, uplink)
    packed = loader.packed
    if packed == "dynamic-int8" and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UnsupportedModel(
            f"dynamic-int8 of {folder.name} needs torch's FBGEMM kernels, which are for x86 only; "
            "int8 and int4 run here"
        )
    if packed and device.type != "cpu":
        raise UnsupportedModel(
            f"{folder.name} is packed as {packed} for CPU kernels and cannot run on {device}"
        )
    layers = []
    for index in range(spec.layers):
        progress("loading weights", index / spec.layers)
        layers.append(loader.layer(f"model.layers.{index}."))
    embedding = loader.matrix("model.embed_tokens.weight")
    head: Linear = loader.wrap(embedding, None)
    if not spec.tied or packed:
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
        elif isinstance(value, DynamicInt8):
            found[id(value)] = value.resident_bytes
            add(value.bias)
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
    """What `resident_bytes` will be; the embedding and vectors of packed formats are bf16."""
    if weight_format in DTYPES:
        return spec.parameters * DTYPES[weight_format].itemsize
    embedding = spec.vocabulary * spec.hidden
    outputs = sum(
        t.shape[0]
        for t in spec.tensors()
        if t.is_matrix and "embed_tokens" not in t.name and "lm_head" not in t.name
    )
    outputs += spec.vocabulary
    vectors = sum(t.elements for t in spec.tensors() if not t.is_matrix)
    if weight_format == "dynamic-int8":
        return spec.matrix_parameters + 12 * outputs + 2 * embedding + 4 * vectors
    if weight_format == "int8":
        return spec.matrix_parameters + 2 * (outputs + embedding + vectors)
    return int(spec.matrix_parameters * (0.5 + 4 / _INT4_GROUP)) + 2 * (embedding + vectors)


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        weight_format: str,
        device: torch.device,
        uplink: Uplink | None = None,
    ) -> None:
        self._uplink = uplink
        self.packed = checkpoint.metadata.get("crossover_format", "")
        self.seen: set[str] = set()
        self._checkpoint = checkpoint
        self._shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        self._device = device
        self._stored_dtype = DTYPES.get(weight_format, torch.bfloat16)
        self._compute_dtype = compute_dtype(weight_format, device)
        is_widened = self._stored_dtype != self._compute_dtype and not self.packed
        self._scratch = torch.empty(WIDEN_ELEMENTS if is_widened else 0)

    def tensor(self, name: str) -> Tensor:
        """A vector, in the compute type."""
        return self._read(name, self._compute_dtype)

    def matrix(self, name: str) -> Tensor:
        """A matrix, in the type that weights are kept in."""
        return self._read(name, self._stored_dtype)

    def wrap(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return (
            Dense(weight, bias)
            if self._stored_dtype == self._compute_dtype
            else Widened(weight, self._scratch, bias)
        )

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.seen.add(name)
        tensor = self._checkpoint.read(name, self._shapes[name])
        if self._uplink is not None:
            return self._uplink(tensor).to(dtype)
        return tensor.to(device=self._device, dtype=dtype, copy=True)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self._shapes else None

    def linear(self, modules: list[str]) -> Linear:
        """One fused matrix of several modules with the same input."""
        biases = [f"{module}.bias" for module in modules]
        bias = (
            torch.cat([self.tensor(name) for name in biases]) if biases[0] in self._shapes else None
        )
        if self.packed == "int8":
            weight = self._stored(modules, "int8")
            return Int8(weight, self._stored(modules, "scale").bfloat16(), bias)
        if self.packed == "dynamic-int8":
            return dynamic_int8(self._stored(modules, "int8"), self._stored(modules, "scale"), bias)
        if self.packed == "int4":
            return self._int4(modules, bias)
        parts = [self.matrix(f"{module}.weight") for module in modules]
        return self.wrap(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def layer(self, prefix: str) -> Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            qkv=self.linear([attention + "q_proj", attention + "k_proj", attention + "v_proj"]),
            out=self.linear([attention + "o_proj"]),
            gate_up=self.linear([mlp + "gate_proj", mlp + "up_proj"]),
            down=self.linear([mlp + "down_proj"]),
            attention_norm=self.tensor(prefix + "input_layernorm.weight"),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight"),
            query_norm=self.optional(attention + "q_norm.weight"),
            key_norm=self.optional(attention + "k_norm.weight"),
        )

    def _stored(self, modules: list[str], kind: str) -> Tensor:
        names = [f"{module}.{kind}" for module in modules]
        self.seen.update(names)
        return torch.cat([self._checkpoint.read(name) for name in names])

    def _int4(self, modules: list[str], bias: Tensor | None) -> Int4:
        nibbles, scale = self._stored(modules, "int4"), self._stored(modules, "scale")
        whole = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(1).to(torch.int32)
        # The kernel's layout depends on the CPU's vector width.
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
        scales_zeros = (
            torch.stack((scale, torch.zeros_like(scale)), dim=-1)
            .transpose(0, 1)
            .contiguous()
            .bfloat16()
        )
        return Int4(packed, scales_zeros, whole.shape[1] // scale.shape[1], bias)


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
