"""What the torch backend is asked for, checked before anything is loaded, the sizes that follow
from it, and, on a GPU, how many slots fit beside the largest step, which is run once to measure it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from models.formatting import size
from models.hf_config import read_spec
from models.machine import available_bytes
from models.manifest import Progress, read_manifest, verify
from models.spec import ModelSpec
from serving.backends.backend_interface import EngineConfig, MemoryParts, check_sizes, parse_options
from serving.backends.kv_rows import RowMap
from serving.backends.torch.forward_pass import SlotModel, cache_width, run_pass
from serving.backends.torch.gpu_memory import (
    GPU_MARGIN,
    GPU_PREFILL_CHUNK,
    pass_bytes,
    step_tokens,
    working_bytes,
)
from serving.backends.torch.gpu_sampler import draw
from serving.backends.torch.torch_weights import DTYPES, Checkpoint, Weights, compute_dtype
from serving.backends.torch.varlen_attention import KvCache, flash_trouble
from serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported
from serving.sampling.step_rows import Row, Sampling

KV_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CPU_PREFILL_CHUNK = 512
# What CUDA's libraries say when they find no memory, beside torch's own words.
_MEMORY_WORDS = ("not enough memory", "out of memory", "_ALLOC_FAILED", "ERROR_OUT_OF_MEMORY")
_TOP_P = Sampling(temperature=1.0, top_p=0.9)  # takes most memory of all draws
KINDS_OF_DRAWS = (
    *(Sampling(), Sampling(temperature=1.0), _TOP_P),
    Sampling(temperature=1.0, top_k=50, min_p=0.01),
)


class TorchOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the torch backend. None: on a GPU yes, on the CPU no."""

    graphs: bool | None = None  # CUDA graphs
    # Draw on the device, and launch a step before the tokens of the one before are read.
    device_sampling: bool | None = None
    # flash: torch's FlashAttention-2; sdpa: scaled_dot_product_attention. auto: flash on GPUs that
    # have it.
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    margin: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = GPU_MARGIN  # of free VRAM, kept free
    # Prompt tokens of a pass. None: 2048 on a GPU, 512 on the CPU.
    prefill_chunk: Annotated[int, msgspec.Meta(ge=1, le=8192)] | None = None


@dataclass(frozen=True)
class Plan:
    """What is loaded and where: sizes that follow from the configuration."""

    config: EngineConfig
    spec: ModelSpec
    checkpoint: Checkpoint
    weight_format: str
    dtype: torch.dtype  # of activations and KV cache
    device: torch.device
    has_graphs: bool
    draws_on_device: bool
    is_flash: bool
    margin: float
    prefill_chunk: int

    @property
    def is_gpu(self) -> bool:
        return self.config.device == "gpu"

    @property
    def token_bytes(self) -> int:
        """Of the KV cache."""
        return self.spec.kv_bytes_per_token(KV_NAMES[self.dtype])

    @property
    def row_bytes(self) -> int:
        """Of a slot's row of the KV cache."""
        return cache_width(self.config.context_tokens) * self.token_bytes

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return step_tokens(self.config.slots, self.prefill_chunk)

    def predicted(self) -> MemoryParts:
        """Memory before the load. On the CPU: activations, logits, the runtime."""
        spec, slots = self.spec, self.config.slots
        if self.is_gpu:
            working = working_bytes(spec, slots, self.step_tokens, self.dtype.itemsize)
        else:
            tokens = self.prefill_chunk + slots
            working = pass_bytes(spec, tokens, slots, 4) + 4 * slots * spec.vocabulary + (256 << 20)
        weights = spec.parameters * DTYPES[self.weight_format].itemsize
        return MemoryParts(weights, slots * self.row_bytes, working)

    def new_model(self, weights: Weights, rows: int) -> SlotModel:
        """The model with a KV cache of so many rows."""
        width = cache_width(self.config.context_tokens)
        cache = KvCache(self.spec, rows, width, self.dtype, self.device, self.is_flash)
        return SlotModel(self.spec, weights, cache)


def plan_of(config: EngineConfig, progress: Progress) -> Plan:
    """What is asked for, with every default filled in. Raises Unsupported, BackendUnavailable,
    BrokenWeights."""
    options = parse_options(TorchOptions, config.options, "torch")
    device = device_of(config.device)
    is_gpu = config.device == "gpu"
    if options.graphs and not is_gpu:
        raise Unsupported("option graphs is true, and graphs need device gpu", "graphs")
    folder = Path(config.model_path)
    spec = read_spec(folder, config.model_name)
    manifest = read_manifest(folder)
    if manifest is not None:
        verify(folder, manifest)
    checkpoint = Checkpoint(folder)
    weight_format = config.weight_format or checkpoint.weight_format
    known = ["fp32", "bf16", "fp16"] if is_gpu else ["fp32", "bf16"]
    if weight_format not in known:
        raise Unsupported(
            f"torch has no weight_format {weight_format!r} on this device; it has "
            f"{', '.join(known)}",
            "weight_format",
        )
    dtype = compute_dtype(weight_format, device)
    check_sizes(config, spec.context, KV_NAMES[dtype])
    trouble = flash_trouble(spec, dtype, device)
    if trouble is not None and options.attention == "flash":
        raise Unsupported(f"option attention is flash, and {trouble}", "attention")
    return Plan(
        *(config, spec, checkpoint, weight_format, dtype, device),
        has_graphs=is_gpu if options.graphs is None else options.graphs,
        draws_on_device=is_gpu if options.device_sampling is None else options.device_sampling,
        is_flash=trouble is None and options.attention != "sdpa",
        margin=options.margin,
        prefill_chunk=options.prefill_chunk or (GPU_PREFILL_CHUNK if is_gpu else CPU_PREFILL_CHUNK),
    )


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


def check_memory(plan: Plan) -> None:
    """Raises OutOfMemory where it cannot fit: on a GPU not even with one slot."""
    said = plan.predicted()
    weights = said.weight_bytes or 0
    if plan.is_gpu:
        needed = weights + plan.row_bytes + (said.compute_bytes or 0)
        free, total = torch.cuda.mem_get_info()
        usable = int(free * (1 - plan.margin))
        what = f"{size(free)} of the GPU's {size(total)} are free, {plan.margin:.0%} stay so"
    else:
        needed = weights  # pages of the KV cache count when they are written
        usable = available_bytes()
        what = f"{size(usable)} are available"
    if needed > usable:
        raise OutOfMemory(
            f"weights of {size(weights)} and a KV cache of {size(said.kv_bytes or 0)} do not fit: "
            f"{what}; fewer slots or a shorter context need less"
        )


@torch.inference_mode()
def slots_that_fit(plan: Plan, weights: Weights, free_at_first: int) -> int:
    """Slots for which a GPU has room beside the largest step, which is run to see what it takes (as
    nano-vllm's warmup_model does). `free_at_first`: bytes before the load. Raises OutOfMemory."""
    asked, row_bytes = plan.config.slots, plan.row_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _largest_step(plan, weights)
    torch.cuda.synchronize()
    largest = max(0, torch.cuda.max_memory_allocated() - before - row_bytes)
    if not plan.config.check_memory:
        return asked
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    graphs = pass_bytes(plan.spec, asked, asked, plan.dtype.itemsize) if plan.has_graphs else 0
    room = max(0, free - int(plan.margin * free_at_first) - largest - graphs)
    slots = min(asked, room // row_bytes)
    if not slots:
        raise OutOfMemory(
            f"no slot of {size(row_bytes)} fits: beside weights of {size(weights.bytes)} and a "
            f"step of {size(largest)}, {size(room)} of the GPU are left; fewer slots, a smaller "
            "prefill_chunk or a shorter context need less"
        )
    return slots


def _largest_step(plan: Plan, weights: Weights) -> None:
    """As many tokens as a step may hold and a draw for every slot, over a cache of one row."""
    slots, tokens, context = plan.config.slots, plan.step_tokens, plan.config.context_tokens
    pieces = max(slots, -(-tokens // context))
    given = []
    for index in range(pieces):
        piece = np.zeros(tokens // pieces + (index < tokens % pieces), np.int32)
        given.append((Row(0, piece, 0, index < slots, _TOP_P), 0, piece, 0))
    logits = torch.empty(slots, plan.spec.vocabulary, device=plan.device)
    model = plan.new_model(weights, 1)
    draw(*run_pass(model, RowMap(1, context, 0.0), given, out=logits))


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
        is_memory = isinstance(problem, torch.OutOfMemoryError | MemoryError)
        if is_memory or any(word in str(problem) for word in _MEMORY_WORDS):
            raise OutOfMemory(f"{self._what} did not fit in memory: {text}") from problem
        raise EngineFailed(f"torch failed in {self._what}: {text}") from problem
