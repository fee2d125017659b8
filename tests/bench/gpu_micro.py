"""Attention of one decode step by kernel, and what one step of the engine launches.

    python -m tests.bench.gpu_micro --device gpu --model llama-3.1-8b --json FILE

For each batch and context: microseconds of one layer's attention by torch's flash kernels over
packed rows (what the engine takes on a GPU), and by SDPA with each of its backends. Then one decode
step and one prompt of the engine under torch.profiler: kernels by name, number and time, and the
load's account of memory and time. A kernel that refuses the shape is a "-" with its reason.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from models.ladder import rung
from models.resolve import resolve
from models.spec import ModelSpec
from serving.backends.backend_interface import EngineConfig
from serving.backends.torch.backend import TorchBackend
from serving.backends.torch.varlen_attention import flash_kernel
from serving.sampling.step_rows import Row

SDPA = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
REPEATS = 50


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--model", default="8b", help="a rung of the ladder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[384, 2048])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if arguments.device == "gpu" else "cpu")
    spec = rung(arguments.model).spec
    found: dict[str, Any] = {"torch": str(torch.__version__), "attention": {}}
    for rows in arguments.rows:
        for context in arguments.contexts:
            line = attention(spec, rows, context, device)
            found["attention"][f"{rows} x {context}"] = line
            shown = "  ".join(f"{name} {told}" for name, told in line.items())
            print(f"{spec.name} {rows:4} rows x {context:5}, us a layer: {shown}", flush=True)
    found |= engine(arguments.model, max(arguments.rows), arguments.device)
    print(json.dumps(found["memory"], indent=1))
    for name, (count, microseconds) in found["decode"].items():
        print(f"{count:5} {microseconds:9.1f} us  {name[:90]}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


def attention(
    spec: ModelSpec, rows: int, context: int, device: torch.device
) -> dict[str, float | str]:
    """Microseconds of one layer's decode attention, by kernel; a text: why there is none."""
    dtype = torch.bfloat16
    pairs = torch.randn(rows * context, 2, spec.kv_heads, spec.head_dim, device=device, dtype=dtype)
    query = torch.randn(rows, spec.heads, spec.head_dim, device=device, dtype=dtype)
    starts = torch.arange(rows + 1, device=device, dtype=torch.int32)
    held = torch.full((rows,), context, device=device, dtype=torch.int32)
    scale = spec.head_dim**-0.5

    def packed() -> Any:
        cache = pairs[:, 0], pairs[:, 1]
        call = (query, *cache, starts, starts * context, 1, context, 0.0, True, False)
        return flash_kernel()(*call, scale=scale, seqused_k=held)[0]

    keys, values = (
        pairs[:, part].view(rows, context, spec.kv_heads, -1).transpose(1, 2).contiguous()
        for part in (0, 1)
    )
    grouped = query.view(rows, spec.kv_heads, -1, spec.head_dim)
    mask = torch.zeros(rows, 1, 1, context, device=device, dtype=dtype)

    def plain() -> Any:
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)

    found = {"flash": timed(packed, device)}
    for name, kind in SDPA.items():
        with sdpa_kernel(kind):
            found[name] = timed(plain, device)
    return found


def timed(call: Callable[[], Any], device: torch.device) -> float | str:
    """Mean microseconds of a call, the first ones left out; a text where it cannot be."""
    try:
        for _ in range(3):
            call()
        finish(device)
        began = time.perf_counter()
        for _ in range(REPEATS):
            call()
        finish(device)
    except (RuntimeError, NotImplementedError) as problem:
        return f"- ({(str(problem).splitlines() or ['?'])[0][:60]})"
    return round((time.perf_counter() - began) / REPEATS * 1e6, 1)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def engine(model: str, rows: int, device: str) -> dict[str, Any]:
    """The engine's load, and kernels of one decode step and one prompt: name -> (number, us)."""
    files = resolve(model, kind="hf", weight_format="bf16")
    config = EngineConfig(
        *("torch", files.path, files.name),
        weight_format="bf16",
        device=device,
        slots=rows,
        context_tokens=512,
    )
    backend = TorchBackend(config, lambda what, fraction: None)
    prompt = np.ones(256, np.int32)
    fill = [Row(slot, prompt, 0, wants_token=True) for slot in range(min(rows, backend.info.slots))]
    prefill = profiled(lambda: backend.step(fill[:1]), device)
    for row in fill:
        backend.step([row])
    one = np.ones(1, np.int32)
    decode = profiled(
        lambda: backend.step([Row(row.slot, one, 256, wants_token=True) for row in fill]), device
    )
    found = {
        "details": backend.info.details,
        "prefill": prefill,
        "decode": decode,
    }
    backend.close()
    return found


def profiled(step: Callable[[], Any], device: str) -> dict[str, tuple[int, float]]:
    """Kernels of a step, the longest first; on the CPU its operators."""
    kind = torch.profiler.ProfilerActivity
    activities = [kind.CPU, kind.CUDA] if device == "gpu" else [kind.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    table = {}
    for event in profile.key_averages():
        name = "self_device_time_total" if device == "gpu" else "self_cpu_time_total"
        microseconds = float(getattr(event, name))
        if microseconds > 0:
            table[event.key] = (int(event.count), microseconds)
    return dict(sorted(table.items(), key=lambda item: -item[1][1])[:40])


if __name__ == "__main__":
    main()
