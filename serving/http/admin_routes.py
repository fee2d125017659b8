"""The admin routes: which models there are, loading and unloading them.

| GET  /admin/models | state, memory, last use, requests                                   |
| POST /admin/load   | {"name": "small"}, or a new one: {"name": "big", "source": "1b"}    |
| POST /admin/unload | {"name": "small"}; "drain": false cuts off                          |

They have a key of their own, and are trusted as the command line is: a source may be a path of this
machine or a hub name. A load or unload is answered when it is done, and goes on when the client
goes away. Errors: 404 no model, 400 wrong options, 503 no room, 507 it can not fit, 500 it did not
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
from serving.errors import LoadFailed, NoRoom, ServingError
from serving.http.api_schemas import Wire
from serving.http.errors import ApiError, as_answer, invalid, scrubbed, try_again
from serving.http.http_request import Request
from serving.placement.placement_policy import NoPlacement
from serving.registry.engine_config import prepare
from serving.registry.loaded_model import ServedModel, read_vocabulary
from serving.registry.model_registry import Registry
from serving.server_options import model_options
from serving.supervisor.supervisor import Background

# What one of these raises is in the model's state, in the log, and in the answer of whoever waited.
_background = Background("an admin route", expected=(ServingError, ModelError))


class UnloadRequest(Wire, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish."""

    name: str
    drain: bool = True


CHOICE = msgspec.json.Decoder(dict[str, Any])
UNLOAD = msgspec.json.Decoder(UnloadRequest)


async def list_models(request: Request) -> None:
    """All models, and the memory they share; a limit that is null does not hold."""
    registry = _registry(request)
    states = [_state(tenant) for tenant in registry.models.values()]
    memories = [one["memory"] for one in states if one["memory"]["loaded"]]
    loaded = sum(one["measured_bytes"] or one["predicted_bytes"] for one in memories)
    shared = {
        "loaded_bytes": loaded,
        "available_bytes": available_bytes(),  # what a new process can take
        "memory_limit_bytes": registry.limits.memory_bytes,
    }
    await request.answer({"models": states} | shared)


def _state(tenant: ServedModel) -> dict[str, Any]:
    """One model, and what its engines' processes take (RSS); what is not known is null."""
    supervisor, model = tenant.supervisor, tenant.prepared.model
    metrics, progress = tenant.metrics, tenant.progress()
    is_loaded = bool(supervisor.pids)
    predicted = sum(attempt.need_bytes for attempt in tenant.attempts())
    idle = None if not tenant.was_used else round(time.monotonic() - tenant.used_at, 3)
    return {
        "name": tenant.served_name,
        "source": model.source,
        "state": tenant.state,
        "reason": scrubbed(supervisor.reason or "") or None,
        "policy": model.policy,
        "engine": supervisor.label,
        "weight_format": tenant.placement.weight_format,
        "on_demand": tenant.on_demand,
        "loading": progress and {"what": progress[0], "fraction": progress[1]},
        "problem": scrubbed(tenant.problem or "") or None,
        "memory": {
            "device": tenant.placement.device,
            "predicted_bytes": predicted or tenant.placement.need_bytes,
            "measured_bytes": tenant.measured_bytes if is_loaded else None,
            "loaded": is_loaded,
        },
        "in_flight": supervisor.in_flight,
        "idle_seconds": idle,
        "restarts": supervisor.restarts,
        "fallbacks": supervisor.fallbacks,
        "loads": metrics.loads["ready"],
        "engine_pid": supervisor.engine_pid,
    }


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
        added = registry.serve(prepared, vocabulary)
        try:
            await registry.load(prepared.name)
        except Exception:
            if added.on_demand and added.load is None:  # else others have plans with it
                await registry.forget(prepared.name)
            raise

    await _do(request, name, add_and_load())


async def unload_model(request: Request) -> None:
    registry, body = _registry(request), await request.read(UNLOAD)
    if body.name not in registry.models:
        raise _no_model(body.name, "/admin/models lists what there is")
    await _do(request, body.name, registry.unload(body.name, body.drain))


async def _do(request: Request, name: str, work: Coroutine[Any, Any, Any]) -> None:
    """Run it to its end even when the client goes away; answer with the state then."""
    task = _background.keep(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        text = f"the load of {name!r} was given up: it was unloaded, or the server ends"
        raise try_again(503, text, "unloaded", 5.0) from None
    except (ServingError, ModelError) as problem:
        answer = as_answer(problem)
        text = str(problem)
        match problem:
            case NoRoom():
                answer = try_again(503, text, "no_room", 5.0)
            case NoPlacement():
                answer = ApiError(507, text, "does_not_fit")
            case LoadFailed():
                answer = ApiError(500, text, "load_failed")
        raise answer or invalid(text, code="wrong_model") from problem
    await request.answer(_state(_registry(request).models[name]))


def _no_model(name: str, advice: str) -> ApiError:
    return ApiError(404, f"there is no model {name[:200]!r}; {advice}", "model_not_found", "name")


def _registry(request: Request) -> Registry:
    router = request.endpoint.router
    assert isinstance(router, Registry), "admin routes are those of a registry"
    return router
