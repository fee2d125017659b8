"""Crossover's llama_cpp engine beside llama.cpp's own llama-server: same commit, same GGUF, same cores, in one run.

    python -m tests.bench.llama_server.compare --model smollm2-135m --streams 1 4 16 --rounds 5

Both servers are up all the time and take turns, a round each, so that a slow minute of the machine falls on both; what is reported are
medians over the rounds and the medians of the rounds' ratios. The engine's threads are on --engine-cores, HTTP and the client on
--client-cores. Prompts are different in every request (no prefix can be reused) and outputs have a fixed length (ignore_eos).
Builds the peer first (build.sh), if it is not there yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from models.hub import resolve
from models.tokenizer import load_tokenizer
from tests.bench.closed_loop import Result, run

HERE = Path(__file__).parent
PORTS = {"crossover": 18431, "llama-server": 18432}


def mask(cores: list[int]) -> str:
    return hex(sum(1 << core for core in cores))


@contextlib.contextmanager
def server(command: list[str], port: int, ready: str, log: Path) -> Iterator[str]:
    """A server process for as long as the block runs; waits until it says that it is ready."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 300
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(url + ready, timeout=2).status == 200:
                        break
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def prompts(tokenizer_path: str, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of about `tokens` tokens, each beginning differently."""
    tokenizer = load_tokenizer(tokenizer_path)
    words = "the model reads a long prompt and then answers one word after the other until nothing is left to say about it".split()
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        text = f"{rng.randrange(10**9)}"
        while len(tokenizer.encode(text)) < tokens:
            text += " " + " ".join(rng.choice(words) for _ in range(8))
        out.append(text)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--format", default="Q4_0")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[4, 12, 32], help="requests of a round, one figure for each of --streams"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--engine-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--client-cores", type=int, nargs="+", default=[1])
    parser.add_argument("--option", action="append", default=[], help="passed on to crossover serve")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = resolve(arguments.model, backend="llama_cpp", weight_format=arguments.format)
    programs = Path(subprocess.run(["bash", str(HERE / "build.sh")], check=True, capture_output=True, text=True).stdout.strip())
    slots, context = max(arguments.streams), 512
    cores, client = ",".join(map(str, arguments.engine_cores)), ",".join(map(str, arguments.client_cores))
    ours = [
        *(sys.executable, "-m", "crossover", "serve", arguments.model, "--format", arguments.format, "--port", str(PORTS["crossover"])),
        *("--cores", cores, "--api-cores", client, "--slots", str(slots), "--context", str(context)),
    ] + [word for option in arguments.option for word in ("--option", option)]
    both = ",".join(map(str, sorted({*arguments.engine_cores, *arguments.client_cores})))
    theirs = [
        *("taskset", "-c", both, str(programs / "llama-server"), "-m", str(model.path), "--port", str(PORTS["llama-server"])),
        *("-t", str(len(arguments.engine_cores)), "-tb", str(len(arguments.engine_cores))),
        *("--cpu-mask", mask(arguments.engine_cores), "--cpu-strict", "1", "-np", str(slots), "-c", str(slots * context)),
        *("--no-webui",),
    ]
    logs = Path(os.environ.get("TMPDIR", "/tmp"))
    table: dict[str, dict[str, list[Result]]] = {}
    with (
        server(ours, PORTS["crossover"], "/ready", logs / "bench-crossover.log") as our_url,
        server(theirs, PORTS["llama-server"], "/health", logs / "bench-llama-server.log") as their_url,
    ):
        os.sched_setaffinity(0, arguments.client_cores)
        urls = {"crossover": our_url, "llama-server": their_url}
        for url in urls.values():
            run(url, prompts(model.tokenizer_path, 2, 32, 0), 8, 1, arguments.model)  # first touches
        for streams, count in zip(arguments.streams, arguments.requests, strict=True):
            rows: dict[str, list[Result]] = {name: [] for name in urls}
            for number in range(arguments.rounds):
                for name in sorted(urls, reverse=number % 2 == 1):
                    texts = prompts(model.tokenizer_path, count, arguments.prompt, 1000 * streams + 2 * number + (name == "crossover"))
                    rows[name].append(run(urls[name], texts, arguments.output, streams, arguments.model))
                    print(
                        f"  {streams:2} streams, round {number + 1}: {name:13} {rows[name][-1].output_tokens_per_second:7.1f} tokens/s",
                        flush=True,
                    )
            table[str(streams)] = rows
            report(arguments.model, streams, rows)
    if arguments.json:
        raw = {s: {name: [vars(r) for r in results] for name, results in rows.items()} for s, rows in table.items()}
        arguments.json.write_text(json.dumps(raw, indent=1))


def report(model: str, streams: int, rows: dict[str, list[Result]]) -> None:
    """Medians, and the medians of the paired ratios."""

    def middle(name: str, key: str) -> float:
        return statistics.median(getattr(result, key) for result in rows[name])

    def ratio(key: str) -> float:
        pairs = zip(rows["crossover"], rows["llama-server"], strict=True)
        return statistics.median(getattr(a, key) / getattr(b, key) for a, b in pairs)

    print(f"{model}, {streams} streams: (medians; ratio = crossover / llama-server)")
    for key, unit, scale in (
        ("output_tokens_per_second", "tokens/s", 1.0),
        ("ttft_p50", "ms", 1e3),
        ("ttft_p95", "ms", 1e3),
        ("itl_p50", "ms", 1e3),
        ("itl_p99", "ms", 1e3),
    ):
        ours, theirs = middle("crossover", key) * scale, middle("llama-server", key) * scale
        print(f"  {key:26} {ours:10.1f} {theirs:10.1f} {unit:9} ratio {ratio(key):.2f}", flush=True)


if __name__ == "__main__":
    main()
