"""The admin routes on the wire: what they are asked for, and what they say of the models (state, memory, last use)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from serving.options import Standby
from serving.placement import Policy
from serving.protocol import Wire, scrubbed

if TYPE_CHECKING:
    from serving.fleet import Tenant


class ModelChoice(Wire, kw_only=True, frozen=True):
    """A model and how to run it: the keys of a models file; what is left out is as the server was started with."""

    name: str
    source: str | UnsetType = UNSET
    backend: str | None | UnsetType = UNSET
    weight_format: str | None | UnsetType = UNSET
    policy: Policy | UnsetType = UNSET
    threads: int | None | UnsetType = UNSET
    cores: str | UnsetType = UNSET
    slots: int | UnsetType = UNSET
    context_tokens: int | UnsetType = UNSET
    kv_tokens: int | None | UnsetType = UNSET
    kv_dtype: str | UnsetType = UNSET
    prefill_tokens: int | UnsetType = UNSET
    step_seconds_target: float | UnsetType = UNSET
    prefix_reuse: bool | UnsetType = UNSET
    options: dict[str, Any] | UnsetType = UNSET
    check_memory: bool | UnsetType = UNSET
    standby: Standby | UnsetType = UNSET
    idle_unload_seconds: float | None | UnsetType = UNSET
    wait: bool = True


class UnloadRequest(Wire, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish. `forget`: the name is served no more."""

    name: str
    drain: bool = True
    forget: bool = False
    wait: bool = True


class ModelMemory(msgspec.Struct, frozen=True):
    """In bytes. `predicted_bytes`: weights, KV cache and overhead as placement expects them, on `device`. `measured_bytes`: resident memory
    of the engine's processes now; None while none runs. `loaded`: an engine process lives."""

    device: str
    predicted_bytes: int
    measured_bytes: int | None
    loaded: bool


class LoadProgress(msgspec.Struct, frozen=True):
    """`fraction` is 0 to 1, None where it is not known."""

    what: str
    fraction: float | None


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `on_demand`: the next request loads it. `idle_seconds`: since its last request came or ended; None: there was none."""

    name: str
    source: str
    state: str
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
        supervisor, prepared = tenant.supervisor, tenant.prepared
        pids = supervisor.pids
        placement = tenant.placement
        predicted = sum(attempt.need_bytes for attempt in tenant.attempts())
        metrics = tenant.service.metrics
        return cls(
            name=tenant.name,
            source=prepared.model.source,
            state=state_of(supervisor.state, tenant.load is not None),
            reason=scrubbed(supervisor.reason) if supervisor.reason else None,
            policy=prepared.model.policy.value,
            engine=supervisor.label,
            weight_format=placement.weight_format,
            standby=supervisor.standby,
            on_demand=tenant.on_demand,
            loading=_progress(tenant),
            swapping_to=tenant.swapping_to.prepared.model.source if tenant.swapping_to is not None else None,
            problem=scrubbed(tenant.problem) if tenant.problem else None,
            memory=ModelMemory(placement.device, predicted or placement.need_bytes, memory_of(pids) if pids else None, bool(pids)),
            in_flight=supervisor.in_flight,
            waiting=supervisor.waiting,
            idle_seconds=None if tenant.used_unix is None else round(time.monotonic() - tenant.used_at, 3),
            idle_unload_seconds=prepared.model.idle_unload_seconds,
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


class FleetState(msgspec.Struct, frozen=True):
    """All models, and the memory they share. `available_bytes`: what a new process can take; the limits are None where there are none."""

    models: list[ModelState]
    loaded_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    max_loaded_models: int | None


def state_of(supervisor_state: str, loading: bool) -> str:
    """The supervisor's word, but a model whose load has been asked for is loading even before its engine is started."""
    return "loading" if loading and supervisor_state in ("unloaded", "failed") else supervisor_state


def memory_of(pids: Iterable[int]) -> int:
    """Resident bytes of these processes; one that has ended meanwhile counts nothing."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


def _progress(tenant: Tenant) -> LoadProgress | None:
    for one in (tenant.swapping_to, tenant):
        said: Any = one.supervisor.loading if one is not None else None
        if said is not None and one is not None and one.supervisor.state == "loading":
            return LoadProgress(said.what, said.fraction)
    return LoadProgress(tenant.doing, None) if tenant.doing is not None else None
