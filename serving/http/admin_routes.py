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
from collections.abc import Awaitable
from typing import Any

import msgspec

from models.errors import ModelError
from models.machine import available_bytes
from serving.errors import EngineState, ServingError
from serving.http.api_errors import ApiError, as_answer, invalid, try_again
from serving.http.api_schemas import Wire
from serving.http.http_request import Request
from serving.registry.model_registry import Registry, ServedModel


class LoadRequest(Wire, kw_only=True, frozen=True):
    name: str


class UnloadRequest(Wire, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish."""

    name: str
    drain: bool = True


LOAD = msgspec.json.Decoder(LoadRequest)
UNLOAD = msgspec.json.Decoder(UnloadRequest)


async def list_models(request: Request) -> None:
    """All models, and the memory they share; `memory_limit_bytes` null: what the machine has."""
    registry = request.endpoint.router
    await request.answer(
        {
            "models": [_state(model) for model in registry.models.values()],
            "available_bytes": available_bytes(),  # what a new process can take
            "memory_limit_bytes": registry.limits.memory_bytes,
        }
    )


def _state(model: ServedModel) -> dict[str, Any]:
    """One model, and what its engines' processes take (RSS); what is not known is null."""
    supervisor, placement = model.supervisor, model.placement
    loading = supervisor.loading if supervisor.state == EngineState.loading else None
    predicted = sum(attempt.need_bytes for attempt in model.attempts())
    return {
        "name": model.served_name,
        "source": model.prepared.model.source,
        "state": model.state,
        "reason": supervisor.reason,
        "policy": model.prepared.model.policy,
        "engine": supervisor.label,
        "engine_pid": supervisor.engine_pid,
        "weight_format": placement.weight_format,
        "on_demand": model.on_demand,
        "loading": loading and {"what": loading.what, "fraction": loading.fraction},
        "memory": {
            "device": placement.device,
            "predicted_bytes": predicted or placement.need_bytes,
            "measured_bytes": model.measured_bytes if supervisor.pids else None,
        },
        "in_flight": supervisor.in_flight,
        "idle_seconds": round(time.monotonic() - model.used_at, 3),
    }


async def load_model(request: Request) -> None:
    registry, body = request.endpoint.router, await request.read(LOAD)
    _check_name(registry, body.name)
    await _do(request, body.name, registry.load(body.name))


async def unload_model(request: Request) -> None:
    registry, body = request.endpoint.router, await request.read(UNLOAD)
    _check_name(registry, body.name)
    await _do(request, body.name, registry.unload(body.name, body.drain))


async def _do(request: Request, name: str, work: Awaitable[Any]) -> None:
    """Do it to its end, also when the client goes away; answer with the state then."""
    try:
        await work
        await asyncio.sleep(0)  # a load that it has cancelled ends first
    except asyncio.CancelledError:
        text = f"the load of {name!r} was given up: it was unloaded, or the server ends"
        raise try_again(503, text, "unloaded", 5.0) from None
    except (ServingError, ModelError) as problem:
        raise (as_answer(problem) or invalid(str(problem), code="wrong_model")) from problem
    await request.answer(_state(request.endpoint.router.models[name]))


def _check_name(registry: Registry, name: str) -> None:
    if name not in registry.models:
        text = f"there is no model {name[:200]!r}; /admin/models lists what there is"
        raise ApiError(404, text, "model_not_found", "name")
