"""The admin routes: which models there are, loading, unloading and swapping them. Off unless asked for, and apart from everything else.

| GET  /admin/models, /admin/models/NAME | state, memory predicted and measured, last use, what is in flight                        |
| POST /admin/load                       | {"name": "small"}, or a new model: {"name": "big", "source": "1b", "slots": 4}           |
| POST /admin/unload                     | {"name": "small"}; what is in flight may finish; "forget": true takes it off the list    |
| POST /admin/swap                       | {"name": "small", "source": "360m"}: another model under the same name, without a gap    |

They are there in one of two ways, never by default: on the endpoint's own port behind a key of their own (`--admin-key-env`,
`--admin-key-file`), or on another port of the loopback interface (`--admin-port`), with that key where one is given. The API key opens none
of them. What they are told is trusted as the command line is: a source may be a path of this machine or a hub name.

A load, unload or swap is answered when it is done; with "wait": false at once, with 202 and the state so far. It goes on when the client
goes away. An answer is the model's state, or an error: 404 no such model, 400 wrong options, 409 already under way, 503 no room, 507 it can
not fit, 500 it did not load (the reason is in the message).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import msgspec
from msgspec import UNSET
from starlette.types import ASGIApp, Receive, Scope, Send

from models.errors import ModelError
from serving.access import Exchange, header
from serving.admin_wire import ModelChoice, UnlistedModel, UnloadRequest
from serving.background import Background
from serving.errors import ServingError
from serving.fleet import Busy, Fleet, LoadFailed, NoRoom
from serving.options import ModelOptions, model_options
from serving.placement import NoPlacement
from serving.preparation import prepare
from serving.protocol import ApiError, decode, invalid, try_again
from serving.replies import encode
from serving.service import Desk

# What one of these raises is in the model's state, in the log, and in the answer of whoever waited.
_background = Background("an admin route", expected=(ServingError, ModelError))

CHOICE: msgspec.json.Decoder[ModelChoice] = msgspec.json.Decoder(ModelChoice)
UNLOAD: msgspec.json.Decoder[UnloadRequest] = msgspec.json.Decoder(UnloadRequest)


async def list_models(desk: Desk, exchange: Exchange) -> None:
    await exchange.answer(await _fleet(desk).state())


async def show_model(desk: Desk, exchange: Exchange) -> None:
    fleet = _fleet(desk)
    await exchange.answer(fleet.state_of_model(_known(fleet, exchange.scope["path_params"]["name"])))


async def load_model(desk: Desk, exchange: Exchange) -> None:
    fleet, request = _fleet(desk), decode(CHOICE, await exchange.body())
    if request.name in fleet.tenants:
        given = sorted(_given(request))
        if given:
            raise invalid(f"{request.name} is served already, so {given[0]} cannot be given; POST /admin/swap changes what it is", given[0])
        await _do(desk, exchange, request.name, fleet.load(request.name), request.wait)
        return
    if request.source is UNSET:
        raise ApiError(404, f"there is no model {request.name!r}; name its source to add it", code="model_not_found", param="name")
    model = _options(fleet, request)

    async def add_and_load() -> None:
        prepared = await asyncio.to_thread(prepare, model, fleet.machine)
        fleet.add(prepared)
        await fleet.load(prepared.name)

    await _do(desk, exchange, request.name, add_and_load(), request.wait)


async def unload_model(desk: Desk, exchange: Exchange) -> None:
    fleet, request = _fleet(desk), decode(UNLOAD, await exchange.body())
    name = _known(fleet, request.name)
    if not request.forget:
        await _do(desk, exchange, name, fleet.unload(name, request.drain), request.wait)
        return
    await _do(desk, exchange, name, fleet.remove(name, request.drain), request.wait)


async def swap_model(desk: Desk, exchange: Exchange) -> None:
    fleet, request = _fleet(desk), decode(CHOICE, await exchange.body())
    name = _known(fleet, request.name)
    if request.source is UNSET:
        raise invalid("source is needed: what to serve under this name", "source")
    await _do(desk, exchange, name, fleet.swap(name, _options(fleet, request)), request.wait)


ROUTES = (
    ("GET", "/admin/models", list_models),
    ("POST", "/admin/load", load_model),
    ("POST", "/admin/unload", unload_model),
    ("POST", "/admin/swap", swap_model),
    ("GET", "/admin/models/{name:path}", show_model),
)


async def _do(desk: Desk, exchange: Exchange, name: str, work: Coroutine[Any, Any, Any], wait: bool) -> None:
    """Run it to its end even when the client goes away; the state afterwards (or so far) is the answer. Raises ApiError."""
    fleet = _fleet(desk)
    task = _background.keep(work)
    if not wait:
        await asyncio.sleep(0)  # so far that it shows in the state, and what is wrong at once is said at once
    if wait or task.done():
        try:
            await asyncio.shield(task)
        except (ServingError, ModelError) as problem:
            raise _as_answer(problem) from problem
    status = 200 if task.done() else 202
    listed = name in fleet.tenants
    await exchange.answer(fleet.state_of_model(name) if listed else UnlistedModel(name, "forgotten" if task.done() else "loading"), status)


def _as_answer(problem: ServingError | ModelError) -> ApiError:
    text = str(problem)
    match problem:
        case ApiError():
            return problem
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


def _given(request: ModelChoice) -> dict[str, Any]:
    """What the request says of the model beside its name."""
    named = {field: getattr(request, field) for field in request.__struct_fields__ if field not in ("name", "wait")}
    return {field: value for field, value in named.items() if value is not UNSET}


def _options(fleet: Fleet, request: ModelChoice) -> ModelOptions:
    try:
        return model_options({"name": request.name, **_given(request)}, fleet.shared, "the request")
    except ServingError as problem:
        raise invalid(str(problem)) from problem


def _known(fleet: Fleet, name: str) -> str:
    if name not in fleet.tenants:
        raise ApiError(404, f"there is no model {name[:200]!r}; /admin/models lists what there is", code="model_not_found", param="name")
    return name


def _fleet(desk: Desk) -> Fleet:
    assert desk.keeper is not None
    return cast(Fleet, desk.keeper)


class LoopbackOnly:
    """Refuses requests whose Host is not a name of this machine: a web page may point a name of its own at 127.0.0.1 (DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_loopback_host(header(scope, b"host") or b""):
            problem = ApiError(403, "the admin port answers to localhost only", code="wrong_host")
            body = encode(problem.body)
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)


def is_loopback_host(host: bytes) -> bool:
    """True for localhost, 127.x.y.z and [::1], with or without a port."""
    name = host.decode("latin-1").strip().lower()
    if name.startswith("["):
        return name == "[::1]" or name.startswith("[::1]:")
    name = name.partition(":")[0]
    parts = name.split(".")
    return name == "localhost" or (len(parts) == 4 and parts[0] == "127" and all(part.isdigit() for part in parts))
