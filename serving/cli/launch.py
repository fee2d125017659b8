"""From `crossover serve MODEL...` to a server that answers: prepare, listen, load, serve, drain.

    status = launch(ServeOptions(models=("smollm2-135m",), port=0))

The port is bound before anything slow happens, so a taken port is an error at once; the server
listens while engines load (503 with the reason until they are ready). The first SIGTERM or SIGINT
drains, a second one aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import uvloop
from starlette.middleware.cors import CORSMiddleware

from models import formatting
from models.manifest import write_atomically
from serving.bounds import parse_bytes
from serving.errors import EngineState, ServingError
from serving.hardware.machine_facts import resident_bytes
from serving.http.body_limits import Limits
from serving.http.http_server import HttpServer, is_loopback, listen, room_for_connections, url_of
from serving.http.routes import App
from serving.logs import Narrator
from serving.metrics import ServerMetrics
from serving.placement.placement_policy import explain
from serving.registry.engine_config import Machine, prepare
from serving.registry.eviction import RegistryLimits
from serving.registry.loaded_model import ModelRouter, Tenant
from serving.registry.model_registry import Registry, supervisor_of
from serving.server_options import ServeOptions, models_of, shared_of

LOOK_SECONDS = 0.5  # between two looks at how far a load is
EXPOSED = ("X-Request-Id", "X-Crossover-Backend", "Retry-After", "Retry-After-Ms")  # to web pages


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes. Exit status: 0 after a drain, 1 when nothing could be served or
    requests were cut off."""
    narrator = Narrator(sys.stderr or open(os.devnull, "w"), options.log_format == "json")
    narrator.take_logging(options.log_requests)
    _check_files(options)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no thread a core for one text
    api_key, admin_key = keys_of(options)
    limits = limits_of(options)
    with _listening(options, api_key, narrator) as listener:
        registry = make_registry(options, narrator)
        local = api_key is None and is_loopback(listener)
        app: Any = App(registry.router, limits, api_key, admin_key, local)
        if options.allowed_origins is not None:
            app = CORSMiddleware(
                app,
                [origin.strip() for origin in options.allowed_origins.split(",")],
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )
        server = HttpServer(app, limits, (options.tls_certificate, options.tls_key))
        url = url_of(listener, tls=options.tls_certificate is not None)
        run = _run(options, registry, server, listener, url, narrator)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run)


def make_registry(options: ServeOptions, narrator: Narrator) -> Registry:
    """The models with their files, none of them loaded yet; says where each will run and why.

    The process is put on the cores that are its own.
    """
    memory_limit = None
    if options.memory_limit is not None:
        memory_limit = parse_bytes(options.memory_limit, "--memory-limit")
    models = models_of(options)
    machine = Machine(options.cache, options.api_cores, narrator.say, narrator.progress)
    facts = machine.facts()
    prepared = [prepare(model, machine, facts) for model in models]
    for one in prepared:
        narrator.say(*explain(one.placement), one.note)
        if one.model.standby == "warm" and len(one.configs) < 2:
            narrator.say(
                f"--standby warm: {one.name} has no engine to fall back to, so none stands by"
            )
    narrator.name_models = len(prepared) > 1
    machine.is_serving = True
    os.sched_setaffinity(0, machine.split(options.cores, options.threads).api)
    registry = Registry(
        ModelRouter(ServerMetrics()),
        machine,
        lambda one, placed: supervisor_of(options, one, placed, narrator.event, narrator.output),
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
    return registry


def limits_of(options: ServeOptions) -> Limits:
    """The limits of requests and connections; fewer connections where the system allows fewer."""
    body_bytes = None
    if options.max_body is not None:
        body_bytes = parse_bytes(options.max_body, "--max-body", least_bytes=1024)
    return Limits(
        body_bytes=body_bytes,
        connections=room_for_connections(Limits().connections),
        waiting_for_load=options.max_waiting,
        deadline_seconds=options.deadline_seconds,
    )


async def _run(
    options: ServeOptions,
    registry: Registry,
    server: HttpServer,
    listener: socket.socket,
    url: str,
    narrator: Narrator,
) -> int:
    """Serve until a signal comes, or until there can be nothing to serve. The exit status."""
    count = len(registry.tenants)
    await registry.start()
    narrator.say(f"listening on {url}, loading {'the model' if count == 1 else f'{count} models'}")
    announcing = asyncio.create_task(_announce(registry, url, options.ready_file, narrator))
    status = 0
    holds = registry.router.metrics.loop_holds
    async with server.serving(listener, holds, lambda: _signalled(server, registry, narrator)):
        either: tuple[asyncio.Future[Any], ...] = (announcing, server.ended)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if announcing.done():
            status = 1
            narrator.say(f"giving up: {announcing.result()}")
        elif not server.signals:
            status = 1
            narrator.say("the HTTP server ended by itself")
        cut_off = await registry.stop(not announcing.done(), options.drain_seconds)
        announcing.cancel()
    if options.ready_file:
        with contextlib.suppress(OSError):
            Path(options.ready_file).unlink(missing_ok=True)
    narrator.say(f"stopped, {cut_off} requests cut off" if cut_off else "stopped")
    return 1 if cut_off else status


def _signalled(server: HttpServer, registry: Registry, narrator: Narrator) -> None:
    if server.signals == 1:
        narrator.say(f"draining {registry.in_flight} requests; a second signal aborts them")
    else:
        server.aborting = asyncio.ensure_future(registry.stop(False, 0.0))
        narrator.say("aborting")


# --- what it says


async def _announce(
    registry: Registry, url: str, ready_file: str | None, narrator: Narrator
) -> str:
    """Tell how far loads are, and each time an engine is ready: a line and the ready file.

    Returns the reason when nothing can ever be served.
    """
    told: dict[str, int] = {}  # model -> pid of the engine that was announced
    while True:
        changes = [asyncio.ensure_future(one.supervisor.wait_change()) for one in registry.all()]
        for tenant in list(registry.tenants.values()):
            supervisor, name = tenant.supervisor, f"{tenant.name}: " * narrator.name_models
            is_loading = supervisor.state in (EngineState.loading, EngineState.restarting)
            if is_loading and supervisor.loading is not None:
                loading = supervisor.loading
                narrator.progress(name + loading.what, loading.fraction)
            pid = supervisor.engine_pid
            if supervisor.ready is None or pid is None or pid == told.get(tenant.name):
                continue
            told[tenant.name] = pid
            with contextlib.suppress(OSError):  # nobody reads our standard output
                narrator.end_progress()
                print(_ready_line(tenant, url, narrator.name_models), flush=True)
            if ready_file:
                content = json.dumps(_ready_content(registry, url)).encode()
                try:
                    write_atomically(Path(ready_file), content)
                except OSError as problem:  # a full disk ends no server
                    narrator.say(f"--ready-file {ready_file} cannot be written: {problem}")
        tenants = registry.tenants.values()
        if not told and all(tenant.given_up for tenant in tenants):
            reasons = ((f"{one.name}: " * narrator.name_models, one) for one in tenants)
            said = "; ".join(name + (one.supervisor.reason or "") for name, one in reasons)
            return said or "the engine failed"
        try:
            await asyncio.wait(changes, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()


def _ready_line(tenant: Tenant, url: str, name_model: bool) -> str:
    supervisor, attempts = tenant.supervisor, tenant.placement.attempts
    assert supervisor.ready is not None and supervisor.engine_pid is not None
    measured = formatting.size(resident_bytes(supervisor.engine_pid))
    here = (one for one in attempts if one.device == supervisor.config.device)
    predicted = formatting.size(next(here, attempts[0]).need_bytes)
    name = f"{tenant.name}, " if name_model else ""
    return (
        f"ready: {url} ({name}{supervisor.label}, "
        f"loaded in {supervisor.ready.load_seconds:.1f} s, "
        f"memory {predicted} predicted, {measured} measured)"
    )


def _ready_content(registry: Registry, url: str) -> dict[str, Any]:
    """Of the ready file: the first model that serves, and all of them by name."""
    models = {
        tenant.name: {
            "engine_pid": tenant.supervisor.engine_pid,
            "backend": tenant.supervisor.label,
        }
        for tenant in registry.tenants.values()
        if tenant.supervisor.engine_pid is not None and tenant.supervisor.ready is not None
    }
    return {"url": url, "pid": os.getpid(), **next(iter(models.values())), "models": models}


# --- what the options name


def _listening(options: ServeOptions, api_key: str | None, narrator: Narrator) -> socket.socket:
    """The bound port, and warnings where it is open to more than it should be."""
    listener = listen(options.host, options.port)
    if api_key is None and not is_loopback(listener):
        narrator.say(
            f"WARNING: --host {options.host} opens this server to everybody who can reach this "
            "machine, since it has no key; --api-key-env or --api-key-file gives it one"
        )
    if os.geteuid() == 0 and not is_loopback(listener):
        narrator.say("WARNING: it runs as root; a user of its own could lose less")
    files = {
        "--api-key-file": options.api_key_file,
        "--admin-key-file": options.admin_key_file,
        "--tls-key": options.tls_key,
    }
    for name, file in files.items():
        if file and os.stat(file).st_mode & 0o77:
            narrator.say(f"WARNING: {name} {file} can be read by other users: chmod 600")
    return listener


def _check_files(options: ServeOptions) -> None:
    """Fail before the load for a file that cannot be read or written. Raises ServingError."""
    certificate, key = options.tls_certificate, options.tls_key
    if (certificate is None) != (key is None):
        raise ServingError(
            "--tls-certificate and --tls-key belong together; one of them is missing"
        )
    if certificate is not None:
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as problem:
            raise ServingError(
                f"--tls-certificate {certificate}, --tls-key {key}: "
                f"not a certificate and its unencrypted key in PEM form: {problem}"
            ) from problem
    if options.ready_file is not None:
        folder = Path(options.ready_file).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ServingError(
                f"--ready-file {options.ready_file}: "
                "its folder does not exist or cannot be written to"
            )


def keys_of(options: ServeOptions) -> tuple[str | None, str | None]:
    """The API key and the admin key; None where none is asked for. Raises ServingError.

    Their variables are taken out of the environment: no engine inherits them.
    """
    api = _read_key(options.api_key_env, options.api_key_file, "--api-key")
    admin = _read_key(options.admin_key_env, options.admin_key_file, "--admin-key")
    for variable in (options.api_key_env, options.admin_key_env):
        os.environ.pop(variable or "", None)
    if admin is not None and admin == api:
        raise ServingError(
            "--admin-key-... is the same key as --api-key-...; "
            "whoever may ask a model may not load and unload them"
        )
    return api, admin


def _read_key(variable: str | None, file: str | None, option: str) -> str | None:
    """A key from a variable or a file; the command line could be read by every process."""
    if variable and file:
        raise ServingError(f"{option}-env and {option}-file exclude each other")
    key: str | None = None
    if variable:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ServingError(f"{option}-env names {variable}, which is not set or empty")
    elif file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise ServingError(f"{option}-file {file}: {reason}") from problem
        if not key:
            raise ServingError(f"{option}-file {file} is empty")
    return key
