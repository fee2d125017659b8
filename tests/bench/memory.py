"""Memory of the three backends: what each says before it loads, what it accounts for after, and
what the process really took.

    python -m tests.bench.memory --model smollm2-135m llama_cpp:Q4_0 onnx:int4 onnx:fp32 torch:bf16
    torch:int4

weights + KV: `said` before the load (BackendInfo.predicted), `found` by the engine after it
(BackendInfo.measured); they must be within --within of each other, else the exit status is 1.
`planned` is what placement plans with before any file is there: the KV cache, and all of it.
Beside them, as the kernel counts: what the process grew by from before the load until every slot
was full (file-backed pages included), and the peak, which takes in the interpreter, the libraries
and whatever loading needed for a moment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from models.ladder import rung
from serving.hardware.machine_facts import hardware_facts
from serving.placement.placement_policy import PlacementRequest, predicted
from serving.supervisor.engine_process import allocator
from tests.bench.engines_in_process import COMMAND, engine, settings
from tests.bench.paired import machine, machine_line
from tests.bench.peers.jobs import Child

MIB = 1 << 20
WIDTHS = (14, 9, 12, 9, 9, 12, 10, 10, 10)


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
    parser.add_argument("--json", type=Path, help="keeps all figures, in bytes")
    arguments = parser.parse_args()
    facts = machine("llama-cpp-python", "onnxruntime", "torch")
    print(machine_line(facts))
    print(f"{arguments.model}, {arguments.slots} slots of {arguments.context} tokens, MiB")
    headings = zip(
        (
            *("weights said", "found", "KV planned", "said", "found", "sum off by", "grew by"),
            *("peak RSS", "planned"),
        ),
        WIDTHS,
        strict=True,
    )
    print(" " * 28 + "".join(f"{heading:>{width}}" for heading, width in headings), flush=True)
    out = {}
    for backend, weight_format in arguments.engines:
        config = settings(
            arguments.model,
            backend,
            weight_format,
            arguments.slots,
            arguments.context,
            len(arguments.cores),
            {},
        )
        with Child(
            COMMAND, msgspec.to_builtins(config), arguments.cores, allocator(backend)
        ) as child:
            full = child.ask({"do": "fill"})
            request = PlacementRequest(
                model=rung(arguments.model).spec,
                weight_format=weight_format,
                slots=arguments.slots,
                context_tokens=arguments.context,
            )
            plan = predicted(request, hardware_facts(), backend, None)
            found = figures(child.facts, full) | {"planned": msgspec.to_builtins(plan)}
            out[f"{backend} {weight_format}"] = found
        print(f"{backend + ' ' + weight_format:28}{line(found)}", flush=True)
    if arguments.json:
        kept = {
            "machine": facts,
            "model": arguments.model,
            "slots": arguments.slots,
            "context_tokens": arguments.context,
            "engines": out,
        }
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    wide = [
        name
        for name, found in out.items()
        if found["error"] is None or abs(found["error"]) > arguments.within
    ]
    if wide:
        print(f"further off than {arguments.within:.0%}: {', '.join(wide)}")
    return 1 if wide else 0


def figures(facts: dict[str, Any], full: dict[str, int]) -> dict[str, Any]:
    """Bytes by name; `error` is the share by which weights + KV were said too high, None where the
    engine does not account for both.
    """
    said, found = facts["info"]["predicted"], facts["info"]["measured"]
    sums = [
        None
        if None in (part["weight_bytes"], part["kv_bytes"])
        else part["weight_bytes"] + part["kv_bytes"]
        for part in (said, found)
    ]
    return {
        "said": said,
        "found": found,
        "error": sums[0] / sums[1] - 1 if sums[0] is not None and sums[1] else None,
        "grew_bytes": full["rss_bytes"] - facts["before"]["rss_bytes"],
        "grew_anonymous_bytes": full["anonymous_bytes"] - facts["before"]["anonymous_bytes"],
        "peak_rss_bytes": full["peak_rss_bytes"],
        "load_seconds": facts["load_seconds"],
    }


def line(found: dict[str, Any]) -> str:
    """The figures of one engine as a line of the table."""

    def mib(size: int | None) -> str:
        return "-" if size is None else f"{size / MIB:.1f}"

    error = "-" if found["error"] is None else f"{found['error']:+.1%}"
    said, taken, planned = found["said"], found["found"], found["planned"]
    sizes = [
        *(said["weight_bytes"], taken["weight_bytes"]),
        *(planned["kv_bytes"], said["kv_bytes"], taken["kv_bytes"]),
    ]
    whole = planned["weight_bytes"] + planned["kv_bytes"] + planned["overhead_bytes"]
    ends = [mib(size) for size in (found["grew_bytes"], found["peak_rss_bytes"], whole)]
    cells = [*map(mib, sizes), error, *ends]
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


if __name__ == "__main__":
    sys.exit(main())
