"""From loaded weights to the first step on a GPU: how many slots fit, logits, graphs."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.formatting import size
from models.manifest import Progress
from models.spec import ModelSpec
from serving.backends.base import EngineConfig, GpuLoad, MemoryParts
from serving.backends.kv_slots import RowMap
from serving.backends.torch.cuda_graphs import DecodeGraphs
from serving.backends.torch.kernels.fused import FusedModel, load_kernels
from serving.backends.torch.load_watch import LoadWatch
from serving.backends.torch.model import HeadCache, SlotModel, cache_width
from serving.backends.torch.need import (
    fitting_slots,
    graph_bytes,
    step_tokens,
    working_bytes,
)
from serving.backends.torch.packed import PackedCache, flash_trouble
from serving.backends.torch.sampler import draw
from serving.backends.torch.settings import TorchOptions, compute_bytes, uses_flash
from serving.backends.torch.step_batch import StepBatch
from serving.backends.torch.weights import Weights
from serving.errors import OutOfMemory, Unsupported
from serving.sampling.types import Row, Sampling

_TOP_P = Sampling(temperature=1.0, top_p=0.9)  # takes most memory of all draws
KINDS_OF_DRAWS = (
    *(Sampling(), Sampling(temperature=1.0), _TOP_P),
    Sampling(temperature=1.0, top_k=50, min_p=0.01),
)


@dataclass(frozen=True)
class Plan:
    """What is loaded and where: sizes that follow from the configuration."""

    config: EngineConfig
    options: TorchOptions
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        """Raises Unsupported where kernels=triton is asked for in vain."""
        if self.options.kernels == "plain":
            return
        load_kernels(self.device)
        if not self.uses_flash:
            why = flash_trouble(self.spec, self.dtype, self.device) or "option attention is sdpa"
            raise Unsupported(f"option kernels is triton, which needs flash, and {why}", "kernels")

    @property
    def is_gpu(self) -> bool:
        return self.config.device == "gpu"

    @property
    def uses_flash(self) -> bool:
        return uses_flash(self.options, self.spec, self.dtype, self.device)

    @property
    def token_bytes(self) -> int:
        """Of the KV cache."""
        return self.spec.kv_bytes_per_token("bf16") * self.dtype.itemsize // 2

    @property
    def row_bytes(self) -> int:
        """Of a slot's row of the KV cache."""
        return cache_width(self.config.context_tokens) * self.token_bytes

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        assert self.options.prefill_chunk is not None
        return step_tokens(self.config.slots, self.options.prefill_chunk)

    def kv_tokens(self, slots: int) -> int:
        """Most tokens of all slots together."""
        whole = slots * self.config.context_tokens
        return min(self.config.kv_tokens or whole, whole)

    def predicted(self, weight_bytes: int) -> MemoryParts:
        """Memory before the load."""
        slots = self.config.slots
        if self.is_gpu:
            element = self.dtype.itemsize
            working = working_bytes(self.spec, slots, self.step_tokens, element)
        else:
            assert self.options.prefill_chunk is not None
            working = compute_bytes(self.spec, slots, self.options.prefill_chunk)
        return MemoryParts(weight_bytes, slots * self.row_bytes, working)

    def least(self, predicted: MemoryParts) -> MemoryParts:
        """What must fit before anything is read: on a GPU one slot, since fewer may do."""
        kv_bytes = self.row_bytes if self.is_gpu else predicted.kv_bytes
        return MemoryParts(predicted.weight_bytes, kv_bytes, predicted.compute_bytes)

    def new_model(self, weights: Weights, rows: int) -> SlotModel:
        """The model with a KV cache of so many rows."""
        width = cache_width(self.config.context_tokens)
        kind = PackedCache if self.uses_flash else HeadCache
        cache = kind(self.spec, rows, width, self.dtype, self.device)
        fuses = self.options.kernels == "triton"
        return (FusedModel if fuses else SlotModel)(self.spec, weights, cache)


class GpuStart:
    """One load on a GPU. `doubts`: what is not as it was asked for, and why."""

    def __init__(self, plan: Plan) -> None:
        # From torch 2.11 on cuDNN comes first on sm_90 and newer, and builds a plan of 40 ms or
        # more for every new shape: a stall a step where lengths grow (pytorch issue 191576).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.watch = LoadWatch(plan.device)
        self.doubts: dict[str, str] = {}
        self._plan = plan

    def slots_that_fit(self, weights: Weights) -> int:
        """Slots for which there is room beside the largest step, which is run to see what it takes
        (as nano-vllm's warmup_model does). Raises OutOfMemory where there is none."""
        plan, watch = self._plan, self.watch
        watch.weight_bytes = weights.bytes
        asked, row_bytes = plan.config.slots, plan.row_bytes
        largest = watch.peak_of(lambda: self._largest_step(weights)) - row_bytes
        watch.largest_step_bytes = largest
        if not plan.config.check_memory:
            return asked
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        kept = graph_bytes(plan.spec, asked, plan.dtype.itemsize) if plan.options.graphs else 0
        room = free - int(plan.options.margin * watch.free_bytes) - largest - kept
        slots = fitting_slots(room, row_bytes, asked)
        if not slots:
            raise OutOfMemory(
                f"no slot of {size(row_bytes)} fits: beside weights of {size(weights.bytes)} and a "
                f"step of {size(largest)}, {size(max(0, room))} of the GPU are left; fewer slots, "
                "a smaller prefill_chunk or a shorter context need less"
            )
        if slots < asked:
            self._doubt("slots", f"{slots} of {asked}: {size(room)} are left for their KV cache")
        return slots

    def graphs(
        self, model: SlotModel, slots: int, progress: Progress
    ) -> tuple[Tensor, DecodeGraphs]:
        """The buffer of logits and the decode step; without graphs where they cannot be captured:
        eager steps are slower, not wrong."""
        self.watch.kv_bytes = model.kv_bytes
        logits = self._new_logits(slots)
        made: list[DecodeGraphs] = []

        def capture() -> None:
            wanted = bool(self._plan.options.graphs)
            made.append(DecodeGraphs(model, slots, logits, capture=wanted, progress=progress))

        try:
            self.watch.captured(capture)
        except RuntimeError as problem:
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            self._doubt("graphs", f"false: the decode step could not be captured: {why}")
            torch.cuda.empty_cache()
            made.append(DecodeGraphs(model, slots, logits, capture=False))
        return logits, made[-1]

    def _new_logits(self, rows: int) -> Tensor:
        shape = (rows, self._plan.spec.vocabulary)
        return torch.empty(shape, dtype=torch.float32, device=self._plan.device)

    def _largest_step(self, weights: Weights) -> None:
        """As many tokens as a step may hold and a draw for every slot, over a cache of one row."""
        plan = self._plan
        slots, tokens, context = plan.config.slots, plan.step_tokens, plan.config.context_tokens
        model = plan.new_model(weights, 1)
        columns = torch.arange(model.width, device=plan.device)
        batch = StepBatch(model, RowMap(1, context, 0.0), columns)
        pieces = max(slots, -(-tokens // context))
        for index in range(pieces):
            piece = np.zeros(tokens // pieces + (index < tokens % pieces), np.int32)
            batch.add_prompt(Row(0, piece, 0, wants_token=index < slots, sampling=_TOP_P), piece, 0)
        draw(batch.run(self._new_logits(slots)), batch.wanted)

    def _doubt(self, key: str, what: str) -> None:
        self.doubts[key] = what
        print(f"torch: {key} {what}", file=sys.stderr, flush=True)


def workspace_of(gpu: GpuLoad | None) -> int | None:
    """Device memory beyond weights and KV: graphs and the allocator's rest; None on the CPU."""
    if gpu is None or gpu.reserved_bytes is None:
        return None
    return max(0, gpu.reserved_bytes - (gpu.weight_bytes or 0) - (gpu.kv_bytes or 0))
