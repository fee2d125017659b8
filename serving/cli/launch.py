"""From `crossover serve MODEL...` to a server that answers: prepare, listen, load, serve, drain.

    status = launch(ServeOptions(models=("smollm2-135m",), port=0))

The port is bound before anything slow happens, so a taken port is an error at once; the server
listens while engines load (503 with the reason until they are ready). The first SIGTERM or SIGINT
drains, a second one aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn

from models.cli import parse_bytes
from serving.cli.announce import announce
from serving.cli.console import Narrator
from serving.cli.files import check_files, keys_of, new_admin_key, readable_by_others
from serving.http.admin import ROUTES as ADMIN_ROUTES
from serving.http.app import App, app_of
from serving.http.auth import Key, LocalNames, only_key
from serving.http.connections import (
    bound_handshakes,
    is_loopback,
    listen,
    room_for_connections,
    server_options,
    url_of,
)
from serving.http.limits import Limits
from serving.http.wire.cors import Cors, origins_of
from serving.metrics import ServerMetrics, watch_loop
from serving.placement.placement_policy import explain
from serving.registry.engine_config import Machine, Prepared, prepare
from serving.registry.eviction import RegistryLimits
from serving.registry.loaded_model import ModelRouter
from serving.registry.model_registry import Registry, supervisor_of
from serving.registry.options import ModelOptions, ServeOptions, models_of, shared_of
from serving.supervisor.supervisor import Background

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Listening(NamedTuple):
    """An application on a bound port."""

    app: Any
    port: socket.socket
    certificate: str | None = None
    key: str | None = None
    local_names: bool = False  # a Host that is a name of the DNS is refused
    origins: tuple[str, ...] = ()  # of pages that may read the answers


@dataclass(frozen=True)
class Work:
    """What is served. `announce` tells of it, and returns why nothing can ever be served.

    `stop(drain, seconds)` returns how many requests were cut off.
    """

    what: str
    start: Callable[[], Awaitable[None]]
    announce: Callable[[str], Coroutine[Any, Any, str]]
    stop: Callable[[bool, float], Awaitable[int]]
    in_flight: Callable[[], int]


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes. Exit status: 0 after a drain, 1 when nothing could be served or
    requests were cut off."""
    narrator = begin(options)
    api_keys, admin_key = keys_of(options)
    limits = limits_of(options, narrator)
    memory_limit = None
    if options.memory_limit is not None:
        memory_limit = parse_bytes(options.memory_limit, "--memory-limit")
    models = models_of(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(opened(options, api_keys, narrator))
        admin = None
        if options.admin_port is not None:
            admin = stack.enter_context(listen("127.0.0.1", options.admin_port))
            if admin_key is None:
                admin_key, file = new_admin_key(admin.getsockname()[1], options.cache)
                stack.callback(file.unlink, missing_ok=True)
                narrator.say(f"the key of the admin routes is in {file}")
        machine = Machine(options.cache, options.api_cores, narrator.say, narrator.progress)
        prepared = _prepared(models, machine, narrator)
        machine.is_serving = True
        os.sched_setaffinity(0, machine.split(options.cores, options.threads).api)
        registry = Registry(
            ModelRouter(ServerMetrics()),
            machine,
            lambda one, placed: supervisor_of(
                options, one, placed, narrator.event, narrator.output
            ),
            RegistryLimits(
                memory_limit,
                options.max_loaded_models,
                options.load_wait_seconds,
                options.drain_seconds,
            ),
            shared_of(options),
        )
        for one in prepared:
            registry.add(one)
        narrator.on_lost = registry.router.metrics.lost_lines.inc
        app = _app(options, registry.router, limits, (api_keys, admin_key))
        served = [endpoint(options, app, listener, api_keys)]
        if admin is not None:
            served.append(_admin(admin, app, admin_key, narrator))
        count = len(prepared)
        work = Work(
            what="the model" if count == 1 else f"{count} models",
            start=registry.start,
            announce=lambda url: announce(registry, url, options.ready_file, narrator),
            stop=registry.stop,
            in_flight=lambda: registry.in_flight,
        )
        return run(serve(options, work, served, narrator))


def begin(options: ServeOptions) -> Narrator:
    """Who tells what happens, once the files that the options name are known to be usable.

    Raises ServingError.
    """
    out = sys.stderr or open(os.devnull, "w")  # None where it was closed
    narrator = Narrator(out, as_json=options.log_format == "json")
    check_files(options)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no thread a core for one text
    narrator.take_logging(options.log_requests)
    return narrator


def opened(options: ServeOptions, keys: Sequence[Key], narrator: Narrator) -> socket.socket:
    """The bound port, and warnings where it is open to more than it should be."""
    listener = listen(options.host, options.port)
    if not keys and not is_loopback(listener):
        narrator.say(
            f"WARNING: --host {options.host} opens this server to everybody who can reach this "
            "machine, since it has no key; --api-key-env or --api-key-file gives it one"
        )
    if os.geteuid() == 0 and not is_loopback(listener):
        narrator.say("WARNING: it runs as root; a user of its own could lose less")
    for what in readable_by_others(options):
        narrator.say(f"WARNING: {what} can be read by other users: chmod 600")
    return listener


def endpoint(
    options: ServeOptions, app: App, port: socket.socket, keys: Sequence[Key]
) -> Listening:
    """The application on its port, with the options' certificate and origins."""
    origins = origins_of(options.allowed_origins) if options.allowed_origins is not None else ()
    local = not keys and is_loopback(port)
    return Listening(*(app, port, options.tls_certificate, options.tls_key), local, origins)


def _prepared(
    models: Sequence[ModelOptions], machine: Machine, narrator: Narrator
) -> list[Prepared]:
    """The models with their files, and lines that say where each will run and why."""
    facts = machine.facts()
    prepared = [prepare(model, machine, facts) for model in models]
    for one in prepared:
        narrator.say(*explain(one.placement), one.note)
        if one.model.standby == "warm" and len(one.configs) < 2:
            narrator.say(
                f"--standby warm: {one.name} has no engine to fall back to, so none stands by"
            )
    narrator.name_models = len(prepared) > 1
    return prepared


def _app(
    options: ServeOptions,
    router: ModelRouter,
    limits: Limits,
    keys: tuple[Sequence[Key], str | None],
) -> App:
    """The endpoint, with the admin routes where they have a key and no port of their own."""
    api_keys, admin_key = keys
    here = options.admin_port is None and admin_key is not None
    return app_of(
        router,
        limits,
        api_keys,
        admin=ADMIN_ROUTES if here else (),
        admin_key=admin_key if here else None,
    )


def _admin(port: socket.socket, app: App, key: str | None, narrator: Narrator) -> Listening:
    """The admin routes on their own port."""
    narrator.say(f"admin routes on {url_of(port)}/admin/")
    routes = App(app.router, app.limits, only_key(key, "admin"), ADMIN_ROUTES)
    return Listening(routes, port, local_names=True)


def limits_of(options: ServeOptions, narrator: Narrator) -> Limits:
    """The limits of requests and connections; fewer connections where the system allows fewer."""
    body_bytes = None
    if options.max_body is not None:
        body_bytes = parse_bytes(options.max_body, "--max-body", least_bytes=1024)
    limits = Limits(
        body_bytes=body_bytes,
        connections=options.max_connections,
        sequences=options.max_sequences,
        deadline_seconds=options.deadline_seconds,
        ignore_unknown_fields=options.ignore_unknown_fields,
        strict_max_tokens=options.strict_max_tokens,
    )
    connections = room_for_connections(limits.connections)
    if connections < limits.connections:
        narrator.say(
            f"at most {connections} connections at once, not {limits.connections}: "
            "the hard limit of open files (ulimit -Hn) allows no more"
        )
    return msgspec.structs.replace(limits, connections=connections)


def _server(served: Listening, app: App) -> uvicorn.Server:
    outer = Cors(served.app, served.origins) if served.origins else served.app
    responses = app.router.metrics.responses
    server = uvicorn.Server(
        uvicorn.Config(
            LocalNames(outer) if served.local_names else outer,
            ssl_certfile=served.certificate,
            ssl_keyfile=served.key,
            timeout_graceful_shutdown=5,
            **server_options(
                app.limits,
                lambda status: responses.labels("connection", str(status)).inc(),
            ),
        )
    )
    # Signals are ours: drain, then close.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    return server


async def _serve_all(servers: list[uvicorn.Server], ports: list[socket.socket]) -> None:
    pairs = zip(servers, ports, strict=True)
    await asyncio.gather(*(server.serve(sockets=[port]) for server, port in pairs))


async def serve(
    options: ServeOptions, work: Work, served: list[Listening], narrator: Narrator
) -> int:
    """Serve until a signal comes, or until there can be nothing to serve. The exit status."""
    app: App = served[0].app
    servers = [_server(one, app) for one in served]
    url = url_of(served[0].port, tls=options.tls_certificate is not None)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    bound_handshakes(loop, app.limits.connections)
    for number in _SIGNALS:
        loop.add_signal_handler(number, _on_signal, work, stop, narrator)
    gc.collect()
    gc.freeze()  # no collection walks through what is there now while tokens wait
    await work.start()
    narrator.say(f"listening on {url}, loading {work.what}")
    watching = asyncio.create_task(watch_loop(app.router.metrics.loop_holds))
    serving = asyncio.create_task(_serve_all(servers, [one.port for one in served]))
    announcing = asyncio.create_task(work.announce(url))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, announcing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if announcing.done() and not stop.is_set():
        status = 1
        narrator.say(f"giving up: {announcing.result()}")
    elif serving.done() and not stop.is_set():
        status = 1
        narrator.say("the HTTP server ended by itself")
    drain = not announcing.done()
    cut_off = await work.stop(drain, options.drain_seconds)
    for task in (announcing, stopping, watching):
        task.cancel()
    for server in servers:
        server.should_exit = True
    await serving
    if options.ready_file:
        with contextlib.suppress(OSError):
            Path(options.ready_file).unlink(missing_ok=True)
    narrator.say(f"stopped, {cut_off} requests cut off" if cut_off else "stopped")
    return 1 if cut_off else status


def _on_signal(work: Work, stop: asyncio.Event, narrator: Narrator) -> None:
    if not stop.is_set():
        stop.set()
        narrator.say(f"draining {work.in_flight()} requests; a second signal aborts them")
    else:
        _background.keep(work.stop(False, 0.0))
        narrator.say("aborting")


_background = Background("the end of the server")


def run(work: Coroutine[Any, Any, int]) -> int:
    """The work on uvloop where there is one."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
