"""A server under pressure: does it keep its promises when it gets more requests than it can serve,
when it is stopped, and over hours?

    python -m tests.bench.pressure                           # every part, some 20 minutes
    python -m tests.bench.pressure overload soak --seconds 600 --backend llama_cpp

Every part has a server of its own. The engine runs on --engine-cores; HTTP and this client run on
--api-cores, so that refusals cost those who serve the other requests:

  overload  capacity by a closed loop, then Poisson arrivals at 1, 2, 5 and 10 times that; refused
            requests are not sent again. Goodput: answers per second that are complete and whose
            TTFT, counted from the scheduled time, meets the limit
  drain     SIGTERM with 16 answers in flight and 50 idle connections: all are finished, later
            requests get a 503 with the code "draining", and the exit status is 0
  twice     a second SIGTERM during the drain: everything is cut off at once, exit status 1
  crowd     2,000 streams at the same time, with a slot for each
  leavers   10,000 requests; 30 % of the clients disconnect at a random moment
  bodies    one client sends 17 kinds of bodies of up to 4 MiB in turn; /health is asked
            all the time and never waits longer than 50 ms
  soak      a mixture of all kinds of requests for --seconds: each answer has the status that its
            request should get, and memory does not grow

After crowd, leavers and soak, with nothing in flight, the server must have as many file descriptors
and threads as before. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from crossover.loadtests.host.child_processes import Child
from crossover.models.child_process import python_variables
from crossover.serving.hardware.cpu_topology import parse_cores
from crossover.serving.workload.arrivals import Poisson, due_times
from tests.bench.http_client import Client, Outcome, get, post, run
from tests.bench.paired import parser_of

Found = dict[str, Any]
FACTORS = (1.0, 2.0, 5.0, 10.0)
SLO_SECONDS = 1.0
GROWTH_LIMIT_BYTES = 8 << 20  # of a process's private memory in a soak, after its first fifth
HEALTH_SECONDS = 0.05
MAX_OPEN = 500  # requests of a soak at once: a server that stopped shall not fill this process
WORDS = "river stone light under many small houses wait for rain where nobody lives now".split()


@dataclass
class Server:
    """A `crossover serve` that is ready."""

    port: int
    api: int  # process ids
    engine: int
    child: Child


@contextlib.contextmanager
def serving(model: str, *words: str, folder: Path, cores: str = "") -> Iterator[Server]:
    """`crossover serve MODEL WORDS` on a free port, while the block runs; this process is on
    `cores` meanwhile. Raises RuntimeError where the server does not start.
    """
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "crossover",
        "serve",
        model,
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    log = folder / "server.log"
    before = os.sched_getaffinity(0)
    with Child([*command, *words], log=log, environment=python_variables()) as child:
        until = time.monotonic() + 120
        while not ready.exists() and child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if not ready.exists():
            raise RuntimeError(f"the server did not start: {log.read_text()}")
        about = json.loads(ready.read_text())
        os.sched_setaffinity(0, parse_cores(cores) or before)
        try:
            yield Server(
                int(about["url"].rpartition(":")[2]), about["pid"], about["engine_pid"], child
            )
        finally:
            os.sched_setaffinity(0, before)


async def numbers(client: Client) -> dict[str, float]:
    """The server's metrics, summed over labels; without histograms' buckets."""
    found: dict[str, float] = {}
    for line in (await client.ask(get("/metrics"))).body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if line and not line.startswith("#") and "_bucket{" not in name:
            key = name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


async def at_rest(server: Server, client: Client) -> dict[str, float]:
    """Return what the server uses once nothing is in flight. Raises RuntimeError after 90 s."""
    until = time.monotonic() + 90
    while True:
        found = await numbers(client)
        busy = found["crossover_num_requests_running"] + found["crossover_num_requests_waiting"]
        if not busy and found["crossover_http_requests_open"] == 1:
            break
        if time.monotonic() > until:
            raise RuntimeError(f"still busy after 90 s: {busy:g} requests run or wait")
        await asyncio.sleep(0.05)
    client.close()
    await asyncio.sleep(0.3)
    counts: dict[str, float] = {}
    for name, pid in (("api", server.api), ("engine", server.engine)):
        process = psutil.Process(pid)
        counts[f"{name} descriptors"] = process.num_fds()
        counts[f"{name} threads"] = process.num_threads()
    return counts


def leaked(before: dict[str, float], after: dict[str, float]) -> list[str]:
    return [
        f"{name} {before[name]:g} -> {after[name]:g}"
        for name in before
        if after[name] > before[name]
    ]


def private_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)


async def open_loop(
    client: Client, rate: float, seconds: float, body: Callable[[], bytes], seed: int
) -> list[Outcome]:
    """Send requests at Poisson times and return their outcomes once all have ended."""
    loop = asyncio.get_running_loop()
    dues = due_times(Poisson(), rate, seconds, seed)
    bodies = [body() for _ in dues]
    start = loop.time() + 0.1
    tasks = []
    for due, data in zip(dues, bodies, strict=True):
        await asyncio.sleep(max(0.0, start + due - loop.time()))
        tasks.append(asyncio.create_task(client.ask(data, start + due)))
    return await asyncio.gather(*tasks)


def short_answer() -> bytes:
    """A streamed answer of 16 tokens, every prompt different."""
    prompt = " ".join(str(random.randrange(100, 999)) for _ in range(12))
    return post(prompt=prompt, max_tokens=16, ignore_eos=True, stream=True, temperature=0)


async def capacity_of(client: Client, streams: int, seconds: float) -> float:
    """Return the requests per second that a closed loop finishes, without its first third."""
    loop = asyncio.get_running_loop()
    start, ends = loop.time(), list[float]()

    async def user() -> None:
        while loop.time() < start + seconds:
            outcome = await client.ask(short_answer())
            if outcome.status == 200 and outcome.complete and outcome.last is not None:
                ends.append(outcome.last - start)
            else:
                await asyncio.sleep(outcome.retry_after or 0.1)

    await asyncio.gather(*(user() for _ in range(streams)))
    return sum(seconds / 3 <= end < seconds for end in ends) / (seconds * 2 / 3)


async def level(client: Client, rate: float, seconds: float) -> Found:
    """Run one open-loop level of the overload. Rates are per second, times in seconds."""
    before = asyncio.get_running_loop().time()
    outcomes = await open_loop(client, rate, seconds, short_answer, int(rate * 10))
    # While the queue fills, more is let in than can be done; what ends after that is counted.
    filled = min(2 * SLO_SECONDS, seconds / 3)
    start, end = before + filled, before + seconds
    accepted = [one for one in outcomes if one.status == 200]
    refused = [one for one in outcomes if one.status == 429]
    ttft = [np.inf if one.ttft is None else one.ttft for one in accepted] or [np.inf]
    good = [one for one in accepted if one.complete and (one.ttft or np.inf) <= SLO_SECONDS]
    return {
        "offered": len(outcomes),
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(outcomes) - len(refused) - sum(one.complete for one in accepted),
        "goodput": sum(start <= (one.last or 0.0) < end for one in good) / (end - start),
        "ttft_p50": float(np.percentile(ttft, 50)),
        "ttft_p99": float(np.percentile(ttft, 99, method="higher")),
        "retry_after_mean": float(np.mean([one.retry_after or 0.0 for one in refused] or [0.0])),
        "send_delay_p99": float(
            np.percentile([(one.sent or np.inf) - one.due for one in outcomes], 99)
        ),
    }


async def overload(server: Server, options: argparse.Namespace) -> Found:
    client = Client("127.0.0.1", server.port)
    capacity = await capacity_of(client, 24, max(3.0, options.seconds / 2))
    print(f"  capacity {capacity:.1f} requests/s in a closed loop", flush=True)
    found: Found = {"capacity": capacity}
    levels = []
    for factor in FACTORS:
        await at_rest(server, client)
        levels.append(await level(client, capacity * factor, options.seconds))
        found[f"{factor:g} x"] = levels[-1]
    peak = max(one["goodput"] for one in levels)
    found["goodput at the highest load / peak"] = levels[-1]["goodput"] / peak
    found["kept"] = (
        levels[-1]["goodput"] >= 0.95 * peak
        and all(one["ttft_p99"] <= SLO_SECONDS for one in levels)
        and all(one["send_delay_p99"] < 0.05 for one in levels)  # this client kept up
        and not any(one["failed"] for one in levels)
    )
    return found


async def ending(server: Server, tokens: int, twice: bool) -> Found:
    """Fill the server, then send SIGTERM; with `twice`, a second one half a second later."""
    loop = asyncio.get_running_loop()
    client, fresh = Client("127.0.0.1", server.port), Client("127.0.0.1", server.port, keep=False)
    await asyncio.gather(*(client.ask(post(prompt="x", max_tokens=1)) for _ in range(50)))
    tasks = [
        asyncio.create_task(
            client.ask(
                post(prompt=f"{number}", max_tokens=tokens, stream=number % 3 > 0, ignore_eos=True)
            )
        )
        for number in range(16)
    ]
    await asyncio.sleep(1.0)
    os.kill(server.api, signal.SIGTERM)
    signaled_at = loop.time()
    late: Counter[str] = Counter()

    # What comes before the server has seen the signal is served or cut off like the others.
    while server.child.poll() is None and (await fresh.ask(get("/ready"))).status == 200:
        await asyncio.sleep(0.01)

    async def come_late() -> None:
        """Send requests to a server that drains, on kept and on new connections, until nobody
        listens.

        If a connection closes between the decision to use it and its first byte, the outcome is
        "too late", which is no fault of the server.
        """
        while server.child.poll() is None:
            await asyncio.sleep(0.05)
            for chosen in (client, fresh):
                with contextlib.suppress(OSError):
                    outcome = await chosen.ask(post(prompt="late", max_tokens=1))
                    code = json.loads(outcome.body or b"{}").get("error", {}).get("code", "")
                    late[f"{outcome.status} {code}" if outcome.status else "too late"] += 1

    coming = asyncio.create_task(come_late())
    if twice:
        await asyncio.sleep(0.5)
        os.kill(server.api, signal.SIGTERM)
    outcomes = await asyncio.gather(*tasks)
    while server.child.poll() is None and loop.time() < signaled_at + 90:
        await asyncio.sleep(0.01)
    seconds = loop.time() - signaled_at
    await asyncio.wait({coming}, timeout=5)
    return {
        "complete": sum(one.status == 200 and one.complete for one in outcomes),
        "exit status": server.child.poll(),
        "seconds from the signal to the end": seconds,
        "asked after the signal": dict(late),
        "turned away": set(late) <= {"503 draining", "503 stopped", "too late"},
    }


async def drain(server: Server, options: argparse.Namespace, tokens: int = 150) -> Found:
    found = await ending(server, tokens, twice=False)
    turned_away = found["asked after the signal"].get("503 draining", 0) > 0
    kept = (
        found["complete"] == 16
        and found["exit status"] == 0
        and found["turned away"]
        and turned_away
    )
    return found | {"kept": kept}


async def twice(server: Server, options: argparse.Namespace) -> Found:
    found = await ending(server, 900, twice=True)
    in_time = found["seconds from the signal to the end"] < 5.0
    return found | {"kept": found["exit status"] == 1 and in_time and found["turned away"]}


async def first_request(server: Server, client: Client) -> dict[str, float]:
    """Send a request and return what the server uses at rest afterwards, so that what is allocated
    once is allocated."""
    await client.ask(post(prompt="x", max_tokens=2, stream=True, logprobs=1, seed=1))
    return await at_rest(server, client)


async def crowd(server: Server, options: argparse.Namespace, streams: int = 2000) -> Found:
    client = Client("127.0.0.1", server.port)
    before, memory = await first_request(server, client), private_bytes(server.api)
    body = post(prompt="hello", max_tokens=60, stream=True, ignore_eos=True)
    tasks = [asyncio.create_task(client.ask(body)) for _ in range(streams)]
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, private_bytes(server.api))
        await asyncio.sleep(0.5)
    outcomes = [task.result() for task in tasks]
    ends = min(one.last or 0.0 for one in outcomes)
    together = sum(bool(one.chunks) and one.chunks[0] < ends for one in outcomes)
    lost = leaked(before, await at_rest(server, client))
    complete = sum(one.complete for one in outcomes)
    return {
        "complete": complete,
        "streaming at the same moment": together,
        "KiB a stream on the HTTP side": (most - memory) / streams / 1024,
        "leaked": lost,
        "kept": complete == together == streams and not lost,
    }


async def leavers(server: Server, options: argparse.Namespace, requests: int = 10_000) -> Found:
    client, draw = Client("127.0.0.1", server.port), random.Random(5)
    before = await first_request(server, client)
    seen: Counter[str] = Counter()
    todo = iter(range(requests))

    async def user() -> None:
        for _ in todo:
            task = asyncio.create_task(
                client.ask(
                    post(
                        prompt="hello you",
                        max_tokens=draw.choice([4, 16, 40]),
                        stream=draw.random() < 0.7,
                        n=draw.choice([1, 1, 1, 2]),
                    )
                )
            )
            if draw.random() < 0.3:
                await asyncio.wait({task}, timeout=draw.random() * 0.15)
                task.cancel()
                await asyncio.wait({task})
                seen["left"] += 1
            else:
                outcome = await task
                seen["complete" if outcome.complete else f"status {outcome.status}"] += 1

    await asyncio.gather(*(user() for _ in range(100)))
    lost = leaked(before, await at_rest(server, client))
    return {
        "seen": dict(seen),
        "leaked": lost,
        "kept": not lost and set(seen) == {"left", "complete"},
    }


def text(draw: random.Random, least: int = 2, most: int = 30) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def completion(draw: random.Random, **fields: Any) -> bytes:
    fields = {"max_tokens": draw.choice([1, 8, 16, 24]), "stream": draw.random() < 0.6} | fields
    return post(prompt=text(draw), seed=draw.randrange(1 << 30), **fields)


def chat(draw: random.Random) -> bytes:
    roles = ("user", "assistant", "user")[: draw.choice([1, 1, 3])]
    return post(
        "/v1/chat/completions",
        messages=[{"role": role, "content": text(draw)} for role in roles],
        max_tokens=draw.choice([4, 12, 20]),
        stream=draw.random() < 0.6,
    )


def wrong(draw: random.Random) -> bytes:
    return draw.choice(
        [
            post(raw=b'{"prompt": "x"'),
            post(prompt="x", max_tokens=-2),
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
    paths = ("/metrics", "/v1/models", "/ready", "/v1/placement", "/openapi.json")
    return draw.choice([*map(get, paths), post("/tokenize", prompt=text(draw))])


def leaving(draw: random.Random) -> bytes:
    return post(prompt=text(draw), max_tokens=200, stream=draw.random() < 0.5, ignore_eos=True)


# what is sent, its share of all, the statuses it may be answered with (a full queue is an answer)
_ANSWERED, _WRONG = {200, 429}, {400, 404, 405, 429}
KINDS: dict[str, tuple[float, Callable[[random.Random], bytes], set[int]]] = {
    "completion": (0.30, completion, _ANSWERED),
    "chat": (0.20, chat, _ANSWERED),
    "long": (0.04, lambda draw: completion(draw, max_tokens=120, ignore_eos=True), _ANSWERED),
    "stop strings": (0.08, lambda draw: completion(draw, stop=["never", "the way"]), _ANSWERED),
    "several answers": (0.09, lambda draw: completion(draw, n=3, temperature=1.0), _ANSWERED),
    "logprobs": (0.04, lambda draw: completion(draw, logprobs=3), _ANSWERED),
    "wrong": (0.10, wrong, _WRONG),
    "leaves": (0.10, leaving, _ANSWERED),
    "beside": (0.05, beside, {200}),
}


async def soak(server: Server, options: argparse.Namespace) -> Found:
    client, draw, loop = (
        Client("127.0.0.1", server.port),
        random.Random(1),
        asyncio.get_running_loop(),
    )
    seen: Counter[str] = Counter()
    surprises: Counter[str] = Counter()
    running: set[asyncio.Task[None]] = set()
    memory: dict[str, list[int]] = {"api": [], "engine": []}

    async def one(name: str) -> None:
        _, make, statuses = KINDS[name]
        task = asyncio.create_task(client.ask(make(draw)))
        if name == "leaves":
            await asyncio.wait({task}, timeout=draw.expovariate(10.0))
            if not task.done():
                task.cancel()
                seen["left in the middle"] += 1
                return
        outcome = await task
        seen[f"{name} {outcome.status}"] += 1
        if outcome.status not in statuses or not outcome.complete:
            answer_text = outcome.error or outcome.body[:160].decode(errors="replace")
            surprises[f"{name}: status {outcome.status}, {answer_text}"] += 1

    async def load(seconds: float) -> None:
        due, end, sample = loop.time(), loop.time() + seconds, loop.time()
        while (due := due + draw.expovariate(options.rate)) < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            if loop.time() >= sample:
                memory["api"].append(private_bytes(server.api))
                memory["engine"].append(private_bytes(server.engine))
                sample += max(0.2, seconds / 100)
            if len(running) >= MAX_OPEN:
                surprises[f"{MAX_OPEN} requests open"] += 1
                continue
            [name] = draw.choices(list(KINDS), [share for share, *_ in KINDS.values()])
            task = asyncio.create_task(one(name))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running, timeout=300)

    await load(min(10.0, options.seconds / 10))  # what is made once is made
    before = await at_rest(server, client)
    for samples in memory.values():
        samples.clear()
    await load(options.seconds)
    lost = leaked(before, await at_rest(server, client))
    grown = {}
    for name, samples in memory.items():
        part = max(1, len(samples) // 5)
        grown[name] = float(
            np.median(samples[-part:]) - np.median(samples[part : 2 * part] or samples)
        )
    growth_mib = {name: round(bytes_ / (1 << 20), 1) for name, bytes_ in grown.items()}
    return {
        "seen": dict(sorted(seen.items())),
        "surprises": dict(surprises),
        "leaked": lost,
        "private memory grew by, MiB": growth_mib,
        "kept": not (lost or surprises) and max(grown.values()) <= GROWTH_LIMIT_BYTES,
    }


def large_bodies() -> dict[str, bytes]:
    """Return bodies just below a bound, of 4 MiB, 500,000 values or 100,000 texts, by what each has
    very many of."""
    size = (4 << 20) - 4096
    message = {"role": "user", "content": "a"}
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": {}}}
        for number in range(14_000)
    ]
    prompts: dict[str, Any] = {
        "words": "word " * (size // 5),
        "one word": "a" * size,
        "spaces": " " * size,
        "emoji": "\U0001f600" * (size // 12),
        "token ids": [1] * 490_000,
        "numbers": [1.0] * 490_000,
        "texts": ["a"] * 99_000,
    }
    unknown_keys: dict[str, Any] = {f"k{number}": 1 for number in range(99_000)}
    bodies = {name: post(prompt=prompt, max_tokens=1) for name, prompt in prompts.items()}
    chat = "/v1/chat/completions"
    return bodies | {
        "text to tokenize": post("/tokenize", prompt="word " * (size // 5)),
        "chat text": post(chat, messages=[{**message, "content": "word " * (size // 5)}]),
        "messages": post(chat, messages=[message] * 24_000),
        "tools": post(chat, messages=[message], tools=tools),
        "template values": post(
            chat,
            messages=[message],
            chat_template_kwargs={str(number): 1 for number in range(99_000)},
        ),
        "biases": post(prompt="a", logit_bias={str(number): 1 for number in range(99_000)}),
        "stops": post(prompt="a", stop=["x" * 36] * 99_000),
        "unknown keys": post(prompt="a", **unknown_keys),
        "nested": post(raw=b'{"prompt":' + b"[" * 2000 + b"]" * 2000 + b"}"),
        "no JSON": post(raw=b"x" * size),
    }


async def bodies(server: Server, options: argparse.Namespace) -> Found:
    client, watcher = Client("127.0.0.1", server.port), Client("127.0.0.1", server.port)
    loop = asyncio.get_running_loop()
    waits: list[float] = []

    async def watch() -> None:
        while True:
            began = loop.time()
            await watcher.ask(get("/health"))
            waits.append(loop.time() - began)
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    longest, statuses = {}, {}
    for name, body in large_bodies().items():
        # Building a body blocks this process, which must not count.
        await asyncio.sleep(0.1)
        waits.clear()
        outcome = await client.ask(body)
        await asyncio.sleep(0.1)
        longest[name], statuses[name] = max(waits), outcome.status
    watching.cancel()
    return {
        "longest wait for /health, ms": {
            name: round(1e3 * seconds, 1) for name, seconds in longest.items()
        },
        "statuses": statuses,
        "kept": max(longest.values()) <= HEALTH_SECONDS and None not in statuses.values(),
    }


Part = Callable[..., Coroutine[Any, Any, Found]]
# what runs, the fake engine's seconds a step, its slots, more words of `crossover serve`
PARTS: dict[str, tuple[Part, float, int, str]] = {
    "overload": (overload, 0.02, 16, f"--ttft-slo {SLO_SECONDS}"),
    "drain": (drain, 0.02, 16, "--drain-timeout 60"),
    "twice": (twice, 0.02, 16, "--drain-timeout 60"),
    "crowd": (crowd, 0.3, 2000, "--max-waiting 4000 --max-wait 1000 --no-prefix-reuse"),
    "leavers": (leavers, 0.005, 64, ""),
    "bodies": (bodies, 0.004, 16, ""),
    "soak": (soak, 0.004, 16, ""),
}


def measure(part: str, options: argparse.Namespace, **sizes: Any) -> Found:
    """Run one part on a server of its own."""
    work, step_seconds, slots, words = PARTS[part]
    context = 512 if part == "crowd" else 1024
    common = f"--slots {slots} --context {context} {words}".split()
    if options.engine_cores:
        common += [
            "--cores",
            options.engine_cores,
            "--api-cores",
            options.api_cores,
            "--threads",
            "1",
        ]
    if options.backend == "fake" or part in ("crowd", "leavers"):
        model, own = "fake", ["--option", f"step_seconds={step_seconds}"]
    else:
        model, own = "smollm2-135m", ["--backend", options.backend, "--format", "Q4_0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, *common, *own, folder=Path(folder), cores=options.api_cores) as server,
    ):
        return run(work(server, options, **sizes))


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--backend", choices=["fake", "llama_cpp"], default="fake")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a level, and of the soak")
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second of the soak")
    parser.add_argument("--engine-cores", default="0")
    parser.add_argument("--api-cores", default="1")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    options = parser.parse_args(words)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def main() -> int:
    options = arguments()
    found = {}
    for part in options.parts or PARTS:
        found[part] = measure(part, options)
        print(f"{part}: {'kept' if found[part]['kept'] else 'MISSED'}")
        for name, value in found[part].items():
            print(f"  {name}: {value:.3g}" if isinstance(value, float) else f"  {name}: {value}")
        sys.stdout.flush()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    return 0 if all(one["kept"] for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
