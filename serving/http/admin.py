"""The admin routes: which models there are, loading, unloading and swapping them.

| GET  /admin/models, /admin/models/NAME | state, memory, last use, requests                |
| POST /admin/load   | {"name": "small"}, or a new one: {"name": "big", "source": "1b"}    |
| POST /admin/unload | {"name": "small"}; "drain": false cuts off, "forget": true unlists  |
| POST /admin/swap   | {"name": "small", "source": "360m"}: no gap under the same name     |

They are never there by default: either on the endpoint's port behind a key of their own
(`--admin-key-env`, `--admin-key-file`), or on another port of the loopback interface
(`--admin-port`), with that key or one that is made. The API key opens none of them. Their requests
are trusted as the command line is: a source may be a path of this machine or a hub name.

A load, unload or swap is answered when it is done; with "wait": false at once, with 202 and the
state so far. It goes on when the client goes away. Errors: 404 no model, 400 wrong options, 409
already under way, 503 no room, 507 it can not fit, 500 it did not load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET

from models.errors import ModelError
from serving.errors import Busy, LoadFailed, NoRoom, ServingError
from serving.http.admin_wire import (
    Choice,
    ModelChoice,
    ModelState,
    RegistryState,
    UnboundedChoice,
    UnlistedModel,
    UnloadRequest,
)
from serving.http.exchange import Exchange
from serving.http.wire.errors import ApiError, as_answer, invalid, try_again
from serving.http.wire.openapi import Route
from serving.placement.decision import NoPlacement
from serving.registry.model import ModelRouter, read_vocabulary
from serving.registry.options import ModelOptions, model_options
from serving.registry.prepare import prepare
from serving.registry.registry import Registry
from serving.supervisor.tasks import Background

# What one of these raises is in the model's state, in the log, and in the answer of whoever waited.
_background = Background("an admin route", expected=(ServingError, ModelError))

CHOICE: msgspec.json.Decoder[Choice] = msgspec.json.Decoder(UnboundedChoice)
UNLOAD: msgspec.json.Decoder[UnloadRequest] = msgspec.json.Decoder(UnloadRequest)


async def list_models(router: ModelRouter, exchange: Exchange) -> None:
    registry = _registry(router)
    available = (await asyncio.to_thread(registry.machine.facts)).usable_memory_bytes
    await exchange.answer(RegistryState.of(registry, available))


async def show_model(router: ModelRouter, exchange: Exchange) -> None:
    registry = _registry(router)
    name = _known(registry, exchange.scope["path_params"]["name"])
    await exchange.answer(ModelState.of(registry.tenants[name]))


async def load_model(router: ModelRouter, exchange: Exchange) -> None:
    registry, request = _registry(router), await exchange.read(CHOICE)
    if request.name in registry.tenants:
        given = sorted(_given(request))
        if given:
            raise invalid(
                f"{request.name} is served already, so {given[0]} cannot be given; "
                "POST /admin/swap changes what it is",
                given[0],
            )
        await _do(router, exchange, request.name, registry.load(request.name), request.wait)
        return
    if request.source is UNSET:
        raise ApiError(
            404,
            f"there is no model {request.name!r}; name its source to add it",
            code="model_not_found",
            param="name",
        )
    model = _options(registry, request)

    async def add_and_load() -> None:
        prepared = await asyncio.to_thread(prepare, model, registry.machine)
        vocabulary = await asyncio.to_thread(read_vocabulary, prepared.tokenizer_path)
        registry.add(prepared, vocabulary)
        await registry.load(prepared.name)

    await _do(router, exchange, request.name, add_and_load(), request.wait)


async def unload_model(router: ModelRouter, exchange: Exchange) -> None:
    registry, request = _registry(router), await exchange.read(UNLOAD)
    name = _known(registry, request.name)
    if not request.forget:
        await _do(router, exchange, name, registry.unload(name, request.drain), request.wait)
        return
    await _do(router, exchange, name, registry.remove(name, request.drain), request.wait)


async def swap_model(router: ModelRouter, exchange: Exchange) -> None:
    registry, request = _registry(router), await exchange.read(CHOICE)
    name = _known(registry, request.name)
    if request.source is UNSET:
        raise invalid("source is needed: what to serve under this name", "source")
    await _do(
        router, exchange, name, registry.swap(name, _options(registry, request)), request.wait
    )


_CHANGED = (ModelState, UnlistedModel)
_ERRORS = (404, 409, 500, 503, 507)

ROUTES = (
    Route("GET", "/admin/models", list_models, "State of every model", RegistryState),
    Route(
        *("POST", "/admin/load", load_model, "Load a model, or add one", _CHANGED, ModelChoice),
        errors=_ERRORS,
        others={202: _CHANGED},
    ),
    Route(
        *("POST", "/admin/unload", unload_model, "Unload a model", _CHANGED, UnloadRequest),
        errors=_ERRORS,
        others={202: _CHANGED},
    ),
    Route(
        *("POST", "/admin/swap", swap_model, "Serve another model under the same name", _CHANGED),
        body=ModelChoice,
        errors=_ERRORS,
        others={202: _CHANGED},
    ),
    Route(
        *("GET", "/admin/models/{name:path}", show_model, "State of one model", ModelState),
        errors=(404,),
    ),
)


async def _do(
    router: ModelRouter, exchange: Exchange, name: str, work: Coroutine[Any, Any, Any], wait: bool
) -> None:
    """Run it to its end even when the client goes away; answer with the state then (or so far)."""
    registry = _registry(router)
    task = _background.keep(work)
    if not wait:
        await asyncio.sleep(0)  # so that it shows in the state, and what is wrong at once is said
    if wait or task.done():
        try:
            await asyncio.shield(task)
        except (ServingError, ModelError) as problem:
            raise _as_answer(problem) from problem
    status = 200 if task.done() else 202
    tenant = registry.tenants.get(name)
    if tenant is not None:
        await exchange.answer(ModelState.of(tenant), status)
        return
    state: Literal["forgotten", "loading"] = "forgotten" if task.done() else "loading"
    await exchange.answer(UnlistedModel(name, state), status)


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
        case Busy():
            return ApiError(409, text, code="under_way")
        case _:
            return invalid(text, code="wrong_model")


def _given(request: Choice) -> dict[str, Any]:
    """What the request says of the model beside its name."""
    named = {
        field: getattr(request, field)
        for field in request.__struct_fields__
        if field not in ("name", "wait")
    }
    return {field: value for field, value in named.items() if value is not UNSET}


def _options(registry: Registry, request: Choice) -> ModelOptions:
    try:
        return model_options(
            {"name": request.name, **_given(request)}, registry.shared, "the request"
        )
    except ServingError as problem:
        raise invalid(str(problem)) from problem


def _known(registry: Registry, name: str) -> str:
    if name not in registry.tenants:
        raise ApiError(
            404,
            f"there is no model {name[:200]!r}; /admin/models lists what there is",
            code="model_not_found",
            param="name",
        )
    return name


def _registry(router: ModelRouter) -> Registry:
    assert router.keeper is not None
    return cast(Registry, router.keeper)
