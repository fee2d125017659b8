"""Supervisors over real engine children of the fake backend, for tests: short waits, one way to run
them, one way to read a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import Delta
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.inflight_requests import Stream, merged
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.fake_backend import continuation

VOCABULARY = 2048
QUICK = RecoveryLimits(
    backoff_first_seconds=0.05,
    health_timeout_seconds=10.0,  # a busy machine is no hung engine
    return_first_seconds=0.2,
    kill_after_seconds=3.0,
)
LONG = 400  # tokens of a sequence that is still running when something happens to it


@contextlib.asynccontextmanager
async def running(
    *configs: EngineConfig, wait: bool = True, **arguments: Any
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(configs, **{"limits": QUICK, **arguments})
    await supervisor.start()
    try:
        if wait:
            await supervisor.wait_ready(20)
        yield supervisor
    finally:
        await supervisor.stop(drain=False)


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited(), debug=False)


async def next_of(stream: Stream) -> Delta:
    """What comes next; of a `whole` one, all of it."""
    while (delta := stream.take()) is None:
        await stream.arrived.wait()
        stream.arrived.clear()
    return delta


async def collect(stream: Stream) -> Delta:
    """Everything of a stream as one Delta."""
    deltas = [await next_of(stream)]
    while deltas[-1].finish is None:
        deltas.append(await next_of(stream))
    return merged(deltas)


def truth(tokenizer_path: str, prompt: list[int], count: int) -> str:
    table = load_tokenizer(tokenizer_path).token_bytes()
    return b"".join(table[token] for token in continuation(prompt, count, VOCABULARY)).decode(
        errors="replace"
    )


def kinds(supervisor: Supervisor) -> list[str]:
    return [event.kind for event in supervisor.events]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int | None) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
