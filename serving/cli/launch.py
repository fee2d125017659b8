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

from crossover.models.weights.weights_manifest import write_atomically
from crossover.serving.engine.ipc_messages import Ready
from crossover.serving.errors import EngineState, ServingError
from crossover.serving.hardware.cpu_topology import Arrangement
from crossover.serving.http.http_server import is_loopback, listen, serving, url_of
from crossover.serving.http.routes import App
from crossover.serving.logs import ConsoleLog
from crossover.serving.metrics import ServerMetrics
from crossover.serving.option_help import parse_bytes
from crossover.serving.placement.placement_policy import explain
from crossover.serving.registry.model_loader import RegistryLimits
from crossover.serving.registry.prepare_model import Host, Prepared, prepare, with_shared_cores
from crossover.serving.registry.registry import Registry
from crossover.serving.registry.served_model import ServedModel
from crossover.serving.server_options import ServeOptions, models_of
from crossover.serving.supervisor.admission import QueueBounds
from crossover.serving.supervisor.engine_supervisor import Supervisor

PROGRESS_CHECK_SECONDS = 0.05  # between two checks of the loads' progress
MAX_LISTED_TOKENS = 8  # in the log line about tokens that are out of range


def launch(options: ServeOptions) -> int:
    """Serve until a signal arrives. Return the exit status: 0 after a drain, 1 if nothing could be
    served or requests were aborted."""
    out = sys.stderr or open(os.devnull, "w")
    log = ConsoleLog(out)
    logging.basicConfig(stream=out, format="%(message)s", level=logging.WARNING, force=True)
    if options.replicas > 1:
        raise ServingError(f"--replicas {options.replicas} needs --on ray")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text needs no thread per core
    api_key = key_of(options.api_key_env, "--api-key-env")
    admin_key = key_of(options.admin_key_env, "--admin-key-env")
    with listen(options.host, options.port) as listener:
        is_local = is_loopback(listener)
        if not is_local and api_key is None:
            log.say(
                f"WARNING: With --host {options.host} the server is reachable from the network "
                "without an API key. Set --api-key-env."
            )
        registry = make_registry(options, log)
        # A local server without a key checks the Host header (see App).
        checked_host = options.host if is_local and api_key is None else None
        app = App(
            registry,
            api_key,
            admin_key,
            checked_host,
            options.cors_origin,
            options.open_metrics,
            options.require_cache_salt,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options, registry, app, listener, log))


def make_registry(options: ServeOptions, log: ConsoleLog) -> Registry:
    """Return the registry with all models, none of them loaded yet, and log where each will run and
    why. Makes or fetches missing weights, and pins this process to the cores for HTTP."""
    memory_limit = None
    if options.memory_limit is not None:
        memory_limit = parse_bytes(options.memory_limit, "--memory-limit")
    model_options = models_of(options)
    machine = Host(options.cache, options.api_cores, log.say, log.progress)
    facts = machine.facts()
    prepared = with_shared_cores([prepare(model, machine, facts) for model in model_options])
    for model in prepared:
        log.say(*explain(model.placement), model.split.note)
    log.name_models = len(prepared) > 1
    split = prepared[0].split
    if len(prepared) > 1:
        arrangement = Arrangement(options.engines or 1)
        split = machine.split(options.cores, options.threads, arrangement)
    os.sched_setaffinity(0, split.api)

    def supervisor_of(model: Prepared) -> Supervisor:
        return Supervisor(
            model.configs,
            bounds=QueueBounds(
                waiting_requests=options.max_waiting,
                wait_seconds=options.max_wait_seconds,
                ttft_seconds=options.ttft_slo_seconds,
            ),
            standby=model.model.standby == "warm",
            side_by_side=len(model.split.engines) > 1,
            on_event=log.event,
            on_output=log.say,
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
    log: ConsoleLog,
) -> int:
    """Serve until a signal arrives or no model can ever be served. Return the exit status."""
    stop_requested = asyncio.Event()
    aborting: list[asyncio.Future[int]] = []  # references, or they would be garbage-collected

    def on_signal() -> None:
        if not stop_requested.is_set():
            stop_requested.set()
            running = _requests_text(registry.in_flight)
            log.say(f"draining {running}; a second signal aborts")
        else:
            aborting.append(asyncio.ensure_future(registry.stop(False, 0.0)))
            log.say("aborting")

    url = url_of(listener)
    await registry.start()
    count = len(registry.models)
    log.say(f"listening on {url}, loading {'the model' if count == 1 else f'{count} models'}")
    announce_task = asyncio.create_task(_announce(registry, url, options.ready_file, log))
    stop_task = asyncio.create_task(stop_requested.wait())
    async with serving(app, listener, on_signal) as server_task:
        await asyncio.wait(
            (announce_task, stop_task, server_task), return_when=asyncio.FIRST_COMPLETED
        )
        has_failed = not stop_requested.is_set()
        if has_failed:
            why = "the HTTP server ended by itself"
            if announce_task.done():
                why = announce_task.result()
            log.say(f"giving up: {why}")
        aborted_count = await registry.stop(not has_failed, options.drain_seconds)
        for task in (announce_task, stop_task):
            task.cancel()
    if options.ready_file:
        with contextlib.suppress(OSError):
            Path(options.ready_file).unlink(missing_ok=True)
    if aborted_count:
        log.say(f"stopped, {_requests_text(aborted_count)} aborted")
    else:
        log.say("stopped")
    return int(has_failed or aborted_count > 0)


async def _announce(registry: Registry, url: str, ready_file: str | None, log: ConsoleLog) -> str:
    """Log the progress of loads, and announce each engine that becomes ready. Runs until it is
    canceled, or returns the reason if no model can ever be served."""
    announced_pids: dict[str, int] = {}  # of the engine that was announced last, by model
    while True:
        models = list(registry.models.values())
        for model in models:
            supervisor = model.supervisor
            prefix = f"{model.served_name}: " if log.name_models else ""
            is_loading = supervisor.state in (EngineState.loading, EngineState.restarting)
            if is_loading and supervisor.loading is not None:
                log.progress(prefix + supervisor.loading.what, supervisor.loading.fraction)
            pid = supervisor.engine_pid
            is_ready = supervisor.state == EngineState.ready  # not while it drains
            if not is_ready or supervisor.ready is None or pid is None:
                continue
            if announced_pids.get(model.served_name) != pid:
                announced_pids[model.served_name] = pid
                _announce_engine(model, supervisor.ready, pid, url, ready_file, log)
        if not announced_pids and all(model.has_given_up for model in models):
            return "; ".join(f"{model.served_name}: {model.supervisor.reason}" for model in models)
        await asyncio.sleep(PROGRESS_CHECK_SECONDS)


def _announce_engine(
    model: ServedModel,
    ready: Ready,
    pid: int,
    url: str,
    ready_file: str | None,
    log: ConsoleLog,
) -> None:
    """Print a line about an engine that is ready, log its tokens that are out of range, and write
    the ready file. `pid`: of the engine."""
    prefix = f"{model.served_name}: " if log.name_models else ""
    label = model.supervisor.label
    with contextlib.suppress(OSError):  # standard output may be closed
        loaded_text = f"loaded in {ready.load_seconds:.1f} s"
        print(f"ready: {url} ({prefix}{label}, {loaded_text})", flush=True)
    if out_of_range := model.tokens_out_of_range():
        log.say(prefix + tokens_out_of_range_text(out_of_range))
    if not ready_file:
        return
    ready_record = {
        "url": url,
        "pid": os.getpid(),
        "model": model.served_name,
        "engine_pid": pid,
        "backend": label,
    }
    try:
        write_atomically(Path(ready_file), json.dumps(ready_record).encode())
    except OSError as problem:  # a full disk must not stop the server
        log.say(f"--ready-file {ready_file} cannot be written: {problem}")


def tokens_out_of_range_text(tokens: Mapping[int, str]) -> str:
    """Return the log line about tokens, id -> text, that the model has no rows for."""
    descriptions = [f"{text or 'a token'} ({token})" for token, text in tokens.items()]
    listed = ", ".join(descriptions[:MAX_LISTED_TOKENS])
    more_count = len(descriptions) - MAX_LISTED_TOKENS
    more = f" and {more_count} more" if more_count > 0 else ""
    return (
        f"The model's files name tokens beyond the rows of its weights: {listed}{more}. Requests "
        "whose text contains one of them are refused."
    )


def _requests_text(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def key_of(variable: str | None, option: str) -> str | None:
    """Return the key in an environment variable, and remove the variable so that no engine inherits
    it. `option`: the option that names the variable. Raises ServingError if there is no key."""
    if variable is None:
        return None
    key = os.environ.pop(variable, "").strip()
    if not key:
        raise ServingError(f"{option}: the environment variable {variable} is not set or is empty")
    return key
