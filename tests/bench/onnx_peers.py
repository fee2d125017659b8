"""The onnx engine beside its peers: onnxruntime-genai's own Generator and optimum's
ORTModelForCausalLM.generate.

    python -m tests.bench.onnx_peers genai --model smollm2-135m --workloads 1 8 8:staggered --rounds
    5 python -m tests.bench.onnx_peers optimum-fp32 optimum-int8 --model qwen2.5-0.5b --workloads 8

Every engine runs in a process of its own on the same core, one thread each, and they take turns
(tests.bench.paired). Ours is the backend under the scheduler in process, as the peers are, and with
--http also the whole server: the engine on --cores, HTTP and the client on --client-cores. The
peers batch statically: all prompts of a batch have one length, so nothing of theirs is lost to
padding. genai runs the very same int4 graph; optimum runs its own export (growing past_key_values),
for int8 through its own ORTQuantizer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from models.resolve import resolve
from serving.backends.backend_interface import EngineConfig
from serving.supervisor.engine_process import allocator
from tests.bench.peers.crossover_http import served
from tests.bench.peers.jobs import Child
from tests.bench.peers.match import Player, add_options, compete, in_process, room

# Peer -> (its module, our formats that stand beside it, the format and exporter of its graph).
PEERS: dict[str, tuple[str, tuple[str, ...], tuple[str, str]]] = {
    "genai": ("tests.bench.peers.genai_generator", ("int4",), ("int4", "genai")),
    "optimum-fp32": ("tests.bench.peers.optimum_generate", ("fp32",), ("fp32", "optimum")),
    "optimum-int8": (
        "tests.bench.peers.optimum_generate",
        ("dynamic-int8", "int8"),
        ("dynamic-int8", "optimum"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="+", choices=PEERS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--http", action="store_true", help="our server over HTTP as well")
    parser.add_argument("--client-cores", type=int, nargs="+", default=[1])
    add_options(
        parser,
        ["1", "8", "8:staggered"],
        "onnxruntime onnxruntime-genai optimum optimum-onnx transformers torch",
    )
    arguments = parser.parse_args()
    if arguments.json and len(arguments.peers) > 1:
        parser.error("--json is a file of one peer's runs: name one peer")
    for peer in arguments.peers:
        print(
            f"\n{arguments.model}, onnx beside {peer}, {len(arguments.cores)} thread(s)", flush=True
        )
        with contextlib.ExitStack() as stack:
            ours = f"crossover {PEERS[peer][1][0]}"
            players = dict(stack.enter_context(contestants(arguments, peer)))
            vocabulary = resolve(arguments.model, kind="none").spec.vocabulary
            compete(
                players,
                ours,
                vocabulary,
                arguments,
                {"model": arguments.model, "peer": peer, "http": arguments.http},
            )


@contextlib.contextmanager
def contestants(arguments: argparse.Namespace, peer: str) -> Iterator[dict[str, Player]]:
    """All players of one comparison, loaded."""
    module, formats, (graph_format, exporter) = PEERS[peer]
    slots, context = room(arguments)
    players: dict[str, Player] = {}
    with contextlib.ExitStack() as stack:
        for weight_format in formats:
            model = resolve(arguments.model, kind="onnx", weight_format=weight_format)
            config = EngineConfig(
                backend="onnx",
                model_path=model.path,
                model_name=model.name,
                weight_format=weight_format,
                tokenizer_path=model.tokenizer_path,
                slots=slots,
                context_tokens=context,
                threads=len(arguments.cores),
            )
            settings: dict[str, Any] = msgspec.to_builtins(config)
            command = [sys.executable, "-m", "tests.bench.peers.crossover_engine"]
            child = Child(command, settings, arguments.cores, allocator("onnx"))
            players[f"crossover {weight_format}"] = in_process(stack.enter_context(child))
            if arguments.http:
                server = served(config, arguments.model, arguments.cores, arguments.client_cores)
                players[f"crossover {weight_format} over HTTP"] = stack.enter_context(server)
        folder = resolve(
            arguments.model, kind="onnx", weight_format=graph_format, exporter=exporter
        ).path
        settings = {"folder": folder, "threads": len(arguments.cores)}
        players[peer] = in_process(
            stack.enter_context(Child([sys.executable, "-m", module], settings, arguments.cores))
        )
        yield players


if __name__ == "__main__":
    main()
