"""Reading safetensors into the few fused matrices that the step multiplies with.

Tensors are read one at a time from the memory-mapped files, by their Hugging Face names, and checked against the shapes that config.json
implies: a missing, foreign or misshapen tensor is an error that names it, never a silent default. Query, key and value become one matrix,
gate and up another. Peak memory is the weights plus the largest fused matrix.

int8, dynamic-int8 and int4 folders hold the matrices already quantised (models/convert_torch.py); they are loaded as they are, without a
float copy in between.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from models.convert_torch import ACTIVATION_STEPS
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import PACKED_FORMATS
from models.spec import ModelSpec

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDEN_ELEMENTS = 1 << 21  # 8 MB of float32: within the last-level cache of any server CPU
_IGNORED = ("rotary_emb.inv_freq",)  # written by old versions of transformers, computed here


@dataclass(slots=True)
class Dense:
    """x @ weight.T + bias, weight [out, in] in the compute type."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Widened:
    """bfloat16 weights on a CPU without bfloat16 arithmetic: widened to float32 a block at a time, while the block is in the cache.

    torch multiplies bfloat16 matrices there with scalar code, 5 to 50 times slower than float32. Its product with one or two vectors is
    quick, and reads half the bytes: those go there. The scratch block is shared by all matrices.
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


@dataclass(slots=True)
class Int8:
    """Weight-only int8: one scale per output, by torch's CPU kernel, which is quick for bfloat16 activations only."""

    weight: Tensor  # int8 [out, in]
    scale: Tensor  # bf16 [out]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.weight, self.scale).to(x.dtype)
        return out if self.bias is None else out + self.bias


@dataclass(slots=True)
class Int4:
    """Weight-only int4: one scale per `group` inputs of an output, by torch's CPU kernel; `weight` is in the kernel's own layout."""

    weight: Tensor
    scales_zeros: Tensor  # bf16 [in / group, out, 2]
    group: int
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        packed = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.weight, self.group, self.scales_zeros)
        out: Tensor = packed.to(x.dtype)
        return out if self.bias is None else out + self.bias


@dataclass(slots=True)
class DynamicInt8:
    """int8 weights and int8 activations with integer arithmetic (FBGEMM): one scale per output, one per token.

    torch's own `linear_dynamic` takes one activation scale for the whole batch, so that a token's result depends on its batch mates. Here
    each token is first divided by its own largest magnitude; integer sums are exact, so that mates change no bit of it.
    Activations take 7 bits: with 8, pairs of products overflow the 16-bit sums of VPMADDUBSW, the instruction that AVX2 has for this.
    """

    packed: Any  # weights in FBGEMM's own layout, made at load
    outputs: int
    inputs: int
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / scale, 1 / ACTIVATION_STEPS, ACTIVATION_STEPS + 1, self.packed
        )
        out *= scale
        return out if self.bias is None else out + self.bias

    @property
    def resident_bytes(self) -> int:
        """Weights, and for each output a scale, a zero point and a sum."""
        return self.outputs * (self.inputs + 12)


Linear = Dense | Widened | Int8 | Int4 | DynamicInt8


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
                raise BrokenWeights(f"{file.name} of {folder.name} cannot be read: {problem}; it may be cut off") from problem
            for name in names:
                if not name.endswith(_IGNORED):
                    self._where[name] = opened
        self.metadata: dict[str, str] = (next(iter(self._where.values())).metadata() or {}) if self._where else {}

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One tensor as stored, on the CPU."""
        if name not in self._where:
            raise BrokenWeights(f"{self._folder.name} lacks the tensor {name!r}")
        tensor: Tensor = self._where[name].get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise BrokenWeights(f"{name!r} of {self._folder.name} has the shape {list(tensor.shape)}; config.json implies {list(shape)}")
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
    raise UnsupportedModel(f"{folder.name} holds weights of type {dtype}; known: {', '.join(DTYPES)}, {', '.join(PACKED_FORMATS)}")


def cpu_has_bf16() -> bool:
    """True where this CPU multiplies bfloat16 matrices quickly (oneDNN's own test: AVX-512 and up, or Arm with bf16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(weight_format: str, device: torch.device) -> torch.dtype:
    """The type of activations and KV cache: the weights' own, but float32 on a CPU that has no bfloat16 arithmetic, and for FBGEMM."""
    if weight_format in ("fp32", "fp16"):
        return DTYPES[weight_format]
    if weight_format == "dynamic-int8":
        return torch.float32
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32


def load(folder: Path, spec: ModelSpec, weight_format: str, device: torch.device, progress: Callable[[str, float | None], None]) -> Weights:
    """All weights, fused, as `weight_format` on `device`. Packed matrices stay packed (CPU only)."""
    dtype = compute_dtype(weight_format, device)
    checkpoint = Checkpoint(folder)
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
    packed = checkpoint.metadata.get("crossover_format", "")
    if packed == "dynamic-int8" and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UnsupportedModel(
            f"dynamic-int8 of {folder.name} needs torch's FBGEMM kernels, which are for x86 only; int8 and int4 run here"
        )
    if packed and device.type != "cpu":
        raise UnsupportedModel(f"{folder.name} is packed as {packed} for CPU kernels and cannot run on {device}")
    stored = DTYPES.get(weight_format, torch.bfloat16)
    loader = _Loader(checkpoint, shapes, packed, stored, dtype, device)
    layers = []
    for index in range(spec.layers):
        progress("loading weights", index / spec.layers)
        layers.append(loader.layer(f"model.layers.{index}.", spec))
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
            f"{folder.name} holds tensors that a {spec.family} model of this kind does not have: {', '.join(foreign[:3])}"
            + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        )
    weights.bytes = resident_bytes(weights)
    return weights


def resident_bytes(weights: Weights) -> int:
    """Bytes of all distinct tensors."""
    found: dict[int, int] = {}

    def add(*tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def add_linear(linear: Linear) -> None:
        if isinstance(linear, DynamicInt8):
            found[id(linear)] = linear.resident_bytes
            add(linear.bias)
            return
        add(linear.weight, linear.bias)
        if isinstance(linear, Int8):
            add(linear.scale)
        if isinstance(linear, Int4):
            add(linear.scales_zeros)

    add(weights.embedding, weights.norm)
    add_linear(weights.head)
    for layer in weights.layers:
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            add_linear(linear)
        add(layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    return sum(found.values())


def predicted_bytes(spec: ModelSpec, weight_format: str, group: int = 32) -> int:
    """What `resident_bytes` will be: matrices in `weight_format`, the embedding and vectors in the compute type (bf16 where packed)."""
    if weight_format in DTYPES:
        return spec.parameters * DTYPES[weight_format].itemsize  # vectors may be wider: a thousandth of it
    embedding = spec.vocabulary * spec.hidden
    outputs = sum(t.shape[0] for t in spec.tensors() if t.is_matrix and "embed_tokens" not in t.name and "lm_head" not in t.name)
    outputs += spec.vocabulary
    vectors = sum(t.elements for t in spec.tensors() if not t.is_matrix)
    if weight_format == "dynamic-int8":
        return spec.matrix_parameters + 12 * outputs + 2 * embedding + 4 * vectors
    if weight_format == "int8":
        return spec.matrix_parameters + 2 * (outputs + embedding + vectors)
    return int(spec.matrix_parameters * (0.5 + 4 / group)) + 2 * (embedding + vectors)


def dynamic_int8(weight: Tensor, scale: Tensor, bias: Tensor | None) -> DynamicInt8:
    """int8 [out, in] and float32 scales [out] in FBGEMM's layout."""
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        # torch's quantised tensors are to go some day; the versions that this project is tested with have them, and no other kernels of
        # torch multiply int8 as quickly on a CPU without VNNI (oneDNN's take 1.6 x as long for 16 tokens).
        warnings.filterwarnings("ignore", message=".*quantized tensor", category=UserWarning)
        quantised = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    outputs, inputs = weight.shape
    return DynamicInt8(torch.ops.quantized.linear_prepack(quantised, None), outputs, inputs, bias)


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: dict[str, tuple[int, ...]],
        packed: str,
        stored: torch.dtype,
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._shapes, self._packed, self._device = checkpoint, shapes, packed, device
        self._stored_dtype, self._compute_dtype = stored, compute
        self._scratch = torch.empty(WIDEN_ELEMENTS if stored != compute and not packed else 0)
        self.seen: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        """A vector, in the compute type."""
        return self._read(name, self._compute_dtype)

    def matrix(self, name: str) -> Tensor:
        """A matrix, in the type that weights are kept in."""
        return self._read(name, self._stored_dtype)

    def wrap(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Dense(weight, bias) if self._stored_dtype == self._compute_dtype else Widened(weight, self._scratch, bias)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.seen.add(name)
        return self._checkpoint.read(name, self._shapes[name]).to(device=self._device, dtype=dtype, copy=True)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self._shapes else None

    def linear(self, modules: list[str]) -> Linear:
        """One fused matrix of several modules with the same input."""
        biases = [f"{module}.bias" for module in modules]
        bias = torch.cat([self.tensor(name) for name in biases]) if biases[0] in self._shapes else None
        if self._packed == "int8":
            weight = self._stored(modules, "int8")
            return Int8(weight, self._stored(modules, "scale").bfloat16(), bias)
        if self._packed == "dynamic-int8":
            return dynamic_int8(self._stored(modules, "int8"), self._stored(modules, "scale"), bias)
        if self._packed == "int4":
            return self._int4(modules, bias)
        parts = [self.matrix(f"{module}.weight") for module in modules]
        return self.wrap(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def layer(self, prefix: str, spec: ModelSpec) -> Layer:
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
        # The kernel's layout depends on the CPU's vector width, so that it is made here and not in the file.
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
        scales_zeros = torch.stack((scale, torch.zeros_like(scale)), dim=-1).transpose(0, 1).contiguous().bfloat16()
        return Int4(packed, scales_zeros, whole.shape[1] // scale.shape[1], bias)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise BrokenWeights(f"{index.name} of {folder.name} is no weight index: {problem}") from problem
        missing = [name for name in names if not (folder / name).is_file() or Path(name).name != name]
        if missing:
            raise BrokenWeights(f"{folder.name} lacks {missing[0]}, which its index names")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BrokenWeights(f"{folder.name} holds no *.safetensors file")
    return files
