"""The bridge: while a GPU's engine restarts, the CPU's answers where it is ready sooner.

Engines are real children, the first of them under device "gpu", and are really killed.
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
# The GPU's engine starts again only by the way back, so that no test depends on who is quicker.
NEVER_RESTARTED = msgspec.structs.replace(QUICK, backoff_first_seconds=600.0)
SLOW_LOAD = 0.6  # seconds of the GPU engine's load


def allow_bridge(supervisor: Supervisor, seconds: float | None = 0.0) -> list[EngineConfig]:
    """Let the supervisor bridge, and return the configurations that it asks about."""
    requested: list[EngineConfig] = []

    def estimate(config: EngineConfig) -> float | None:
        requested.append(config)
        return seconds

    supervisor.estimate_load_seconds = estimate
    return requested


def kill_engine(supervisor: Supervisor) -> None:
    assert supervisor.engine_pid is not None
    os.kill(supervisor.engine_pid, signal.SIGKILL)


def test_the_cpu_answers_until_the_gpu_has_restarted(config: Config, tokenizer_path: str) -> None:
    async def scenario() -> None:
        gpu, cpu = config(device="gpu", load_seconds=SLOW_LOAD), config()
        async with running(gpu, cpu, limits=NO_RETURN) as supervisor:
            requested = allow_bridge(supervisor)
            read = supervisor.submit(GenerationRequest([1, 2, 3], LONG, ignore_eos=True))
            await next_of(read)
            kill_engine(supervisor)
            await until(lambda: supervisor.label == "fake/cpu" and supervisor.state == "ready")
            assert (supervisor.restarts, supervisor.fallbacks, supervisor.bridges) == (1, 1, 1)
            assert requested == [cpu]
            await until(lambda: len(supervisor.pids) == 2)  # the GPU engine is on its way
            short = supervisor.submit(GenerationRequest([4, 5], 10, ignore_eos=True))
            begun = supervisor.submit(GenerationRequest([4, 6], LONG, ignore_eos=True))
            first = await next_of(begun)
            whole = supervisor.submit(GenerationRequest([7], LONG, ignore_eos=True, whole=True))
            assert (await collect(short)).text == truth(tokenizer_path, [4, 5], 10)
            assert (await collect(read)).finish == "error"
            cpu_pid = supervisor.engine_pid
            await until(lambda: supervisor.label == "fake/gpu")
            # What its reader has begun to read ends where it is; the other one moves.
            assert begun.engine is not None and begun.engine.label == "fake/cpu"
            assert whole.engine is not None and whole.engine.label == "fake/gpu"
            text = first.text + (await collect(begun)).text
            assert text == truth(tokenizer_path, [4, 6], LONG)
            assert (await collect(whole)).text == truth(tokenizer_path, [7], LONG)
            await until(lambda: not alive(cpu_pid) and len(supervisor.pids) == 1)
            assert (supervisor.returns, supervisor.deaths) == (1, {"engine_died": 1})
            expected = ["died", "restarting", "started", "fell_back", "returned"]
            assert [kind for kind in kinds(supervisor)[2:] if kind != "returning"] in (
                expected,
                [*expected[:3], "started", *expected[3:]],  # the GPU's, before the bridge served
            )
            fell = next(event for event in supervisor.events if event.kind == "fell_back")
            assert fell.cause == "engine_died" and fell.engine == "fake/gpu"
            assert "to fake/cpu" in fell.message and "until fake/gpu has restarted" in fell.message

    run(scenario())


def test_what_was_in_flight_and_unread_goes_to_whoever_is_ready_first(
    config: Config, tokenizer_path: str
) -> None:
    async def scenario() -> None:
        async with running(config(device="gpu"), config(), limits=NEVER_RESTARTED) as supervisor:
            allow_bridge(supervisor)
            unread = [
                supervisor.submit(GenerationRequest([4, n], 20, ignore_eos=True, whole=True))
                for n in range(6)
            ]
            kill_engine(supervisor)
            for n, stream in enumerate(unread):
                assert (await collect(stream)).text == truth(tokenizer_path, [4, n], 20)
            assert supervisor.bridges == 1 and supervisor.fallbacks == 1
            await until(lambda: supervisor.label == "fake/gpu")
            assert supervisor.returns == 1

    run(scenario())


def test_a_bridge_that_is_late_is_ended_and_counts_as_nothing(config: Config) -> None:
    async def scenario() -> None:
        gpu, cpu = config(device="gpu"), config(load_seconds=30.0)
        async with running(gpu, cpu, limits=NO_RETURN) as supervisor:
            allow_bridge(supervisor)
            kill_engine(supervisor)
            await until(lambda: len(supervisor.pids) == 2)
            await until(lambda: supervisor.state == "ready")
            await until(lambda: len(supervisor.pids) == 1)
            assert supervisor.label == "fake/gpu"
            assert (supervisor.restarts, supervisor.fallbacks, supervisor.bridges) == (1, 0, 0)
            assert supervisor.deaths == {"engine_died": 1} and kinds(supervisor).count("died") == 1

    run(scenario())


@pytest.mark.parametrize(
    ("devices", "bound_seconds"),
    [
        (("gpu", "cpu"), None),  # no memory for it
        (("gpu", "cpu"), 600.0),  # later than the GPU
        (("cpu", "cpu"), 0.0),  # nothing changes on a machine without a GPU
        (("gpu",), 0.0),  # there is no fallback
    ],
)
def test_there_is_no_bridge(
    config: Config,
    devices: tuple[str, ...],
    bound_seconds: float | None,
) -> None:
    async def scenario() -> None:
        engines = [config(device=device) for device in devices]
        async with running(*engines) as supervisor:
            allow_bridge(supervisor, bound_seconds)
            kill_engine(supervisor)
            await until(lambda: supervisor.restarts == 1 and supervisor.state == "ready")
            assert kinds(supervisor).count("started") == 2 and supervisor.fallbacks == 0

    run(scenario())


def test_what_a_load_took_counts_for_more_than_the_estimate(config: Config) -> None:
    """The CPU's engine took 1.5 s, the GPU's less: there is no second bridge."""

    async def scenario() -> None:
        gpu, cpu = config(device="gpu"), config(load_seconds=1.5)
        async with running(gpu, cpu, limits=NEVER_RESTARTED) as supervisor:
            requested = allow_bridge(supervisor)
            kill_engine(supervisor)
            await until(lambda: supervisor.returns == 1)
            assert (supervisor.bridges, len(requested)) == (1, 1)
            supervisor._limits = msgspec.structs.replace(QUICK, window_seconds=0.0)
            kill_engine(supervisor)
            await until(lambda: supervisor.restarts == 2 and supervisor.state == "ready")
            assert (supervisor.bridges, len(requested), supervisor.label) == (1, 2, "fake/gpu")

    run(scenario())
