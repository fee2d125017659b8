"""From `crossover serve MODEL` to a server that answers: plan, listen, load, serve, drain.

    status = launch(ServeOptions(model="smollm2-135m", port=0))

The port is bound before anything slow happens, so a taken port is an error at once; the server listens while the engine loads (503 with the
reason until it is ready). The first SIGTERM or SIGINT drains, a second one aborts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from models.tokenizer import load_tokenizer
from serving.access import Limits
from serving.address import listen, url_of, write_atomically
from serving.admission import QueueBounds
from serving.app import create_app
from serving.backends.base import EngineConfig
from serving.cores import CoreSplit, parse_cores, physical_of, split_cores
from serving.hardware import allowed_cores, hardware_facts, process_memory
from serving.listener import server_options
from serving.narrator import Narrator
from serving.placement import Placement, explain, gib
from serving.preparation import ServeOptions, check_files, parse_options, prepare, read_api_key
from serving.probe import find_gpus
from serving.recovery import RecoveryLimits
from serving.supervisor import Supervisor

RETURN_NEED = 1.2  # the GPU must have this much of the predicted need free before the engine goes back to it
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes. The exit status: 0 after a drain, 1 when nothing could be served or requests were cut off."""
    narrator = Narrator(sys.stderr, as_json=options.log_json)
    check_files(options)
    if options.log_requests:
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        logging.getLogger("crossover.http").setLevel(logging.INFO)
    api_key = read_api_key(options.api_key_env, options.api_key_file)
    engine_options = parse_options(options.options)
    split = _split(options)
    with listen(options.host, options.port) as listener:
        facts = hardware_facts()
        placement, configs, tokenizer_path = prepare(options, engine_options, facts, split, narrator)
        narrator.say(*explain(placement), split.note)
        os.sched_setaffinity(0, split.api)
        return _run(_serve(options, placement, configs, tokenizer_path, api_key, listener, narrator))


def _split(options: ServeOptions) -> CoreSplit:
    allowed = allowed_cores()
    return split_cores(allowed, parse_cores(options.cores), parse_cores(options.api_cores), options.threads, physical_of(allowed))


async def _serve(
    options: ServeOptions,
    placement: Placement,
    configs: list[EngineConfig],
    tokenizer_path: str,
    api_key: str | None,
    listener: socket.socket,
    narrator: Narrator,
) -> int:
    supervisor = Supervisor(
        configs,
        bounds=QueueBounds(waiting_requests=options.most_waiting, wait_seconds=options.longest_wait_seconds),
        limits=RecoveryLimits(health_timeout_seconds=options.health_timeout_seconds),
        preferred_usable=_preferred_usable(placement),
        on_event=narrator.event,
    )
    app = create_app(
        supervisor,
        load_tokenizer(tokenizer_path),
        served_name=configs[0].model_name,
        api_key=api_key,
        placement={**msgspec.to_builtins(placement), "lines": explain(placement)},
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
            timeout_graceful_shutdown=5,
            **server_options(Limits()),
        )
    )
    server.capture_signals = _leave_signals_alone  # type: ignore[method-assign]  # the order below matters: drain, then close
    url = url_of(listener, tls=options.tls_certificate is not None)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _on_signal, supervisor, stop, narrator)
    await supervisor.start()
    narrator.say(f"listening on {url}, loading the model")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announcing = asyncio.create_task(_announce(supervisor, placement, url, options.ready_file, narrator))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, announcing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if announcing.done() and not stop.is_set():
        status = 1
        narrator.say(f"giving up: {announcing.result()}")
    elif serving.done() and not stop.is_set():
        status = 1
        narrator.say("the HTTP server ended by itself")
    cut_off = await supervisor.stop(drain=not announcing.done(), timeout_seconds=options.drain_seconds)
    announcing.cancel()
    stopping.cancel()
    server.should_exit = True
    await serving
    if options.ready_file:
        Path(options.ready_file).unlink(missing_ok=True)
    narrator.say(f"stopped, {cut_off} requests cut off" if cut_off else "stopped")
    return 1 if cut_off else status


async def _announce(supervisor: Supervisor, placement: Placement, url: str, ready_file: str | None, narrator: Narrator) -> str:
    """Tell how far the load is, and each time an engine is ready; returns the reason when the first one never is."""
    told_for: int | None = None
    first = True
    while True:
        if supervisor.state == "failed" and first:
            return supervisor.reason or "the engine failed"
        if supervisor.state in ("loading", "restarting") and supervisor.loading is not None:
            narrator.progress(supervisor.loading.what, supervisor.loading.fraction)
        ready, pid = supervisor.ready, supervisor.engine_pid
        if ready is not None and pid is not None and pid != told_for:
            told_for, first = pid, False
            memory = process_memory(pid)
            measured = gib(memory.rss_bytes) if memory is not None else "not measured"
            attempt = next((a for a in placement.attempts if a.device == supervisor.config.device), placement.attempts[0])
            narrator.end_progress()
            print(
                f"ready: {url} ({supervisor.label}, loaded in {ready.load_seconds:.1f} s, "
                f"memory {gib(attempt.need_bytes)} predicted, {measured} measured)",
                flush=True,
            )
            if ready_file:
                content = {"url": url, "pid": os.getpid(), "engine_pid": pid, "backend": supervisor.label}
                write_atomically(Path(ready_file), json.dumps(content))
        await supervisor.wait_change()


def _on_signal(supervisor: Supervisor, stop: asyncio.Event, narrator: Narrator) -> None:
    if not stop.is_set():
        narrator.say(f"draining {supervisor.in_flight} requests; a second signal aborts them")
        stop.set()
    else:
        narrator.say("aborting")
        task = asyncio.ensure_future(supervisor.stop(drain=False))
        _background.add(task)
        task.add_done_callback(_background.discard)


_background: set[asyncio.Future[int]] = set()  # asyncio keeps only weak references to tasks


def _preferred_usable(placement: Placement) -> Callable[[], Any] | None:
    """Asks the GPU's driver, in a subprocess, whether the first engine would fit now with room to spare."""
    if placement.device != "gpu" or len(placement.attempts) < 2:
        return None

    async def usable() -> bool:
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
