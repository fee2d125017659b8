"""What a step of a CPU engine takes, by decode rows and prompt tokens, under several settings.

    python -m tests.bench.step_times --model llama-3.2-1b --engine onnx:int8
    python -m tests.bench.step_times --threads 14 7 --options "" pinned=false flash_attention=true

Each setting is an engine in a process of its own, on the first `threads` cores; all are loaded at
once and take turns, so that a slow minute of the machine falls on all alike. Printed are the least
times in milliseconds: of a decode step of 1, 8, 16 and 64 rows with contexts of 64 to 192 tokens,
of a prompt of 64 and of 256 tokens, and what a row and a prompt token add.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from crossover.serving.backends.backend_interface import Backend, EngineConfig
from crossover.serving.backends.backend_table import backend_class
from crossover.serving.sampling.step_inputs import Row, Sampling
from tests.bench.engine_child import config_of, engine
from tests.bench.paired import machine, machine_line, parser_of

CASES = ("r1", "r8", "r16", "r64", "p64", "p256")
CONTEXT = 128
GREEDY = Sampling()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--engine", type=engine, default="onnx:int8", metavar="BACKEND:FORMAT")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=[len(cores)])
    parser.add_argument(
        "--options", nargs="+", default=[""], help='of the backend: "a=b,c=d"; "": its own'
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    arguments = parser.parse_args()
    backend, weight_format = arguments.engine
    print(machine_line(machine("onnxruntime")))
    print(f"{arguments.model}, {backend} {weight_format}, ms of a step", flush=True)
    engines = []
    for threads in arguments.threads:
        for text in arguments.options:
            options = dict(pair.split("=", 1) for pair in text.split(",") if pair)
            config = config_of(
                arguments.model,
                backend,
                weight_format,
                slots=64,
                context_tokens=512,
                threads=threads,
                cores=tuple(cores[:threads]),
                options=options,
            )
            engines.append((f"{threads} {text or 'as it is'}", Child(config)))
    least: dict[str, dict[str, float]] = {name: {} for name, _ in engines}
    for _ in range(arguments.rounds):
        for case in arguments.cases:
            for name, child in engines:
                seconds = child.ask(case)
                least[name][case] = min(seconds, least[name].get(case, seconds))
    print(f"{'threads, options':32}", *(f"{case:>8}" for case in arguments.cases))
    for name, found in least.items():
        print(f"{name:32}", *(f"{found[case] * 1e3:8.1f}" for case in arguments.cases), end="")
        if {"r1", "r16"} <= found.keys():
            print(f"   a row {(found['r16'] - found['r1']) / 15 * 1e3:.2f}", end="")
        if {"p64", "p256"} <= found.keys():
            print(f", a prompt token {(found['p256'] - found['p64']) / 192 * 1e3:.3f}", end="")
        print(flush=True)
    for _, child in engines:
        child.close()


class Child:
    """An engine in a process of its own that times the steps it is asked for."""

    def __init__(self, config: EngineConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__.replace("__main__", "tests.bench.step_times"), "child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.ask(json.dumps(msgspec.to_builtins(config)))

    def ask(self, line: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the engine has died; what it said stands above")
        return float(answer)

    def close(self) -> None:
        self._process.communicate("")


def child() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    os.sched_setaffinity(0, config.cores)
    backend = backend_class(config.backend)(config, lambda what, fraction: None)
    print(0.0, flush=True)
    for line in sys.stdin:
        print(seconds_of(backend, line.strip()), flush=True)
    backend.close()


def seconds_of(backend: Backend, case: str) -> float:
    """The least time of some steps."""
    count = int(case[1:])
    token = np.array([7], np.int32)
    found = []
    if case[0] == "p":
        prompt = np.arange(count, dtype=np.int32) + 7
        for _ in range(3):
            backend.truncate(0, 0)
            before = time.perf_counter()
            backend.step([Row(0, prompt, 0, True, GREEDY)])
            found.append(time.perf_counter() - before)
        return min(found)
    contexts = np.linspace(CONTEXT // 2, CONTEXT * 3 // 2, count).astype(int)
    for slot, tokens in enumerate(contexts):
        backend.step([Row(slot, np.full(tokens, 7, np.int32), 0, False, GREEDY)])
    for step in range(6):
        rows = [Row(slot, token, int(at) + step, True, GREEDY) for slot, at in enumerate(contexts)]
        before = time.perf_counter()
        backend.step(rows)
        found.append(time.perf_counter() - before)
    for slot in range(count):
        backend.truncate(slot, 0)
    return min(found)


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        child()
    else:
        main()
