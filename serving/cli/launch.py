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
import sys
from pathlib import Path
from typing import Any

import uvloop

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
from serving.registry.engine_config import Machine, Prepared, prepare
from serving.registry.model_registry import Registry, RegistryLimits
from serving.server_options import ServeOptions, models_of, shared_of
from serving.supervisor.admission import QueueBounds
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.supervisor import Supervisor

LOOK_SECONDS = 0.5  # between two looks at how far a load is


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes. Exit status: 0 after a drain, 1 when nothing could be served or
    requests were cut off."""
    narrator = Narrator(sys.stderr or open(os.devnull, "w"))
    narrator.take_logging(options.log_requests)
    if options.ready_file and not os.access(Path(options.ready_file).absolute().parent, os.W_OK):
        raise ServingError(
            f"--ready-file {options.ready_file}: its folder does not exist or cannot be written to"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no thread a core for one text
    api_key, admin_key = keys_of(options)
    limits = limits_of(options)
    with listen(options.host, options.port) as listener:
        is_local = is_loopback(listener)
        if not is_local and api_key is None:
            narrator.say(
                f"WARNING: --host {options.host} opens this server to everybody who can reach this "
                "machine, since it has no key; --api-key-env or --api-key-file gives it one"
            )
        registry = make_registry(options, narrator)
        app = App(registry, limits, api_key, admin_key, is_local and api_key is None)
        run = _run(options, registry, HttpServer(app, limits), listener, narrator)
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
        narrator.say(*explain(one.placement), one.split.note)
        if one.model.standby == "warm" and len(one.placement.attempts) < 2:
            narrator.say(
                f"--standby warm: {one.name} has no engine to fall back to, so none stands by"
            )
    narrator.name_models = len(prepared) > 1
    machine.is_serving = True
    os.sched_setaffinity(0, machine.split(options.cores, options.threads).api)

    def supervisor_of(one: Prepared) -> Supervisor:
        return Supervisor(
            one.configs,
            bounds=QueueBounds(
                waiting_requests=options.max_waiting,
                wait_seconds=options.max_wait_seconds,
                ttft_seconds=options.ttft_slo_seconds,
            ),
            limits=RecoveryLimits(health_timeout_seconds=options.health_timeout_seconds),
            standby=one.model.standby == "warm",
            on_event=narrator.event,
            on_output=narrator.output,
        )

    limits = RegistryLimits(memory_limit, drain_seconds=options.drain_seconds)
    registry = Registry(ServerMetrics(), machine, supervisor_of, limits, shared_of(options))
    for one in prepared:
        registry.serve(one)
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
    narrator: Narrator,
) -> int:
    """Serve until a signal comes, or until there can be nothing to serve. The exit status."""

    def signalled() -> None:
        if server.signals == 1:
            narrator.say(f"draining {registry.in_flight} requests; a second signal aborts them")
        else:
            server.aborting = asyncio.ensure_future(registry.stop(False, 0.0))
            narrator.say("aborting")

    url, count = url_of(listener), len(registry.models)
    await registry.start()
    narrator.say(f"listening on {url}, loading {'the model' if count == 1 else f'{count} models'}")
    announcing = asyncio.create_task(_announce(registry, url, options.ready_file, narrator))
    status = 0
    async with server.serving(listener, registry.metrics.loop_holds, signalled):
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


async def _announce(
    registry: Registry, url: str, ready_file: str | None, narrator: Narrator
) -> str:
    """Tell how far loads are, and each time an engine is ready: a line and the ready file.

    Returns the reason when nothing can ever be served.
    """
    told: dict[str, int] = {}  # model -> pid of the engine that was announced
    while True:
        models = list(registry.models.values())
        changes = [asyncio.ensure_future(one.supervisor.wait_change()) for one in models]
        for model in models:
            supervisor, name = model.supervisor, f"{model.served_name}: " * narrator.name_models
            is_loading = supervisor.state in (EngineState.loading, EngineState.restarting)
            if is_loading and supervisor.loading is not None:
                narrator.progress(name + supervisor.loading.what, supervisor.loading.fraction)
            pid = supervisor.engine_pid
            if supervisor.ready is None or pid is None or pid == told.get(model.served_name):
                continue
            told[model.served_name] = pid
            narrator.end_progress()
            attempts, device = model.placement.attempts, supervisor.config.device
            here = next((one for one in attempts if one.device == device), attempts[0])
            memory = (
                f"memory {formatting.size(here.need_bytes)} predicted, "
                f"{formatting.size(resident_bytes(pid))} measured"
            )
            loaded = f"{supervisor.label}, loaded in {supervisor.ready.load_seconds:.1f} s"
            with contextlib.suppress(OSError):  # nobody reads our standard output
                print(f"ready: {url} ({name}{loaded}, {memory})", flush=True)
            about = {"url": url, "pid": os.getpid(), "model": model.served_name}
            about |= {"engine_pid": pid, "backend": supervisor.label}
            try:
                if ready_file:
                    write_atomically(Path(ready_file), json.dumps(about).encode())
            except OSError as problem:  # a full disk ends no server
                narrator.say(f"--ready-file {ready_file} cannot be written: {problem}")
        if not told and all(model.given_up for model in models):
            reasons = {one.served_name: one.supervisor.reason or "" for one in models}
            if len(reasons) > 1:
                return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            return "".join(reasons.values()) or "the engine failed"
        try:
            await asyncio.wait(changes, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()


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
    if not variable and not file:
        return None
    if variable and file:
        raise ServingError(f"{option}-env and {option}-file exclude each other")
    where = f"{option}-env {variable}" if variable else f"{option}-file {file}"
    try:
        key = os.environ.get(variable, "") if variable else Path(file or "").read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise ServingError(f"{where}: {getattr(problem, 'strerror', problem)}") from problem
    if not key.strip():
        raise ServingError(f"{where} is not set or empty")
    return key.strip()
