"""The torch engine against the floor that memory sets: a decode step can be no quicker than reading
the weights and the KV cache once.

    python -m tests.bench.torch_floor --device gpu --models llama-3.1-8b --rows 1 8 32 128
    python -m tests.bench.torch_floor --device cpu --models smollm2-135m --rows 1 8

floor = (bytes of all matrices that a token multiplies with + rows x context x KV bytes of a token)
/ bandwidth (as gpt-fast's "bandwidth achieved"); what is printed is floor / measured, by the
bandwidth that a copy reaches in the same run; of each load its seconds, and the bytes that were
predicted and found. The engine is the backend in a process of its own; figures are medians
over --rounds. What --json has already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec
from tests.bench.engine_child import EngineChild, config_of
from tests.bench.paired import machine, machine_line, parser_of

COPIES = 20


def main() -> None:
    parser = parser_of(__doc__)
    ladder_models = ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"]
    parser.add_argument("--models", nargs="+", default=ladder_models)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--context", type=int, default=256, help="tokens that each row holds before it decodes"
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="keeps every figure as it comes")
    options = parser.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        device, copied = pool.submit(copy_rate, options.device, options.cores).result()
    facts = machine("torch", "transformers") | {"device": device, "copy_bytes_per_second": copied}
    print(machine_line(facts), flush=True)
    kept: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text())
    kept.setdefault("machines", []).append(facts)
    for model in options.models:
        for name, found in measured(model, options, kept):
            kept[name] = found
            if options.json is not None:
                options.json.write_text(json.dumps(kept, indent=1))
            if "step_seconds" in found:
                print(line(name, found, copied), flush=True)
            else:
                print(f"{name:32} {json.dumps(found)}", flush=True)


def measured(model: str, options: argparse.Namespace, kept: dict[str, Any]) -> Any:
    """Name and figures of each thing that is not kept yet: the load, then the rows."""
    todo = [rows for rows in options.rows if f"{model}, {rows} rows" not in kept]
    if not todo:
        return
    config = config_of(
        *(model, "torch", "bf16"),
        device=options.device,
        slots=max(options.rows),
        context_tokens=-(-(options.context + options.steps) // 64) * 64,
        threads=len(options.cores),
    )
    with EngineChild(config, options.cores) as child:
        yield f"{model}, load", {"seconds": child.facts["load_seconds"]}
        for rows in todo:
            job = {"rows": rows, "context": options.context}
            child.ask("decode", **job, steps=2)  # first touches, graphs
            took = [child.ask("decode", **job, steps=options.steps) for _ in range(options.rounds)]
            least = floor_bytes(ladder_model(model).spec, rows, options.context + options.steps / 2)
            seconds = statistics.median(took) / options.steps
            found = {"rows": rows, "step_seconds": seconds, "floor_bytes": least, "rounds": took}
            yield f"{model}, {rows} rows", found


def copy_rate(device: str, cores: Sequence[int]) -> tuple[str, float]:
    """The device's name, and bytes per second, read and written together, of the best of COPIES
    copies between two buffers far larger than any cache (the STREAM benchmark's copy).
    """
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    is_gpu = device == "gpu"
    source = torch.ones(1 << (29 if is_gpu else 26), device="cuda" if is_gpu else "cpu")
    target = torch.zeros_like(source)

    def once() -> float:
        started = time.perf_counter()
        target.copy_(source)
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    rate = 2 * source.nbytes / min(once() for _ in range(COPIES))
    return torch.cuda.get_device_name() if is_gpu else "cpu", rate


def floor_bytes(spec: ModelSpec, rows: int, context_tokens: float) -> float:
    """What a decode step must read at the least, in bytes: every matrix once (the head, not the
    embedding table), and each row's KV.
    """
    return 2 * spec.matrix_parameters + rows * context_tokens * spec.kv_bytes_per_token("bf16")


def line(name: str, found: dict[str, Any], copied: float) -> str:
    """A step's time, the rate, and the share of the floor's speed."""
    seconds = found["step_seconds"]
    share = found["floor_bytes"] / copied / seconds
    rate = f"{seconds * 1e3:8.2f} ms a step {found['rows'] / seconds:9.0f} tokens/s"
    return f"{name:32} {rate}   {share:.2f} of the floor"


if __name__ == "__main__":
    main()
