"""Memory of the three backends: what each says before it loads, what it accounts for after, and
what the process really took.

    python -m tests.bench.memory --model smollm2-135m llama_cpp:Q4_0 onnx:int4 onnx:fp32 torch:bf16

weights + KV: `said` before the load (BackendInfo.predicted), `found` by the engine after it
(BackendInfo.measured); they must be within --within of each other, else the exit status is 1.
Beside them, as the kernel counts: what the process grew by from before the load until every slot
was full (file-backed pages included), and the peak, which takes in the interpreter, the libraries
and whatever loading needed for a moment.
"""

from __future__ import annotations

import argparse
import sys

from tests.bench.engine_child import EngineChild, config_of, engine
from tests.bench.paired import machine, machine_line

HEADS = ("weights said", "found", "KV said", "found", "sum off by", "grew by", "peak RSS")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", type=engine, nargs="+", metavar="BACKEND:FORMAT")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--cores", type=int, nargs="+", default=[0])
    parser.add_argument("--within", type=float, default=0.05)
    asked = parser.parse_args()
    print(machine_line(machine("llama-cpp-python", "onnxruntime", "torch")))
    print(f"{asked.model}, {asked.slots} slots of {asked.context} tokens, MiB")
    print(" " * 20 + "".join(f"{head:>14}" for head in HEADS), flush=True)
    wide = []
    for backend, weight_format in asked.engines:
        name = f"{backend} {weight_format}"
        cells, error = measured(backend, weight_format, asked)
        print(f"{name:20}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
        if error is None or abs(error) > asked.within:
            wide.append(name)
    if wide:
        print(f"further off than {asked.within:.0%}: {', '.join(wide)}")
    return 1 if wide else 0


def measured(
    backend: str, weight_format: str, asked: argparse.Namespace
) -> tuple[list[str], float | None]:
    """The cells of an engine's line, and the share by which weights + KV were said too high; None
    where the engine does not account for both.
    """
    sizes = {"slots": asked.slots, "context_tokens": asked.context}
    config = config_of(asked.model, backend, weight_format, threads=len(asked.cores), **sizes)
    with EngineChild(config, asked.cores) as child:
        facts, full = child.facts, child.ask("fill")
    said, found = facts["info"]["predicted"], facts["info"]["measured"]
    parts = [part[key] for part in (said, found) for key in ("weight_bytes", "kv_bytes")]
    error = None if None in parts else sum(parts[:2]) / sum(parts[2:]) - 1
    grew = full["rss_bytes"] - facts["before"]["rss_bytes"]
    cells = [
        *(mib(parts[0]), mib(parts[2]), mib(parts[1]), mib(parts[3])),
        "-" if error is None else f"{error:+.1%}",
        *(mib(grew), mib(full["peak_rss_bytes"])),
    ]
    return cells, error


def mib(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 20):.1f}"


if __name__ == "__main__":
    sys.exit(main())
