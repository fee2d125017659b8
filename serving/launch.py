"""From `crossover serve MODEL` to a server that answers: resolve, plan, listen, load, serve, drain.

    status = launch(ServeOptions(model="smollm2-135m", port=0))

The port is bound before anything slow happens, so a taken port is an error at once; the server listens while the engine loads (503 with the
reason until it is ready). The first SIGTERM or SIGINT drains, a second one aborts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from serving.cores import CoreSplit, parse_cores, physical_of, split_cores
from serving.errors import EngineFailed, ServingError
from serving.hardware import HardwareFacts, allowed_cores, hardware_facts, process_memory
from serving.narrator import Narrator
from serving.placement import Cause, Placement, Policy, explain, gib, plan

if TYPE_CHECKING:
    from models.spec import ModelSpec
    from serving.backends.base import EngineConfig
    from serving.supervisor import Supervisor

BACKEND_PACKAGES = {"llama_cpp": "llama_cpp", "onnx": "onnxruntime", "torch": "torch"}
RETURN_NEED = 1.2  # the GPU must have this much of the predicted need free before the engine goes back to it
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CannotListen(ServingError):
    """The address is taken, or not this machine's."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `crossover serve` was asked for; its help says what each option means."""

    model: str
    backend: str | None = None
    weight_format: str | None = None
    policy: Policy = Policy.auto
    host: str = "127.0.0.1"
    port: int = 8000
    threads: int | None = None
    cores: str = ""
    api_cores: str = ""
    slots: int = 16
    context_tokens: int = 2048
    kv_tokens: int | None = None
    kv_dtype: str = "fp16"
    prefill_tokens: int = 256
    prefix_reuse: bool = True
    cache: str | None = None
    served_name: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    options: tuple[str, ...] = ()
    most_waiting: int = 256
    longest_wait_seconds: float = 30.0
    health_timeout_seconds: float = 30.0
    drain_seconds: float = 60.0
    ready_file: str | None = None
    check_memory: bool = True
    manage: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    log_json: bool = False


def launch(options: ServeOptions) -> int:
    """Serve until a signal comes. The exit status: 0 after a drain, 1 when nothing could be served or requests were cut off."""
    narrator = Narrator(sys.stderr, as_json=options.log_json)
    api_key = read_api_key(options.api_key_env, options.api_key_file)
    engine_options = parse_options(options.options)
    split = _split(options)
    with listen(options.host, options.port) as listener:
        facts = hardware_facts()
        placement, configs, tokenizer_path = prepare(options, engine_options, facts, split, narrator)
        narrator.say(*explain(placement), split.note)
        os.sched_setaffinity(0, split.api)
        return _run(_serve(options, placement, configs, tokenizer_path, api_key, listener, narrator))


def prepare(
    options: ServeOptions, engine_options: dict[str, Any], facts: HardwareFacts, split: CoreSplit, narrator: Narrator
) -> tuple[Placement, list[EngineConfig], str]:
    """Find the model, decide where it runs, and get its weights for every engine that may run it. Returns the tokenizer's path last."""
    from models.hub import resolve
    from serving.backends.base import EngineConfig

    spec, size, backend, weight_format = _look_at(options, narrator)
    placement = plan(
        spec,
        facts,
        options.policy,
        backend=backend,
        weight_format=weight_format,
        slots=options.slots,
        context_tokens=options.context_tokens,
        kv_tokens=options.kv_tokens,
        kv_dtype=options.kv_dtype,
        weight_bytes=size,
        missing=missing_backends(),
        gpu_trouble=_gpu_trouble(facts, options, backend),
        check_memory=options.check_memory,
    )
    configs: list[EngineConfig] = []
    tokenizer_path = ""
    for attempt in placement.attempts:
        wanted = None if attempt.backend == "fake" else attempt.weight_format
        found = resolve(options.model, backend=attempt.backend, weight_format=wanted, cache=options.cache, progress=narrator.progress)
        extra = {"vocabulary": spec.vocabulary, **engine_options} if attempt.backend == "fake" else engine_options
        tokenizer_path = tokenizer_path or found.tokenizer_path
        configs.append(
            EngineConfig(
                backend=attempt.backend,
                model_path=found.path,
                model_name=options.served_name or spec.name,
                weight_format=found.weight_format,
                tokenizer_path=found.tokenizer_path,
                device=attempt.device,
                slots=options.slots,
                context_tokens=placement.context_tokens,
                kv_tokens=options.kv_tokens,
                kv_dtype=options.kv_dtype,
                threads=split.threads,
                cores=split.engine,
                prefill_tokens=options.prefill_tokens,
                prefix_reuse=options.prefix_reuse,
                options=extra,
            )
        )
        if found.synthetic and attempt.backend != "fake":
            narrator.say(f"{spec.name} has random weights: times and memory are those of the real model, the text is noise")
    return placement, configs, tokenizer_path


def _look_at(options: ServeOptions, narrator: Narrator) -> tuple[ModelSpec, int | None, str | None, str | None]:
    """The model's shape, its file's size where there is one file, and the backend and format that follow from what it is."""
    from models.hub import resolve
    from models.ladder import is_rung, rung

    if is_rung(options.model):
        return rung(options.model).spec, None, options.backend, options.weight_format
    backend = options.backend or ("fake" if options.model == "fake" else backend_of_path(Path(options.model)) or "llama_cpp")
    found = resolve(options.model, backend=backend, weight_format=options.weight_format, cache=options.cache, progress=narrator.progress)
    path = Path(found.path)
    size = path.stat().st_size if found.path and path.is_file() else None
    return found.spec, size, backend, found.weight_format or None


def backend_of_path(path: Path) -> str | None:
    """The backend that a local model asks for: llama_cpp for a GGUF file, onnx or torch for a folder; None for anything else."""
    if path.suffix == ".gguf":
        return "llama_cpp"
    if path.is_dir():
        if any(path.glob("*.onnx")):
            return "onnx"
        if any(path.glob("*.safetensors")):
            return "torch"
    return None


def missing_backends() -> dict[str, str]:
    """Backends whose package is not installed -> what to do; found without importing any."""
    from importlib.util import find_spec

    return {
        name: f"its package {package} is not installed (pip install 'llm-crossover[{name.replace('_', '-')}]')"
        for name, package in BACKEND_PACKAGES.items()
        if find_spec(package) is None
    }


def _gpu_trouble(facts: HardwareFacts, options: ServeOptions, backend: str | None) -> dict[str, tuple[Cause, str]]:
    """Ask the backends that may drive the GPU, in subprocesses, whether they can; empty where there is none to drive."""
    if not facts.gpus or options.policy is Policy.cpu_only:
        return {}
    from serving.probe import probe_backend

    trouble: dict[str, tuple[Cause, str]] = {}
    for name in ("torch", "llama_cpp") if backend is None else (backend,):
        if name not in BACKEND_PACKAGES:
            continue
        answer = probe_backend(name)
        if not answer.gpu:
            cause = Cause(answer.gpu_cause) if answer.gpu_cause else Cause.backend_missing
            trouble[name] = (cause, answer.gpu_note or answer.problem or "it does not say why")
    return trouble


def _split(options: ServeOptions) -> CoreSplit:
    allowed = allowed_cores()
    return split_cores(allowed, parse_cores(options.cores), parse_cores(options.api_cores), options.threads, physical_of(allowed))


# Serving.


async def _serve(
    options: ServeOptions,
    placement: Placement,
    configs: list[EngineConfig],
    tokenizer_path: str,
    api_key: str | None,
    listener: socket.socket,
    narrator: Narrator,
) -> int:
    import uvicorn

    from models.tokenizer import load_tokenizer
    from serving.admission import QueueBounds
    from serving.app import create_app
    from serving.recovery import RecoveryLimits
    from serving.supervisor import Supervisor

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
        placement=placement,
        manage=options.manage,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
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
        from serving.probe import find_gpus

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


# Small things.


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one. Raises CannotListen in one sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, OverflowError, UnicodeError) as problem:
        raise CannotListen(f"cannot listen on {host}:{port}: {getattr(problem, 'strerror', None) or problem}") from problem
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.set_inheritable(False)
    except (OSError, OverflowError) as problem:
        listener.close()
        advice = "; --port 0 takes a free one" if getattr(problem, "errno", None) == 98 else ""
        raise CannotListen(f"cannot listen on {host}:{port}: {getattr(problem, 'strerror', None) or problem}{advice}") from problem
    return listener


def url_of(listener: socket.socket, tls: bool = False) -> str:
    """The URL under which this machine reaches the socket; a wildcard address is named by its loopback."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def parse_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """("step_seconds=0.01", "mlock=true") -> {"step_seconds": 0.01, "mlock": True}: values are JSON where they can be, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ServingError(f"--option {pair!r} is not of the form key=value")
        if key in options:
            raise ServingError(f"--option {key} is given twice")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def read_api_key(variable: str | None, file: str | None) -> str | None:
    """The key from an environment variable or a file, never from the command line, which every process can read."""
    if variable and file:
        raise ServingError("--api-key-env and --api-key-file exclude each other")
    if variable:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ServingError(f"--api-key-env names {variable}, which is not set or empty")
        return key
    if file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise ServingError(f"--api-key-file {file}: {getattr(problem, 'strerror', None) or problem}") from problem
        if not key:
            raise ServingError(f"--api-key-file {file} is empty")
        return key
    return None


def write_atomically(path: Path, text: str) -> None:
    """The whole text or nothing: written beside and renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = ["CannotListen", "EngineFailed", "ServeOptions", "launch"]
