"""What a supervisor does when real engine children die, hang or cannot load."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.errors import EngineFailed, Unavailable
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


SOON_HUNG = msgspec.structs.replace(QUICK, health_timeout_seconds=1.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_after_a_death_the_unread_start_again_and_the_read_end_with_an_error(
    config: Callable[..., EngineConfig], tokenizer_path: str, number: signal.Signals
) -> None:
    async def scenario() -> None:
        async with running(config()) as supervisor:
            read = supervisor.submit(GenerationRequest([1, 2, 3], LONG, ignore_eos=True))
            unread = [
                supervisor.submit(GenerationRequest([4, 5, 6 + n], 40, ignore_eos=True))
                for n in range(6)
            ]
            whole = supervisor.submit(GenerationRequest([9, 9, 9], 40, ignore_eos=True, whole=True))
            await next_of(read)
            first_pid = supervisor.engine_pid
            assert first_pid is not None
            os.kill(first_pid, number)
            last = await collect(read)
            assert last.finish == "error" and last.error is not None and number.name in last.error
            await until(lambda: supervisor.state != "ready")
            assert supervisor.state == "restarting" and supervisor.reason is not None
            with pytest.raises(Unavailable, match="restarting") as refused:
                supervisor.submit(GenerationRequest([1], 1))
            assert refused.value.retry_after_seconds >= 1.0
            for n, stream in enumerate(unread):
                result = await collect(stream)
                assert (result.tokens, result.finish) == (40, "length")
                assert result.text == truth(tokenizer_path, [4, 5, 6 + n], 40)
            assert (await collect(whole)).text == truth(tokenizer_path, [9, 9, 9], 40)
            assert supervisor.engine_pid not in (None, first_pid)
            assert (supervisor.restarts, supervisor.fallbacks) == (1, 0)
            died = next(event for event in supervisor.events if event.kind == "died")
            assert died.cause == "engine_died" and number.name in died.message

    run(scenario())


def test_what_its_reader_has_given_up_does_not_begin_again(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config()) as supervisor:
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGSTOP)  # it does not see the cancellation
            left = supervisor.submit(GenerationRequest([1, 2], LONG, ignore_eos=True))
            left.cancel()
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            assert (await collect(left)).finish == "cancelled" and supervisor.in_flight == 0

    run(scenario())


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_stopped_child_is_found_killed_and_replaced(
    config: Callable[..., EngineConfig], device: str
) -> None:
    """On a CPU by its pace, where steps have told it: before that after 20 s here."""

    async def scenario() -> None:
        quick = config(device=device, prompt_token_seconds=0.0003)
        async with running(quick, limits=SOON_HUNG) as supervisor:
            for n in range(8):
                await collect(supervisor.submit(GenerationRequest([n] * 300, 1)))
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGSTOP)
            started = time.monotonic()
            result = await collect(
                supervisor.submit(GenerationRequest([1, 2], 10, ignore_eos=True))
            )
            assert result.finish == "length" and 0.9 < time.monotonic() - started < 10
            assert [event.cause for event in supervisor.events if event.kind == "died"] == [
                "health_timeout"
            ]

    run(scenario())


@pytest.mark.parametrize(
    ("cause", "starts"),
    [("load_failed", 2), ("load_oom", 2), ("backend_missing", 1), ("unsupported", 1)],
)
def test_an_engine_that_cannot_load_is_not_started_for_ever(
    config: Callable[..., EngineConfig], cause: str, starts: int
) -> None:
    async def scenario() -> None:
        async with running(config(fail_cause=cause), wait=False) as supervisor:
            assert supervisor.state == "loading"
            with pytest.raises(Unavailable):
                supervisor.submit(GenerationRequest([1], 1))
            with pytest.raises(EngineFailed, match=cause):
                await supervisor.wait_ready(20)
            assert (
                supervisor.state == "failed"
                and supervisor.reason is not None
                and cause in supervisor.reason
            )
            assert kinds(supervisor).count("started") == starts
            await asyncio.sleep(0.3)
            assert kinds(supervisor).count("started") == starts
            with pytest.raises(Unavailable, match="failed"):
                supervisor.submit(GenerationRequest([1], 1))

    run(scenario())


@pytest.mark.parametrize(
    ("cause", "restarts"),
    [
        ("load_oom", 0),
        ("load_failed", 0),
        ("backend_missing", 0),
        ("runtime_oom", 0),
        ("hang", 0),
        ("engine_died", 1),
        ("abort", 1),
        ("exit", 1),
    ],
)
def test_every_cause_on_the_gpu_ends_on_the_cpu_with_no_unread_request_lost(
    config: Callable[..., EngineConfig], cause: str, restarts: int
) -> None:
    async def scenario() -> None:
        gpu, cpu = config(device="gpu", fail_cause=cause, fail_after_steps=3), config(device="cpu")
        patient = SOON_HUNG if cause == "hang" else QUICK
        limits = msgspec.structs.replace(patient, return_first_seconds=600.0)
        async with running(gpu, cpu, limits=limits) as supervisor:
            streams = [
                supervisor.submit(GenerationRequest([7, n], 20, ignore_eos=True, whole=True))
                for n in range(8)
            ]
            results = [await collect(stream) for stream in streams]
            assert [(r.tokens, r.finish) for r in results] == [(20, "length")] * 8
            assert (supervisor.label, supervisor.fallbacks, supervisor.restarts) == (
                "fake/cpu",
                1,
                restarts,
            )
            fell = next(event for event in supervisor.events if event.kind == "fell_back")
            expected = {
                "hang": "health_timeout",
                "abort": "engine_died",
                "exit": "engine_died",
            }.get(cause, cause)
            assert (fell.cause, fell.engine) == (
                expected,
                "fake/gpu",
            ) and "fake/cpu" in fell.message

    run(scenario())


def test_the_preferred_engine_comes_back_after_a_pause(
    config: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    """It loads beside the one that serves, which finishes what it has."""

    async def scenario() -> None:
        gpu = config(device="gpu", fail_cause="runtime_oom", fail_once_file=str(tmp_path / "once"))
        limits = msgspec.structs.replace(QUICK, return_first_seconds=0.5)
        async with running(gpu, config(), limits=limits) as supervisor:
            await collect(supervisor.submit(GenerationRequest([1], 1)))
            assert supervisor.label == "fake/cpu"
            cpu_pid = supervisor.engine_pid
            old = supervisor.submit(GenerationRequest([1, 2], 2 * LONG, ignore_eos=True))
            await next_of(old)
            await until(lambda: supervisor.label == "fake/gpu")
            at = {event.kind: event.unix_seconds for event in supervisor.events}
            assert at["returning"] - at["fell_back"] >= 0.5
            new = await collect(supervisor.submit(GenerationRequest([1, 3], 5, ignore_eos=True)))
            rest = await collect(old)
            assert new.finish == "length" and rest.finish == "length"
            assert supervisor.engine_pid != cpu_pid
            await until(lambda: not alive(cpu_pid))
            assert (supervisor.fallbacks, supervisor.returns) == (1, 1)
            assert kinds(supervisor)[-2:] == ["returning", "returned"]

    run(scenario())


def test_a_fallback_that_died_is_not_started_beside_the_preferred_engine(
    config: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    """It dies while the preferred one comes back, and serves before the fallback's restart."""

    async def scenario() -> None:
        once = str(tmp_path / "once")
        gpu = config("gpu", fail_cause="runtime_oom", fail_once_file=once, load_seconds=0.3)
        limits = msgspec.structs.replace(QUICK, backoff_first_seconds=0.8)
        async with running(gpu, config(), limits=limits) as supervisor:
            await collect(supervisor.submit(GenerationRequest([1], 1)))
            await until(lambda: kinds(supervisor)[-1] == "returning")
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: kinds(supervisor)[-1] == "returned")
            await asyncio.sleep(1.0)
            assert kinds(supervisor)[-1] == "returned" and len(supervisor.pids) == 1

    run(scenario())


def test_an_engine_death_in_a_drain_is_reported_and_a_pause_counts_in_retry_after(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        limits = msgspec.structs.replace(QUICK, backoff_first_seconds=7.0)
        async with running(config(), limits=limits) as supervisor:
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: supervisor.state == "restarting")
            assert 6.0 < supervisor.retry_after_seconds() < 30.0
        async with running(config()) as supervisor:
            cut = supervisor.submit(GenerationRequest([1], LONG, ignore_eos=True))
            await next_of(cut)
            stopping = asyncio.create_task(supervisor.stop(drain=True, timeout_seconds=20))
            await until(lambda: supervisor.state == "draining")
            os.kill(supervisor.pids[0], signal.SIGSEGV)
            assert "SIGSEGV" in ((await collect(cut)).error or "")
            assert await stopping == 1 and supervisor.deaths == {"engine_died": 1}
            assert "restarting" not in kinds(supervisor)

    run(scenario())


def test_a_request_that_kills_every_engine_is_given_up_and_the_server_lives(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config(fail_cause="abort")) as supervisor:
            result = await collect(supervisor.submit(GenerationRequest([1], 5)))
            assert result.finish == "error" and "SIGABRT" in (result.error or "")
            assert kinds(supervisor).count("died") == 2
            await supervisor.wait_ready(20)

    run(scenario())
