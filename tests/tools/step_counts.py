"""What a step asks of the device: kernels and copies, counted on tensors without data.

The device "meta" has shapes and no numbers, so that a shape of any size is traced in milliseconds.
A call that makes no tensor of its own (a view, an allocation) is no kernel. Kernels within one aten
call (the parts of a split attention, a product's own copies) are not seen. A norm and an attention
are one kernel each, as torch has them for CUDA; elsewhere they are made of several.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.ladder import rung
from models.spec import ModelSpec
from serving.backends.torch.backend import KINDS_OF_DRAWS, TorchBackend
from serving.backends.torch.cuda_graphs import DecodeGraphs
from serving.backends.torch.forward_pass import SlotModel, run_pass
from serving.backends.torch.torch_weights import Dense, Layer, Weights
from serving.backends.torch.varlen_attention import KvCache
from serving.sampling.step_rows import DRAWN, Row

_ONE_KERNEL = (rms_norm, torch.rms_norm, scaled_dot_product_attention)
LAYERS = 3  # that are traced; what is not of a layer comes at most twice
META = torch.device("meta")
_MAKES_NOTHING = (
    *("empty", "empty_strided", "empty_like", "new_empty", "detach", "alias"),
    *("_unsafe_view", "lift_fresh"),
)


class Kernels(TorchDispatchMode):
    """Counts aten calls by name; `blocking`: copies between host and device that are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.blocking: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        to_host = name == "copy_" and (args[0].device.type, args[1].device.type) == ("cpu", "meta")
        out = args[0] if to_host else func(*args, **kwargs)  # there are no numbers to fetch
        devices = {one.device.type for one in _tensors((args, kwargs, out))}
        if {"cpu", "meta"} <= devices and not _asks_to_go_on(args, kwargs):
            scalars = [one for one in _tensors(args) if one.device.type == "cpu" and not one.dim()]
            if not scalars:
                self.blocking.append(name)
        if "meta" in devices and not func.is_view and name not in _MAKES_NOTHING:
            self.calls[name] += 1
        return out

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class HostTensors(TorchFunctionMode):
    """Lists tensors made on the device from numbers of the host: each is a copy that is waited
    for. Counts norms and attentions in `kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.made: list[str] = []
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ONE_KERNEL and args[0].device == META:
            self._kernels.calls[func.__name__] += 1
            return torch.empty_like(args[0])
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device not in (None, "cpu"):
            if torch.device(device).type != "cpu":
                self.made.append(func.__name__)
        return func(*args, **kwargs)


def traced(name: str, *, packed: bool, prompts: bool = False) -> tuple[Kernels, HostTensors]:
    """A step of 8 decode rows of a rung's shape, cut to a few layers; with `prompts` the last row
    is a piece of a prompt."""
    spec = msgspec.structs.replace(rung(name).spec, layers=LAYERS)
    cache = KvCache(spec, 8, 512, torch.bfloat16, META, is_flash=packed)
    model = SlotModel(spec, meta_weights(spec), cache)
    one, piece = np.ones(1, np.int32), np.ones(40, np.int32)
    given = [one] * 7 + [piece if prompts else one]
    pieces = [(Row(slot, each, 20, wants_token=True), each, 20) for slot, each in enumerate(given)]
    out = torch.empty(8, spec.vocabulary, device=META)
    kernels = Kernels()
    with HostTensors(kernels) as host, kernels:
        run_pass(model, pieces, out)
    return kernels, host


def launched(name: str, *, prompts: bool = False) -> tuple[Kernels, HostTensors]:
    """A step that is launched while the tokens of the one before are still being drawn, draws of
    every kind among them; with `prompts` beside a piece of a prompt."""
    spec = msgspec.structs.replace(rung(name).spec, layers=LAYERS)
    backend = TorchBackend.__new__(TorchBackend)  # as it is after a load
    cache = KvCache(spec, 8, 512, torch.bfloat16, META, is_flash=True)
    model = SlotModel(spec, meta_weights(spec), cache)
    logits = torch.empty(8, spec.vocabulary, device=META)
    backend._model, backend._logits, backend._device = model, logits, META
    backend._lengths = [20] * 8
    backend._graphs = DecodeGraphs(model, 8, logits, False, lambda *said: None)
    backend._chunk, backend._is_gpu, backend._device_sampling = 256, False, True
    one, drawn = np.ones(1, np.int32), np.array([DRAWN], np.int32)
    kinds = [kind for _, kind in zip(range(7), itertools.cycle(KINDS_OF_DRAWS), strict=False)]
    rows = [Row(slot, one, 20, True, kind) for slot, kind in enumerate(kinds)]
    kernels = Kernels()
    with kernels:
        before = backend.launch(rows, None)
    rows = [Row(slot, drawn, 21, True, kind) for slot, kind in enumerate(kinds)]
    if prompts:
        rows.append(Row(7, np.ones(40, np.int32), 20, wants_token=True))
    kernels = Kernels()
    with HostTensors(kernels) as host, kernels:
        assert backend.launch(rows, before) is not None
    return kernels, host


def kernels_of_a_layer(kernels: Kernels) -> int:
    """Calls that come once a layer or oftener."""
    return sum(count // LAYERS for count in kernels.calls.values())


def meta_weights(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """A model's weights without numbers."""
    return made_weights(spec, lambda *shape: torch.empty(shape, dtype=dtype, device=META))


def made_weights(spec: ModelSpec, tensor: Callable[..., Tensor]) -> Weights:
    """A model's weights of tensors that `tensor` makes for a shape."""
    hidden, heads = spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    normed = spec.family == "qwen3"
    layers = [
        Layer(
            qkv=Dense(tensor(heads, hidden), tensor(heads) if spec.qkv_bias else None),
            out=Dense(tensor(hidden, spec.heads * spec.head_dim)),
            gate_up=Dense(tensor(2 * spec.intermediate, hidden)),
            down=Dense(tensor(hidden, spec.intermediate)),
            attention_norm=tensor(hidden),
            mlp_norm=tensor(hidden),
            query_norm=tensor(spec.head_dim) if normed else None,
            key_norm=tensor(spec.head_dim) if normed else None,
        )
        for _ in range(spec.layers)
    ]
    embedding = tensor(spec.vocabulary, hidden)
    return Weights(embedding, Dense(embedding), tensor(hidden), layers)


def _asks_to_go_on(args: Any, kwargs: Any) -> bool:
    """Whether a copy is asked for that the host does not wait for."""
    return bool(kwargs.get("non_blocking")) or True in args[2:]


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]
