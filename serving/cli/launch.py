"""The life of a server, from `crossover serve MODEL...` on: listen, prepare, load, serve, drain.

    status = launch(ServeOptions(models=("smollm2-135m",), port=0))

The port is bound before anything slow happens, so a port that is in use is an immediate error. The
server listens while engines load and answers 503 with the reason until they are ready. The first
SIGTERM or SIGINT drains, a second one aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop

from crossover.models.weights_manifest import write_atomically
from crossover.serving.errors import EngineState, ServingError
from crossover.serving.http.http_server import is_loopback, listen, serving, url_of
from crossover.serving.http.routes import App
from crossover.serving.logs import ConsoleLog
from crossover.serving.metrics import ServerMetrics
from crossover.serving.option_help import parse_bytes
from crossover.serving.placement.placement_policy import explain
from crossover.serving.registry.model_loader import RegistryLimits
from crossover.serving.registry.prepare_model import Machine, Prepared, prepare
from crossover.serving.registry.registry import Registry
from crossover.serving.server_options import ServeOptions, models_of
from crossover.serving.supervisor.admission import QueueBounds
from crossover.serving.supervisor.engine_supervisor import Supervisor

LOOK_SECONDS = 0.05  # between two checks of a load's progress


def launch(options: ServeOptions) -> int:
    """Serve until a signal arrives. Return the exit status: 0 after a drain, 1 if nothing could be
    served or requests were aborted."""
    out = sys.stderr or open(os.devnull, "w")
    narrator = ConsoleLog(out)
    logging.basicConfig(stream=out, format="%(message)s", level=logging.WARNING, force=True)
    if options.replicas > 1:
        raise ServingError(f"--replicas {options.replicas} needs --on ray")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text needs no thread per core
    api_key = key_of(options.api_key_env, "--api-key-env")
    admin_key = key_of(options.admin_key_env, "--admin-key-env")
    with listen(options.host, options.port) as listener:
        is_local = is_loopback(listener)
        if not is_local and api_key is None:
            narrator.say(
                f"WARNING: With --host {options.host} the server is reachable from the network "
                "without an API key. Set --api-key-env."
            )
        registry = make_registry(options, narrator)
        has_open_door = is_local and api_key is None
        app = App(registry, api_key, admin_key, options.host if has_open_door else None)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options, registry, app, listener, narrator))


def make_registry(options: ServeOptions, narrator: ConsoleLog) -> Registry:
    """Return the registry of all models with their files, none of them loaded yet, and log where
    each will run and why.

    The process is pinned to its own cores.
    """
    memory_limit = None
    if options.memory_limit is not None:
        memory_limit = parse_bytes(options.memory_limit, "--memory-limit")
    requested = models_of(options)
    machine = Machine(options.cache, options.api_cores, narrator.say, narrator.progress)
    facts = machine.facts()
    prepared = [prepare(model, machine, facts) for model in requested]
    for model in prepared:
        narrator.say(*explain(model.placement), model.split.note)
    narrator.name_models = len(prepared) > 1
    os.sched_setaffinity(0, machine.split(options.cores, options.threads).api)

    def supervisor_of(model: Prepared) -> Supervisor:
        return Supervisor(
            model.configs,
            bounds=QueueBounds(
                waiting_requests=options.max_waiting,
                wait_seconds=options.max_wait_seconds,
                ttft_seconds=options.ttft_slo_seconds,
            ),
            standby=model.model.standby == "warm",
            on_event=narrator.event,
            on_output=narrator.say,
        )

    limits = RegistryLimits(memory_limit, drain_seconds=options.drain_seconds)
    registry = Registry(ServerMetrics(), machine, supervisor_of, limits)
    for model in prepared:
        registry.add_prepared(model)
    return registry


async def _run(
    options: ServeOptions,
    registry: Registry,
    app: App,
    listener: socket.socket,
    narrator: ConsoleLog,
) -> int:
    """Serve until a signal arrives or no model can ever be served. Return the exit status."""
    stop_requested = asyncio.Event()
    aborting: list[asyncio.Future[int]] = []  # references, or they would be garbage-collected

    def signalled() -> None:
        if not stop_requested.is_set():
            stop_requested.set()
            running = _requests(registry.in_flight)
            narrator.say(f"draining {running}; a second signal aborts")
        else:
            aborting.append(asyncio.ensure_future(registry.stop(False, 0.0)))
            narrator.say("aborting")

    url, count = url_of(listener), len(registry.models)
    await registry.start()
    narrator.say(f"listening on {url}, loading {'the model' if count == 1 else f'{count} models'}")
    announce_task = asyncio.create_task(_announce(registry, url, options.ready_file, narrator))
    stop_task = asyncio.create_task(stop_requested.wait())
    async with serving(app, listener, signalled) as ended:
        await asyncio.wait((announce_task, stop_task, ended), return_when=asyncio.FIRST_COMPLETED)
        failed = not stop_requested.is_set()
        if failed:
            why = (
                announce_task.result()
                if announce_task.done()
                else "the HTTP server ended by itself"
            )
            narrator.say(f"giving up: {why}")
        cut_off = await registry.stop(not failed, options.drain_seconds)
        for task in (announce_task, stop_task):
            task.cancel()
    if options.ready_file:
        with contextlib.suppress(OSError):
            Path(options.ready_file).unlink(missing_ok=True)
    narrator.say(f"stopped, {_requests(cut_off)} aborted" if cut_off else "stopped")
    return int(failed or cut_off > 0)


async def _announce(
    registry: Registry, url: str, ready_file: str | None, narrator: ConsoleLog
) -> str:
    """Log the progress of loads; print a line and write the ready file when an engine is ready.

    Returns the reason if no model can ever be served.
    """
    announced_pids: dict[str, int] = {}  # model -> pid of the engine that was announced
    while True:
        models = list(registry.models.values())
        for model in models:
            supervisor, name = model.supervisor, f"{model.served_name}: " * narrator.name_models
            is_loading = supervisor.state in (EngineState.loading, EngineState.restarting)
            if is_loading and supervisor.loading is not None:
                narrator.progress(name + supervisor.loading.what, supervisor.loading.fraction)
            pid = supervisor.engine_pid
            if (
                supervisor.ready is None
                or pid is None
                or pid == announced_pids.get(model.served_name)
            ):
                continue
            announced_pids[model.served_name] = pid
            label, seconds = supervisor.label, supervisor.ready.load_seconds
            with contextlib.suppress(OSError):  # standard output may be closed
                print(f"ready: {url} ({name}{label}, loaded in {seconds:.1f} s)", flush=True)
            if out_of_range := model.tokens_out_of_range():
                narrator.say(name + words_of_tokens_out_of_range(out_of_range))
            ready_record = {"url": url, "pid": os.getpid(), "model": model.served_name}
            ready_record |= {"engine_pid": pid, "backend": label}
            try:
                if ready_file:
                    write_atomically(Path(ready_file), json.dumps(ready_record).encode())
            except OSError as problem:  # a full disk must not stop the server
                narrator.say(f"--ready-file {ready_file} cannot be written: {problem}")
        if not announced_pids and all(model.has_given_up for model in models):
            return "; ".join(f"{model.served_name}: {model.supervisor.reason}" for model in models)
        await asyncio.sleep(LOOK_SECONDS)


def words_of_tokens_out_of_range(tokens: Mapping[int, str]) -> str:
    """Return the log line about tokens that the model has no rows for."""
    texts = [f"{text or 'a token'} ({number})" for number, text in tokens.items()]
    rest_text = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    return (
        f"The model's files name tokens beyond the rows of its weights: {', '.join(texts[:8])}"
        f"{rest_text}. Requests whose text contains one of them are refused."
    )


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


def key_of(variable: str | None, option: str) -> str | None:
    """Return the key in an environment variable and remove the variable, so that no engine inherits
    it. Raises ServingError."""
    if variable is None:
        return None
    key = os.environ.pop(variable, "").strip()
    if not key:
        raise ServingError(f"{option}: the environment variable {variable} is not set or is empty")
    return key
