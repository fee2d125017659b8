"""What a step of the llama_cpp backend costs: decode at several batch sizes, prefill, and the
host's share, under each option.

    python -m tests.bench.llama_cpp_steps model.gguf --threads 1 --rows 1 8 16 --set
    kv_unified=true,false --set flash_attention=on,off

How threads wait (OMP_WAIT_POLICY) and huge pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1) are fixed
when llama.cpp is loaded: compare them in runs of their own. `--context` compares tokens of context
a slot, of which the same few are filled.

Each cell is measured in rounds that go through all variants in turn, so that a drifting machine
hits all alike; the best and the median round are printed. With one thread the process's CPU time is
measured and not wall time, which a busy neighbour cannot falsify much.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serving.backends.backend_interface import EngineConfig
from serving.backends.llama_cpp.backend import LlamaCppBackend
from serving.sampling.step_rows import Row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scattered", action="store_true", help="use every second slot, as after leaves"
    )
    parser.add_argument("--kv-dtype", default="fp16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="an option and the values to compare",
    )
    parser.add_argument("--context", type=int, nargs="+", help="without it: as much as is filled")
    arguments = parser.parse_args()
    keys = [item.split("=", 1)[0] for item in arguments.set]
    values = [item.split("=", 1)[1].split(",") for item in arguments.set]
    filled = -(-(arguments.prompt + arguments.steps * arguments.rounds + 16) // 256) * 256
    variants = [
        (context, dict(zip(keys, chosen, strict=True)))
        for context in arguments.context or [filled]
        for chosen in itertools.product(*values)
    ]
    clock: Callable[[], float] = time.process_time if arguments.threads == 1 else time.perf_counter
    most = max(arguments.rows) * (2 if arguments.scattered else 1)
    backends = [
        LlamaCppBackend(
            EngineConfig(
                backend="llama_cpp",
                model_path=str(arguments.model),
                model_name="m",
                slots=most,
                context_tokens=context,
                threads=arguments.threads,
                kv_dtype=arguments.kv_dtype,
                options=dict(variant),
            ),
            lambda what, fraction: None,
        )
        for context, variant in variants
    ]
    decode: dict[tuple[int, int], list[float]] = {}
    prefill: dict[int, list[float]] = {}
    host: dict[tuple[int, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for index, backend in enumerate(backends):
            prefill.setdefault(index, []).append(prefill_rate(backend, clock))
            for count in arguments.rows:
                slots = range(0, count * 2, 2) if arguments.scattered else range(count)
                rate, host_seconds = decode_rate(
                    backend, list(slots), arguments.prompt, arguments.steps, clock
                )
                decode.setdefault((index, count), []).append(rate)
                host.setdefault((index, count), []).append(host_seconds)
    print(
        f"{arguments.model.name}, {arguments.threads} threads, "
        f"{'CPU' if arguments.threads == 1 else 'wall'} time, best (median), tokens/s"
    )
    for index, (context, variant) in enumerate(variants):
        name = f"context={context} " + " ".join(f"{key}={value}" for key, value in variant.items())
        cells = [
            f"n={count}: {max(decode[index, count]):.0f} "
            f"({statistics.median(decode[index, count]):.0f})"
            for count in arguments.rows
        ]
        small = min(host[index, arguments.rows[-1]]) * 1e3
        best, usual = max(prefill[index]), statistics.median(prefill[index])
        print(
            f"{name:48s} prefill {best:.0f} ({usual:.0f})  {'  '.join(cells)}  host {small:.3f} "
            "ms/step"
        )


def prefill_rate(backend: LlamaCppBackend, clock: Callable[[], float]) -> float:
    """Tokens per second of a 512-token prompt (or a whole context)."""
    tokens = (
        np.random.default_rng(0)
        .integers(3, backend.info.vocabulary, min(512, backend.info.context_tokens))
        .astype(np.int32)
    )
    started = clock()
    for begin in range(0, len(tokens), backend.info.step_tokens):
        backend.step(
            [Row(0, tokens[begin : begin + backend.info.step_tokens], begin, wants_token=True)]
        )
    return len(tokens) / (clock() - started)


def decode_rate(
    backend: LlamaCppBackend, slots: list[int], prompt: int, steps: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Tokens per second of greedy decoding in `slots`, and the host's seconds per step (everything
    but llama_decode).
    """
    random = np.random.default_rng(1)
    for slot in slots:
        backend.step(
            [
                Row(
                    slot,
                    random.integers(3, backend.info.vocabulary, prompt).astype(np.int32),
                    0,
                    wants_token=False,
                )
            ]
        )
    inside = [0.0]
    library = backend._llama
    plain = library.llama_decode

    class Timed:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def llama_decode(self, *given: object) -> int:
            before = clock()
            code: int = plain(*given)
            inside[0] += clock() - before
            return code

    backend._llama = Timed()
    tokens = [np.array([5 + slot], np.int32) for slot in slots]
    started = clock()
    for step in range(steps):
        drawn = backend.step(
            [
                Row(slot, tokens[line], prompt + step, wants_token=True)
                for line, slot in enumerate(slots)
            ]
        )
        tokens = [np.array([each.token], np.int32) for each in drawn]
    seconds = clock() - started
    backend._llama = library
    return steps * len(slots) / seconds, (seconds - inside[0]) / steps


if __name__ == "__main__":
    main()
