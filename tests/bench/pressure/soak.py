"""Soak: does memory, or anything else that is handed out and must come back, creep up under mixed
load?

    python -m tests.bench.pressure.soak --backend fake --minutes 30 --rate 40 --out soak.json
    python -m tests.bench.pressure.soak --backend llama_cpp --minutes 10 --rate 1.5

Poisson arrivals of everything that a server meets: chats and completions, streamed and not, short
and long, stop strings, several answers, log-probabilities, clients that leave at any moment,
requests that are wrong in every way, questions beside them. Each answer must have the status that
its request deserves. Memory, descriptors and threads of the HTTP side and of the engine are sampled
every few seconds; after a warm-up the slope of resident memory must be indistinguishable from 0
(see tests.bench.pressure.trend). What is counted, not weighed (descriptors, threads, tasks of the
event loop), must in the end be what it was when all was idle at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.pressure.trend import Trend, trend
from tests.bench.pressure.wire import (
    Client,
    Held,
    Outcome,
    Server,
    get,
    held,
    mib,
    post,
    run,
    serving,
    until_idle,
)

WORDS = "river stone light under many small houses wait for rain where nobody lives now".split()
# requests of ours at once: a server that has stopped answering shall not fill this process's memory
MOST_OPEN = 500
TASKS = "crossover_event_loop_tasks"


@dataclass(frozen=True)
class Kind:
    """One kind of request: its share of all, how it is made, and the statuses that it may be
    answered with.
    """

    name: str
    share: float
    make: Callable[[random.Random], bytes]
    statuses: frozenset[int]
    leaves: bool = False  # the client hangs up


def text(draw: random.Random, least: int = 2, most: int = 30) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def completion(draw: random.Random, **fields: object) -> bytes:
    tokens = draw.choice([1, 4, 8, 16, 16, 24])
    return post(
        prompt=text(draw),
        max_tokens=tokens,
        stream=draw.random() < 0.6,
        seed=draw.randrange(1 << 30),
        **fields,
    )


def chat(draw: random.Random, **fields: object) -> bytes:
    turns = [
        {"role": ("user", "assistant")[turn % 2], "content": text(draw)}
        for turn in range(draw.choice([1, 1, 3]))
    ]
    return post(
        "/v1/chat/completions",
        messages=turns,
        max_tokens=draw.choice([4, 12, 20]),
        stream=draw.random() < 0.6,
        **fields,
    )


def wrong(draw: random.Random) -> bytes:
    return draw.choice(
        [
            post(raw=b'{"prompt": "x"'),
            post(prompt="x", max_tokens=-1),
            post(prompt="x", temprature=1),
            post(prompt="x", temperature="hot"),
            post(prompt=text(draw, 3000, 3000)),
            post(prompt=[1 << 40]),
            post(prompt="x", model="not-served"),
            post("/v1/chat/completions", messages=[{"role": "nobody", "content": "x"}]),
            post("/v1/nothing", prompt="x"),
            get("/v1/completions"),
        ]
    )


def beside(draw: random.Random) -> bytes:
    return draw.choice(
        [
            get("/metrics"),
            get("/v1/models"),
            get("/ready"),
            get("/v1/placement"),
            get("/openapi.json"),
            post("/tokenize", prompt=text(draw)),
        ]
    )


# 429 is an answer too: on a slow moment of the machine the queue may be full.
_ANSWERED, _WRONG = frozenset({200, 429}), frozenset({400, 404, 405, 429})
KINDS: tuple[Kind, ...] = (
    Kind("completion", 0.30, completion, _ANSWERED),
    Kind("chat", 0.20, chat, _ANSWERED),
    Kind(
        "long",
        0.04,
        lambda draw: post(prompt=text(draw, 60, 150), max_tokens=120, stream=True, ignore_eos=True),
        _ANSWERED,
    ),
    Kind(
        "stop strings",
        0.08,
        lambda draw: completion(draw, stop=[draw.choice("aeiou"), "never in it", "the way"]),
        _ANSWERED,
    ),
    Kind(
        "several answers",
        0.06,
        lambda draw: completion(draw, n=draw.randint(2, 4), temperature=1.0),
        _ANSWERED,
    ),
    Kind(
        "several prompts",
        0.03,
        lambda draw: post(prompt=[text(draw), text(draw)], max_tokens=6, stream=True),
        _ANSWERED,
    ),
    Kind("logprobs", 0.04, lambda draw: completion(draw, logprobs=3), _ANSWERED),
    Kind("wrong", 0.10, wrong, _WRONG),
    Kind(
        "leaves",
        0.10,
        lambda draw: post(
            prompt=text(draw), max_tokens=200, stream=draw.random() < 0.5, ignore_eos=True
        ),
        _ANSWERED,
        True,
    ),
    Kind("beside", 0.05, beside, frozenset({200})),
)


@dataclass(frozen=True)
class Sample:
    seconds: float
    api: Held
    engine: Held
    tasks: float | None


class Soak:
    """The load and its samples."""

    def __init__(self, server: Server, rate: float, seed: int) -> None:
        self.server, self.rate = server, rate
        self.client, self.draw = Client(server.port), random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.surprises: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._open: set[asyncio.Task[None]] = set()

    async def one(self, kind: Kind) -> None:
        data = kind.make(self.draw)
        if kind.leaves:
            task = asyncio.create_task(self.client.ask(data))
            await asyncio.wait({task}, timeout=self.draw.expovariate(1 / 0.1))
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                self.seen[f"{kind.name} in the middle"] += 1
                return
            outcome = task.result()
        else:
            outcome = await self.client.ask(data)
        self.seen[f"{kind.name} {outcome.status}"] += 1
        if outcome.status not in kind.statuses or not outcome.complete:
            self.surprises[_surprise(kind, outcome)] += 1

    async def load(self, until: float) -> None:
        """Poisson arrivals until that moment (monotonic clock), then the rest."""
        shares = [kind.share for kind in KINDS]
        due = time.monotonic()
        while (due := due + self.draw.expovariate(self.rate)) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._open) >= MOST_OPEN:
                self.surprises[f"{MOST_OPEN} requests open"] += 1
                continue
            task = asyncio.create_task(self.one(self.draw.choices(KINDS, shares)[0]))
            self._open.add(task)
            task.add_done_callback(self._ended)
        if self._open:
            await asyncio.wait(self._open, timeout=300)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self.surprises[f"{type(problem).__name__}: {problem}"] += 1

    async def watch(self, every: float, began: float) -> None:
        while True:
            self.samples.append(self.sample(time.monotonic() - began))
            await asyncio.sleep(every)

    def sample(self, seconds: float, tasks: float | None = None) -> Sample:
        return Sample(seconds, held(self.server.api), held(self.server.engine), tasks)

    async def idle(self) -> Sample:
        """Nothing in flight and no connection of ours open but one: what the server holds then."""
        self.client.close()
        numbers = await until_idle(self.client, 300)
        await asyncio.sleep(0.2)
        return self.sample(0.0, numbers.get(TASKS))


def _surprise(kind: Kind, outcome: Outcome) -> str:
    how = "" if outcome.complete else ", cut off"
    return (
        f"{kind.name}: status {outcome.status}{how} {outcome.body[:160].decode(errors='replace')}"
    )


async def soak(
    server: Server, seconds: float, rate: float, every: float, seed: int
) -> tuple[Soak, Sample, Sample]:
    """The load for so long; the samples at rest before (after a few seconds of load, so that what
    is made once is made) and after.
    """
    one = Soak(server, rate, seed)
    await one.load(time.monotonic() + min(10.0, seconds / 10))
    before = await one.idle()
    began = time.monotonic()
    watching = asyncio.create_task(one.watch(every, began))
    await one.load(began + seconds)
    watching.cancel()
    gc.collect()
    after = await one.idle()
    one.client.close()
    return one, before, after


def trends(samples: list[Sample], warm_up: float) -> dict[str, Trend]:
    """Slopes of memory in bytes per hour after the warm-up."""
    later = [sample for sample in samples if sample.seconds >= warm_up]
    times = [sample.seconds for sample in later]
    found = {}
    for name in ("api", "engine"):
        found[f"{name} RSS"] = trend(times, [getattr(sample, name).rss_bytes for sample in later])
        found[f"{name} private"] = trend(
            times, [getattr(sample, name).private_bytes for sample in later]
        )
    return found


def counted(before: Sample, after: Sample) -> dict[str, tuple[float | None, float | None]]:
    """What must be the same at rest, before and after."""
    return {
        "api descriptors": (before.api.descriptors, after.api.descriptors),
        "engine descriptors": (before.engine.descriptors, after.engine.descriptors),
        "api threads": (before.api.threads, after.api.threads),
        "engine threads": (before.engine.threads, after.engine.threads),
        "api tasks": (before.tasks, after.tasks),
    }


def measure(
    backend: str, minutes: float, rate: float, cores: tuple[str, str], every: float, seed: int = 1
) -> dict[str, object]:
    """A soak on a server of its own, told on standard output as it goes."""
    arguments = [
        "--cores",
        cores[0],
        "--api-cores",
        cores[1],
        "--threads",
        "1",
        "--slots",
        "16",
        "--context",
        "1024",
    ]
    if backend == "fake":
        model = "fake"
        arguments += ["--option", "step_seconds=0.004", "--option", "row_seconds=0.0001"]
    else:
        model = "smollm2-135m"
        arguments += ["--backend", backend, "--format", "Q4_0"]
    seconds = 60 * minutes
    warm_up = max(seconds / 5, min(60.0, seconds / 2))
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, *arguments, folder=Path(folder)) as server,
    ):
        print(
            f"{backend}: {minutes:g} min at {rate:g} requests/s, this process is {os.getpid()}",
            flush=True,
        )
        one, before, after = run(soak(server, seconds, rate, every, seed))
        log = server.log()
    slopes, same = trends(one.samples, warm_up), counted(before, after)
    for kind, count in sorted(one.seen.items()):
        print(f"  {count:7d}  {kind}")
    print(f"slopes after {warm_up / 60:.1f} min, {next(iter(slopes.values())).samples} samples:")
    for name, slope in slopes.items():
        print(
            f"  {name}: {mib(slope.mean)}; {slope.slope / 1024:+.0f} KiB/h "
            f"({slope.low / 1024:+.0f} to {slope.high / 1024:+.0f}), "
            f"Theil-Sen {slope.theil_sen / 1024:+.0f} KiB/h, autocorrelation "
            f"{slope.autocorrelation:.2f}: {slope.verdict}"
        )
    for name, (first, last) in same.items():
        print(f"  {name} at rest: {first} -> {last}")
    for text_, count in one.surprises.items():
        print(f"  SURPRISE {count} x {text_}")
    leaked = [
        name
        for name, (first, last) in same.items()
        if first is not None and last is not None and last > first
    ]
    grows = [name for name, slope in slopes.items() if slope.verdict == "grows"]
    kept = not (leaked or grows or one.surprises)
    print(
        "kept: nothing grows"
        if kept
        else f"MISSED: {', '.join(grows + leaked) or 'answers that were not deserved'}",
        flush=True,
    )
    return {
        "backend": backend,
        "minutes": minutes,
        "rate": rate,
        "seen": dict(one.seen),
        "surprises": dict(one.surprises),
        "trends": {
            name: {**asdict(slope), "verdict": slope.verdict} for name, slope in slopes.items()
        },
        "counted": same,
        "samples": [asdict(sample) for sample in one.samples],
        "server_log": log[-4000:],
        "kept": kept,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=["fake", "llama_cpp"], default="fake")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--engine-cores", default="0")
    parser.add_argument("--api-cores", default="1")
    parser.add_argument("--out", type=Path, help="everything as JSON")
    given = parser.parse_args()
    found = measure(
        given.backend, given.minutes, given.rate, (given.engine_cores, given.api_cores), given.every
    )
    if given.out:
        given.out.write_text(json.dumps(found))
    return 0 if found["kept"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
