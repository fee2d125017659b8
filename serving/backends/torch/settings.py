"""What the torch backend is asked for, checked before anything is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import torch

from models.formats import PACKED_FORMATS
from models.formatting import size
from models.machine import available_bytes
from models.spec import ModelSpec
from serving.backends.base import EngineConfig, MemoryParts
from serving.backends.options import parse_options
from serving.backends.spec import AUTO
from serving.backends.torch.matrices import DTYPES
from serving.backends.torch.need import GPU_MARGIN, GPU_PREFILL_CHUNK
from serving.backends.torch.packed import flash_trouble
from serving.bounds import check
from serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported

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
    # triton: what lies between the products of a layer in kernels of our own; needs flash.
    kernels: Literal["plain", "triton"] = "plain"
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
    """What is asked for, else what is stored. Packed folders stay packed. Raises Unsupported."""
    if not wanted or wanted == stored in PACKED_FORMATS:
        return stored
    packed = ", ".join(PACKED_FORMATS)
    if stored in PACKED_FORMATS or wanted in PACKED_FORMATS:
        problem = (
            f"weight_format {wanted!r} was asked for and the folder holds {stored}; {packed} "
            "are packed beforehand, not at load"
        )
    elif wanted not in DTYPES:
        problem = (
            f"the torch backend has no weight_format {wanted!r}; it has {', '.join(DTYPES)}, "
            f"{packed}"
        )
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
