"""From `crossover serve MODEL...` to a server that answers: prepare, listen, load, serve, drain.

    status = launch(ServeOptions(models=("smollm2-135m",), port=0))

The port is bound before anything slow happens, so a taken port is an error at once; the server listens while engines load (503 with the
reason until they are ready). The first SIGTERM or SIGINT drains, a second one aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from models.cli import parse_bytes
from serving.access import Limits
from serving.address import is_loopback, listen, url_of, write_atomically
from serving.admin import ROUTES as ADMIN_ROUTES
from serving.admin import LoopbackOnly
from serving.admission import QueueBounds
from serving.app import App, app_of
from serving.background import Background
from serving.cores import parse_cores, physical_of, split_cores
from serving.errors import ServingError
from serving.fleet import Fleet, FleetLimits, Tenant
from serving.hardware import allowed_cores, process_memory
from serving.listener import room_for_connections, server_options
from serving.metrics import ServerMetrics
from serving.narrator import Narrator
from serving.options import ServeOptions, check_files, models_of, read_api_key, shared_of
from serving.placement import Placement, explain, gib
from serving.preparation import Machine, Prepared, prepare
from serving.probe import find_gpus
from serving.recovery import RecoveryLimits
from serving.service import Desk
from serving.supervisor import Supervisor
from serving.tracing import make_tracer

RETURN_NEED = 1.2  # the GPU must have this much of the predicted need free before the engine goes back to it
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes. The exit status: 0 after a drain, 1 when nothing could be served or requests were cut off."""
    narrator = Narrator(sys.stderr, as_json=options.log_format == "json")
    check_files(options)
    narrator.take_logging(options.log_requests)
    api_key = read_api_key(options.api_key_env, options.api_key_file)
    admin_key = read_api_key(options.admin_key_env, options.admin_key_file, "--admin-key")
    if admin_key is not None and admin_key == api_key:
        raise ServingError("--admin-key-... is the same key as --api-key-...; whoever may ask a model may not load and unload them")
    memory_limit = parse_bytes(options.memory_limit) if options.memory_limit is not None else None
    models = models_of(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        if api_key is None and not is_loopback(listener):
            narrator.say(
                f"WARNING: --host {options.host} opens this server to everybody who can reach this machine, since it has no key; "
                "--api-key-env or --api-key-file gives it one"
            )
        admin = None if options.admin_port is None else stack.enter_context(listen("127.0.0.1", options.admin_port))
        machine = Machine(options.cache, options.api_cores, narrator)
        facts = machine.facts()
        prepared = [prepare(model, machine, facts) for model in models]
        for one in prepared:
            narrator.say(*explain(one.placement), one.note)
            if one.model.standby == "warm" and len(one.configs) < 2:
                narrator.say(f"--standby warm: {one.name} has no engine to fall back to, so none stands by")
        narrator.name_models = len(prepared) > 1
        allowed = allowed_cores()
        split = split_cores(allowed, parse_cores(options.cores), parse_cores(options.api_cores), options.threads, physical_of(allowed))
        os.sched_setaffinity(0, split.api)
        desk = Desk(_limits(narrator), ServerMetrics())
        desk.tracer = make_tracer(options.otlp_endpoint)
        limits = FleetLimits(memory_limit, options.max_loaded_models, options.load_wait_seconds, options.drain_seconds)
        fleet = Fleet(desk, machine, lambda p, placed: _supervisor(options, p, placed, narrator), limits, shared_of(options))
        for one in prepared:
            fleet.add(one)
        apart = admin is not None or admin_key is None
        app = app_of(desk, api_key, admin=() if apart else ADMIN_ROUTES, admin_key=None if apart else admin_key)
        served: list[tuple[Any, socket.socket, str | None, str | None]] = [(app, listener, options.tls_certificate, options.tls_key)]
        if admin is not None:
            key = None if admin_key is None else admin_key.encode()
            served.append((LoopbackOnly(App(desk, key, ADMIN_ROUTES)), admin, None, None))
            narrator.say(
                f"admin routes on {url_of(admin)}/admin/{'' if admin_key else ' (for anybody on this machine: no --admin-key-...)'}"
            )
        return _run(_serve(options, fleet, served, narrator))


def _limits(narrator: Narrator) -> Limits:
    """The limits of requests and connections; fewer connections, and a line that says so, where the system allows too few open files."""
    limits = Limits()
    connections = room_for_connections(limits.connections)
    if connections < limits.connections:
        narrator.say(
            f"at most {connections} connections at once, not {limits.connections}: the hard limit of open files (ulimit -Hn) allows no more"
        )
    return msgspec.structs.replace(limits, connections=connections)


def _supervisor(options: ServeOptions, prepared: Prepared, placed: Callable[[], Placement], narrator: Narrator) -> Supervisor:
    """The supervisor of one model, not started."""
    return Supervisor(
        prepared.configs,
        bounds=QueueBounds(
            waiting_requests=options.most_waiting,
            wait_seconds=options.longest_wait_seconds,
            ttft_seconds=options.ttft_promise_seconds,
        ),
        limits=RecoveryLimits(health_timeout_seconds=options.health_timeout_seconds),
        standby=prepared.model.standby == "warm",
        preferred_usable=_preferred_usable(placed),
        on_event=narrator.event,
        on_output=narrator.output,
    )


def _server(app: Any, certificate: str | None, key: str | None, limits: Limits) -> uvicorn.Server:
    server = uvicorn.Server(
        uvicorn.Config(app, ssl_certfile=certificate, ssl_keyfile=key, timeout_graceful_shutdown=5, **server_options(limits))
    )
    server.capture_signals = _leave_signals_alone  # type: ignore[method-assign]  # the order is: drain, then close
    return server


async def _serve(
    options: ServeOptions, fleet: Fleet, served: list[tuple[Any, socket.socket, str | None, str | None]], narrator: Narrator
) -> int:
    desk = fleet.desk
    listener = served[0][1]
    servers = [(_server(app, certificate, key, desk.limits), port) for app, port, certificate, key in served]
    url = url_of(listener, tls=options.tls_certificate is not None)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _on_signal, fleet, stop, narrator)
    gc.collect()
    gc.freeze()  # what is there now stays: no collection has to walk through it while tokens wait
    await fleet.start()
    narrator.say(f"listening on {url}, loading {'the model' if len(fleet.tenants) == 1 else f'{len(fleet.tenants)} models'}")
    serving = asyncio.create_task(_serve_all(servers))
    announcing = asyncio.create_task(_announce(fleet, url, options.ready_file, narrator))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, announcing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if announcing.done() and not stop.is_set():
        status = 1
        narrator.say(f"giving up: {announcing.result()}")
    elif serving.done() and not stop.is_set():
        status = 1
        narrator.say("the HTTP server ended by itself")
    cut_off = await fleet.stop(drain=not announcing.done(), timeout_seconds=options.drain_seconds)
    announcing.cancel()
    stopping.cancel()
    for server, _ in servers:
        server.should_exit = True
    await serving
    if desk.tracer is not None:
        await asyncio.to_thread(desk.tracer.close)
    if options.ready_file:
        Path(options.ready_file).unlink(missing_ok=True)
    narrator.say(f"stopped, {cut_off} requests cut off" if cut_off else "stopped")
    return 1 if cut_off else status


async def _serve_all(servers: list[tuple[uvicorn.Server, socket.socket]]) -> None:
    await asyncio.gather(*(server.serve(sockets=[port]) for server, port in servers))


async def _announce(fleet: Fleet, url: str, ready_file: str | None, narrator: Narrator) -> str:
    """Tell how far loads are, and each time an engine is ready; returns the reason when nothing can ever be served."""
    told: dict[str, int] = {}
    while True:
        changes = [asyncio.ensure_future(tenant.supervisor.wait_change()) for tenant in fleet.all()]
        for tenant in list(fleet.tenants.values()):
            supervisor = tenant.supervisor
            if supervisor.state in ("loading", "restarting") and supervisor.loading is not None:
                name = f"{tenant.name}: " if narrator.name_models else ""
                narrator.progress(name + supervisor.loading.what, supervisor.loading.fraction)
            pid = supervisor.engine_pid
            if supervisor.ready is not None and pid is not None and pid != told.get(tenant.name):
                told[tenant.name] = pid
                _tell_ready(tenant, url, narrator)
                if ready_file:
                    write_atomically(Path(ready_file), json.dumps(_ready_content(fleet, url)))
        if not told and all(tenant.given_up for tenant in fleet.tenants.values()):
            reasons = [
                f"{t.name}: {t.supervisor.reason}" if narrator.name_models else t.supervisor.reason or "" for t in fleet.tenants.values()
            ]
            return "; ".join(reasons) or "the engine failed"
        try:
            await asyncio.wait(changes, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()


def _tell_ready(tenant: Tenant, url: str, narrator: Narrator) -> None:
    supervisor, placement = tenant.supervisor, tenant.placement
    assert supervisor.ready is not None and supervisor.engine_pid is not None
    memory = process_memory(supervisor.engine_pid)
    measured = gib(memory.rss_bytes) if memory is not None else "not measured"
    attempt = next((a for a in placement.attempts if a.device == supervisor.config.device), placement.attempts[0])
    name = f"{tenant.name}, " if narrator.name_models else ""
    narrator.end_progress()
    print(
        f"ready: {url} ({name}{supervisor.label}, loaded in {supervisor.ready.load_seconds:.1f} s, "
        f"memory {gib(attempt.need_bytes)} predicted, {measured} measured)",
        flush=True,
    )


def _ready_content(fleet: Fleet, url: str) -> dict[str, Any]:
    """Of the ready file: the first model that serves, and all of them by name."""
    serving = {
        t.name: t.supervisor for t in fleet.tenants.values() if t.supervisor.engine_pid is not None and t.supervisor.ready is not None
    }
    models = {name: {"engine_pid": one.engine_pid, "backend": one.label} for name, one in serving.items()}
    return {"url": url, "pid": os.getpid(), **next(iter(models.values())), "models": models}


def _on_signal(fleet: Fleet, stop: asyncio.Event, narrator: Narrator) -> None:
    if not stop.is_set():
        narrator.say(f"draining {fleet.in_flight} requests; a second signal aborts them")
        stop.set()
    else:
        narrator.say("aborting")
        _background.keep(fleet.stop(drain=False))


_background = Background("the end of the server")


def _preferred_usable(placed: Callable[[], Placement]) -> Callable[[], Awaitable[bool]]:
    """Asks the GPU's driver, in a subprocess, whether the first engine would fit now with room to spare."""

    async def usable() -> bool:
        placement = placed()
        if placement.device != "gpu":
            return True
        found = await asyncio.to_thread(find_gpus)
        return any(gpu.free_bytes is None or gpu.free_bytes >= RETURN_NEED * placement.need_bytes for gpu in found.gpus)

    return usable


def _run(work: Any) -> int:
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        status: int = runner.run(work)
    return status


class _NoSignals:
    """A context manager that does nothing, in place of uvicorn's own signal handlers."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _leave_signals_alone() -> Any:
    return _NoSignals()
