"""The admin routes: which models there are, loading and unloading them.

| GET  /admin/models | state, memory, last use, requests            |
| POST /admin/load   | {"name": "small"}                            |
| POST /admin/unload | {"name": "small"}; "drain": false cuts off   |

They have a key of their own. A load or unload is answered when it is done, and goes on when the
client goes away. Errors: 404 no model, 503 no room, 507 it can not fit, 500 it did not load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from models.machine import available_bytes
from serving.http.api_errors import ApiError, try_again
from serving.http.api_schemas import Wire
from serving.http.http_request import Request
from serving.registry.loaded_model import ServedModel
from serving.registry.model_registry import Registry


class LoadRequest(Wire, kw_only=True, frozen=True):
    name: str


class UnloadRequest(LoadRequest, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish."""

    drain: bool = True


LOAD = msgspec.json.Decoder(LoadRequest)
UNLOAD = msgspec.json.Decoder(UnloadRequest)


async def list_models(request: Request) -> dict[str, Any]:
    """All models, and the memory they share; `memory_limit_bytes` null: what the machine has."""
    registry = _registry(request)
    return {
        "models": [_state(model) for model in registry.models.values()],
        "available_bytes": available_bytes(),  # what a new process can take
        "memory_limit_bytes": registry.limits.memory_bytes,
    }


def _state(model: ServedModel) -> dict[str, Any]:
    """One model, and what its engines' processes take (RSS); what is not known is null."""
    supervisor, placement = model.supervisor, model.placement
    predicted = sum(attempt.need_bytes for attempt in model.attempts())
    return {
        "name": model.served_name,
        "state": model.state,
        "reason": model.doing or supervisor.reason,
        "problem": model.problem,
        "engine": supervisor.label,
        "engine_pid": supervisor.engine_pid,
        "on_demand": model.on_demand,
        "memory": {
            "device": placement.device,
            "predicted_bytes": predicted or placement.need_bytes,
            "measured_bytes": model.measured_bytes if supervisor.pids else None,
        },
        "in_flight": supervisor.in_flight,
        "idle_seconds": round(time.monotonic() - model.used_at, 3),
    }


async def load_model(request: Request) -> dict[str, Any]:
    name = (await request.read(LOAD)).name
    return await _done(request, name, lambda registry: registry.load(name))


async def unload_model(request: Request) -> dict[str, Any]:
    body = await request.read(UNLOAD)
    return await _done(request, body.name, lambda registry: registry.unload(body.name, body.drain))


async def _done(
    request: Request, name: str, work: Callable[[Registry], Awaitable[Any]]
) -> dict[str, Any]:
    """Do it to its end, also when the client goes away; the state then."""
    registry = _registry(request)
    if name not in registry.models:
        text = f"there is no model {name[:200]!r}; /admin/models lists what there is"
        raise ApiError(404, text, "model_not_found", "name")
    try:
        await work(registry)
        await asyncio.sleep(0)  # a load that it has cancelled ends first
    except asyncio.CancelledError:
        text = f"the load of {name!r} was given up: it was unloaded, or the server ends"
        raise try_again(503, text, "unloaded", 5.0) from None
    return _state(registry.models[name])


def _registry(request: Request) -> Registry:
    assert isinstance(request.router, Registry), "admin routes are those of a registry"
    return request.router
