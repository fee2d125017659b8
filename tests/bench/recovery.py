"""How long a failing engine is missed, and what it costs: `python -m tests.bench.recovery --model
135m --repeats 5`.

A fake engine plays the GPU (it has the real model's tokenizer, and answers at once), the real model
on the CPU is what it falls back to; both are real engine processes behind the real HTTP server.
Requests come at a fixed rate, whatever happens (an open loop on plain sockets), every other one
streamed; the answer to one that is not has no byte before it is complete. In the midst of them the
GPU's engine is killed (SIGKILL), aborts (SIGABRT) or hangs (SIGSTOP, found by the health timeout).

For each fault and each way of standing by (cold: the CPU's engine is loaded when it is needed;
warm: it is loaded already):

  first token   from the fault to the first token that the engine after it made for anybody
  serving       from the fault to the first answer to a request that was sent after it
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
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvicorn

from models.resolve import resolve
from models.tokenizer import load_tokenizer
from serving.backends.backend_interface import EngineConfig
from serving.http.http_server import server_options
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.supervisor import Supervisor
from tests.bench.http_client import Client, Outcome, post, run
from tests.serving.fakes import app_on

FAULTS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
PROMPT = "Once upon a time there was a"


@dataclass(frozen=True)
class Cost:
    """What one fault cost. Times in seconds; None: it did not come back."""

    first_token_seconds: float | None
    serving_seconds: float | None
    refused: int
    started_again: int
    lost: int
    cut_off: int
    ended_on: str


@contextlib.asynccontextmanager
async def serving(
    options: argparse.Namespace, standby: bool
) -> AsyncIterator[tuple[Supervisor, int]]:
    real = options.fallback == "llama_cpp"
    found = resolve(
        options.model if real else "fake",
        kind="gguf" if real else "none",
        weight_format="Q4_0" if real else None,
    )
    tokenizer = load_tokenizer(found.tokenizer_path or found.path)
    vocabulary = len(tokenizer.token_bytes())
    common = {
        "tokenizer_path": found.tokenizer_path or found.path,
        "slots": 4,
        "context_tokens": 512,
        "threads": 1,
        "cores": options.engine_cores,
    }
    fake = {"vocabulary": vocabulary, "step_seconds": options.step_seconds}
    gpu = EngineConfig("fake", "", "m", device="gpu", options=fake, **common)
    cpu = EngineConfig(
        options.fallback,
        found.path,
        "m",
        device="cpu",
        weight_format=found.weight_format,
        options={} if real else fake,
        **common,
    )
    limits = RecoveryLimits(
        health_timeout_seconds=options.health_timeout, flips_per_hour=0
    )  # what is measured here is the way there
    supervisor = Supervisor([gpu, cpu], limits=limits, standby=standby, on_output=lambda _: None)
    app = app_on(supervisor, tokenizer=tokenizer)
    await supervisor.start()
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **{**server_options(), "loop": "none"})
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        await supervisor.wait_ready(60)
        while standby and supervisor.standby is None:
            await asyncio.sleep(0.02)
        yield supervisor, server.servers[0].sockets[0].getsockname()[1]
    finally:
        await supervisor.stop(drain=True, timeout_seconds=5.0)
        server.should_exit = True
        await running


async def under_fire(
    supervisor: Supervisor, port: int, number: signal.Signals, options: argparse.Namespace
) -> Cost:
    """Requests at the rate for a while, the fault among them, and on until a request that came
    after it has been answered.
    """
    client = Client("127.0.0.1", port, keep=False)
    tasks: list[asyncio.Task[Outcome]] = []
    clock = asyncio.get_running_loop().time
    begun = clock()
    fault: float | None = None
    due, until = begun, begun + options.longest
    while clock() < until:
        await asyncio.sleep(max(0.0, due - clock()))
        due += 1 / options.rate
        body = post(
            prompt=PROMPT,
            max_tokens=options.tokens,
            ignore_eos=True,
            stream=len(tasks) % 2 == 0,
            temperature=0,
        )
        tasks.append(asyncio.create_task(client.ask(body)))
        if fault is None and clock() - begun > options.before:
            await asyncio.sleep(0.4 / options.rate)  # not in step with the arrivals
            pid = supervisor.engine_pid
            assert pid is not None
            fault = clock()
            os.kill(pid, number)
        ended = [task.result() for task in tasks if task.done()]
        if fault is not None and sum(served(one) and one.due > fault for one in ended) >= 3:
            break
    assert fault is not None
    asked = await asyncio.wait_for(asyncio.gather(*tasks), timeout=30)
    return judged(asked, fault, supervisor.label)


def served(one: Outcome) -> bool:
    """Answered to its end, by an engine."""
    return one.complete and one.status == 200


def judged(asked: list[Outcome], fault: float, ended_on: str) -> Cost:
    """What the clients saw, in numbers."""
    before = [one for one in asked if one.due < fault and (one.last or 0.0) > fault]
    unread = [one for one in before if not one.chunks or one.chunks[0] > fault]
    after = [one for one in asked if one.due >= fault]
    firsts = [time for one in asked if served(one) for time in one.chunks[:1] if time > fault]
    return Cost(
        first_token_seconds=min(firsts) - fault if firsts else None,
        serving_seconds=min((one.chunks[0] - fault for one in after if served(one)), default=None),
        refused=sum(one.status in (429, 503) for one in after),
        started_again=sum(map(served, unread)),
        lost=sum(not served(one) for one in unread),
        cut_off=sum(not served(one) for one in before if one not in unread),
        ended_on=ended_on,
    )


async def measure(options: argparse.Namespace) -> dict[str, list[Cost]]:
    found: dict[str, list[Cost]] = {}
    for repeat in range(options.repeats):
        for way in options.standby:
            for fault in options.faults:
                number = FAULTS[fault]
                async with serving(options, way == "warm") as (supervisor, port):
                    # A death is worth one restart in place, where nobody stands by; a hang falls
                    # back at once.
                    rounds = (
                        ["in place", "fall back"]
                        if way == "cold" and fault != "stop"
                        else ["fall back"]
                    )
                    for what in rounds:
                        outcome = await under_fire(supervisor, port, number, options)
                        found.setdefault(f"{fault:5} {way} {what}", []).append(outcome)
                        print(
                            f"{repeat + 1}/{options.repeats} {fault} {way} {what}: {outcome}",
                            file=sys.stderr,
                            flush=True,
                        )
                        await supervisor.wait_ready(60)
    return found


def table(found: dict[str, list[Cost]]) -> str:
    lines = [
        "| fault, standby | runs | first token p50 / p95, s | serving p50 / p95, s | refused | "
        "started again | lost | cut off | then on |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for what, outcomes in found.items():
        times = [
            _spread([one.first_token_seconds for one in outcomes]),
            _spread([one.serving_seconds for one in outcomes]),
        ]
        counts = [
            sum(getattr(one, name) for one in outcomes)
            for name in ("refused", "started_again", "lost", "cut_off")
        ]
        ends = ", ".join(sorted({one.ended_on for one in outcomes}))
        lines.append(
            f"| {what} | {len(outcomes)} | {times[0]} | {times[1]} | "
            f"{' | '.join(map(str, counts))} | {ends} |"
        )
    return "\n".join(lines)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} never"
    return f"{statistics.median(known):.2f} / {float(np.quantile(known, 0.95)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fallback", choices=("llama_cpp", "fake"), default="llama_cpp")
    parser.add_argument("--model", default="135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    parser.add_argument("--standby", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=12, help="output tokens of a request")
    parser.add_argument(
        "--step-seconds", type=float, default=0.03, help="of the engine that plays the GPU"
    )
    parser.add_argument(
        "--before", type=float, default=1.5, help="seconds of load before the fault"
    )
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of one round, at most")
    parser.add_argument(
        "--health-timeout", type=float, default=2.0, help="seconds (the server's default is 30)"
    )
    parser.add_argument(
        "--engine-cores", type=lambda text: tuple(map(int, text.split(","))), default=(0,)
    )
    parser.add_argument(
        "--api-cores", type=lambda text: set(map(int, text.split(","))), default={1}
    )
    parser.add_argument("--out", type=Path, help="also write the outcomes here, as JSON")
    options = parser.parse_args()
    os.sched_setaffinity(0, options.api_cores)
    found = run(measure(options))
    print(table(found))
    if options.out is not None:
        options.out.write_text(
            json.dumps(
                {what: [vars(one) for one in outcomes] for what, outcomes in found.items()},
                indent=1,
            )
        )
    lost = sum(one.lost for outcomes in found.values() for one in outcomes)
    raise SystemExit(f"{lost} requests without a byte were lost" if lost else 0)


if __name__ == "__main__":
    main()
