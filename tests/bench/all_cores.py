"""The engine on all cores below HTTP and the client, against a core kept for these: over HTTP.

    python -m tests.bench.all_cores --rounds 3 --json runs.json

The servers run all the time and are asked in turns; an idle engine sleeps. The client is at nice 0
without real-time priority, as with a user who has no right to it. `--nice` gives each value to an
engine that shares (needs rights for less than the default). `strangers`: cores that others used on
the engine's; `taken`: the share of disturbance as a campaign computes it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

from loadtests.analysis.disturbance import disturbance_of
from loadtests.host.core_watch import CoreWatch
from loadtests.host.resource_sampler import engine_pids
from models.resolve import resolve
from serving.backends.backend_table import spec_of
from serving.hardware.cpu_topology import SHARED_NICE, cores_text
from serving.hardware.machine_facts import allowed_cores
from tests.bench.closed_loop import Stream, _one, run
from tests.bench.llama_server.compare import prompts
from tests.bench.llama_server.servers import server
from tests.bench.paired import Figures, Line, Series, machine, machine_line, table, take_turns

PORT = 8361
LINES = (
    Line("output_tokens_per_second", "tokens/s"),
    Line("ttft_p50", "ms", 1000),
    Line("ttft_p95", "ms", 1000),
    Line("itl_p99", "ms", 1000),
    Line("send_lag_p50", "ms", 1000),
    Line("send_lag_p99", "ms", 1000),
    Line("strangers", "% core", 100),
    Line("taken", "%", 100),
)


class Entry(NamedTuple):
    """A layout: the engine's cores and nice value, and the cores of HTTP and the client."""

    engine: tuple[int, ...]
    others: tuple[int, ...]
    nice: int | None = None


def layouts(values: Sequence[int]) -> dict[str, Entry]:
    cores = allowed_cores()
    shared = {f"all, nice {nice}": Entry(cores, cores, nice) for nice in values}
    return {"split": Entry(cores[:-1], cores[-1:])} | shared


def renice(pid: int, nice: int) -> None:
    """All threads of a process, and its session."""
    for thread in psutil.Process(pid).threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, nice)
    if (group := Path(f"/proc/{pid}/autogroup")).exists():
        group.write_text(str(nice))


def watched(engine: int, work: Callable[[], Figures]) -> Figures:
    """The figures, and who else ran on the engine's cores meanwhile."""
    watch = CoreWatch(lambda: [engine], os.getpid())
    watch.read(scan=True)
    figures = work()
    part = watch.read(scan=True)
    found = disturbance_of([part] if part else [])
    if found is None or found.total.strangers_seconds is None:
        return figures
    return figures | {
        "strangers": found.total.strangers_seconds / found.total.seconds,
        "taken": found.share,
    }


def at_rate(
    url: str, texts: list[str], output_tokens: int, per_second: float, seed: int
) -> Figures:
    """Open load: Poisson arrivals, and how late each request left. Times in seconds."""
    gaps = np.random.default_rng(seed).exponential(1 / per_second, len(texts))
    parts = urlsplit(url)
    lags: list[float] = []

    async def one(due: float, prompt: str, start: float) -> Stream:
        wish = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        body = json.dumps(wish | {"ignore_eos": True}).encode()
        await asyncio.sleep(due - (time.perf_counter() - start))
        lags.append(time.perf_counter() - start - due)
        return await _one(str(parts.hostname), parts.port or 80, body, output_tokens, start)

    async def every() -> list[Stream]:
        start = time.perf_counter()
        jobs = zip(np.cumsum(gaps), texts, strict=True)
        return await asyncio.gather(*(one(due, prompt, start) for due, prompt in jobs))

    done = asyncio.run(every())
    if wrong := [stream.error for stream in done if stream.error or not stream.chunks]:
        raise RuntimeError(f"{len(wrong)} of {len(done)} requests failed: {wrong[:3]}")
    ttft = [stream.chunks[0] - stream.sent for stream in done]
    return {
        "ttft_p50": float(np.percentile(ttft, 50)),
        "ttft_p95": float(np.percentile(ttft, 95)),
        "send_lag_p50": float(np.percentile(lags, 50)),
        "send_lag_p99": float(np.percentile(lags, 99, method="inverted_cdf")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="llama_cpp:Q4_0", metavar="BACKEND:FORMAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=250)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--requests", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--rate", type=float, default=0.5, help="requests/s of the open load")
    parser.add_argument("--rate-requests", type=int, default=8, help="of a round; 0: none")
    parser.add_argument("--nice", type=int, nargs="+", default=[SHARED_NICE])
    parser.add_argument("--json", type=Path, help="keeps every run; one that is there is resumed")
    given = parser.parse_args()
    settings = {key: str(value) for key, value in vars(given).items() if key not in ("rounds",)}
    facts = machine("llama-cpp-python", "onnxruntime")
    series = Series.opened(given.json, settings, facts)
    print(machine_line(facts))
    backend, _, weight_format = given.engine.partition(":")
    kind = spec_of(backend).weights or "hf"
    tokenizer = resolve(given.model, kind=kind, weight_format=weight_format).tokenizer_path
    entries = layouts(given.nice)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossover-bench-")))
        urls, engines = {}, {}
        for number, (name, one) in enumerate(entries.items()):
            os.sched_setaffinity(0, {*one.engine, *one.others})
            command = [sys.executable, "-m", "crossover", "serve", given.model]
            command += ["--backend", backend, "--format", weight_format, "--slots", "8"]
            command += ["--port", str(PORT + number), "--context", "512"]
            command += ["--cores", cores_text(one.engine), "--api-cores", cores_text(one.others)]
            log = folder / f"{number}.log"
            before = {child.pid for child in psutil.Process().children()}
            urls[name] = stack.enter_context(server(command, PORT + number, "/ready", log))
            (pid,) = {child.pid for child in psutil.Process().children()} - before
            (engines[name],) = engine_pids(pid)
            if one.nice is not None:
                renice(engines[name], one.nice)
            run(urls[name], prompts(tokenizer, 2, 32, 0), 8, 1, given.model)  # first touches

        def turn(name: str, work: Callable[[str], Figures]) -> Figures:
            os.sched_setaffinity(0, entries[name].others)
            return watched(engines[name], lambda: work(urls[name]))

        def closed(url: str, streams: int, count: int, number: int) -> Figures:
            texts = prompts(tokenizer, count, given.prompt_tokens, 1000 * streams + number)
            found = run(url, texts, given.output_tokens, streams, given.model)
            assert not found.failed and not found.cut, found
            return {line.key: value for line in LINES if (value := vars(found).get(line.key))}

        def offered(url: str, number: int) -> Figures:
            texts = prompts(tokenizer, given.rate_requests, given.prompt_tokens, number)
            return at_rate(url, texts, given.output_tokens, given.rate, number)

        works: dict[str, Callable[[str, int], Figures]] = {
            f"{streams} streams": lambda url, number, s=streams, c=count: closed(url, s, c, number)
            for streams, count in zip(given.streams, given.requests, strict=True)
        }
        if given.rate_requests:
            works[f"{given.rate:g} requests/s"] = offered
        for what, work in works.items():
            done = len(next(iter(series.runs.get(what, {"": []}).values())))
            contestants = {
                name: lambda number, n=name, w=work: turn(n, lambda url: w(url, number))
                for name in entries
            }
            runs = series.add(what, take_turns(contestants, given.rounds, print, done))
            series.save(given.json)
            print(f"\n{what}\n{table(runs, list(entries)[-1], LINES)}", flush=True)


if __name__ == "__main__":
    main()
