"""The admin routes on the wire: what they are asked for, and what they say of the models."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from serving.bounds import unbounded
from serving.errors import EngineState
from serving.http.wire.errors import scrubbed
from serving.http.wire.requests import Wire
from serving.registry.options import ModelOptions
from serving.registry.registry import Registry
from serving.registry.tenant import Tenant


class Choice(Wire, kw_only=True, frozen=True):
    """A model and how to run it. Options that are left out have the command line's value."""

    name: str
    source: str | UnsetType = UNSET
    wait: bool = True


def _choice(kind_of: Callable[[Any], Any]) -> type[Choice]:
    """Choice with every option of a model, as optional fields."""
    fields = [
        (field.name, kind_of(field.type) | UnsetType, UNSET)
        for field in msgspec.structs.fields(ModelOptions)
        if field.name not in ("name", "source", "load")  # it is loaded now
    ]
    made = msgspec.defstruct("ModelChoice", fields, bases=(Choice,), frozen=True, kw_only=True)
    return cast(type[Choice], made)


ModelChoice = _choice(lambda kind: kind)  # as documented
UnboundedChoice = _choice(unbounded)  # as decoded: model_options checks bounds and says the value


class UnloadRequest(Wire, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish. `forget`: the name is served no more."""

    name: str
    drain: bool = True
    forget: bool = False
    wait: bool = True


class ModelMemory(msgspec.Struct, frozen=True):
    """In bytes. `predicted_bytes`: what placement expects on `device`.

    `measured_bytes`: RSS of the engine's processes; None while none runs. `loaded`: one runs.
    """

    device: str
    predicted_bytes: int
    measured_bytes: int | None
    loaded: bool

    @classmethod
    def of(cls, tenant: Tenant) -> ModelMemory:
        loaded = bool(tenant.supervisor.pids)
        predicted = sum(attempt.need_bytes for attempt in tenant.attempts())
        return cls(
            tenant.placement.device,
            predicted or tenant.placement.need_bytes,
            tenant.measured_bytes if loaded else None,
            loaded,
        )


class LoadProgress(msgspec.Struct, frozen=True):
    """`fraction` is 0 to 1, None where it is not known."""

    what: str
    fraction: float | None


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `on_demand`: the next request loads it. `idle_seconds`: since its last request
    began or ended; None: it had none."""

    name: str
    source: str
    state: EngineState
    reason: str | None
    policy: str
    engine: str
    weight_format: str
    standby: str | None
    on_demand: bool
    loading: LoadProgress | None
    swapping_to: str | None
    problem: str | None
    memory: ModelMemory
    in_flight: int
    waiting: int
    idle_seconds: float | None
    idle_unload_seconds: float | None
    restarts: int
    fallbacks: int
    loads: int
    unloads: dict[str, int]
    engine_pid: int | None

    @classmethod
    def of(cls, tenant: Tenant) -> ModelState:
        supervisor, model = tenant.supervisor, tenant.prepared.model
        metrics, progress, coming = (
            tenant.served_model.metrics,
            tenant.progress(),
            tenant.swapping_to,
        )
        idle = None if tenant.used_unix is None else round(time.monotonic() - tenant.used_at, 3)
        return cls(
            name=tenant.name,
            source=model.source,
            state=tenant.state,
            reason=scrubbed(supervisor.reason) if supervisor.reason else None,
            policy=model.policy.value,
            engine=supervisor.label,
            weight_format=tenant.placement.weight_format,
            standby=supervisor.standby,
            on_demand=tenant.on_demand,
            loading=None if progress is None else LoadProgress(*progress),
            swapping_to=None if coming is None else coming.prepared.model.source,
            problem=scrubbed(tenant.problem) if tenant.problem else None,
            memory=ModelMemory.of(tenant),
            in_flight=supervisor.in_flight,
            waiting=supervisor.waiting,
            idle_seconds=idle,
            idle_unload_seconds=model.idle_unload_seconds,
            restarts=supervisor.restarts,
            fallbacks=supervisor.fallbacks,
            loads=metrics.loads["ready"],
            unloads=dict(metrics.unloads),
            engine_pid=supervisor.engine_pid,
        )


class UnlistedModel(msgspec.Struct, frozen=True):
    """One that is not on the list: not yet, since it is being got ready, or no more."""

    name: str
    state: Literal["loading", "forgotten"]


class RegistryState(msgspec.Struct, frozen=True):
    """All models, and the memory they share. `available_bytes`: what a new process can take.

    None: there is no limit.
    """

    models: list[ModelState]
    loaded_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    max_loaded_models: int | None

    @classmethod
    def of(cls, registry: Registry, available_bytes: int) -> RegistryState:
        models = [ModelState.of(tenant) for tenant in registry.tenants.values()]
        memories = [one.memory for one in models if one.memory.loaded]
        loaded = sum(one.measured_bytes or one.predicted_bytes for one in memories)
        limits = registry.limits
        return cls(models, loaded, available_bytes, limits.memory_bytes, limits.most_loaded)
