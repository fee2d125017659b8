"""The engine that stands by: loaded beside the one that serves, it takes over at once; and starting
again after an unload.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.supervisor.engine_supervisor import Supervisor
from tests.serving.children import (
    LONG,
    QUICK,
    alive,
    collect,
    kinds,
    next_of,
    run,
    running,
    truth,
    until,
)

pytestmark = pytest.mark.usefixtures("forked_engines")

Config = Callable[..., EngineConfig]
NO_RETURN = msgspec.structs.replace(QUICK, return_first_seconds=600.0)
SLOW_LOAD = 0.5  # seconds of the CPU engine's load: what standing by saves


def standing_by(supervisor: Supervisor) -> Callable[[], bool]:
    return lambda: "standby" in kinds(supervisor)


def test_it_takes_over_at_once_after_a_single_death_and_nothing_unread_is_lost(
    config: Config, tokenizer_path: str
) -> None:
    async def scenario() -> None:
        gpu, cpu = config(device="gpu"), config(load_seconds=SLOW_LOAD)
        async with running(gpu, cpu, standby=True, limits=NO_RETURN) as supervisor:
            await until(standing_by(supervisor))
            assert supervisor.label == "fake/gpu" and len(supervisor.pids) == 2
            read = supervisor.submit(GenerationRequest([1, 2, 3], LONG, ignore_eos=True))
            unread = [
                supervisor.submit(GenerationRequest([4, 5, 6 + n], 20, ignore_eos=True, whole=True))
                for n in range(6)
            ]
            await next_of(read)
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            for n, stream in enumerate(unread):
                whole = await collect(stream)
                assert (whole.finish, whole.text) == (
                    "length",
                    truth(tokenizer_path, [4, 5, 6 + n], 20),
                )
            assert kinds(supervisor).count("started") == 2  # nothing was loaded for it
            assert (await collect(read)).finish == "error"
            assert (
                supervisor.label,
                supervisor.state,
                supervisor.fallbacks,
                supervisor.restarts,
            ) == ("fake/cpu", "ready", 1, 0)
            fell = next(event for event in supervisor.events if event.kind == "fell_back")
            assert fell.cause == "engine_died" and "which was on standby" in fell.message
            assert "restarting" not in kinds(supervisor) and supervisor.deaths == {"engine_died": 1}

    run(scenario())


def test_after_the_way_back_the_other_engine_stands_by_again_and_finishes_what_it_has(
    config: Config,
) -> None:
    async def scenario() -> None:
        async with running(config(device="gpu"), config(), standby=True) as supervisor:
            await until(standing_by(supervisor))
            (cpu_pid,) = set(supervisor.pids) - {supervisor.engine_pid}
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: supervisor.label == "fake/cpu")
            old = supervisor.submit(GenerationRequest([1, 2], LONG, ignore_eos=True))
            await next_of(old)
            await until(lambda: supervisor.label == "fake/gpu")
            assert (await collect(old)).finish == "length"
            assert alive(cpu_pid) and cpu_pid in supervisor.pids
            assert (supervisor.returns, kinds(supervisor).count("started")) == (1, 2)

    run(scenario())


def test_an_unloaded_supervisor_can_start_again_and_remembers_nothing_bad(config: Config) -> None:
    async def scenario() -> None:
        async with running(config()) as supervisor:
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: supervisor.state == "restarting")
            await supervisor.wait_ready(20)
            assert await supervisor.stop(unload="for a test") == 0
            assert (
                supervisor.state == "unloaded"
                and supervisor.reason == "the model was unloaded: for a test"
                and supervisor.pids == []
            )
            other = config(slots=2)
            await supervisor.start([other])
            ready = await supervisor.wait_ready(20)
            assert (
                ready.info.settings.slots == 2
                and (await collect(supervisor.submit(GenerationRequest([1], 5)))).tokens == 5
            )
            assert supervisor.restarts == 1  # counts of the process go on
        assert supervisor.state == "stopped"

    run(scenario())
