"""Several models in one server, with real engine children of the fake backend: who is loaded, who
makes room, what a request waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from serving.engine.messages import GenerationRequest
from serving.errors import Busy, LoadFailed, Unavailable
from serving.http.admin_wire import ModelState
from serving.metrics import ServerMetrics
from serving.placement.decision import NoPlacement
from serving.registry import registry, tenant
from serving.registry.model import ModelRouter, Vocabulary, read_vocabulary
from serving.registry.options import ModelOptions
from serving.registry.prepare import Machine, prepare
from serving.registry.registry import Registry
from serving.registry.room import RegistryLimits
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.stream import merged
from serving.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("forked_engines")

MIB = 1 << 20
QUICK = RecoveryLimits(
    backoff_first_seconds=0.02, health_timeout_seconds=10.0, kill_after_seconds=1.0
)
ONE_AT_A_TIME = [
    RegistryLimits(most_loaded=1),
    RegistryLimits(memory_bytes=100 * MIB),
]  # an engine is expected to take 60 MiB


def model(name: str, load: Any = "start", **options: Any) -> ModelOptions:
    idle, wait = options.pop("idle", None), options.pop("standby", "cold")
    fast = {"step_seconds": 0.002, **options}
    return ModelOptions(
        source="fake",
        name=name,
        load=load,
        slots=2,
        options=fast,
        idle_unload_seconds=idle,
        standby=wait,
    )


@contextlib.asynccontextmanager
async def fleet_of(
    *models: ModelOptions, limits: RegistryLimits | None = None
) -> AsyncIterator[Registry]:
    machine = Machine()
    router = ModelRouter(ServerMetrics())
    registry = Registry(
        router,
        machine,
        lambda prepared, _: Supervisor(prepared.configs, limits=QUICK),
        limits or RegistryLimits(),
        {},
    )
    for one in models:
        registry.add(prepare(one, machine))
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
        await registry.hold(name)
    assert problem.value.retry_after_seconds > 0
    return problem.value


def started(registry: Registry, name: str) -> int:
    return [event.kind for event in registry.tenants[name].supervisor.events].count("started")


@pytest.mark.parametrize("limits", ONE_AT_A_TIME, ids=["by number", "by memory"])
def test_the_idle_make_room_and_the_busy_never_go(limits: RegistryLimits) -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b"), limits=limits) as registry:
            await until(lambda: registry.states() == {"a": "ready", "b": "unloaded"})
            held = await registry.hold("b")  # waits for the load; a was idle and went
            assert registry.states() == {"a": "unloaded", "b": "ready"}
            assert "to make room for b" in (registry.tenants["a"].supervisor.reason or "")
            pid = registry.tenants["b"].supervisor.engine_pid
            problem = await refused(registry, "a")
            assert problem.code == "no_room" and "b is busy" in problem.reason
            assert (
                registry.tenants["b"].supervisor.engine_pid == pid
                and registry.states()["b"] == "ready"
            )
            held()
            held()  # letting go twice is letting go once
            release = await registry.hold("a")
            assert registry.states() == {"a": "ready", "b": "unloaded"}
            release()
            counts = registry.tenants["b"].served_model.metrics
            assert (counts.loads["ready"], counts.unloads["evicted"]) == (1, 1)

    run(scenario())


def test_a_sequence_in_flight_keeps_its_model_whoever_holds_it() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a", step_seconds=0.005),
            model("b", "demand"),
            limits=RegistryLimits(most_loaded=1),
        ) as registry:
            await until(lambda: registry.states()["a"] == "ready")
            stream = registry.tenants["a"].supervisor.submit(
                GenerationRequest([1, 2], 100, ignore_eos=True)
            )
            assert (await refused(registry, "b")).code == "no_room"
            assert merged([delta async for delta in stream]).tokens == 100
            (await registry.hold("b"))()

    run(scenario())


def test_many_requests_for_a_model_that_is_not_loaded_load_it_once() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand", load_seconds=0.3)) as registry:
            assert (
                registry.states() == {"a": "unloaded"}
                and registry.tenants["a"].supervisor.pids == []
            )
            entering = [asyncio.create_task(registry.hold("a")) for _ in range(20)]
            await until(lambda: registry.states() == {"a": "loading"})
            for release in await asyncio.gather(*entering):
                release()
            assert started(registry, "a") == 1 and registry.tenants["a"].holders == 0

    run(scenario())


def test_who_waits_too_long_is_told_when_to_come_back_and_the_load_goes_on() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a", "demand", load_seconds=1.0), limits=RegistryLimits(load_wait_seconds=0.1)
        ) as registry:
            problem = await refused(registry, "a")
            assert problem.code == "loading" and "within 0.1 s" in problem.reason
            await until(lambda: registry.states()["a"] == "ready")
            (await registry.hold("a"))()
            assert started(registry, "a") == 1

    run(scenario())


def test_an_idle_model_is_unloaded_and_comes_back_when_it_is_asked_for() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", idle=0.3)) as registry:
            await until(lambda: registry.states()["a"] == "ready")
            release = await registry.hold("a")
            await asyncio.sleep(0.5)
            assert registry.states()["a"] == "ready"  # held, so not idle
            release()
            await until(lambda: registry.states()["a"] == "unloaded", 5)
            assert (
                "idle for" in (registry.tenants["a"].supervisor.reason or "")
                and registry.tenants["a"].supervisor.pids == []
            )
            state = ModelState.of(registry.tenants["a"])
            assert (
                state.on_demand
                and state.memory.measured_bytes is None
                and state.idle_seconds is not None
            )
            (await registry.hold("a"))()
            assert registry.tenants["a"].served_model.metrics.unloads["idle"] == 1

    run(scenario())


def test_what_an_administrator_unloads_stays_so_until_an_administrator_loads_it() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b", "demand")) as registry:
            await until(lambda: registry.states()["a"] == "ready")
            await registry.unload("a")
            assert "administrator" in (await refused(registry, "a")).reason
            await registry.load("a")
            (await registry.hold("a"))()
            await registry.remove("b")
            assert list(registry.tenants) == ["a"] == list(registry.router.models)

    run(scenario())


def test_unloading_lets_what_is_in_flight_finish() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a")) as registry:
            await until(lambda: registry.states()["a"] == "ready")
            stream = registry.tenants["a"].supervisor.submit(
                GenerationRequest([1, 2], 100, ignore_eos=True)
            )
            assert await registry.unload("a") == 0
            assert merged([delta async for delta in stream]).finish == "length"

    run(scenario())


def test_a_load_that_is_under_way_can_be_called_off() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand", load_seconds=20.0)) as registry:
            loading = asyncio.create_task(registry.load("a"))
            await until(lambda: bool(registry.tenants["a"].supervisor.pids))
            await registry.unload("a")
            with pytest.raises(LoadFailed):
                await loading
            assert (
                registry.states() == {"a": "unloaded"}
                and registry.tenants["a"].supervisor.pids == []
            )

    run(scenario())


def test_a_model_that_does_not_load_is_not_tried_by_every_request() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a"), model("bad", "demand", fail_cause="load_failed")
        ) as registry:
            problem = await refused(registry, "bad")
            assert (
                problem.code == "load_failed" and "told to fail with load_failed" in problem.reason
            )
            tries = started(registry, "bad")
            again = await refused(registry, "bad")
            assert again.code == "load_failed" and started(registry, "bad") == tries
            with pytest.raises(LoadFailed):
                await registry.load("bad")  # an administrator may
            assert (
                started(registry, "bad") > tries
                and registry.tenants["bad"].served_model.metrics.loads["failed"] == 2
            )
            await until(lambda: registry.states()["a"] == "ready")
            (await registry.hold("a"))()

    run(scenario())


def test_a_model_whose_engines_kept_dying_is_loaded_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant, "FUSE_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(registry, "idle_check_seconds", lambda tenants: 0.01)

    async def scenario() -> None:
        async with fleet_of(model("a", fail_cause="exit", fail_token=9)) as fleet:
            a = fleet.tenants["a"]
            for tries in (1, 2):
                await until(lambda: a.supervisor.state == "ready")
                for token in range(9):
                    poison = GenerationRequest([token, 9], 1)
                    if a.supervisor.state == "ready":
                        stream = a.supervisor.submit(poison)
                        assert merged([delta async for delta in stream]).finish == "error"
                    await until(lambda: a.supervisor.state in ("ready", "failed"))
                await until(lambda: a.retry_at > 0)
                problem = await refused(fleet, "a")
                assert "the engine died 5 times" in problem.reason
                assert 0 < problem.retry_after_seconds < 0.5 * tries

    run(scenario())


def test_what_can_never_fit_is_said_to_be_so() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a", "demand"), limits=RegistryLimits(memory_bytes=MIB)
        ) as registry:
            with pytest.raises(NoPlacement, match="even alone"):
                await registry.load("a")
            assert (await refused(registry, "a")).code == "load_failed"

    run(scenario())


def test_a_swap_goes_on_serving_and_one_that_fails_changes_nothing() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a"), limits=RegistryLimits(most_loaded=1)
        ) as registry:  # the one that leaves does not count
            await until(lambda: registry.states()["a"] == "ready")
            old = registry.tenants["a"]
            old_pid = old.supervisor.engine_pid
            with pytest.raises(LoadFailed, match="load_oom"):
                await registry.swap("a", model("a", fail_cause="load_oom"))
            assert (
                registry.tenants["a"] is old
                and old.supervisor.engine_pid == old_pid
                and registry.states()["a"] == "ready"
            )
            assert "the swap to fake failed" in (ModelState.of(registry.tenants["a"]).problem or "")

            stream = old.supervisor.submit(GenerationRequest([1, 2], 300, ignore_eos=True))
            swapping = asyncio.create_task(registry.swap("a", model("a", load_seconds=0.3)))
            await until(lambda: old.swapping_to is not None)
            with pytest.raises(Busy):
                await registry.swap("a", model("a"))
            before = await registry.hold("a")  # served by the old one meanwhile
            assert old.holders == 1
            await swapping
            new = registry.tenants["a"]
            assert (
                new is not old
                and new.supervisor.engine_pid != old_pid
                and registry.router.models["a"] is new.served_model
            )
            assert (
                registry.states() == {"a": "ready"}
                and ModelState.of(registry.tenants["a"]).problem is None
            )
            await asyncio.sleep(0.1)
            late = old.supervisor.submit(GenerationRequest([1], 2))  # by who held it before
            assert merged([delta async for delta in late]).finish == "length"
            before()
            assert (
                merged([delta async for delta in stream]).finish == "length"
            )  # nobody was cut off
            await until(lambda: old.supervisor.state == "unloaded")
            assert (
                new.served_model.metrics is old.served_model.metrics
                and new.served_model.metrics.unloads["swapped"] == 1
            )

    run(scenario())


def test_an_engine_that_is_killed_is_replaced_and_the_other_models_do_not_notice() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b")) as registry:
            await until(lambda: set(registry.states().values()) == {"ready"})
            other = registry.tenants["b"].supervisor.submit(
                GenerationRequest([1, 2], 200, ignore_eos=True)
            )
            unread = registry.tenants["a"].supervisor.submit(
                GenerationRequest([1, 2], 50, ignore_eos=True, whole=True)
            )
            pid = registry.tenants["a"].supervisor.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert merged([delta async for delta in other]).tokens == 200
            assert merged([delta async for delta in unread]).tokens == 50
            assert [registry.tenants[name].supervisor.restarts for name in ("a", "b")] == [1, 0]

    run(scenario())


def test_stopping_ends_every_engine_and_every_wait() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a"), model("b", load_seconds=50.0), model("c", "demand")
        ) as registry:
            await until(lambda: registry.states()["a"] == "ready")
            waiting = asyncio.create_task(registry.hold("c"))  # behind the load of b
            await until(
                lambda: (
                    bool(registry.tenants["b"].supervisor.pids)
                    and registry.tenants["c"].load is not None
                )
            )
            await registry.stop(drain=False)
            with pytest.raises(Unavailable):
                await waiting
            assert [tenant.supervisor.pids for tenant in registry.all()] == [[], [], []]

    run(scenario())


def test_what_ends_one_load_ends_no_other() -> None:
    class Broken(Supervisor):
        async def start(self, configs: Any = ()) -> None:
            raise RuntimeError("nobody thought of this")

    async def scenario() -> None:
        machine = Machine()
        registry = Registry(
            ModelRouter(ServerMetrics()),
            machine,
            lambda one, _: (Broken if one.name == "bad" else Supervisor)(one.configs, limits=QUICK),
            RegistryLimits(),
            {},
        )
        for one in (model("bad"), model("good")):
            registry.add(prepare(one, machine))
        await registry.start()
        try:
            await until(lambda: registry.states() == {"bad": "failed", "good": "ready"})
            reason = registry.tenants["bad"].supervisor.reason
            assert reason == "RuntimeError: nobody thought of this"
        finally:
            await registry.stop(drain=False)

    run(scenario())


def test_a_vocabulary_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(path: str) -> Vocabulary:
        threads.append(threading.current_thread().name)
        return read_vocabulary(path)

    async def scenario() -> None:
        async with fleet_of(model("a")) as registry:
            monkeypatch.setattr("serving.registry.registry.read_vocabulary", watched)
            await registry.swap("a", model("a"))
            assert threads and threading.main_thread().name not in threads

    run(scenario())


def test_a_later_placement_sees_the_cores_from_before_this_process_took_its_own() -> None:
    machine, before = Machine(), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.facts().allowed_cores == tuple(sorted(before))
    finally:
        os.sched_setaffinity(0, before)
