"""Several engines of one model behind one queue, as real children of the fake backend."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.errors import EngineFailed, Overloaded, Unavailable
from crossover.serving.supervisor import engine_supervisor, restart_policy
from crossover.serving.supervisor.admission import QueueBounds
from crossover.serving.supervisor.choose_engine import Histories, as_history
from crossover.serving.supervisor.engine_process import EngineProcess
from crossover.serving.supervisor.engine_supervisor import Supervisor
from tests.serving.children import LONG, QUICK, collect, kinds, next_of, run, running, truth, until

pytestmark = pytest.mark.usefixtures("forked_engines")


def in_flight(supervisor: Supervisor) -> list[int]:
    return [engine.in_flight for engine in supervisor.engines]


def test_requests_are_spread_and_wait_in_one_queue(
    config: Callable[..., EngineConfig], tokenizer_path: str
) -> None:
    async def scenario() -> None:
        bounds = QueueBounds(waiting_requests=3)
        async with running(config(), config(), side_by_side=True, bounds=bounds) as supervisor:
            assert len(supervisor.pids) == 2 and kinds(supervisor).count("ready") == 2
            streams = [
                supervisor.submit(GenerationRequest([5, 6, 7 + n], 100, ignore_eos=True))
                for n in range(11)
            ]
            assert in_flight(supervisor) == [4, 4] and supervisor.in_flight == 11
            with pytest.raises(Overloaded, match="3 requests are waiting"):
                supervisor.submit(GenerationRequest([1], 1))
            await next_of(streams[0])
            await next_of(streams[1])

            def counts() -> tuple[int, int] | None:
                stats = supervisor.requests.stats
                return stats and (stats.running, supervisor.requests.waiting_count)

            await until(lambda: counts() == (8, 3))
            for n, stream in enumerate(streams[2:], 2):
                assert (await collect(stream)).text == truth(tokenizer_path, [5, 6, 7 + n], 100)
            await until(lambda: supervisor.in_flight == 0)

    run(scenario())


def test_a_death_is_only_of_those_that_the_engine_ran(
    config: Callable[..., EngineConfig], tokenizer_path: str
) -> None:
    async def scenario() -> None:
        async with running(config(), config(), side_by_side=True) as supervisor:
            read = [
                supervisor.submit(GenerationRequest([1, 2, 3 + n], LONG, ignore_eos=True))
                for n in range(2)
            ]
            for stream in read:
                await next_of(stream)
            unread = [
                supervisor.submit(GenerationRequest([4, 5, 6 + n], 40, ignore_eos=True, whole=True))
                for n in range(6)
            ]
            waiting = supervisor.submit(GenerationRequest([9], 20, ignore_eos=True))
            dead, living = read[0].engine, read[1].engine  # either may have been ready first
            assert dead is not None and living is not None and dead is not living
            assert dead.pid is not None and in_flight(supervisor) == [4, 4]
            os.kill(dead.pid, signal.SIGKILL)
            last = await collect(read[0])
            assert last.finish == "error" and last.error is not None and "SIGKILL" in last.error
            assert supervisor.state == "ready" and supervisor.requests.engines == [living]
            for n, stream in enumerate(unread):
                assert (await collect(stream)).text == truth(tokenizer_path, [4, 5, 6 + n], 40)
            assert (await collect(waiting)).tokens == 20
            assert (await collect(read[1])).finish == "length"
            await until(lambda: len(supervisor.requests.engines) == 2)
            assert supervisor.restarts == 1 and dead.pid not in supervisor.pids

    run(scenario())


def test_the_model_is_restarting_only_while_no_engine_serves(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config(), config(), side_by_side=True) as supervisor:
            for pid in supervisor.pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: supervisor.state == "restarting")
            assert supervisor.ready is None
            await until(lambda: supervisor.state == "ready")
            after = supervisor.submit(GenerationRequest([1], 30, ignore_eos=True))
            assert (await collect(after)).tokens == 30

    run(scenario())


def test_what_waits_and_what_was_counted_outlives_the_engines(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        small = config(slots=2)
        settings = msgspec.structs.replace(small.settings, kv_tokens=256)
        small = msgspec.structs.replace(small, settings=settings)
        async with running(small, small, side_by_side=True) as supervisor:
            requests = supervisor.requests

            def preemptions() -> int:
                return 0 if requests.stats is None else requests.stats.preemptions

            for n in range(8):  # two of them are more than the KV cache of an engine has room for
                supervisor.submit(GenerationRequest([1, n], 150, ignore_eos=True, whole=True))
            await until(lambda: preemptions() > 1)
            counted = preemptions()
            for pid in supervisor.pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not requests.engines)
            assert requests.waiting_count == supervisor.in_flight >= 4
            assert preemptions() >= counted
            await until(lambda: supervisor.in_flight == 0)
            assert preemptions() >= counted

    run(scenario())


def test_what_killed_two_engines_is_not_started_a_third_time(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        configs = [config() for _ in range(3)]
        async with running(*configs, side_by_side=True) as supervisor:
            poison = supervisor.submit(GenerationRequest([1], LONG, ignore_eos=True, whole=True))
            for deaths in (1, 2):  # wherever it runs
                await until(lambda: poison.produced > 0)
                assert poison.engine is not None and poison.engine.pid is not None
                os.kill(poison.engine.pid, signal.SIGKILL)
                await until(lambda deaths=deaths: supervisor.deaths.total() == deaths)  # type: ignore[misc]
            assert (await collect(poison)).finish == "error" and supervisor.state == "ready"

    run(scenario())


def test_the_death_of_an_engine_that_never_read_a_request_is_not_one_of_the_request(
    config: Callable[..., EngineConfig], tokenizer_path: str
) -> None:
    """Stopped engines read nothing, as dead ones whose end has not been noticed yet."""

    def kill(engine: EngineProcess | None, number: int = signal.SIGKILL) -> None:
        assert engine is not None and engine.pid is not None
        os.kill(engine.pid, number)

    async def scenario() -> None:
        async with running(config(), config(), config(), side_by_side=True) as supervisor:
            for pid in supervisor.pids:
                os.kill(pid, signal.SIGSTOP)
            request = GenerationRequest([4, 5, 6], LONG, ignore_eos=True, whole=True)
            stream = supervisor.submit(request)
            first = stream.engine
            kill(first)
            await until(lambda: stream.engine is not first)
            second = stream.engine
            kill(second, signal.SIGCONT)
            await until(lambda: stream.produced > 0)
            kill(second)  # the one death that may be the request's doing
            await until(lambda: stream.engine is not second)
            third = stream.engine
            assert len({first, second, third}) == 3
            kill(third)
            assert (await collect(stream)).text == truth(tokenizer_path, [4, 5, 6], LONG)
            assert supervisor.deaths.total() == 3

    run(scenario())


def test_an_engine_that_cannot_load_leaves_the_model_to_the_others(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        broken = config(fail_cause="unsupported")
        async with running(config(), broken, side_by_side=True) as supervisor:
            assert len(supervisor.requests.engines) == 1 and "failed" in kinds(supervisor)
            assert (await collect(supervisor.submit(GenerationRequest([1], 5)))).tokens == 5
        async with running(broken, broken, side_by_side=True, wait=False) as supervisor:
            with pytest.raises(EngineFailed, match="unsupported"):
                await supervisor.wait_ready(20)

    run(scenario())


def test_the_model_is_ready_when_all_engines_are(config: Callable[..., EngineConfig]) -> None:
    async def scenario() -> None:
        slow = config(load_seconds=0.5)
        async with running(config(), slow, side_by_side=True, wait=False) as supervisor:
            await until(lambda: "ready" in kinds(supervisor))
            assert supervisor.state == "loading"
            await supervisor.wait_ready(20)
            assert len(supervisor.requests.engines) == 2

    run(scenario())


def test_an_engine_that_hangs_while_it_loads_does_not_keep_the_others_from_serving(
    config: Callable[..., EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after the silence that a load may have, and another one is started."""
    monkeypatch.setattr(engine_supervisor, "MIN_WAIT_FOR_OTHERS_SECONDS", 0.5)
    monkeypatch.setitem(restart_policy.LOAD_SILENCE_SECONDS, "cpu", 3.0)
    hanging = config(fail_cause="load_hang", fail_once_file=str(tmp_path / "hung"))

    async def scenario() -> None:
        async with running(config(), hanging, side_by_side=True) as supervisor:
            assert len(supervisor.requests.engines) == 1 and "late" in kinds(supervisor)
            hung = supervisor.engines[1]
            assert hung.ready is None and hung.alive
            assert (await collect(supervisor.submit(GenerationRequest([1], 5)))).tokens == 5
            await until(lambda: len(supervisor.requests.engines) == 2)
            assert supervisor.deaths == {"health_timeout": 1} and supervisor.restarts == 1
            assert not hung.alive and supervisor.state == "ready"
            died = next(event for event in supervisor.events if event.kind == "died")
            assert "no message from the loading engine for 3 s" in died.message

    run(scenario())


def test_a_model_does_not_wait_for_a_hanging_load_when_its_other_engine_is_given_up(
    config: Callable[..., EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loading meanwhile, and by the load of the other it is known what takes too long."""
    monkeypatch.setattr(engine_supervisor, "MIN_WAIT_FOR_OTHERS_SECONDS", 0.5)
    monkeypatch.setattr(engine_supervisor, "MIN_LAST_LOAD_SECONDS", 2.0)
    monkeypatch.setattr(engine_supervisor, "MAX_LOAD_SLOWDOWN", 1.0)
    hanging = config(fail_cause="load_hang", fail_once_file=str(tmp_path / "hung"))
    limits = msgspec.structs.replace(QUICK, deaths=2)

    async def scenario() -> None:
        async with running(config(), hanging, side_by_side=True, limits=limits) as supervisor:
            for deaths in (1, 2):
                await supervisor.wait_ready(20)
                os.kill(supervisor.requests.engines[0].pid or 0, signal.SIGKILL)
                await until(lambda deaths=deaths: supervisor.deaths.total() >= deaths)
            assert supervisor.state == "loading" and supervisor.reason is not None
            assert supervisor.reason.startswith("waiting for the other engines; fake/cpu #1 is")
            with pytest.raises(Unavailable, match=r"not available \(loading\)"):
                supervisor.submit(GenerationRequest([1], 5))
            await supervisor.wait_ready(20)
            assert supervisor.deaths["health_timeout"] == 1
            assert (await collect(supervisor.submit(GenerationRequest([1], 5)))).tokens == 5

    run(scenario())


def test_a_drain_finishes_those_that_wait_in_the_queue(config: Callable[..., EngineConfig]) -> None:
    async def scenario() -> None:
        one_slot = config(slots=1)
        async with running(one_slot, one_slot, side_by_side=True) as supervisor:
            streams = [
                supervisor.submit(GenerationRequest([1, n], 30, ignore_eos=True)) for n in range(6)
            ]
            stopping = asyncio.create_task(supervisor.stop(drain=True, timeout_seconds=20))
            for stream in streams:
                assert (await collect(stream)).finish == "length"
            assert await stopping == 0 and supervisor.state == "stopped"

    run(scenario())


def test_a_request_that_waits_too_long_ends_at_its_deadline(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        one_slot = config(slots=1)
        async with running(one_slot, one_slot, side_by_side=True) as supervisor:
            for n in range(2):
                supervisor.submit(GenerationRequest([1, n], LONG, ignore_eos=True))
            late = supervisor.submit(GenerationRequest([3], 5, deadline_seconds=0.3))
            assert (await collect(late)).finish == "deadline"

    run(scenario())


def test_the_wait_for_an_engine_is_part_of_the_queue_time(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        one_slot = config(slots=1)
        async with running(one_slot, one_slot, side_by_side=True) as supervisor:
            for n in range(2):
                supervisor.submit(GenerationRequest([1, n], 60, ignore_eos=True))
            delta = await collect(supervisor.submit(GenerationRequest([3], 2, ignore_eos=True)))
            assert delta.queue_seconds is not None and delta.queue_seconds > 0.2

    run(scenario())


def test_a_conversation_stays_on_the_engine_that_has_it_while_that_has_room(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config(slots=2), config(slots=2), side_by_side=True) as supervisor:
            first, second = supervisor.requests.engines  # in the order in which they were ready
            turn = list(range(40))
            other = supervisor.submit(GenerationRequest([7] * 40, LONG, ignore_eos=True))
            began = supervisor.submit(GenerationRequest(turn, 3, ignore_eos=True))
            assert (other.engine, began.engine) == (first, second)
            await collect(began)
            busy = supervisor.submit(GenerationRequest([8] * 40, LONG, ignore_eos=True))
            assert busy.engine is second  # which has more room
            turn += range(50, 80)
            again = supervisor.submit(GenerationRequest(turn, 3, ignore_eos=True))
            assert again.engine is second
            turn += range(90, 120)
            elsewhere = supervisor.submit(GenerationRequest(turn, 3, ignore_eos=True))
            assert elsewhere.engine is first  # since the other one is full

    run(scenario())


@pytest.mark.parametrize(("salt", "prefix_reuse"), [("b", True), ("a", False)])
def test_a_conversation_that_cannot_be_reused_is_no_reason_to_choose_an_engine(
    config: Callable[..., EngineConfig], salt: str, prefix_reuse: bool
) -> None:
    async def scenario() -> None:
        one = msgspec.structs.replace(config(slots=2), prefix_reuse=prefix_reuse)
        async with running(one, one, side_by_side=True) as supervisor:
            first, second = supervisor.requests.engines
            turn = list(range(40))
            other = supervisor.submit(GenerationRequest([7] * 40, 3, ignore_eos=True))
            began = supervisor.submit(GenerationRequest(turn, 3, ignore_eos=True, cache_salt="a"))
            assert (other.engine, began.engine) == (first, second)
            await collect(other)
            await collect(began)
            turn += range(50, 80)
            guess = GenerationRequest(turn, 3, ignore_eos=True, cache_salt=salt)
            assert supervisor.submit(guess).engine is first  # the first of two idle ones

    run(scenario())


def test_requests_one_after_the_other_use_the_slots_of_all_engines(
    config: Callable[..., EngineConfig],
) -> None:
    async def scenario() -> None:
        async with running(config(slots=2), config(slots=2), side_by_side=True) as supervisor:
            chosen = []
            for n in range(4):
                stream = supervisor.submit(GenerationRequest([n] * 40, 2, ignore_eos=True))
                await collect(stream)
                chosen.append(stream.engine)
            first, second = supervisor.requests.engines
            assert chosen == [first, second, first, second]

    run(scenario())


def test_a_shared_beginning_is_no_conversation() -> None:
    histories = Histories()
    system = list(range(100, 164))
    histories.add(as_history([*system, *range(30)]))
    assert histories.continued_by(as_history([*system, *range(500, 540)])) == 0
    assert histories.continued_by(as_history([*system, *range(30)])) == 0  # the same once more
    assert histories.continued_by(as_history([*system, *range(30), *range(40)])) == 64 + 30 - 8
