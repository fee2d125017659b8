"""The admin routes: which models there are, loading and unloading them.

| GET  /admin/models | state, memory, last use, requests                                   |
| POST /admin/load   | {"name": "small"}, or a new one: {"name": "big", "source": "1b"}    |
| POST /admin/unload | {"name": "small"}; "drain": false cuts off                          |

They are there behind a key of their own alone (`--admin-key-env`, `--admin-key-file`); the API key
opens none of them. Their requests are trusted as the command line is: a source may be a path of
this machine or a hub name.

A load or unload is answered when it is done, and goes on when the client goes away. Errors: 404 no
model, 400 wrong options, 503 no room, 507 it can not fit, 500 it did not
load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from models.errors import ModelError
from models.machine import available_bytes
from serving.errors import EngineState, LoadFailed, NoRoom, ServingError
from serving.http.api_schemas import Wire
from serving.http.errors import ApiError, as_answer, invalid, scrubbed, try_again
from serving.http.http_request import Request
from serving.placement.placement_policy import NoPlacement
from serving.registry.engine_config import prepare
from serving.registry.loaded_model import ServedModel, read_vocabulary
from serving.registry.model_registry import Registry
from serving.server_options import ModelOptions, model_options
from serving.supervisor.supervisor import Background

# What one of these raises is in the model's state, in the log, and in the answer of whoever waited.
_background = Background("an admin route", expected=(ServingError, ModelError))


class UnloadRequest(Wire, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish."""

    name: str
    drain: bool = True


class ModelMemory(msgspec.Struct, frozen=True):
    """In bytes. `predicted_bytes`: what placement expects on `device`.

    `measured_bytes`: RSS of the engine's processes; None while none runs. `loaded`: one runs.
    """

    device: str
    predicted_bytes: int
    measured_bytes: int | None
    loaded: bool


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
    def of(cls, tenant: ServedModel) -> ModelState:
        supervisor, model = tenant.supervisor, tenant.prepared.model
        metrics, progress = tenant.metrics, tenant.progress()
        loaded = bool(supervisor.pids)
        predicted = sum(attempt.need_bytes for attempt in tenant.attempts())
        idle = None if tenant.used_unix is None else round(time.monotonic() - tenant.used_at, 3)
        return cls(
            name=tenant.served_name,
            source=model.source,
            state=tenant.state,
            reason=scrubbed(supervisor.reason) if supervisor.reason else None,
            policy=model.policy.value,
            engine=supervisor.label,
            weight_format=tenant.placement.weight_format,
            standby=supervisor.standby,
            on_demand=tenant.on_demand,
            loading=None if progress is None else LoadProgress(*progress),
            problem=scrubbed(tenant.problem) if tenant.problem else None,
            memory=ModelMemory(
                tenant.placement.device,
                predicted or tenant.placement.need_bytes,
                tenant.measured_bytes if loaded else None,
                loaded,
            ),
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


class RegistryState(msgspec.Struct, frozen=True):
    """All models, and the memory they share. `available_bytes`: what a new process can take.
    `memory_limit_bytes`, `max_loaded_models`: None: there is no limit."""

    models: list[ModelState]
    loaded_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    max_loaded_models: int | None


CHOICE = msgspec.json.Decoder(dict[str, Any])
UNLOAD = msgspec.json.Decoder(UnloadRequest)


async def list_models(request: Request) -> None:
    registry = _registry(request)
    states = [ModelState.of(tenant) for tenant in registry.models.values()]
    memories = [one.memory for one in states if one.memory.loaded]
    loaded = sum(one.measured_bytes or one.predicted_bytes for one in memories)
    limits = registry.limits
    known = RegistryState(
        states, loaded, available_bytes(), limits.memory_bytes, limits.most_loaded
    )
    await request.answer(known)


async def load_model(request: Request) -> None:
    registry, given = _registry(request), await request.read(CHOICE)
    name = given.get("name")
    if not isinstance(name, str):
        raise invalid("name: a text is needed", "name")
    if name in registry.models:
        more = sorted(given.keys() - {"name"})
        if more:
            text = f"{name} is served already, so {more[0]} cannot be given"
            raise invalid(text, more[0])
        await _do(request, name, registry.load(name))
        return
    if "source" not in given:
        raise _no_model(name, "name its source to add it")
    try:
        model = model_options(given, registry.shared, "the request")
    except ServingError as problem:
        raise invalid(str(problem), next((k for k in given if k in str(problem)), None)) from None

    async def add_and_load() -> None:
        prepared = await asyncio.to_thread(prepare, model, registry.machine)
        vocabulary = await asyncio.to_thread(read_vocabulary, prepared.tokenizer_path)
        registry.serve(prepared, vocabulary)
        await registry.load(prepared.name)

    await _do(request, name, add_and_load())


async def unload_model(request: Request) -> None:
    registry, body = _registry(request), await request.read(UNLOAD)
    if body.name not in registry.models:
        raise _no_model(body.name, "/admin/models lists what there is")
    await _do(request, body.name, registry.unload(body.name, body.drain))


async def _do(request: Request, name: str, work: Coroutine[Any, Any, Any]) -> None:
    """Run it to its end even when the client goes away; answer with the state then."""
    try:
        await asyncio.shield(_background.keep(work))
    except (ServingError, ModelError) as problem:
        raise _as_answer(problem) from problem
    await request.answer(ModelState.of(_registry(request).models[name]))


def _as_answer(problem: ServingError | ModelError) -> ApiError:
    text = str(problem)
    answer = as_answer(problem) if isinstance(problem, ServingError) else None
    if answer is not None:
        return answer
    match problem:
        case NoRoom():
            return try_again(503, text, "no_room", 5.0)
        case NoPlacement():
            return ApiError(507, text, code="does_not_fit")
        case LoadFailed():
            return ApiError(500, text, code="load_failed")
        case _:
            return invalid(text, code="wrong_model")


def _no_model(name: str, advice: str) -> ApiError:
    text = f"there is no model {name[:200]!r}; {advice}"
    return ApiError(404, text, code="model_not_found", param="name")


def _registry(request: Request) -> Registry:
    router = request.endpoint.router
    assert isinstance(router, Registry), "admin routes are those of a registry"
    return router


BODY = ModelOptions  # of /admin/load, where it adds a model; else its name alone
