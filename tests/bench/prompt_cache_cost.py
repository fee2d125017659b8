"""What a prompt cache costs where it gains nothing, and whether its memory is what was predicted.

    python -m tests.bench.prompt_cache_cost --rounds 4          # 135M, about 6 minutes
    python -m tests.bench.prompt_cache_cost --backend onnx --format int8

Two servers run at the same time, one with --cache and one without, and are measured in turns, each
idle while the other one is measured. No prompt begins like an earlier one, so nothing is ever
reused, and with few slots every prompt has a sequence stored that never returns. A round has the
ratio of the two for TTFT, time between tokens, and tokens/s; the last lines have the median of the
ratios with their range, the share of the measured time that went into copies, and the memory of the
engine beside the predicted one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.bench.http_client import Result, closed_loop
from tests.bench.paired import machine, machine_line, parser_of
from tests.bench.peers.compare import prompts
from tests.bench.peers.servers import Server, Setup, parsed, started

CONTEXT_TOKENS = 1024
TOUCH_SECONDS = 60.0  # at most, until the engine has taken the memory of its prompt cache
FIGURES = ("ttft_p50", "itl_p50", "output_tokens_per_second")


def placement_of(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/v1/placement", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def copy_seconds_of(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    name = "crossover_prompt_cache_copy_seconds_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def wait_for_memory(server: Server) -> None:
    """Wait until the engine's memory no longer grows: it takes that of its prompt cache while it is
    idle."""
    deadline, before = time.monotonic() + TOUCH_SECONDS, -1
    while time.monotonic() < deadline:
        rss = placement_of(server)["memory"]["rss_bytes"]
        if rss == before:
            return
        before = rss
        time.sleep(1.0)


def measured(server: Server, options: argparse.Namespace, seed: int) -> Result:
    texts = prompts(server.tokenizer_path, options.requests, options.prompt, seed)
    lengths = [options.output] * len(texts)
    return closed_loop(server.url, texts, lengths, options.slots, options.model)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="llama_cpp")
    parser.add_argument("--format", default="Q4_0")
    parser.add_argument("--cache", default="512MiB", metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16, help="of a server in a round")
    parser.add_argument("--prompt", type=int, default=300, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--slots", type=int, default=2, help="and requests at the same time")
    parser.add_argument("--engine-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--client-cores", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    contestant = parsed(f"{options.backend}:{options.format}")
    print(machine_line(machine("llama-cpp-python", "onnxruntime")))
    ratios: dict[str, list[float]] = {name: [] for name in FIGURES}
    measured_seconds = 0.0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossover-bench-")))

        def server_with(cache: str) -> Server:
            setup = Setup(
                options.model,
                options.slots,
                CONTEXT_TOKENS,
                tuple(options.engine_cores),
                tuple(options.client_cores),
                prompt_cache=cache,
            )
            return stack.enter_context(started(contestant, setup, folder / f"{cache}.log"))

        cached, plain = server_with(options.cache), server_with("0")
        wait_for_memory(cached)
        for server in (cached, plain):  # a warm-up, after which every slot holds something
            measured(server, options, seed=10**6)
        copied_before = copy_seconds_of(cached)
        for number in range(options.rounds):
            order = (cached, plain) if number % 2 == 0 else (plain, cached)
            results = {server: measured(server, options, number) for server in order}
            measured_seconds += results[cached].seconds
            for name in FIGURES:
                ratios[name].append(getattr(results[cached], name) / getattr(results[plain], name))
            shown = "  ".join(f"{name} {ratios[name][-1]:.3f}" for name in FIGURES)
            print(f"round {number + 1}: with / without: {shown}", flush=True)
        copied = copy_seconds_of(cached) - copied_before
        memory = placement_of(cached)["memory"]
    for name, values in ratios.items():
        middle = statistics.median(values)
        print(f"{name:26} with / without {middle:.3f} ({min(values):.3f}-{max(values):.3f})")
    print(f"copies took {copied / measured_seconds:.2%} of the time ({copied:.3f} s)")
    predicted = sum(memory["predicted"].values())
    print(
        f"memory {memory['rss_bytes'] / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f} MiB "
        f"({memory['rss_bytes'] / predicted:.3f})"
    )


if __name__ == "__main__":
    main()
