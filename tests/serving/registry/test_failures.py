"""What happens to the other models, and to those who wait, when a load or an engine fails."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from serving.engine.ipc_messages import GenerationRequest
from serving.errors import LoadFailed
from serving.metrics import ServerMetrics
from serving.placement.placement_policy import NoPlacement
from serving.registry import loaded_model
from serving.registry.engine_config import Machine, prepare
from serving.registry.eviction import RegistryLimits
from serving.registry.loaded_model import ModelRouter
from serving.registry.model_registry import Registry
from serving.supervisor.inflight_requests import merged
from serving.supervisor.supervisor import Supervisor
from tests.serving.registry.fleets import (
    MIB,
    QUICK,
    fleet_of,
    model,
    refused,
    run,
    started,
    until,
)

pytestmark = pytest.mark.usefixtures("forked_engines")


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
    monkeypatch.setattr(loaded_model, "RETRY_FIRST_SECONDS", 0.5)

    async def scenario() -> None:
        async with fleet_of(model("a", fail_cause="exit", fail_token=9, idle=600.0)) as fleet:
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
