"""The three engines in process, without scheduler and HTTP: prefill, and decode at several batch
sizes, in turns.

    python -m tests.bench.engines_in_process --models 135m 1b --rows 1 4 16 llama_cpp:Q4_0 onnx:int4
    onnx:int8 torch:bf16

Each engine is in a process of its own, all on the same cores with as many threads; in a round each
does every cell once. Printed are the medians over the rounds, least and greatest beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

from models.resolve import resolve
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import spec_of
from serving.supervisor.engine_process import allocator
from tests.bench.paired import Figures, Series, machine, machine_line, take_turns
from tests.bench.peers.jobs import Child

COMMAND = [sys.executable, "-m", "tests.bench.peers.engine_steps"]
PACKAGES = ("llama-cpp-python", "onnxruntime", "torch")


def engine(text: str) -> tuple[str, str]:
    """From "onnx:int4" to backend and format."""
    backend, _, weight_format = text.partition(":")
    if not backend or not weight_format:
        raise argparse.ArgumentTypeError(
            f"an engine is BACKEND:FORMAT, such as onnx:int4, got {text!r}"
        )
    return backend, weight_format


def settings(
    model: str,
    backend: str,
    weight_format: str,
    slots: int,
    context: int,
    threads: int,
    options: dict[str, Any],
) -> EngineConfig:
    """What the engine process is told."""
    found = resolve(model, kind=spec_of(backend).weights or "hf", weight_format=weight_format)
    return EngineConfig(
        backend=backend,
        model_path=found.path,
        model_name=found.name,
        weight_format=found.weight_format,
        tokenizer_path=found.tokenizer_path,
        slots=slots,
        context_tokens=context,
        threads=threads,
        options=options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", type=engine, nargs="+", metavar="BACKEND:FORMAT")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument(
        "--context", type=int, default=256, help="tokens that each row holds before it decodes"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--json", type=Path, help="keeps every run; one that is there is gone on with"
    )
    arguments = parser.parse_args()
    if arguments.json is not None and len(arguments.models) > 1:
        parser.error("--json keeps the runs of one model")
    for model in arguments.models:
        measure(model, arguments)


def measure(model: str, arguments: argparse.Namespace) -> None:
    """All rounds of one model, and its table."""
    context = max(arguments.prompt, arguments.context + arguments.steps)
    facts = machine(*PACKAGES)
    print(machine_line(facts), flush=True)
    about = {
        key: getattr(arguments, key) for key in ("rows", "prompt", "context", "steps", "cores")
    } | {"model": model}
    series = Series.opened(arguments.json, about, facts)
    with contextlib.ExitStack() as stack:
        turns = {}
        for backend, weight_format in arguments.engines:
            config = settings(
                model,
                backend,
                weight_format,
                max(arguments.rows) + 1,
                context,
                len(arguments.cores),
                {},
            )
            child = stack.enter_context(
                Child(COMMAND, msgspec.to_builtins(config), arguments.cores, allocator(backend))
            )
            turns[f"{backend} {weight_format}"] = lambda _, child=child: cells(child, arguments)
        runs = series.add(
            "steps", take_turns(turns, arguments.rounds, lambda text: print(text, flush=True))
        )
    series.save(arguments.json)
    columns = ["prefill", *(f"{rows} rows" for rows in arguments.rows)]
    print(f"{model}, {len(arguments.cores)} thread(s), tokens/s: median (least-greatest)")
    print(f"{'':28}" + "".join(f"{column:>20}" for column in columns))
    for name, found in runs.items():
        print(f"{name:28}" + "".join(f"{spread(found, column):>20}" for column in columns))


def cells(child: Child, arguments: argparse.Namespace) -> Figures:
    """One round of one engine: tokens per second of every cell."""
    out: Figures = {
        "prefill": arguments.prompt
        / child.ask({"do": "prefill", "tokens": arguments.prompt})["seconds"]
    }
    for rows in arguments.rows:
        job = {"do": "decode", "rows": rows, "context": arguments.context, "steps": arguments.steps}
        out[f"{rows} rows"] = rows * arguments.steps / child.ask(job)["seconds"]
    return out


def spread(runs: list[Figures], key: str) -> str:
    values = [value for run in runs if (value := run.get(key)) is not None]
    return (
        f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})" if values else "-"
    )


if __name__ == "__main__":
    main()
