"""Several models in one server, with real engine children of the fake backend: who is loaded, who
makes room, what a request waits for.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from serving.engine.ipc_messages import GenerationRequest
from serving.errors import LoadFailed, Unavailable
from serving.registry.engine_config import Machine
from serving.registry.eviction import RegistryLimits
from serving.supervisor.inflight_requests import merged
from tests.serving.registry.fleets import (
    ONE_AT_A_TIME,
    fleet_of,
    model,
    refused,
    run,
    started,
    until,
)

pytestmark = pytest.mark.usefixtures("forked_engines")


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
            assert registry.tenants["a"].on_demand and registry.tenants["a"].used_unix is not None
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


def test_stopping_ends_every_engine_and_every_wait() -> None:
    async def scenario() -> None:
        async with fleet_of(
            model("a"), model("b", load_seconds=50.0), model("c", "demand")
        ) as registry:
            await until(lambda: bool(registry.tenants["b"].supervisor.pids))
            waiting = asyncio.create_task(registry.hold("c"))  # behind the load of b
            await until(lambda: registry.tenants["c"].load is not None)
            await registry.stop(drain=False)
            with pytest.raises(Unavailable):
                await waiting
            assert [tenant.supervisor.pids for tenant in registry.all()] == [[], [], []]

    run(scenario())


def test_a_later_placement_sees_the_cores_from_before_this_process_took_its_own() -> None:
    machine, before = Machine(), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.facts().allowed_cores == tuple(sorted(before))
    finally:
        os.sched_setaffinity(0, before)
