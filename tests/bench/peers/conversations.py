"""Conversations with more users than slots: ours with and without a prompt cache, and llama-server
with its own (--cache-ram), on the same conversations.

    python -m tests.bench.peers.conversations llama_cpp:Q4_0/8/4GiB llama-server:Q4_0/8/4GiB
    python -m tests.bench.peers.conversations onnx:int8/4/0 onnx:int8/4/4GiB onnx:int8/64/0
    python -m tests.bench.peers.conversations --rates 20 40 --seconds 15 onnx:int8/4/0    # a smoke

A contestant is ENGINE:FORMAT/SLOTS/CACHE, where CACHE is the size of the prompt cache, 0 for none.
Each is started once and gets levels at ascending rates of turns, of --seconds after a warm-up in
which conversations begin, until one has less than half of the SLO attainment that the SLO asks for.
A level takes about 1.4 times --seconds, so that the defaults with two contestants take 13 minutes.

A conversation has four turns on average, whose histories are sent again through the chat route. All
contestants get the same conversations at the same times. Arrivals do not wait for answers, so that
a server that falls behind collapses as it would under real users. A row is printed as soon as it is
measured, and appended to --json. The last lines say how many users each served at its highest
level that met the SLO.

All levels have the same conversations, at the pace of their rates. Short levels flatter a server
near its limit, since within 15 minutes it may still collapse. Levels of less than a minute do the
opposite: most of their turns are the first ones of conversations, which compute most.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from crossover.loadtests.capacity.prefix_reuse import cached_share
from crossover.loadtests.cli.one_level import measure
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.serving.capacity.slo import Slo
from crossover.serving.option_help import parse_bytes
from crossover.serving.workload.conversations import mean_turns_of
from crossover.serving.workload.request_lengths import Spread, Workload
from tests.bench.paired import machine, machine_line, parser_of
from tests.bench.peers.servers import Contestant, Setup, end_of, missing, parsed, started

SLO = Slo("chats", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
THINK_SECONDS = 10.0
CHATS = Workload(
    prompt_tokens=200,
    output_tokens=48,
    shared_prefix_tokens=100,
    turns=Spread(mean=4, sd=1.5, min=2, max=7),
    think_seconds=Spread(mean=THINK_SECONDS, sd=6, min=1, max=30),
    turn_tokens=Spread(mean=50, sd=20, min=16, max=120),
)
CONTEXT_TOKENS = 2048
WARM_UP_SHARE = 0.4  # of the counted time, before it
COLLAPSED = 0.5  # share of the target below which higher rates are left out


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One level of one contestant. Times in seconds; None: not measured."""

    contestant: str
    turns_per_minute: float  # offered
    users: float
    attainment: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p95: float | None
    found_share: float | None  # of the prompt tokens, in the server's cache
    failed: int
    turns: int
    meets_slo: bool

    @property
    def text(self) -> str:
        def shown(value: float | None, scale: float = 1.0) -> str:
            return "-" if value is None else f"{value * scale:.1f}"

        failed = f"  {self.failed} failed" if self.failed else ""
        ttft = f"p50 {shown(self.ttft_p50):>5} p95 {shown(self.ttft_p95):>5} s"
        return (
            f"{self.contestant:28} {self.turns_per_minute:5.0f} turns/min {self.users:6.1f} users  "
            f"SLO attainment {shown(self.attainment, 100):>5} %  TTFT {ttft}  "
            f"TPOT p95 {shown(self.tpot_p95, 1e3):>6} ms  "
            f"{shown(self.found_share, 100):>5} % found{failed}"
        )


class Arm(msgspec.Struct, frozen=True):
    """A contestant with its slots and its prompt cache."""

    name: str
    contestant: Contestant
    slots: int
    cache: str  # a size; "0": none


def arm_of(text: str) -> Arm:
    """Return the arm of `onnx:int8/16/4GiB`. Raises ValueError."""
    engine, _, settings = text.partition("/")
    slots, _, cache = settings.partition("/")
    if not slots.isdigit() or not cache:
        raise ValueError(f"a contestant is ENGINE:FORMAT/SLOTS/CACHE, got {text!r}")
    if cache != "0":
        parse_bytes(cache, "the cache of a contestant")
    return Arm(text, parsed(engine), int(slots), cache)


def users_of(level: Level) -> float:
    """Return the users who talk, by Little's law: each turn takes its answer and, if it is not the
    first, the time to think before it."""
    thinking = THINK_SECONDS * (1 - 1 / mean_turns_of(CHATS))
    seconds = level.e2e[level.counted]
    return level.offered_rate * (float(np.nanmean(seconds)) + thinking)


def quantile(values: np.ndarray, share: float) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.quantile(values, share)) if len(values) else None


def row_of(arm: Arm, rate: float, level: Level) -> Row:
    judged, counted = level.judge(SLO), level.counted
    return Row(
        contestant=arm.name,
        turns_per_minute=rate,
        users=users_of(level),
        attainment=judged.share,
        ttft_p50=quantile(level.ttft[counted], 0.5),
        ttft_p95=quantile(level.ttft[counted], 0.95),
        tpot_p95=quantile(level.tpot[counted], 0.95),
        found_share=cached_share([level]),
        failed=sum(level.failures.values()),
        turns=judged.due,
        meets_slo=judged.share is not None and judged.share >= SLO.target,
    )


def measured(arm: Arm, options: argparse.Namespace) -> list[Row]:
    """Return the levels of one contestant. Raises RuntimeError if it does not start."""
    setup = Setup(
        model=options.model,
        slots=arm.slots,
        context_tokens=CONTEXT_TOKENS,
        engine_cores=tuple(options.engine_cores),
        client_cores=tuple(options.client_cores),
        prompt_cache=arm.cache,
    )
    rows: list[Row] = []
    with tempfile.NamedTemporaryFile(prefix="conversations-", suffix=".log") as log:
        path = Path(log.name)
        try:
            with started(arm.contestant, setup, path) as server:
                for rate in options.rates:
                    plan = LevelPlan(
                        rate=rate / 60,
                        warmup_seconds=WARM_UP_SHARE * options.seconds,
                        window_seconds=options.seconds,
                        seed=options.seed,
                    )
                    target = Target(url=server.url, api="chat")
                    level = measure(LoadPlan(target=target, plan=plan, workload=CHATS))
                    rows.append(row_of(arm, rate, level))
                    print(rows[-1].text, flush=True)
                    with options.json.open("ab") as file:
                        file.write(msgspec.json.encode(rows[-1]) + b"\n")
                    if (rows[-1].attainment or 0.0) < COLLAPSED * SLO.target:
                        break
        except RuntimeError as problem:
            raise RuntimeError(f"{problem}: {end_of(path)}") from problem
    return rows


def best_of(rows: list[Row]) -> Row | None:
    """Return the highest level that met the SLO, below the first one that missed it."""
    best = None
    for row in rows:
        if not row.meets_slo:
            break
        best = row
    return best


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("arms", nargs="+", metavar="ENGINE:FORMAT/SLOTS/CACHE")
    parser.add_argument("--model", default="135m")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[30, 50, 75, 110], help="turns per minute"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="counted, of each level")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and conversations")
    every_core = sorted(os.sched_getaffinity(0))
    parser.add_argument("--engine-cores", type=int, nargs="+", default=every_core)
    parser.add_argument("--client-cores", type=int, nargs="+", default=every_core)
    parser.add_argument("--json", type=Path, default=Path("runs/conversations.jsonl"))
    found = parser.parse_args()
    try:
        found.arms = [arm_of(text) for text in found.arms]
    except ValueError as problem:
        parser.error(str(problem))
    return found


def main() -> None:
    options = arguments()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    print(machine_line(machine("llama-cpp-python", "onnxruntime")))
    rows_by_arm: dict[str, list[Row]] = {}
    for arm in options.arms:
        if (why := missing(arm.contestant)) is not None:
            print(f"{arm.name:28} {why}")
            continue
        try:
            rows_by_arm[arm.name] = measured(arm, options)
        except RuntimeError as problem:
            print(f"{arm.name:28} {problem}")
    print()
    for name, rows in rows_by_arm.items():
        best = best_of(rows)
        if best is None:
            print(f"{name:28} met the SLO at no rate")
        else:
            users, rate = best.users, best.turns_per_minute
            print(f"{name:28} {users:6.1f} users at {rate:.0f} turns/min met the SLO")


if __name__ == "__main__":
    main()
