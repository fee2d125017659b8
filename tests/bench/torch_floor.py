"""The torch engine against the floor that memory sets: a decode step can be no quicker than reading
the weights and the KV cache once.

    python -m tests.bench.torch_floor --device gpu --models llama-3.2-1b llama-3.2-3b llama-3.1-8b
    --rows 1 8 32 128 python -m tests.bench.torch_floor --device cpu --models smollm2-135m --rows 1
    8

floor = (bytes of all matrices that a token multiplies with + rows x context x KV bytes of a token)
/ bandwidth (as gpt-fast's "bandwidth achieved"); what is printed is floor / measured, by the
bandwidth that a copy reaches in the same run, and by the data sheet's where
reports/devices/device_catalog.toml has the device. The engine is the backend in a process of its
own, without scheduler and HTTP; figures are medians over --rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec

from models.resolve import resolve
from models.spec import ModelSpec
from reports.devices.device_catalog import devices
from serving.backends.backend_interface import EngineConfig
from tests.bench.paired import Figures, Series, machine, machine_line
from tests.bench.peers.jobs import Child


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"]
    )
    parser.add_argument("--format", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--context", type=int, default=256, help="tokens that each row holds before it decodes"
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--json", type=Path, help="keeps every run; one that is there is gone on with"
    )
    arguments = parser.parse_args()
    facts = machine("torch", "transformers")
    buffer_bytes = 1 << (31 if arguments.device == "gpu" else 28)
    settings = {
        "device": "cuda" if arguments.device == "gpu" else "cpu",
        "threads": len(arguments.cores),
        "bytes": buffer_bytes,
    }
    with Child(
        [sys.executable, "-m", "tests.bench.peers.bandwidth"], settings, arguments.cores
    ) as child:
        copied: float = child.ask({})["bytes_per_second"]
        device: str = child.facts["device"]
    sheet = data_sheet_bandwidth(device)
    facts |= {
        "device": device,
        "copy_gb_per_second": round(copied / 1e9, 1),
        "data_sheet_gb_per_second": sheet and round(sheet / 1e9),
    }
    print(machine_line(facts), flush=True)
    about = {
        key: getattr(arguments, key)
        for key in ("format", "device", "rows", "context", "steps", "cores")
    }
    series = Series.opened(arguments.json, about, facts)
    for model in arguments.models:
        found = resolve(model, kind="hf", weight_format=arguments.format)
        config = EngineConfig(
            backend="torch",
            model_path=found.path,
            model_name=found.name,
            weight_format=arguments.format,
            tokenizer_path=found.tokenizer_path,
            device=arguments.device,
            slots=max(arguments.rows),
            context_tokens=-(-(arguments.context + arguments.steps) // 64) * 64,
            threads=len(arguments.cores),
        )
        with Child(
            [sys.executable, "-m", "tests.bench.peers.engine_steps"],
            msgspec.to_builtins(config),
            arguments.cores,
        ) as child:
            for rows in arguments.rows:
                job = {
                    "do": "decode",
                    "rows": rows,
                    "context": arguments.context,
                    "steps": arguments.steps,
                }
                child.ask({**job, "steps": 2})  # first touches, graphs
                runs: list[Figures] = [
                    {"step_seconds": child.ask(job)["seconds"] / arguments.steps}
                    for _ in range(arguments.rounds)
                ]
                kept = series.add(f"{model}, {rows} rows", {"crossover": runs})["crossover"]
                series.save(arguments.json)
                seconds = statistics.median(
                    run["step_seconds"] for run in kept if run["step_seconds"] is not None
                )
                least = floor_bytes(
                    found.spec, arguments.format, rows, arguments.context + arguments.steps / 2
                )
                print(
                    line(
                        f"{model} {arguments.format}, {rows} rows",
                        rows,
                        seconds,
                        least,
                        copied,
                        sheet,
                    ),
                    flush=True,
                )


def floor_bytes(spec: ModelSpec, weight_format: str, rows: int, context_tokens: float) -> float:
    """What a decode step must read at the least, in bytes: every matrix once (the head, not the
    embedding table), and each row's KV.
    """
    element = 2 if weight_format == "bf16" else 4
    return element * spec.matrix_parameters + rows * context_tokens * spec.kv_bytes_per_token(
        weight_format
    )


def data_sheet_bandwidth(name: str) -> float | None:
    """Bytes per second of a GPU as its driver calls it; None where the catalogue has none.

    Drivers leave the form (SXM) out; one that says PCIe is not the SXM card.
    """
    said = set(name.replace("-", " ").lower().split())
    for gpu in (one for one in devices() if one.kind == "gpu"):
        words = set(gpu.name.lower().split())
        if words - {"sxm", "pcie"} <= said and not ("pcie" in said and "sxm" in words):
            return gpu.bandwidth_gb_per_second * 1e9
    return None


def line(
    name: str, rows: int, seconds: float, least_bytes: float, copied: float, sheet: float | None
) -> str:
    """A step's time, the rate, and the shares of the floor's speed."""
    shares = f"{least_bytes / copied / seconds:.2f} of the floor by the copy's bandwidth"
    if sheet is not None:
        shares += f", {least_bytes / sheet / seconds:.2f} by the data sheet's"
    return f"{name:32} {seconds * 1e3:8.2f} ms a step {rows / seconds:9.0f} tokens/s   {shares}"


if __name__ == "__main__":
    main()
