"""Ours and other servers over HTTP: same machine, cores and requests, one at a time, in turns.

    tests/bench/peers/install.sh             # servers of others; what is not there is left out
    python -m tests.bench.peers.compare      # all, 135M to 8B: hours; goes on where it was
    python -m tests.bench.peers.compare --models 135m --rounds 1 --seconds 5     # a smoke
    python -m tests.bench.peers.compare onnx:int8 llama-server:Q4_0 --models 1b --spread 0.5
    python -m tests.bench.peers.compare llama_cpp:Q4_0 llama_cpp:Q4_0@/another/checkout --together 8

In a round every contestant is started once, measured at each number of streams and ended; rounds go
through them in alternate order. With --together N they are started at the same time, once for every
N rounds, and each is idle while another one is measured: the two measurements of a pair are then
seconds apart and not a minute, so that the machine's speed is nearly the same for both. They are
also started in alternate order: of two servers of the same code, the one that was started
second was often some percent quicker. --rounds should be an even multiple of N.

Closed loop: each stream sends its next request when its last one has ended, two each (one, of
models above 2 billion parameters; four, of one stream). Every prompt is different, so no prefix is
reused; answers have a fixed length (ignore_eos). Engine threads are on --engine-cores, HTTP and the
client on --client-cores.

A row is printed and appended to --json as soon as it is measured, and never measured again on the
same kind of CPU with the same settings: the command can be ended at any time. What failed is a row
too; delete its line to try it again. At the end stands the table of all rows with these settings:
medians over rounds, and the median (least to greatest) of the rounds' ratios of the first
contestant to each other.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from crossover.loadtests.host.die_with_parent import raise_priority
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.text.tokenizer import load_tokenizer
from tests.bench.http_client import closed_loop
from tests.bench.paired import machine, machine_line, parser_of, ratios
from tests.bench.peers.servers import Contestant, Server, Setup, end_of, missing, parsed, started

ALL = (
    "onnx:int8 llama_cpp:Q4_0 torch:bf16 llama-server:Q4_0 llama-server:Q8_0 openvino-genai:int8 "
    "onnxruntime-genai:int4 onnxruntime-genai:int8 vllm:bf16"
).split()
# What 24 GiB hold, and an hour measures.
OF_THE_BIG = {"llama-3.1-8b": ("onnx:int8", "llama-server:Q4_0")}
KINDS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2")  # a CPU is called by its first
LINES = (
    ("output_tokens_per_second", "tokens/s", 1.0),
    ("output_tokens_per_cpu_second", "a CPU second", 1.0),  # a neighbour falsifies it less
    ("ttft_p50", "TTFT p50, ms", 1e3),
    ("ttft_p95", "TTFT p95, ms", 1e3),
    ("itl_p99", "ITL p99, ms", 1e3),
)


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row: what was asked of whom, and what came of it. Times in seconds."""

    cpu: str
    contestant: str
    model: str
    streams: int
    round: int
    asked: dict[str, Any]
    figures: dict[str, float | None] = {}
    error: str = ""
    machine: dict[str, Any] = {}

    @property
    def key(self) -> tuple[object, ...]:
        asked = msgspec.json.encode(self.asked, order="deterministic")
        return self.cpu, self.contestant, self.model, self.streams, self.round, asked


class Rows:
    """The file of rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.rows = [msgspec.json.decode(line, type=Measured) for line in lines]
        self._keys = {row.key for row in self.rows}

    def has(self, row: Measured) -> bool:
        return row.key in self._keys

    def add(self, row: Measured) -> None:
        self.rows.append(row)
        self._keys.add(row.key)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        print(row_text(row), flush=True)


def row_text(row: Measured) -> str:
    """A row for people."""
    head = f"{row.model:13} {row.streams:3} streams, round {row.round + 1}: {row.contestant:24}"
    if row.error:
        return f"{head} {row.error[:300]}"
    found = "  ".join(f"{_text(row.figures[key], by):>8} {unit}" for key, unit, by in LINES)
    wrong = {key: row.figures[key] for key in ("failed", "cut") if row.figures[key]}
    return f"{head} {found}" + "".join(f"  {key} {count:.0f}" for key, count in wrong.items())


def _text(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:.1f}"


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


def requests_of(model: str, streams: int) -> int:
    """How many a round has."""
    published = find_ladder_model(model)
    is_big = published is not None and published.spec.parameters > 2e9
    return max(2, streams) if is_big else max(4, 2 * streams)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "contestants", nargs="*", metavar="ENGINE:FORMAT[@CHECKOUT]", help=f"default: {ALL}"
    )
    parser.add_argument("--models", nargs="+", default=["135m", "360m", "1b", "3b", "8b"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--together",
        type=int,
        metavar="N",
        help="start all contestants at the same time, once for every N rounds",
    )
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="outputs are --output tokens, more or less by up to this share of it",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument(
        "--seconds", type=float, help="after which a measurement sends no further request"
    )
    parser.add_argument("--engine-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--client-cores", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="for every one of ours"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/peers.jsonl"), help="the rows")
    found = parser.parse_args()
    found.models = [
        published.spec.name if (published := find_ladder_model(one)) is not None else one
        for one in found.models
    ]
    if found.together is not None and found.together < 1:
        parser.error(f"--together must be at least 1, got {found.together}")
    try:
        found.named = [parsed(text) for text in found.contestants or ALL]
    except ValueError as problem:
        parser.error(str(problem))
    return found


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C does
    facts = machine("llama-cpp-python", "onnxruntime", "torch")
    print(machine_line(facts))
    present = []
    for contestant in options.named:
        if (why := missing(contestant)) is None:
            present.append(contestant)
        else:
            print(f"{contestant.name}: {why}")
    rows = Rows(options.json)
    for model in options.models:
        only = None if options.contestants else OF_THE_BIG.get(model)
        chosen = [one for one in present if only is None or one.name in only]
        for group, first in enumerate(range(0, options.rounds, options.together or 1)):
            numbers = range(first, min(first + (options.together or 1), options.rounds))
            starting = in_turn(chosen, group)
            for running in [starting] if options.together else [[one] for one in starting]:
                measure(running, model, numbers, options, rows, facts)
    like = [row for row in rows.rows if row.asked == settings(options)]
    print(*table(like, [one.name for one in options.named], options.models), sep="\n")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    names = ("prompt", "output", "spread", "temperature", "seconds", "engine_cores", "option")
    together = {"together": options.together} if options.together else {}
    return (
        {name: getattr(options, name) for name in names}
        | {"slots": max(options.streams)}
        | together
    )


def in_turn(contestants: list[Contestant], number: int) -> list[Contestant]:
    """Return the contestants in the order of a round: every second round goes backwards."""
    return contestants[::-1] if number % 2 else contestants


def not_measured(
    contestant: Contestant,
    model: str,
    number: int,
    options: argparse.Namespace,
    rows: Rows,
    facts: dict[str, Any],
) -> list[Measured]:
    """Return the rows, without figures, of one contestant and round that are not measured yet."""
    base = Measured(
        cpu=f"{facts['cpu']}, {next((one for one in KINDS if one in facts['isa']), 'no AVX2')}",
        contestant=contestant.name,
        model=model,
        streams=0,
        round=number,
        asked=settings(options),
        machine=facts,
    )
    each = [msgspec.structs.replace(base, streams=streams) for streams in options.streams]
    return [row for row in each if not rows.has(row)]


def setup_of(model: str, options: argparse.Namespace) -> Setup:
    longest = round(options.output * (1 + options.spread))
    return Setup(
        model,
        max(options.streams),
        -(-(options.prompt + 32 + longest) // 128) * 128,
        tuple(options.engine_cores),
        tuple(options.client_cores),
        tuple(options.option),
        prompt_cache="0",  # no prompt begins like an earlier one
    )


def measure(
    contestants: list[Contestant],
    model: str,
    numbers: range,
    options: argparse.Namespace,
    rows: Rows,
    facts: dict[str, Any],
) -> None:
    """Start the contestants, in this order, and measure what the rounds `numbers` lack, while all
    of them run. The first failure of a contestant is a row, and the others go on."""
    todo = {
        (number, contestant): not_measured(contestant, model, number, options, rows, facts)
        for number in numbers
        for contestant in in_turn(contestants, number - numbers.start)
    }
    servers: dict[Contestant, Server] = {}

    def fail(row: Measured, contestant: Contestant, problem: Exception) -> None:
        words = f"{type(problem).__name__}: {problem}"
        if logs[contestant].exists():
            words += f"; the server's log ends: {end_of(logs[contestant])}"
        rows.add(msgspec.structs.replace(row, error=words))
        servers.pop(contestant, None)

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossover-bench-")))
        logs = {contestant: folder / f"{index}.log" for index, contestant in enumerate(contestants)}
        for contestant in contestants:
            cells = [row for key, cells in todo.items() if key[1] == contestant for row in cells]
            if not cells:
                continue
            try:
                setup = setup_of(model, options)
                server = stack.enter_context(started(contestant, setup, logs[contestant]))
                few = prompts(server.tokenizer_path, 2, 32, 0)  # a warm-up
                closed_loop(server.url, few, [8, 8], 1, model)
                servers[contestant] = server
            except (RuntimeError, OSError) as problem:
                fail(cells[0], contestant, problem)
        stack.enter_context(client_on(options.client_cores))
        for streams in options.streams:  # a pair's measurements follow each other
            for (_, contestant), cells in todo.items():
                for row in cells:
                    if row.streams != streams or contestant not in servers:
                        continue
                    try:
                        figures = once(servers[contestant], row, options)
                        rows.add(msgspec.structs.replace(row, figures=figures))
                    except (RuntimeError, OSError) as problem:
                        fail(row, contestant, problem)


@contextlib.contextmanager
def client_on(cores: Sequence[int]) -> Iterator[None]:
    """This process on its cores and before others: else a busy neighbour makes it read several
    tokens at once, and they seem to have come at once.
    """
    before = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setaffinity(0, cores)
    raise_priority()
    try:
        yield
    finally:
        os.sched_setaffinity(0, before[0])
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, *before[1:])


def once(server: Server, row: Measured, options: argparse.Namespace) -> Any:
    """One closed loop, with prompts that the server has not seen; the same for all of a round."""
    count = requests_of(row.model, row.streams)
    texts = prompts(server.tokenizer_path, count, options.prompt, 100_000 * row.streams + row.round)
    least, most = (round(options.output * (1 + sign * options.spread)) for sign in (-1, 1))
    lengths = random.Random(row.round).choices(range(least, most + 1), k=count)
    before = cpu_seconds(server.process)
    result = closed_loop(
        *(server.url, texts, lengths, row.streams, row.model),
        most_seconds=options.seconds,
        temperature=options.temperature,
    )
    used = cpu_seconds(server.process) - before
    tokens = result.output_tokens_per_second * result.seconds
    return dataclasses.asdict(result) | {"output_tokens_per_cpu_second": tokens / max(used, 1e-3)}


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and all that it started."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def table(rows: Sequence[Measured], names: Sequence[str], models: Sequence[str]) -> list[str]:
    """Markdown: a line for each CPU, model, number of streams and contestant."""
    heads = " | ".join(unit for _, unit, _ in LINES)
    out = [f"| model, streams | contestant | {heads} | tokens/s, {names[0]} / it | failed |"]
    out.append("|---" * (len(LINES) + 4) + "|")
    for cpu in dict.fromkeys(row.cpu for row in rows):
        out.append(f"| **{cpu}** |" + " |" * (len(LINES) + 3))
        own = [row for row in rows if row.cpu == cpu and row.model in models]
        for model, streams in dict.fromkeys((row.model, row.streams) for row in own):
            cell = [row for row in own if (row.model, row.streams) == (model, streams)]
            first = {row.round: row.figures for row in cell if row.contestant == names[0]}
            for name in names:
                mine = [row for row in cell if row.contestant == name]
                if mine:
                    out.append(f"| {model}, {streams} | {name} | {_cells(mine, first)} |")
    return out


def _cells(mine: Sequence[Measured], first: dict[int, dict[str, float | None]]) -> str:
    good = [row for row in mine if not row.error]
    cells = []
    for key, _, scale in LINES:
        known = [value * scale for row in good if (value := row.figures.get(key)) is not None]
        middle = statistics.median(known) if known else None
        cells.append("-" if middle is None else f"{middle:.{0 if middle >= 100 else 1}f}")
    paired = [row for row in good if first.get(row.round)]
    ours = [first[row.round] for row in paired]
    found = ratios(ours, [row.figures for row in paired], LINES[0][0])
    cells.append(
        f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f}, {len(found)})"
        if found
        else "-"
    )
    wrong = sum(int(row.figures["failed"] or 0) + int(row.figures["cut"] or 0) for row in good)
    errors = [row.error[:80].replace("|", " ") for row in mine if row.error]
    return " | ".join([*cells, "; ".join([str(wrong), *errors[:1]])])


if __name__ == "__main__":
    main()
