"""What the torch backend is asked for, checked before anything is loaded: options, device, weight format, and whether it fits."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from models.formats import PACKED_FORMATS
from models.spec import ModelSpec
from serving.backends.base import EngineConfig, MemoryParts
from serving.backends.torch_weights import DTYPES
from serving.errors import BackendUnavailable, OutOfMemory, Unsupported

OPTIONS = ("graphs", "device_sampling", "margin", "prefill_chunk")


def check_options(given: dict[str, Any], device: str) -> dict[str, Any]:
    """All options with their values, defaults filled in. Raises Unsupported naming the key and the value."""
    for key in given:
        if key not in OPTIONS:
            raise Unsupported(f"the torch backend has no option {key!r}; it has {', '.join(OPTIONS)}", key)
    gpu = device == "gpu"
    out: dict[str, Any] = {}
    for key in ("graphs", "device_sampling"):
        value = {"true": True, "1": True, "false": False, "0": False}.get(str(given.get(key, gpu)).lower())
        if value is None or (value and key == "graphs" and not gpu):
            raise Unsupported(f"option {key} is {given[key]!r}; it is true or false, and graphs need device gpu", key)
        out[key] = value
    out["margin"] = _number(given, "margin", 0.1, 0.0, 0.9)
    out["prefill_chunk"] = int(_number(given, "prefill_chunk", 512, 1, 8192))
    return out


def _number(given: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    try:
        value = float(given.get(key, default))
    except (TypeError, ValueError):
        value = float("nan")
    if not low <= value <= high:
        raise Unsupported(f"option {key} must be a number from {low:g} to {high:g}, got {given[key]!r}", key)
    return value


def device_of(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name != "gpu":
        raise Unsupported(f"device must be cpu or gpu, got {name!r}", "device")
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"torch {torch.__version__} finds no GPU (built for {torch.version.cuda or torch.version.hip or 'the CPU only'})"
        )
    return torch.device("cuda", 0)


def chosen_format(wanted: str, stored: str, device: torch.device) -> str:
    """What is asked for, else what is stored. Packed folders stay what they are, float ones are converted between floats."""
    if not wanted:
        return stored
    if stored in PACKED_FORMATS or wanted in PACKED_FORMATS:
        if wanted != stored:
            raise Unsupported(
                f"weight_format {wanted!r} was asked for and the folder holds {stored}; "
                f"{', '.join(PACKED_FORMATS)} are packed beforehand, not at load",
                "weight_format",
            )
        return wanted
    if wanted not in DTYPES:
        raise Unsupported(
            f"the torch backend has no weight_format {wanted!r}; it has {', '.join([*DTYPES, *PACKED_FORMATS])}", "weight_format"
        )
    if wanted == "fp16" and device.type == "cpu":
        raise Unsupported("weight_format fp16 is for GPUs; on the CPU use bf16 or fp32", "weight_format")
    return wanted


def check_config(config: EngineConfig, spec: ModelSpec) -> None:
    if config.slots < 1 or not 1 <= config.context_tokens <= spec.context:
        raise Unsupported(
            f"slots is {config.slots} and context_tokens {config.context_tokens}; at least 1 slot and 1 to {spec.context} tokens",
            "context_tokens",
        )
    if config.kv_dtype not in ("fp16", "bf16", "fp32"):
        raise Unsupported(f"kv_dtype {config.kv_dtype!r} is not known to torch; the KV cache has the compute type", "kv_dtype")


def compute_bytes(spec: ModelSpec, slots: int, chunk: int) -> int:
    """Working memory of the largest step, roughly: activations of the widest layer, logits, and the runtime itself."""
    widest = max(2 * spec.intermediate, 3 * spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    return 4 * (chunk + slots) * widest * 3 + 4 * slots * spec.vocabulary + (256 << 20)


def check_memory(predicted: MemoryParts, device: torch.device, margin: float) -> None:
    needed = predicted.total_bytes or 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable, what = (
            free - int(margin * total),
            f"{free >> 20} MiB of the GPU's {total >> 20} MiB are free and {margin:.0%} are to stay so",
        )
    else:
        usable = psutil.virtual_memory().available
        needed = predicted.weight_bytes or 0  # pages of the KV cache count when they are written
        what = f"{usable >> 20} MiB are available"
    if needed > usable:
        weights, kv = (predicted.weight_bytes or 0) >> 20, (predicted.kv_bytes or 0) >> 20
        raise OutOfMemory(
            f"weights of {weights} MiB and a KV cache of {kv} MiB do not fit: {what}; fewer slots or a shorter context need less"
        )
