"""Connections that are many, slow, hostile or gone: does anybody else notice, and does everything
that was handed out come back?

    python -m tests.bench.pressure.connections [--part crowd] [--out FILE]

Each part has a server of its own with the fake backend, engine on core 0, HTTP side and client on
core 1:

  crowd      2,000 streams at the same time, a slot for each
  leavers    10,000 requests, 30 % of the clients leave at a random moment slot
  one slot, one in it, one waiting: the first leaves, the second's first token comes how many steps
  later?

After each, with nothing in flight: descriptors, threads and tasks must be what they were before,
and memory is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.pressure.wire import (
    Client,
    Held,
    Outcome,
    Server,
    held,
    mib,
    on_cores,
    post,
    run,
    serving,
    until_idle,
)

TASKS = "crossover_event_loop_tasks"
Found = dict[str, Any]


class Rest:
    """What the server holds when nobody asks for anything, before and after."""

    def __init__(self, server: Server, client: Client) -> None:
        self._server, self._client = server, client
        self.before: tuple[Held, Held, float | None] | None = None

    async def look(self) -> tuple[Held, Held, float | None]:
        self._client.close()
        await asyncio.sleep(0.1)
        numbers = await until_idle(self._client, 90)
        await asyncio.sleep(0.2)
        return held(self._server.api), held(self._server.engine), numbers.get(TASKS)

    async def start(self) -> None:
        """After a first request: what is made once is made."""
        await self._client.ask(post(prompt="x", max_tokens=2, stream=True, logprobs=1, seed=1))
        self.before = await self.look()

    async def end(self) -> Found:
        assert self.before is not None
        (api, engine, tasks), (api_after, engine_after, tasks_after) = (
            self.before,
            await self.look(),
        )
        self._client.close()
        counted = {
            "api descriptors": (api.descriptors, api_after.descriptors),
            "engine descriptors": (engine.descriptors, engine_after.descriptors),
            "api threads": (api.threads, api_after.threads),
            "engine threads": (engine.threads, engine_after.threads),
            "api tasks": (tasks, tasks_after),
        }
        return {
            "at rest": counted,
            "nothing leaked": all(a is None or b is None or b <= a for a, b in counted.values()),
            "api rss": (api.rss_bytes, api_after.rss_bytes),
            "engine rss": (engine.rss_bytes, engine_after.rss_bytes),
        }


def percentile(outcomes: list[Outcome], share: float) -> float | None:
    found = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    return float(np.percentile(found, share)) if found else None


async def traffic(client: Client, rate: float, until: Callable[[], bool]) -> list[Outcome]:
    """Normal requests, one every 1/rate seconds, until that is true; their outcomes."""
    tasks = []
    loop = asyncio.get_running_loop()
    due = loop.time()
    while not until():
        tasks.append(
            asyncio.create_task(
                client.ask(post(prompt="hi", max_tokens=8, stream=True, ignore_eos=True), due)
            )
        )
        due += 1 / rate
        await asyncio.sleep(max(0.0, due - loop.time()))
    return list(await asyncio.gather(*tasks))


async def traffic_for(client: Client, rate: float, seconds: float) -> list[Outcome]:
    end = asyncio.get_running_loop().time() + seconds
    return await traffic(client, rate, lambda: asyncio.get_running_loop().time() > end)


async def crowd(server: Server, streams: int = 2000, tokens: int = 60) -> Found:
    client = Client(server.port)
    rest = Rest(server, client)
    await rest.start()
    body = post(prompt="hello", max_tokens=tokens, stream=True, ignore_eos=True)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = []
    for _ in range(streams):
        tasks.append(asyncio.create_task(client.ask(body)))
        await asyncio.sleep(0)
    peak = most = 0
    while not all(task.done() for task in tasks):
        now = held(server.api)
        peak, most = max(peak, now.rss_bytes), max(most, now.descriptors)
        await asyncio.sleep(0.2)
    outcomes = [task.result() for task in tasks]
    firsts, lasts = [one.first or 0.0 for one in outcomes], [one.last or 0.0 for one in outcomes]
    together = sum(first < min(lasts) for first in firsts)
    found = await rest.end()
    return found | {
        "streams": streams,
        "complete": sum(one.status == 200 and one.complete for one in outcomes),
        "streaming at the same moment": together,
        "seconds": max(lasts) - began,
        "api rss at most": peak,
        "api descriptors at most": most,
        "kept": found["nothing leaked"]
        and all(one.complete for one in outcomes)
        and together == streams,
    }


async def leavers(
    server: Server, requests: int = 10_000, users: int = 100, share: float = 0.3
) -> Found:
    client, draw = Client(server.port), random.Random(5)
    rest = Rest(server, client)
    await rest.start()
    left = complete = 0
    other: list[int | None] = []
    todo = iter(range(requests))

    async def user() -> None:
        nonlocal left, complete
        for _ in todo:
            body = post(
                prompt="hello you",
                max_tokens=draw.choice([4, 16, 40]),
                stream=draw.random() < 0.7,
                n=draw.choice([1, 1, 1, 2]),
            )
            if draw.random() >= share:
                outcome = await client.ask(body)
                complete += outcome.status == 200 and outcome.complete
                if outcome.status != 200 or not outcome.complete:
                    other.append(outcome.status)
                continue
            task = asyncio.create_task(client.ask(body))
            await asyncio.wait({task}, timeout=draw.random() * 0.15)
            task.cancel()
            await asyncio.wait({task})
            left += 1

    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(user() for _ in range(users)))
    seconds = asyncio.get_running_loop().time() - began
    found = await rest.end()
    return found | {
        "requests": requests,
        "left": left,
        "complete": complete,
        "other": len(other),
        "seconds": seconds,
        "kept": found["nothing leaked"] and not other and left + complete == requests,
    }


async def slot(server: Server, rounds: int = 20, step_seconds: float = 0.1) -> Found:
    """The second's first token needs a step of its own; the one that runs when the first leaves
    ends before: 2 steps at most.
    """
    client, loop, draw = Client(server.port), asyncio.get_running_loop(), random.Random(2)
    rest = Rest(server, client)
    await rest.start()
    waits = []
    for number in range(rounds):
        first = asyncio.create_task(
            client.ask(
                post(prompt="hello", max_tokens=400, stream=number % 2 == 0, ignore_eos=True)
            )
        )
        await asyncio.sleep(2.5 * step_seconds)
        second = asyncio.create_task(
            client.ask(post(prompt="hello", max_tokens=2, stream=True, ignore_eos=True))
        )
        await asyncio.sleep((1 + draw.random()) * step_seconds)
        first.cancel()
        left = loop.time()
        outcome = await second
        assert outcome.status == 200 and outcome.first is not None
        waits.append((outcome.first - left) / step_seconds)
        await asyncio.gather(first, return_exceptions=True)
    found = await rest.end()
    return found | {
        "rounds": rounds,
        "steps until the next one's first token, mean": float(np.mean(waits)),
        "at most": max(waits),
        "kept": found["nothing leaked"] and 0 < min(waits) and max(waits) < 2.5,
    }


Part = Callable[..., Awaitable[Found]]
PARTS: dict[str, tuple[Part, tuple[str, ...]]] = {
    "crowd": (
        crowd,
        (
            "--slots",
            "2000",
            "--max-waiting",
            "4000",
            "--max-wait",
            "1000",
            "--no-prefix-reuse",
            "--option",
            "step_seconds=0.3",
        ),
    ),
    "leavers": (leavers, ("--slots", "64", "--option", "step_seconds=0.005")),
    "slot": (slot, ("--slots", "1", "--max-wait", "1000", "--option", "step_seconds=0.1")),
}


def measure(part: str, cores: tuple[str, str] = ("0", "1"), **sizes: Any) -> Found:
    """One part on a server of its own, told on standard output."""
    work, arguments = PARTS[part]
    context = () if "--context" in arguments else ("--context", "512")
    common = ("--cores", cores[0], "--api-cores", cores[1], "--threads", "1")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("fake", *common, *context, *arguments, folder=Path(folder)) as server,
        on_cores(cores[1]),
    ):
        found = run(work(server, **sizes))
    print(f"{part}: {'kept' if found['kept'] else 'MISSED'}")
    for name, value in found.items():
        if name.endswith(("rss", "rss at most")):
            value = " -> ".join(map(mib, value)) if isinstance(value, tuple) else mib(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {first} -> {last}" for key, (first, last) in value.items())
        print(
            f"  {name}: {value:.3g}" if isinstance(value, float) else f"  {name}: {value}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part", choices=list(PARTS), action="append", help="only this; may be repeated"
    )
    parser.add_argument("--engine-cores", default="0")
    parser.add_argument("--api-cores", default="1")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    given = parser.parse_args()
    found = {
        part: measure(part, (given.engine_cores, given.api_cores)) for part in given.part or PARTS
    }
    if given.out:
        given.out.write_text(json.dumps(found, indent=1, default=asdict))
    return 0 if all(part["kept"] for part in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
