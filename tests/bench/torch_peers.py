"""The torch engine beside transformers: ContinuousBatching of 5.x, and generate() with a static
cache of 4.57 and 5.x.

    python -m tests.bench.torch_peers --model smollm2-135m --workloads 1 8 16 --rounds 5
    python -m tests.bench.torch_peers --device gpu --model llama-3.2-3b --dtypes bfloat16 --peers
    continuous-sdpa --workloads 1 8 32 128 python -m tests.bench.torch_peers --peers
    continuous-eager static-5 --dtypes bfloat16 float32 --formats bf16 int4 --workloads 8

transformers 5 has an environment of its own, which tests/bench/peers/transformers5.sh makes; it has
the same torch. Every engine runs in a process of its own on the same cores, as many threads as
cores, and they take turns (tests.bench.paired). ContinuousBatching gets both attentions that work
on a CPU, a KV pool just large enough (what it masks grows with the pool), and no sharing of
prefixes, as there are none. Where a CPU has no bfloat16 arithmetic, torch emulates it very slowly
and float32 is the peers' best type: name both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from models.resolve import resolve
from serving.backends.backend_interface import EngineConfig
from tests.bench.peers.jobs import Child
from tests.bench.peers.match import Player, add_options, compete, in_process, room

# Peer -> (mode, attention, True for the environment of transformers 5).
PEERS: dict[str, tuple[str, str, bool]] = {
    "continuous-sdpa": ("continuous", "sdpa", True),
    "continuous-eager": ("continuous", "paged|eager", True),
    "static": ("static", "sdpa", False),
    "static-5": ("static", "sdpa", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["bf16"],
        help="ours; the first is the one that ratios are of",
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=("float32", "bfloat16"),
        default=["float32"],
        help="the peers'",
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="of all of them")
    parser.add_argument(
        "--batch-tokens", type=int, default=512, help="most tokens of one ContinuousBatching step"
    )
    add_options(parser, ["1", "8", "16"], "torch transformers")
    arguments = parser.parse_args()
    folder = resolve(arguments.model, kind="hf", weight_format="bf16").path
    slots, context = room(arguments)
    players: dict[str, Player] = {}
    with contextlib.ExitStack() as stack:
        for weight_format in arguments.formats:
            config = our_config(
                arguments.model,
                weight_format,
                arguments.device,
                slots,
                context,
                len(arguments.cores),
            )
            command = [sys.executable, "-m", "tests.bench.peers.crossover_engine"]
            child = stack.enter_context(
                Child(command, msgspec.to_builtins(config), arguments.cores)
            )
            players[f"crossover {weight_format}"] = in_process(child)
        for peer in arguments.peers:
            mode, attention, is_five = PEERS[peer]
            for dtype in arguments.dtypes:
                settings: dict[str, Any] = {
                    "folder": folder,
                    "threads": len(arguments.cores),
                    "dtype": dtype,
                    "mode": mode,
                }
                settings |= {
                    "device": "cuda" if arguments.device == "gpu" else "cpu",
                    "attention": attention,
                    "slots": slots,
                    "context_tokens": context,
                    "batch_tokens": arguments.batch_tokens,
                }
                command = [
                    five() if is_five else sys.executable,
                    "-m",
                    "tests.bench.peers.transformers_engine",
                ]
                child = stack.enter_context(Child(command, settings, arguments.cores))
                players[f"{peer} {dtype} {child.facts['transformers']}"] = in_process(child)
        about = {
            "model": arguments.model,
            "device": arguments.device,
            "batch_tokens": arguments.batch_tokens,
        }
        vocabulary = resolve(arguments.model, kind="none").spec.vocabulary
        compete(players, f"crossover {arguments.formats[0]}", vocabulary, arguments, about)


def our_config(
    model: str, weight_format: str, device: str, slots: int, context_tokens: int, threads: int
) -> EngineConfig:
    """The torch backend for one of its formats."""
    found = resolve(model, kind="hf", weight_format=weight_format)
    return EngineConfig(
        backend="torch",
        model_path=found.path,
        model_name=found.name,
        weight_format=weight_format,
        tokenizer_path=found.tokenizer_path,
        device=device,
        slots=slots,
        context_tokens=context_tokens,
        threads=threads,
    )


def five() -> str:
    """The python of an environment with transformers 5: this one, or one that is made here."""
    if importlib.metadata.version("transformers").startswith("5."):
        return sys.executable
    script = Path(__file__).parent / "peers" / "transformers5.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(script)], check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


if __name__ == "__main__":
    main()
