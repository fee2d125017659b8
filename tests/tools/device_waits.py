"""Whether a step waits for the device, seen on tensors without data.

    assert waits_of_a_launch("1b") == []

The device "meta" has shapes and no numbers, so that a step of any size is traced in milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.torch.backend import WARM_UP_SAMPLINGS, TorchBackend
from crossover.serving.backends.torch.cuda_graphs import Graphs, StepGraphs
from crossover.serving.backends.torch.forward_pass import SlotModel
from crossover.serving.backends.torch.gpu_sampler import DeviceSampler
from crossover.serving.backends.torch.torch_weights import Dense, Layer, ModelTensors
from crossover.serving.backends.torch.varlen_attention import KvCache
from crossover.serving.sampling.step_inputs import PLACEHOLDER, Row

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """`waits`: copies between host and device that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        to_host = name == "copy_" and (args[0].device.type, args[1].device.type) == ("cpu", "meta")
        out = args[0] if to_host else func(*args, **kwargs)  # there are no numbers to fetch
        devices = {one.device.type for one in _tensors((args, kwargs, out))}
        if {"cpu", "meta"} <= devices and not (kwargs.get("non_blocking") or True in args[2:]):
            scalars = [one for one in _tensors(args) if one.device.type == "cpu" and not one.dim()]
            if not scalars:
                self.waits.append(name)
        return out


class HostTensors(TorchFunctionMode):
    """`waits`: tensors made on the device from numbers of the host: each is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and device not in (None, "cpu"):
            if torch.device(device).type != "cpu":
                self.waits.append(func.__name__)
        return func(*args, **(kwargs or {}))


def waits_of_a_launch(name: str, *, prompts: bool = False) -> list[str]:
    """Of a step of a ladder model's shape that is launched while the tokens of the one before are
    still being drawn, draws of every kind among them; with `prompts` beside a piece of a prompt.
    """
    spec = msgspec.structs.replace(ladder_model(name).spec, layers=1)
    backend = TorchBackend.__new__(TorchBackend)  # as it is after a load
    cache = KvCache(spec, 8, 512, torch.bfloat16, META)
    weights = made_weights(
        spec, lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=META)
    )
    model = SlotModel(spec, weights, cache, is_flash=True)
    logits = torch.empty(8, spec.vocabulary, device=META)
    backend._model, backend._logits, backend._device = model, logits, META
    backend._lengths = [20] * 8
    graphs = Graphs(is_capturing=False)
    backend._graphs = StepGraphs(model, logits, 64, graphs, lambda *arguments: None)
    backend._sampler = DeviceSampler(META, logits, graphs)
    backend._is_gpu, backend._device_sampling = False, True
    one, drawn = np.ones(1, np.int32), np.array([PLACEHOLDER], np.int32)
    kinds = [kind for _, kind in zip(range(7), itertools.cycle(WARM_UP_SAMPLINGS), strict=False)]
    rows = [Row(slot, one, 20, True, kind) for slot, kind in enumerate(kinds)]
    with Copies():  # which lets the first launch do without numbers
        before = backend.launch(rows, None)
    rows = [Row(slot, drawn, 21, True, kind) for slot, kind in enumerate(kinds)]
    if prompts:
        rows.append(Row(7, np.ones(40, np.int32), 20, wants_token=True))
    with HostTensors() as host, Copies() as copies:
        assert backend.launch(rows, before) is not None
    return host.waits + copies.waits


def made_weights(spec: ModelSpec, tensor: Callable[..., Tensor]) -> ModelTensors:
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
    return ModelTensors(embedding, Dense(embedding), tensor(hidden), layers)


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]
