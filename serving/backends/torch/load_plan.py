"""What the torch backend is asked for, checked before anything is loaded; sizes that follow from
it; and, on a GPU, how many slots fit beside the largest step, which is run once to measure it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from models.formatting import size
from models.machine import available_bytes
from models.manifest import Progress
from models.spec import ModelSpec
from serving.backends.backend_interface import (
    AUTO,
    EngineConfig,
    GpuLoad,
    MemoryParts,
    parse_options,
)
from serving.backends.kv_rows import RowMap
from serving.backends.torch.cuda_graphs import DecodeGraphs
from serving.backends.torch.device_transfer import Uplink
from serving.backends.torch.forward_pass import HeadCache, SlotModel, StepBatch, cache_width
from serving.backends.torch.gpu_memory import (
    GPU_MARGIN,
    GPU_PREFILL_CHUNK,
    fitting_slots,
    graph_bytes,
    step_tokens,
    working_bytes,
)
from serving.backends.torch.gpu_sampler import draw
from serving.backends.torch.torch_weights import DTYPES, Weights
from serving.backends.torch.varlen_attention import PackedCache, flash_trouble
from serving.bounds import check
from serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported
from serving.sampling.step_rows import Row, Sampling

KV_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CPU_PREFILL_CHUNK = 512
# What CUDA's libraries say when they find no memory, beside torch's own words.
_MEMORY_WORDS = (*("not enough memory", "out of memory", "_ALLOC_FAILED", "ERROR_OUT_OF_MEMORY"),)


class TorchOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the torch backend. None: on a GPU yes, on the CPU no."""

    graphs: bool | None = None  # CUDA graphs
    device_sampling: bool | None = None  # draw on the device
    # Launch a step before the tokens of the one before are read. Needs device_sampling.
    run_ahead: bool | None = None
    # flash: torch's FlashAttention-2 over packed rows; sdpa: scaled_dot_product_attention.
    # auto: flash on GPUs that have it.
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    margin: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = GPU_MARGIN  # of free VRAM, kept free
    # Prompt tokens of a pass. None: 2048 on a GPU, 512 on the CPU.
    prefill_chunk: Annotated[int, msgspec.Meta(ge=1, le=8192)] | None = None


def check_options(given: dict[str, Any], device: str) -> TorchOptions:
    """The options with every default filled in. Raises Unsupported."""
    options = parse_options(TorchOptions, given, "torch")
    is_gpu = device == "gpu"
    if options.graphs and not is_gpu:
        raise Unsupported("option graphs is true, and graphs need device gpu", "graphs")
    draws = is_gpu if options.device_sampling is None else options.device_sampling
    if options.run_ahead and not draws:
        raise Unsupported("option run_ahead is true, and it needs device_sampling", "run_ahead")
    return msgspec.structs.replace(
        options,
        graphs=is_gpu if options.graphs is None else options.graphs,
        device_sampling=draws,
        run_ahead=is_gpu and draws if options.run_ahead is None else options.run_ahead,
        prefill_chunk=options.prefill_chunk or (GPU_PREFILL_CHUNK if is_gpu else CPU_PREFILL_CHUNK),
    )


def uses_flash(
    options: TorchOptions, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether attention is one packed call. Raises Unsupported where that is asked for in vain."""
    if options.attention == "sdpa":
        return False
    trouble = flash_trouble(spec, dtype, device)
    if trouble is not None and options.attention == "flash":
        raise Unsupported(f"option attention is flash, and {trouble}", "attention")
    return trouble is None


def device_of(name: str) -> torch.device:
    """The torch device. Raises Unsupported, BackendUnavailable."""
    if name == "cpu":
        return torch.device("cpu")
    if name != "gpu":
        raise Unsupported(f"device must be cpu or gpu, got {name!r}", "device")
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip or "the CPU only"
        raise BackendUnavailable(f"torch {torch.__version__} finds no GPU (built for {built_for})")
    return torch.device("cuda", 0)


def chosen_format(wanted: str, stored: str, device: torch.device) -> str:
    """What is asked for, else what is stored. Raises Unsupported."""
    if not wanted:
        return stored
    if wanted not in DTYPES:
        problem = f"the torch backend has no weight_format {wanted!r}; it has {', '.join(DTYPES)}"
    elif wanted == "fp16" and device.type == "cpu":
        problem = "weight_format fp16 is for GPUs; on the CPU use bf16 or fp32"
    else:
        return wanted
    raise Unsupported(problem, "weight_format")


def check_config(config: EngineConfig, spec: ModelSpec, kv_dtype: str) -> None:
    """Raises Unsupported for sizes and KV types that cannot be."""
    check(config)
    if config.context_tokens > spec.context:
        raise Unsupported(
            f"context_tokens must be at most {spec.context}, the model's own, "
            f"got {config.context_tokens}",
            "context_tokens",
        )
    if config.kv_dtype not in (AUTO, kv_dtype):
        raise Unsupported(
            f"kv_dtype {config.kv_dtype} cannot be had; torch holds the KV cache in the type that "
            f"it computes with here, {kv_dtype}",
            "kv_dtype",
        )


def compute_bytes(spec: ModelSpec, slots: int, chunk: int) -> int:
    """Working memory of the largest step on the CPU: activations, logits, the runtime."""
    attention = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    widest = max(2 * spec.intermediate, 3 * spec.hidden, attention)
    return 4 * (chunk + slots) * widest * 3 + 4 * slots * spec.vocabulary + (256 << 20)


def check_memory(predicted: MemoryParts, device: str, margin: float) -> None:
    """Raises OutOfMemory where it cannot fit: on a GPU not even with one slot."""
    if device == "gpu":
        needed = predicted.total_bytes or 0
        free, total = torch.cuda.mem_get_info()
        usable = int(free * (1 - margin))
        what = f"{size(free)} of the GPU's {size(total)} are free and {margin:.0%} are to stay so"
    else:
        needed = predicted.weight_bytes or 0  # pages of the KV cache count when they are written
        usable = available_bytes()
        what = f"{size(usable)} are available"
    if needed > usable:
        raise OutOfMemory(
            f"weights of {size(predicted.weight_bytes or 0)} and a KV cache of "
            f"{size(predicted.kv_bytes or 0)} do not fit: {what}; fewer slots or a shorter "
            "context need less"
        )


class memory_errors:
    """Turns torch's out-of-memory errors into OutOfMemory, its other ones into EngineFailed."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if not isinstance(problem, RuntimeError | MemoryError):
            return
        text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        if is_shortage(problem):
            raise OutOfMemory(f"{self._what} did not fit in memory: {text}") from problem
        raise EngineFailed(f"torch failed in {self._what}: {text}") from problem


def is_shortage(problem: BaseException) -> bool:
    """Whether an error says that memory ran out, in torch's words or those of CUDA's libraries."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(problem)
    return any(word in text for word in _MEMORY_WORDS)


class LoadWatch:
    """Marks memory and time while an engine loads. To be made before CUDA is first used."""

    def __init__(self, device: torch.device) -> None:
        self.uplink = Uplink(device)
        self.weight_bytes: int | None = None
        self.kv_bytes: int | None = None
        self.graph_bytes: int | None = None
        self.largest_step_bytes: int | None = None
        self.capture_seconds: float | None = None
        self.first_step_seconds: float | None = None
        self.free_bytes, _ = torch.cuda.mem_get_info()  # makes the context

    def captured(self, capture: Callable[[], None]) -> None:
        """Time the capture of graphs, and the memory that their pool keeps."""
        torch.cuda.empty_cache()
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        capture()
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - began
        torch.cuda.empty_cache()
        self.graph_bytes = max(0, torch.cuda.memory_reserved() - before)

    def first_step(self, step: Callable[[], None]) -> None:
        """Time the first steps, which load and build what all later ones use."""
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        self.first_step_seconds = time.perf_counter() - began

    def peak_of(self, step: Callable[[], None]) -> int:
        """Most bytes that a step has in tensors beyond those that are there before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before)

    def account(self) -> GpuLoad:
        """Where memory and time went, now that all is loaded and warm."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        known = [self.weight_bytes, self.kv_bytes, self.graph_bytes]
        rest = reserved - sum(part or 0 for part in known)
        reasons = []
        if rest < 0:
            reasons.append("the allocator holds less than weights, KV cache and graphs together")
        return GpuLoad(
            weight_bytes=self.weight_bytes,
            kv_bytes=self.kv_bytes,
            graph_bytes=self.graph_bytes,
            workspace_bytes=rest if rest >= 0 else None,
            allocated_bytes=torch.cuda.memory_allocated(),
            reserved_bytes=reserved,
            largest_step_bytes=self.largest_step_bytes,
            device_used_bytes=total - free,
            device_total_bytes=total,
            read_seconds=self.uplink.read_seconds,
            transfer_seconds=self.uplink.transfer_seconds,
            capture_seconds=self.capture_seconds,
            first_step_seconds=self.first_step_seconds,
            valid=not reasons,
            reasons=tuple(reasons),
        )


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
        return SlotModel(self.spec, weights, cache)


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
