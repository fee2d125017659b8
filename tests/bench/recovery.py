"""How long a failing engine is missed, and what it costs.

    python -m tests.bench.recovery --model 135m --repeats 5

A fake engine plays the GPU (it has the real model's tokenizer, and answers at once), the real model
on the CPU is what it falls back to; both are real engine processes behind the real HTTP server.
Requests come at a fixed rate, whatever happens (an open loop on plain sockets), every other one
streamed; the answer to one that is not has no byte before it is complete. In the midst of them the
GPU's engine is killed (SIGKILL), aborts (SIGABRT) or hangs (SIGSTOP, found by the health timeout).

For each fault and each way of standing by (cold: the CPU's engine is loaded when it is needed;
warm: it is loaded already):

  first token   from the fault to the first token that the engine after it made for anybody, s
  refused       requests that came meanwhile and got a 503 with a Retry-After
  started again    requests that had no byte at the fault and were answered completely all the same
  lost          requests that had no byte at the fault and were not answered: must be none
  cut off       streams that were half read at the fault: they end with an error event, as they must

"in place" is the first death of a cold server: it is worth one restart on the GPU. "fall back" is
what follows the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
import uvicorn

from crossover.models.identity.resolve_model import resolve
from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.hardware.cpu_topology import parse_cores
from crossover.serving.http.http_server import server_options
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.bench.http_client import Client, Outcome, post, run
from tests.bench.paired import parser_of
from tests.serving.fakes import app_on
from tests.tools.with_settings import engine_config

FAULTS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
HEALTH_TIMEOUT_SECONDS = 2.0  # the server's default is 30
BEFORE_SECONDS, MAX_SECONDS = 1.5, 30.0  # of load before the fault, and of a round
HEADS = ("runs", "first token p50 / p95, s", "refused", "started again", "lost", "cut off")


class Cost(NamedTuple):
    """What one fault cost; None: nobody made a token after it."""

    first_token_seconds: float | None
    refused: int
    started_again: int
    lost: int
    cut_off: int
    ended_on: str


@contextlib.asynccontextmanager
async def serving(model: str, cores: str, standby: bool) -> AsyncIterator[tuple[Supervisor, int]]:
    """The supervisor and the port of a server that is ready."""
    found = resolve(model, kind="gguf", weight_format="Q4_0")
    tokenizer = load_tokenizer(found.tokenizer_path or found.path)
    common = {
        "tokenizer_path": found.tokenizer_path or found.path,
        "slots": 4,
        "context_tokens": 512,
        "threads": 1,
        "cores": tuple(parse_cores(cores) or ()),
    }
    fake = {"vocabulary": len(tokenizer.token_bytes()), "step_seconds": 0.03}
    gpu = engine_config("fake", "", "m", device="gpu", options=fake, **common)
    cpu = engine_config("llama_cpp", found.path, "m", weight_format=found.weight_format, **common)
    # What is measured here is the way to the CPU, not the way back.
    limits = RecoveryLimits(
        health_timeout_seconds=HEALTH_TIMEOUT_SECONDS, return_first_seconds=900.0
    )
    supervisor = Supervisor([gpu, cpu], limits=limits, standby=standby, on_output=lambda _: None)
    app = app_on(supervisor, tokenizer=tokenizer)
    await supervisor.start()
    options = {**server_options(), "loop": "none"}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, **options))
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        await supervisor.wait_ready(60)
        while standby and not any(event.kind == "standby" for event in supervisor.events):
            await asyncio.sleep(0.02)
        yield supervisor, server.servers[0].sockets[0].getsockname()[1]
    finally:
        await supervisor.stop(drain=True, timeout_seconds=5.0)
        server.should_exit = True
        await running


async def under_fire(supervisor: Supervisor, port: int, number: int, rate: float) -> Cost:
    """Requests at the rate for a while, the fault among them, and on until three requests that
    came after it have been answered.
    """
    client = Client("127.0.0.1", port, keep=False)
    tasks: list[asyncio.Task[Outcome]] = []
    clock = asyncio.get_running_loop().time
    begun = due = clock()
    fault: float | None = None
    while clock() < begun + MAX_SECONDS:
        await asyncio.sleep(max(0.0, due - clock()))
        due += 1 / rate
        body = post(
            prompt="Once upon a time there was a",
            max_tokens=12,
            temperature=0,
            ignore_eos=True,
            stream=len(tasks) % 2 == 0,
        )
        tasks.append(asyncio.create_task(client.ask(body)))
        if fault is None and clock() - begun > BEFORE_SECONDS:
            await asyncio.sleep(0.4 / rate)  # not in step with the arrivals
            pid = supervisor.engine_pid
            assert pid is not None
            fault = clock()
            os.kill(pid, number)
        ended = [task.result() for task in tasks if task.done()]
        if fault is not None and sum(served(one) and one.due > fault for one in ended) >= 3:
            break
    assert fault is not None
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks), timeout=30)
    return judged(outcomes, fault, supervisor.label)


def served(one: Outcome) -> bool:
    """Answered to its end, by an engine."""
    return one.complete and one.status == 200


def judged(outcomes: list[Outcome], fault: float, ended_on: str) -> Cost:
    """What the clients saw, in numbers."""
    before = [one for one in outcomes if one.due < fault and (one.last or 0.0) > fault]
    unread = [one for one in before if not one.chunks or one.chunks[0] > fault]
    firsts = [time for one in outcomes if served(one) for time in one.chunks[:1] if time > fault]
    return Cost(
        first_token_seconds=min(firsts) - fault if firsts else None,
        refused=sum(one.status in (429, 503) for one in outcomes if one.due >= fault),
        started_again=sum(map(served, unread)),
        lost=sum(not served(one) for one in unread),
        cut_off=sum(not served(one) for one in before if one not in unread),
        ended_on=ended_on,
    )


async def measure(options: argparse.Namespace) -> dict[str, list[Cost]]:
    found: dict[str, list[Cost]] = {}
    for _ in range(options.repeats):
        for way in ("cold", "warm"):
            for fault, number in FAULTS.items():
                # A death is worth one restart in place, where nobody stands by; a hang falls back
                # at once.
                twice = way == "cold" and fault != "stop"
                async with serving(options.model, options.engine_cores, way == "warm") as (
                    it,
                    port,
                ):
                    for what in ("in place", "fall back") if twice else ("fall back",):
                        cost = await under_fire(it, port, number, options.rate)
                        found.setdefault(f"{fault} {way} {what}", []).append(cost)
                        print(f"{fault} {way} {what}: {cost}", file=sys.stderr, flush=True)
                        await it.wait_ready(60)
    return found


def row(what: str, costs: list[Cost]) -> str:
    times = [one.first_token_seconds for one in costs if one.first_token_seconds is not None]
    spread = " / ".join(f"{np.quantile(times, q):.2f}" for q in (0.5, 0.95)) if times else "never"
    sums = [sum(counts) for counts in list(zip(*costs, strict=True))[1:5]]
    ends = ", ".join(sorted({one.ended_on for one in costs}))
    cells = [what, f"{len(times)} of {len(costs)}", spread, *map(str, sums), ends]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--engine-cores", default="0")
    parser.add_argument("--api-cores", default="1")
    options = parser.parse_args()
    os.sched_setaffinity(0, parse_cores(options.api_cores) or os.sched_getaffinity(0))
    found = run(measure(options))
    print(f"| fault, standby | {' | '.join(HEADS)} | then on |", "|---" * 8 + "|", sep="\n")
    print(*(row(what, costs) for what, costs in found.items()), sep="\n")
    lost = sum(one.lost for costs in found.values() for one in costs)
    raise SystemExit(f"{lost} requests without a byte were lost" if lost else 0)


if __name__ == "__main__":
    main()
