"""The kinds of matrices that a step multiplies with: dense, widened, int8, int4, dynamic int8."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.convert.torch import ACTIVATION_STEPS

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


@dataclass(slots=True)
class Int8:
    """Weight-only int8, one scale per output; torch's CPU kernel is quick for bfloat16 only."""

    weight: Tensor  # int8 [out, in]
    scale: Tensor  # bf16 [out]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.weight, self.scale).to(
            x.dtype
        )
        return out if self.bias is None else out + self.bias


@dataclass(slots=True)
class Int4:
    """Weight-only int4, one scale per `group` inputs; `weight` in the CPU kernel's own layout."""

    weight: Tensor
    scales_zeros: Tensor  # bf16 [in / group, out, 2]
    group: int
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        packed = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self.weight, self.group, self.scales_zeros
        )
        out: Tensor = packed.to(x.dtype)
        return out if self.bias is None else out + self.bias


@dataclass(slots=True)
class DynamicInt8:
    """int8 weights and activations (FBGEMM): one scale per output, one per token.

    torch's `linear_dynamic` takes one activation scale for the batch, so that tokens depend on
    their batch mates. Here each token is first divided by its largest magnitude. Activations take
    7 bits: with 8, pairs of products overflow the 16-bit sums of AVX2's VPMADDUBSW.
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


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 quickly (oneDNN's test: AVX-512, Arm with bf16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(weight_format: str, device: torch.device) -> torch.dtype:
    """Type of activations and KV cache: the weights', but float32 without bf16 arithmetic."""
    if weight_format in ("fp32", "fp16"):
        return DTYPES[weight_format]
    if weight_format == "dynamic-int8":
        return torch.float32
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32


def dynamic_int8(weight: Tensor, scale: Tensor, bias: Tensor | None) -> DynamicInt8:
    """int8 [out, in] and float32 scales [out] in FBGEMM's layout."""
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        # torch's quantised tensors are deprecated; without VNNI no other kernel of torch is as
        # quick (oneDNN's take 1.6 x as long for 16 tokens).
        warnings.filterwarnings("ignore", message=".*quantized tensor", category=UserWarning)
        quantised = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    outputs, inputs = weight.shape
    return DynamicInt8(torch.ops.quantized.linear_prepack(quantised, None), outputs, inputs, bias)
