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
from collections.abc import Awaitable
from typing import Any

import msgspec

from models.errors import ModelError
from models.machine import available_bytes
from serving.errors import EngineState, ServingError
from serving.http.api_errors import ApiError, as_answer, invalid, try_again
from serving.http.api_schemas import Wire
from serving.http.http_request import Request
from serving.registry.engine_config import prepare
from serving.registry.loaded_model import ServedModel, read_vocabulary
from serving.server_options import model_options


class UnloadRequest(Wire, kw_only=True, frozen=True):
    """`drain`: what is in flight may finish."""

    name: str
    drain: bool = True


CHOICE = msgspec.json.Decoder(dict[str, Any])
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
    registry, given = request.endpoint.router, await request.read(CHOICE)
    name = given.get("name")
    if not isinstance(name, str):
        raise invalid("name: a text is needed", "name")
    if name in registry.models:
        if more := sorted(given.keys() - {"name"}):
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
    registry, body = request.endpoint.router, await request.read(UNLOAD)
    if body.name not in registry.models:
        raise _no_model(body.name, "/admin/models lists what there is")
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


def _no_model(name: str, advice: str) -> ApiError:
    return ApiError(404, f"there is no model {name[:200]!r}; {advice}", "model_not_found", "name")
