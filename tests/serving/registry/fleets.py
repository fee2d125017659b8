"""Several models in one server, with real engine children of the fake backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from serving.errors import Unavailable
from serving.metrics import ServerMetrics
from serving.registry.engine_config import Machine, prepare
from serving.registry.eviction import RegistryLimits
from serving.registry.loaded_model import ModelRouter
from serving.registry.model_registry import Registry
from serving.server_options import ModelOptions
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.supervisor import Supervisor

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
    events = registry.tenants[name].supervisor.events
    return sum(event.kind == "started" for event in events)
