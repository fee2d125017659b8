"""Our engines over HTTP beside another server: same machine, cores and requests, in turns.

    python -m tests.bench.llama_server.compare                     # 1, 4 and 16 streams
    python -m tests.bench.llama_server.compare --spread 0.5        # answers of different lengths
    python -m tests.bench.llama_server.compare --temperature 0.8   # sampled, not greedy
    python -m tests.bench.llama_server.compare --ours onnx:int8 --theirs llama-server:Q8_0
    python -m tests.bench.llama_server.compare --ours llama_cpp:Q4_0
    llama_cpp:Q4_0@/another/checkout

All servers are up all the time and take turns, a round each, so that a slow minute of the machine
falls on all. Reported are medians over rounds and medians of the rounds' ratios. Closed loop: each
of --streams sends its next request when its last one has ended. Every prompt is different (no
prefix is reused); outputs have a fixed length (ignore_eos). Engine threads are on --engine-cores,
HTTP and the client on --client-cores. llama-server is built from the source that llama-cpp-python
ships: same commit, same flags. A format's KL divergence is shown where its weights were converted;
GGUF files of the ladder are random blocks, which have no float original.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import random
import tempfile
from pathlib import Path

import psutil

from loadtests.host.parent_bound import be_urgent
from models.resolve import ResolvedModel, resolve
from models.tokenizer import load_tokenizer
from serving.backends.backend_table import spec_of
from tests.bench.http_client import closed_loop
from tests.bench.llama_server.servers import OURS, PEERS, Launcher, Setup, server
from tests.bench.paired import Figures, Line, Runs, Series, machine, machine_line, table, take_turns

__all__ = ["main", "prompts", "server"]

PORT = 18431
LINES = (
    Line("output_tokens_per_second", "tokens/s"),
    Line(
        "output_tokens_per_cpu_second", "tokens/s"
    ),  # of the server's processes: what a neighbour on the machine cannot falsify much
    *(Line(key, "ms", 1e3) for key in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99")),
)


def prompts(tokenizer_path: str, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of about `tokens` tokens, each beginning differently."""
    tokenizer = load_tokenizer(tokenizer_path)
    words = "the model reads a long prompt and then answers one word after the other".split()
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        text = f"{rng.randrange(10**9)}"
        while len(tokenizer.encode(text)) < tokens:
            text += " " + " ".join(rng.choice(words) for _ in range(8))
        out.append(text)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="a rung, or a folder of safetensors"
    )
    parser.add_argument(
        "--ours", nargs="+", default=["llama_cpp:Q4_0"], metavar="BACKEND:FORMAT[@CHECKOUT]"
    )
    parser.add_argument(
        "--theirs",
        nargs="*",
        default=["llama-server:Q4_0"],
        metavar="SERVER:FORMAT",
        help=f"servers: {', '.join(PEERS)}",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[4, 12, 32],
        help="of a round, one figure for each of --streams",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="outputs are --output tokens, more or less by up to this share of it",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=None, help="sent where it is given")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--engine-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--client-cores", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="passed on to every crossover serve",
    )
    parser.add_argument(
        "--their-argument",
        action="append",
        default=[],
        metavar="WORD",
        help="passed on to every peer",
    )
    parser.add_argument(
        "--json", type=Path, help="keeps every run; one that is there is gone on with"
    )
    arguments = parser.parse_args()
    if len(arguments.streams) != len(arguments.requests):
        parser.error(
            f"--requests must have a figure for each of --streams, got {len(arguments.requests)} "
            f"for {len(arguments.streams)}"
        )

    settings = {
        key: str(value)
        for key, value in vars(arguments).items()
        if key not in ("rounds", "json", "streams", "requests")
    }
    facts = machine("llama-cpp-python", "onnxruntime", "torch")
    series = Series.opened(arguments.json, settings, facts)
    print(machine_line(facts))
    entered = [("ours", word) for word in arguments.ours] + [
        ("theirs", word) for word in arguments.theirs
    ]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossover-bench-")))
        urls: dict[str, str] = {}
        processes: dict[str, psutil.Process] = {}
        for number, (side, word) in enumerate(entered):
            launcher, model, setup = _chosen(parser, side, word, arguments, PORT + number)
            quality = (
                "not measured"
                if model.quality_kl_nats is None
                else f"{model.quality_kl_nats:.2g} nats"
            )
            name = f"{launcher.name} {word}" if side == "ours" else word
            print(f"{name}: KL to the float model {quality}, {Path(model.path).name}", flush=True)
            os.sched_setaffinity(0, {*arguments.engine_cores, *arguments.client_cores})
            command = launcher.command(setup)
            before = set(psutil.Process().children())
            urls[name] = stack.enter_context(
                server(command, setup.port, launcher.ready, folder / f"{number}.log")
            )
            (processes[name],) = set(psutil.Process().children()) - before
        os.sched_setaffinity(0, arguments.client_cores)
        # else a busy neighbour makes the client read several tokens at once, and they seem to have
        # come at once
        be_urgent()
        for url in urls.values():
            first_touches = prompts(model.tokenizer_path, 2, 32, 0)
            closed_loop(url, first_touches, [8, 8], 1, arguments.model)
        for streams, count in zip(arguments.streams, arguments.requests, strict=True):
            contestants = {
                name: functools.partial(
                    _once, url, processes[name], model, arguments, streams, count, place
                )
                for place, (name, url) in enumerate(urls.items())
            }
            workload = f"{streams} streams, {count} requests a round"
            taken = len(next(iter(series.runs.get(workload, {"": []}).values())))
            for number in range(taken, taken + arguments.rounds):
                one = take_turns(contestants, 1, first=number)
                runs = series.add(workload, one)
                series.save(arguments.json)
                rates = ", ".join(
                    f"{name} {one[name][0]['output_tokens_per_second']:.1f}" for name in urls
                )
                print(f"  {streams:2} streams, round {number + 1}: {rates} tokens/s", flush=True)
            _report(f"{arguments.model}, {workload}", runs)


def _chosen(
    parser: argparse.ArgumentParser, side: str, word: str, arguments: argparse.Namespace, port: int
) -> tuple[Launcher, ResolvedModel, Setup]:
    word, _, checkout = word.partition("@")
    name, _, weight_format = word.partition(":")
    if not weight_format or (side == "theirs" and name not in PEERS):
        parser.error(
            f"--{side} takes {'BACKEND' if side == 'ours' else ' or '.join(PEERS)}:FORMAT, got "
            f"{word!r}"
        )
    launcher = OURS if side == "ours" else PEERS[name]
    backend = launcher.backend or name
    model = resolve(
        arguments.model, kind=spec_of(backend).weights or "hf", weight_format=weight_format
    )
    extra = (
        [part for option in arguments.option for part in ("--option", option)]
        if side == "ours"
        else arguments.their_argument
    )
    cores = tuple(arguments.engine_cores), tuple(arguments.client_cores)
    return (
        launcher,
        model,
        Setup(
            arguments.model,
            backend,
            weight_format,
            model.path,
            port,
            max(arguments.streams),
            arguments.context,
            *cores,
            tuple(extra),
            checkout,
        ),
    )


def _once(
    url: str,
    process: psutil.Process,
    model: ResolvedModel,
    arguments: argparse.Namespace,
    streams: int,
    count: int,
    place: int,
    number: int,
) -> Figures:
    """One round of one server, with prompts that no server has seen before."""
    texts = prompts(
        model.tokenizer_path, count, arguments.prompt, 100_000 * streams + 100 * number + place
    )
    least, most = (
        round(arguments.output * (1 - arguments.spread)),
        round(arguments.output * (1 + arguments.spread)),
    )
    lengths = random.Random(number).choices(
        range(least, most + 1), k=count
    )  # the same for all contestants of a round
    before = _cpu_seconds(process)
    drawing = {"temperature": arguments.temperature}
    if arguments.top_p is not None:
        drawing["top_p"] = arguments.top_p
    result = closed_loop(url, texts, lengths, streams, arguments.model, **drawing)
    tokens = result.output_tokens_per_second * result.seconds
    return dataclasses.asdict(result) | {
        "output_tokens_per_cpu_second": tokens / (_cpu_seconds(process) - before)
    }


def _cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and all that it started."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _report(title: str, runs: Runs) -> None:
    """Medians side by side, and the ratio of each engine of ours to every other contestant."""
    ours = [name for name in runs if name.startswith(OURS.name)]
    for name in ours:
        print(f"{title}: (medians; ratio = {name} / the other)")
        print(
            table(
                {name: runs[name], **{other: runs[other] for other in runs if other not in ours}},
                name,
                LINES,
            ),
            flush=True,
        )
    for name in runs:
        wrong = {
            key: sum(int(one[key] or 0) for one in runs[name])
            for key in ("failed", "cut", "requests")
        }
        if wrong["failed"] or wrong["cut"]:
            print(
                f"  {name}: {wrong['failed']} requests failed and {wrong['cut']} were cut off or "
                f"short, of {wrong['requests']}"
            )


if __name__ == "__main__":
    main()
