"""The supervisor with real engine children: real signals, real sockets, the fake backend."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.errors import Overloaded, Unavailable
from crossover.serving.supervisor.admission import QueueBounds
from tests.serving.children import (
    LONG,
    alive,
    collect,
    kinds,
    next_of,
    run,
    running,
    truth,
    until,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_engines")


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_serves_on_either_loop(
    config: Callable[..., EngineConfig], tokenizer_path: str, loop_factory: Any
) -> None:
    async def scenario() -> None:
        async with running(config()) as supervisor:
            assert supervisor.ready is not None and supervisor.ready.info.settings.slots == 4
            prompts = [[5, 6, 7 + number] for number in range(9)]
            streams = [
                supervisor.submit(GenerationRequest(prompt, 30, ignore_eos=True))
                for prompt in prompts
            ]
            assert supervisor.in_flight == 9
            for prompt, stream in zip(prompts, streams, strict=True):
                whole = await collect(stream)
                assert (whole.tokens, whole.finish) == (30, "length")
                assert whole.text == truth(tokenizer_path, prompt, 30)
            assert supervisor.in_flight == 0
            assert supervisor.label == "fake/cpu" and supervisor.requests.stats is not None
        assert supervisor.state == "stopped"

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


def test_the_queue_has_an_end(config: Callable[..., EngineConfig]) -> None:
    async def scenario() -> None:
        async with running(config(slots=1), bounds=QueueBounds(waiting_requests=2)) as supervisor:
            streams = [
                supervisor.submit(GenerationRequest([1, n], 20, ignore_eos=True)) for n in range(3)
            ]
            with pytest.raises(Overloaded) as refused:
                supervisor.submit(GenerationRequest([1], 20))
            assert refused.value.kind == "queue_requests" and refused.value.retry_after_seconds > 0
            for stream in streams:
                assert (await collect(stream)).finish == "length"
            await collect(supervisor.submit(GenerationRequest([1], 1)))

    run(scenario())


def test_cancelling_frees_the_slot_and_ends_the_stream(config: Callable[..., EngineConfig]) -> None:
    async def scenario() -> None:
        async with running(config(slots=1)) as supervisor:
            first = supervisor.submit(GenerationRequest([1], 2000, ignore_eos=True))
            second = supervisor.submit(GenerationRequest([2], 3, ignore_eos=True))
            await next_of(first)
            first.cancel()
            started = time.monotonic()
            assert (await collect(first)).finish == "cancelled"
            assert (await collect(second)).finish == "length"
            assert time.monotonic() - started < 5.0, "its 2000 steps of 5 ms take 10 s"
            first.cancel()
            assert supervisor.in_flight == 0

    run(scenario())


def test_a_deadline_holds_although_the_engine_does_not_answer(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config()) as supervisor:
            (engine,) = supervisor.engines
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            late = supervisor.submit(GenerationRequest([1], 5, deadline_seconds=0.3))
            assert (await collect(late)).finish == "deadline"
            assert engine.in_flight == 1  # it is watched, and its slot is not free
            os.kill(engine.pid, signal.SIGCONT)
            await until(lambda: engine.in_flight == 0)

    run(scenario())


def test_canceling_and_deadlines_work_without_an_engine(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config(load_seconds=0.5)) as supervisor:
            cancelled = supervisor.submit(GenerationRequest([1], LONG, ignore_eos=True))
            late = supervisor.submit(
                GenerationRequest([2], LONG, ignore_eos=True, deadline_seconds=0.3)
            )
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: supervisor.state == "restarting")
            cancelled.cancel()
            assert (await collect(cancelled)).finish == "cancelled"
            assert (await collect(late)).finish == "deadline"

    run(scenario())


def test_draining_finishes_what_is_in_flight_and_refuses_the_rest(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config(slots=2)) as supervisor:
            streams = [
                supervisor.submit(GenerationRequest([1, n], 30, ignore_eos=True)) for n in range(5)
            ]
            stopping = asyncio.create_task(supervisor.stop(drain=True, timeout_seconds=20))
            await until(lambda: supervisor.state == "draining")
            with pytest.raises(Unavailable, match="draining"):
                supervisor.submit(GenerationRequest([1], 1))
            assert [(await collect(stream)).finish for stream in streams] == ["length"] * 5
            assert await stopping == 0 and supervisor.state == "stopped"

    run(scenario())


def test_a_drain_has_a_limit_and_a_second_stop_aborts_it(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario(limit: float, abort: bool) -> None:
        async with running(config()) as supervisor:
            stream = supervisor.submit(GenerationRequest([1], 2000, ignore_eos=True))
            await next_of(stream)
            started = time.monotonic()
            stopping = asyncio.create_task(supervisor.stop(drain=True, timeout_seconds=limit))
            if abort:
                await until(lambda: supervisor.state == "draining")
                await supervisor.stop(drain=False)
            assert await stopping == 1
            assert kinds(supervisor).count("stopped") == 1
            assert time.monotonic() - started < 8.0, "its 2000 steps of 5 ms take 10 s"
            result = await collect(stream)
            assert result.finish == "error" and "stopped" in (result.error or "")

    run(scenario(0.3, abort=False))
    run(scenario(60.0, abort=True))


def test_the_child_dies_with_its_parent(
    config: Callable[..., EngineConfig], tokenizer_path: str
) -> None:
    program = (
        "import asyncio, sys\n"
        "from crossover.serving.backends.backend_interface import EngineConfig\n"
        "from crossover.serving.engine.ipc_messages import GenerationRequest\n"
        "from crossover.serving.supervisor.engine_supervisor import Supervisor\n"
        "async def main():\n"
        "    s = Supervisor([EngineConfig('fake', '', 'fake', tokenizer_path=sys.argv[1], "
        "options={'step_seconds': 0.01})])\n"
        "    await s.start(); await s.wait_ready(20)\n"
        "    s.submit(GenerationRequest([1], 2000, ignore_eos=True))\n"
        "    print(s.engine_pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tokenizer_path], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))
