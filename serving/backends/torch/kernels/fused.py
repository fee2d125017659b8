"""`--option kernels=triton`: the packed pass by three kernels of our own, 9 a layer and not 12.

What lies between two products is one kernel: the sum with what the last product gave and RMSNorm;
RoPE (and norms of heads) with the writing of keys and values; SiLU with the product by `up`. Triton
comes with torch for CUDA and ROCm. The numbers are proved in Triton's interpreter only and no time
has been measured on a GPU: the plain pass is the default.

They are operators of torch, so that a pass can be traced without a device and without Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from models.spec import ModelSpec
from serving.backends.torch.model import HeadCache, SlotModel, Spans
from serving.backends.torch.packed import Packed, PackedCache
from serving.backends.torch.weights import Weights
from serving.errors import Unsupported

INTERPRETED = "TRITON_INTERPRET"  # set to 1: Triton's interpreter, for tests on the CPU

_LIBRARY = torch.library.Library("crossover", "DEF")
# x [tokens, size] += delta where there is one; RMSNorm(x) * weight.
_LIBRARY.define("add_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float epsilon) -> Tensor")
# [tokens, 2 * size] -> [tokens, size].
_LIBRARY.define("silu_mul(Tensor gate_up) -> Tensor")
# heads [tokens, heads + 2 * kv_heads, head_dim]: queries are turned in place, keys are turned and
# go to the cache [rows * width, 2, kv_heads, head_dim] with the values. cos, sin [width, head_dim];
# `at` is row * width + position; scales [heads + kv_heads, head_dim]: norms of heads.
_LIBRARY.define(
    "turn_and_store(Tensor(a!) heads, Tensor at, Tensor cos, Tensor sin, Tensor? scales,"
    " float epsilon, Tensor(b!) cache) -> ()"
)
_LIBRARY.impl("add_norm", lambda x, delta, weight, epsilon: torch.empty_like(x), "Meta")
_LIBRARY.impl("silu_mul", lambda pair: pair.new_empty(len(pair), pair.shape[1] // 2), "Meta")
_LIBRARY.impl("turn_and_store", lambda *given: None, "Meta")


class FusedModel(SlotModel):
    """A SlotModel over a PackedCache, by these kernels."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: PackedCache | HeadCache) -> None:
        super().__init__(spec, weights, cache)
        self._turns = None  # the kernel takes cos and sin

    def _through(self, x: Tensor, positions: Tensor, step: Spans | Packed) -> Tensor:
        spec, cache, kernels = self.spec, self.cache, torch.ops.crossover
        assert isinstance(step, Packed) and isinstance(cache, PackedCache)
        delta: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            y = kernels.add_norm(x, delta, layer.attention_norm, spec.norm_epsilon)
            heads = layer.qkv(y).view(len(x), -1, spec.head_dim)
            scales, kept = self._head_scales[index], cache.layers[index]
            kernels.turn_and_store(
                heads, step.at, self.cos, self.sin, scales, spec.norm_epsilon, kept
            )
            delta = layer.out(cache.attend(index, heads, step, self._scale))
            y = kernels.add_norm(x, delta, layer.mlp_norm, spec.norm_epsilon)
            delta = layer.down(kernels.silu_mul(layer.gate_up(y)))
        return x if delta is None else x.add_(delta)


def load_kernels(device: torch.device) -> None:
    """Raises Unsupported where they cannot run."""
    trouble = kernels_trouble(device)
    if trouble is not None:
        raise Unsupported(f"option kernels is triton, and {trouble}", "kernels")
    _register()


def kernels_trouble(device: torch.device) -> str | None:
    """Why the kernels cannot be used on a device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; torch for CUDA and ROCm brings it"
    if device.type == "cpu" and os.environ.get(INTERPRETED) != "1":
        return f"on a CPU they run only in Triton's interpreter, for tests ({INTERPRETED}=1)"
    return None


@functools.cache
def _register() -> None:
    from serving.backends.torch.kernels import triton_kernels as made

    for kernel in (made.add_norm, made.silu_mul, made.turn_and_store):
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(kernel.__name__, kernel, key)
