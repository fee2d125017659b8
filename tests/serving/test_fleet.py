"""Several models in one server, with real engine children of the fake backend: who is loaded, who makes room, what a request waits for."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from serving.access import Limits
from serving.fleet import Busy, Fleet, FleetLimits, LoadFailed
from serving.metrics import ServerMetrics
from serving.narrator import Narrator
from serving.options import ModelOptions
from serving.placement import NoPlacement
from serving.preparation import Machine, prepare
from serving.protocol import ApiError
from serving.recovery import RecoveryLimits
from serving.service import Desk
from serving.streams import merged
from serving.supervisor import Supervisor

MIB = 1 << 20
QUICK = RecoveryLimits(backoff_first_seconds=0.02, health_timeout_seconds=2.0)
ONE_AT_A_TIME = [FleetLimits(most_loaded=1), FleetLimits(memory_bytes=100 * MIB)]  # an engine is expected to take 60 MiB


def model(name: str, load: Any = "start", **options: Any) -> ModelOptions:
    idle, wait = options.pop("idle", None), options.pop("standby", "cold")
    fast = {"step_seconds": 0.002, **options}
    return ModelOptions(source="fake", name=name, load=load, slots=2, options=fast, idle_unload_seconds=idle, standby=wait)


@contextlib.asynccontextmanager
async def fleet_of(*models: ModelOptions, limits: FleetLimits | None = None) -> AsyncIterator[Fleet]:
    machine = Machine(None, "", Narrator(io.StringIO()))
    desk = Desk(Limits(), ServerMetrics())
    fleet = Fleet(desk, machine, lambda prepared, _: Supervisor(prepared.configs, limits=QUICK), limits or FleetLimits(), {})
    for one in models:
        fleet.add(prepare(one, machine))
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop(drain=False)


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited())


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def refused(fleet: Fleet, name: str) -> ApiError:
    with pytest.raises(ApiError) as problem:
        await fleet.enter(name)
    assert problem.value.status == 503 and int(problem.value.headers["Retry-After"]) >= 1
    return problem.value


def started(fleet: Fleet, name: str) -> int:
    return [event.kind for event in fleet.tenants[name].supervisor.events].count("started")


@pytest.mark.parametrize("limits", ONE_AT_A_TIME, ids=["by number", "by memory"])
def test_the_idle_make_room_and_the_busy_never_go(limits: FleetLimits) -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b"), limits=limits) as fleet:
            await until(lambda: fleet.states() == {"a": "ready", "b": "unloaded"})
            held = await fleet.enter("b")  # waits for the load; a was idle and went
            assert fleet.states() == {"a": "unloaded", "b": "ready"}
            assert "to make room for b" in (fleet.tenants["a"].supervisor.reason or "")
            pid = fleet.tenants["b"].supervisor.engine_pid
            problem = await refused(fleet, "a")
            assert problem.code == "no_room" and "b is busy" in problem.message
            assert fleet.tenants["b"].supervisor.engine_pid == pid and fleet.states()["b"] == "ready"
            held()
            held()  # letting go twice is letting go once
            release = await fleet.enter("a")
            assert fleet.states() == {"a": "ready", "b": "unloaded"}
            release()
            counts = fleet.tenants["b"].service.metrics
            assert (counts.loads["ready"], counts.unloads["evicted"]) == (1, 1)

    run(scenario())


def test_a_sequence_in_flight_keeps_its_model_whoever_holds_it() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b", "demand"), limits=FleetLimits(most_loaded=1)) as fleet:
            await until(lambda: fleet.states()["a"] == "ready")
            stream = fleet.tenants["a"].supervisor.submit([1, 2], 100, ignore_eos=True)
            assert (await refused(fleet, "b")).code == "no_room"
            assert merged([delta async for delta in stream]).tokens == 100
            (await fleet.enter("b"))()

    run(scenario())


def test_many_requests_for_a_model_that_is_not_loaded_load_it_once() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand", load_seconds=0.3)) as fleet:
            assert fleet.states() == {"a": "unloaded"} and fleet.tenants["a"].supervisor.pids == []
            entering = [asyncio.create_task(fleet.enter("a")) for _ in range(20)]
            await asyncio.sleep(0.05)
            assert fleet.states() == {"a": "loading"}
            for release in await asyncio.gather(*entering):
                release()
            assert started(fleet, "a") == 1 and fleet.tenants["a"].holders == 0

    run(scenario())


def test_who_waits_too_long_is_told_when_to_come_back_and_the_load_goes_on() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand", load_seconds=1.0), limits=FleetLimits(load_wait_seconds=0.1)) as fleet:
            problem = await refused(fleet, "a")
            assert problem.code == "loading" and "within 0.1 s" in problem.message
            await until(lambda: fleet.states()["a"] == "ready")
            (await fleet.enter("a"))()
            assert started(fleet, "a") == 1

    run(scenario())


def test_an_idle_model_is_unloaded_and_comes_back_when_it_is_asked_for() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", idle=0.3)) as fleet:
            await until(lambda: fleet.states()["a"] == "ready")
            release = await fleet.enter("a")
            await asyncio.sleep(0.5)
            assert fleet.states()["a"] == "ready"  # held, so not idle
            release()
            await until(lambda: fleet.states()["a"] == "unloaded", 5)
            assert "idle for" in (fleet.tenants["a"].supervisor.reason or "") and fleet.tenants["a"].supervisor.pids == []
            state = fleet.state_of_model("a")
            assert state.on_demand and state.memory.measured_bytes is None and state.idle_seconds is not None
            (await fleet.enter("a"))()
            assert fleet.tenants["a"].service.metrics.unloads["idle"] == 1

    run(scenario())


def test_what_an_administrator_unloads_stays_so_until_an_administrator_loads_it() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b", "demand")) as fleet:
            await until(lambda: fleet.states()["a"] == "ready")
            await fleet.unload("a")
            assert "administrator" in (await refused(fleet, "a")).message
            await fleet.load("a")
            (await fleet.enter("a"))()
            await fleet.remove("b")
            assert list(fleet.tenants) == ["a"] == list(fleet.desk.services)

    run(scenario())


def test_unloading_lets_what_is_in_flight_finish() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a")) as fleet:
            await until(lambda: fleet.states()["a"] == "ready")
            stream = fleet.tenants["a"].supervisor.submit([1, 2], 100, ignore_eos=True)
            assert await fleet.unload("a") == 0
            assert merged([delta async for delta in stream]).finish == "length"

    run(scenario())


def test_a_load_that_is_under_way_can_be_called_off() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand", load_seconds=20.0)) as fleet:
            loading = asyncio.create_task(fleet.load("a"))
            await until(lambda: bool(fleet.tenants["a"].supervisor.pids))
            await fleet.unload("a")
            with pytest.raises(LoadFailed):
                await loading
            assert fleet.states() == {"a": "unloaded"} and fleet.tenants["a"].supervisor.pids == []

    run(scenario())


def test_a_model_that_does_not_load_is_not_tried_by_every_request() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("bad", "demand", fail_cause="load_failed")) as fleet:
            problem = await refused(fleet, "bad")
            assert problem.code == "load_failed" and "told to fail with load_failed" in problem.message
            tries = started(fleet, "bad")
            again = await refused(fleet, "bad")
            assert again.code == "load_failed" and started(fleet, "bad") == tries
            with pytest.raises(LoadFailed):
                await fleet.load("bad")  # an administrator may
            assert started(fleet, "bad") > tries and fleet.tenants["bad"].service.metrics.loads["failed"] == 2
            await until(lambda: fleet.states()["a"] == "ready")
            (await fleet.enter("a"))()

    run(scenario())


def test_what_can_never_fit_is_said_to_be_so() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a", "demand"), limits=FleetLimits(memory_bytes=MIB)) as fleet:
            with pytest.raises(NoPlacement, match="even alone"):
                await fleet.load("a")
            assert (await refused(fleet, "a")).code == "load_failed"

    run(scenario())


def test_a_swap_goes_on_serving_and_one_that_fails_changes_nothing() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), limits=FleetLimits(most_loaded=1)) as fleet:  # the one that leaves does not count
            await until(lambda: fleet.states()["a"] == "ready")
            old = fleet.tenants["a"]
            old_pid = old.supervisor.engine_pid
            with pytest.raises(LoadFailed, match="load_oom"):
                await fleet.swap("a", model("a", fail_cause="load_oom"))
            assert fleet.tenants["a"] is old and old.supervisor.engine_pid == old_pid and fleet.states()["a"] == "ready"
            assert "the swap to fake failed" in (fleet.state_of_model("a").problem or "")

            stream = old.supervisor.submit([1, 2], 300, ignore_eos=True)
            swapping = asyncio.create_task(fleet.swap("a", model("a", load_seconds=0.3)))
            await until(lambda: old.swapping_to is not None)
            with pytest.raises(Busy):
                await fleet.swap("a", model("a"))
            before = await fleet.enter("a")  # served by the old one meanwhile
            assert old.holders == 1
            await swapping
            new = fleet.tenants["a"]
            assert new is not old and new.supervisor.engine_pid != old_pid and fleet.desk.services["a"] is new.service
            assert fleet.states() == {"a": "ready"} and fleet.state_of_model("a").problem is None
            before()
            assert merged([delta async for delta in stream]).finish == "length"  # nobody was cut off
            await until(lambda: old.supervisor.state == "unloaded")
            assert new.service.metrics is old.service.metrics and new.service.metrics.unloads["swapped"] == 1

    run(scenario())


def test_an_engine_that_is_killed_is_replaced_and_the_other_models_do_not_notice() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b")) as fleet:
            await until(lambda: set(fleet.states().values()) == {"ready"})
            other = fleet.tenants["b"].supervisor.submit([1, 2], 200, ignore_eos=True)
            unread = fleet.tenants["a"].supervisor.submit([1, 2], 50, ignore_eos=True, whole=True)
            pid = fleet.tenants["a"].supervisor.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert merged([delta async for delta in other]).tokens == 200
            assert merged([delta async for delta in unread]).tokens == 50
            assert [fleet.tenants[name].supervisor.restarts for name in ("a", "b")] == [1, 0]

    run(scenario())


def test_stopping_ends_every_engine_and_every_wait() -> None:
    async def scenario() -> None:
        async with fleet_of(model("a"), model("b", load_seconds=20.0), model("c", "demand")) as fleet:
            await until(lambda: fleet.states()["a"] == "ready")
            waiting = asyncio.create_task(fleet.enter("c"))  # behind the load of b
            await until(lambda: bool(fleet.tenants["b"].supervisor.pids) and fleet.tenants["c"].load is not None)
            await fleet.stop(drain=False)
            with pytest.raises(ApiError):
                await waiting
            assert [tenant.supervisor.pids for tenant in fleet.all()] == [[], [], []]

    run(scenario())
