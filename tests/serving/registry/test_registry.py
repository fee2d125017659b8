"""Several models in one server, with real engine children of the fake backend: who is loaded, who
makes room, what a request waits for, and what a load or an engine that fails does to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from crossover.serving.engine.ipc_messages import GenerationRequest
from crossover.serving.errors import LoadFailed, Unavailable
from crossover.serving.hardware.machine_facts import allowed_cores
from crossover.serving.metrics import ServerMetrics
from crossover.serving.placement.placement_policy import NoPlacement
from crossover.serving.registry import served_model
from crossover.serving.registry.model_loader import RegistryLimits
from crossover.serving.registry.prepare_model import Host, prepare, with_shared_cores
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel
from crossover.serving.server_options import ModelOptions
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.inflight_requests import Stream
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.serving.children import collect

pytestmark = pytest.mark.usefixtures("forked_engines")

MIB = 1 << 20
ROOM_FOR_ONE = RegistryLimits(memory_bytes=100 * MIB)  # an engine is expected to take 60 MiB
QUICK = RecoveryLimits(
    backoff_first_seconds=0.02, health_timeout_seconds=10.0, kill_after_seconds=1.0
)


def model(name: str, load: Any = "start", idle: float | None = None, **options: Any) -> Any:
    fast = {"step_seconds": 0.002, **options}
    return ModelOptions(
        source="fake", name=name, load=load, slots=2, options=fast, idle_unload_seconds=idle
    )


@contextlib.asynccontextmanager
async def fleet_of(
    *models: ModelOptions,
    limits: RegistryLimits | None = None,
    kinds: dict[str, type[Supervisor]] | None = None,
) -> AsyncIterator[Registry]:
    machine = Host()
    registry = Registry(
        ServerMetrics(),
        machine,
        lambda one: (kinds or {}).get(one.name, Supervisor)(one.configs, limits=QUICK),
        limits or RegistryLimits(),
    )
    for one in models:
        registry.add_prepared(prepare(one, machine))
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop(drain=False)


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited())


async def until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def refused(registry: Registry, name: str) -> Unavailable:
    with pytest.raises(Unavailable) as problem:
        (await registry.acquire(name)).release()
        registry.models[name].engine_limits()
    assert problem.value.retry_after_seconds > 0
    return problem.value


def started(one: ServedModel) -> int:
    return sum(event.kind == "started" for event in one.supervisor.events)


def submit(one: ServedModel, tokens: int, whole: bool = False) -> Stream:
    request = GenerationRequest([1, 2], tokens, ignore_eos=True, whole=whole)
    return one.supervisor.submit(request)


def test_the_idle_make_room_and_the_busy_never_go() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b"), limits=ROOM_FOR_ONE) as registry:
            a, b = registry.models.values()
            await until(lambda: registry.states() == {"a": "ready", "b": "unloaded"})
            acquired = await registry.acquire("b")  # waits for the load; a was idle and went
            assert registry.states() == {"a": "unloaded", "b": "ready"}
            unloads = [event for event in b.supervisor.events if event.kind == "unloaded"]
            assert [one.message for one in unloads] == [
                "there is no room beside a; it is loaded at its first request"
            ]
            assert "to make room for b" in (a.supervisor.reason or "")
            pid = b.supervisor.engine_pid
            problem = await refused(registry, "a")
            assert problem.code == "no_room" and "while b are busy" in problem.reason
            assert b.supervisor.engine_pid == pid and b.state == "ready"
            acquired.release()
            stream = submit(b, 100)  # nobody holds it, and it is busy all the same
            assert (await refused(registry, "a")).code == "no_room"
            assert (await collect(stream)).tokens == 100
            (await registry.acquire("a")).release()
            assert registry.states() == {"a": "ready", "b": "unloaded"}
            assert (b.metrics.loads["ready"], b.metrics.unloads["evicted"]) == (1, 1)

    run(scenario())


def test_many_requests_for_a_model_that_is_not_loaded_load_it_once() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand", load_seconds=0.3)) as registry:
            a = registry.models["a"]
            assert registry.states() == {"a": "unloaded"} and a.supervisor.pids == []
            entering = [asyncio.create_task(registry.acquire("a")) for _ in range(20)]
            await until(lambda: registry.states() == {"a": "loading"})
            for acquired in await asyncio.gather(*entering):
                acquired.release()
            assert started(a) == 1 and a.reference_count == 0

    run(scenario())


def test_a_request_that_waits_too_long_gets_retry_after_and_the_load_goes_on() -> None:
    async def scenario() -> None:
        limits = RegistryLimits(load_wait_seconds=0.1)
        async with fleet_of(model("a", "demand", load_seconds=1.0), limits=limits) as registry:
            problem = await refused(registry, "a")
            assert problem.code == "loading" and "within 0.1 s" in problem.reason
            await until(lambda: registry.states()["a"] == "ready")
            (await registry.acquire("a")).release()
            assert started(registry.models["a"]) == 1

    run(scenario())


def test_an_idle_model_is_unloaded_and_loaded_again_on_demand() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", idle=0.3)) as registry:
            a = registry.models["a"]
            await until(lambda: a.state == "ready")
            acquired = await registry.acquire("a")
            await asyncio.sleep(0.5)
            assert a.state == "ready"  # held, so not idle
            acquired.release()
            await until(lambda: a.state == "unloaded")
            assert "idle for" in (a.supervisor.reason or "") and a.supervisor.pids == []
            (await registry.acquire("a")).release()
            assert a.metrics.unloads["idle"] == 1

    run(scenario())


def test_an_administrator_unloads_what_is_in_flight_ends_and_only_he_loads_it_again() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b", "demand", load_seconds=20.0)) as registry:
            await until(lambda: registry.states()["a"] == "ready")
            stream = submit(registry.models["a"], 100)
            assert await registry.unload("a") == 0
            assert (await collect(stream)).finish == "length"
            assert "administrator" in (await refused(registry, "a")).reason
            await registry.load("a")
            (await registry.acquire("a")).release()

            loading = asyncio.create_task(registry.load("b"))  # and calls off what is under way
            await until(lambda: bool(registry.models["b"].supervisor.pids))
            await registry.unload("b")
            with pytest.raises(Unavailable, match="was canceled"):
                await loading
            assert registry.states()["b"] == "unloaded"
            assert registry.models["b"].supervisor.pids == []

    run(scenario())


def test_a_load_that_is_canceled_before_its_first_step_can_be_requested_again() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", load="demand")) as registry:
            loading = asyncio.create_task(registry.load("a"))
            await asyncio.sleep(0)
            assert await registry.unload("a") == 0
            assert registry.states() == {"a": "unloaded"}
            with pytest.raises(Unavailable, match="was canceled"):
                await loading
            await registry.load("a")
            assert registry.states() == {"a": "ready"}

    run(scenario())


def test_a_request_during_an_unload_waits_for_it_and_loads_the_model() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a")) as registry:
            a = registry.models["a"]
            await until(lambda: a.state == "ready")
            for again in (registry.acquire, registry.load):
                stream = submit(a, 100)
                unloading = asyncio.create_task(registry.loader._unload(a, "idle", "idle"))
                await until(lambda: a.state == "draining")
                async with asyncio.timeout(10):
                    acquired = await again("a")
                assert (await collect(stream)).finish == "length" and await unloading == 0
                assert a.state == "ready"
                if acquired is not None:
                    acquired.release()

    run(scenario())


def test_an_eviction_goes_to_its_end_where_the_load_is_given_up() -> None:
    class Slow(Supervisor):
        async def stop(self, *given: Any, **more: Any) -> int:
            count = await super().stop(*given, **more)
            await asyncio.sleep(0.5)
            return count

    async def scenario() -> None:
        models = model("a"), model("b", "demand")
        async with fleet_of(*models, limits=ROOM_FOR_ONE, kinds={"a": Slow}) as registry:
            a, b = registry.models.values()
            await until(lambda: a.state == "ready")
            loading = asyncio.create_task(registry.load("b"))
            await until(lambda: a.state != "ready")
            await registry.unload("b")
            with pytest.raises(Unavailable, match="was canceled"):
                await loading
            await until(lambda: a.metrics.unloads["evicted"] == 1)
            assert a.state == "unloaded" and b.state == "unloaded"
            (await registry.acquire("a")).release()

    run(scenario())


def test_stopping_ends_every_engine_and_every_wait() -> None:
    async def scenario() -> None:
        models = model("a"), model("b", load_seconds=50.0), model("c", "demand")
        async with fleet_of(*models) as registry:
            await until(lambda: bool(registry.models["b"].supervisor.pids))
            waiting = asyncio.create_task(registry.acquire("c"))  # behind the load of b
            await until(lambda: registry.models["c"].load is not None)
            await registry.stop(drain=False)
            with pytest.raises(Unavailable):
                await waiting
            assert [one.supervisor.pids for one in registry.models.values()] == [[], [], []]

    run(scenario())


def test_a_later_placement_sees_the_cores_from_before_this_process_took_its_own() -> None:
    machine, before = Host(), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.facts().allowed_cores == tuple(sorted(before))
    finally:
        os.sched_setaffinity(0, before)


def test_a_model_that_does_not_load_is_not_tried_by_every_request() -> None:
    class Broken(Supervisor):
        async def start(self, configs: Any = ()) -> None:
            raise RuntimeError("nobody thought of this")

    async def scenario() -> None:
        models = model("broken"), model("bad", "demand", fail_cause="load_failed"), model("a")
        async with fleet_of(*models, kinds={"broken": Broken}) as registry:
            bad = registry.models["bad"]
            problem = await refused(registry, "bad")
            assert problem.code == "load_failed"
            assert "told to fail with load_failed" in problem.reason
            tries = started(bad)
            again = await refused(registry, "bad")
            assert again.code == "failed" and again.retry_after_seconds > 20
            assert "told to fail" in again.reason and started(bad) == tries
            with pytest.raises(LoadFailed):
                await registry.load("bad")  # an administrator may
            assert started(bad) > tries and bad.metrics.loads["failed"] == 2
            await until(lambda: registry.states()["a"] == "ready")  # what ends one ends no other
            (await registry.acquire("a")).release()
            reason = registry.models["broken"].supervisor.reason
            assert reason == "nobody thought of this"

    run(scenario())


def test_a_model_whose_engines_kept_dying_is_loaded_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_model, "RETRY_SECONDS", 0.5)  # 30 s

    async def scenario() -> None:
        async with fleet_of(model("a", fail_cause="exit", fail_token=9, idle=600.0)) as registry:
            a = registry.models["a"]
            for _ in range(2):
                await until(lambda: a.supervisor.state == "ready")
                for token in range(9):
                    poison = GenerationRequest([token, 9], 1)
                    if a.supervisor.state == "ready":
                        assert (await collect(a.supervisor.submit(poison))).finish == "error"
                    await until(lambda: a.supervisor.state in ("ready", "failed"))
                assert "the engine died 5 times" in (await refused(registry, "a")).reason

    run(scenario())


def test_a_model_that_never_fits_is_reported_and_given_up() -> None:
    async def scenario() -> None:
        limits = RegistryLimits(memory_bytes=MIB)
        async with fleet_of(model("a", "demand"), limits=limits) as registry:
            with pytest.raises(
                NoPlacement, match="^it would not fit even without other models: .* 1 MiB may be"
            ):
                await registry.load("a")
            assert (await refused(registry, "a")).code == "failed"
            assert registry.models["a"].has_given_up

    run(scenario())


def test_an_engine_that_is_killed_is_replaced_and_the_other_models_do_not_notice() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b")) as registry:
            await until(lambda: set(registry.states().values()) == {"ready"})
            a, b = registry.models.values()
            other, unread = submit(b, 200), submit(a, 50, whole=True)
            assert a.supervisor.engine_pid is not None
            os.kill(a.supervisor.engine_pid, signal.SIGKILL)
            assert (await collect(other)).tokens == 200
            assert (await collect(unread)).tokens == 50
            assert (a.supervisor.restarts, b.supervisor.restarts) == (1, 0)

    run(scenario())


@pytest.mark.parametrize(
    ("is_allowed", "memory_bytes", "seconds"),
    [(True, None, 2.0), (True, MIB, None), (False, None, None)],
)
def test_a_bridge_needs_memory_and_can_be_turned_off(
    is_allowed: bool, memory_bytes: int | None, seconds: float | None
) -> None:
    async def scenario() -> None:
        one = msgspec.structs.replace(model("a", load="demand"), bridge=is_allowed)
        limits = RegistryLimits(memory_bytes=memory_bytes)
        async with fleet_of(one, limits=limits) as registry:
            supervisor = registry.models["a"].supervisor
            estimate = supervisor.estimate_load_seconds
            assert (estimate is not None) == is_allowed
            if estimate is not None:
                assert estimate(supervisor.configs[0]) == seconds

    run(scenario())


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
def test_engines_are_told_whether_another_model_has_their_cores() -> None:
    first, second = allowed_cores()[:2]
    prepared = with_shared_cores(
        [
            prepare(msgspec.structs.replace(model(name), cores=str(core)), Host())
            for name, core in (("a", first), ("b", first), ("c", second))
        ]
    )
    shared = {one.name: [config.shares_cores for config in one.configs] for one in prepared}
    assert shared == {"a": [True], "b": [True], "c": [False]}
    (alone,) = with_shared_cores(prepared[:1])
    assert not alone.shares_cores
