"""Replicas on a Ray cluster, by Ray Serve's own ingress: `crossover serve MODEL --on ray`.

    status = launch_on_ray(ServeOptions(models=("1b",), on="ray", replicas=2, threads=4))

Ray Serve's proxy listens on --host and --port and spreads requests over the replicas. Each replica
is this server's app with an engine of its own, and Ray restarts it if it dies. Without RAY_ADDRESS,
a cluster is started on this machine: on 127.0.0.1, without dashboard, and with a token, because
everyone who reaches a Ray cluster without one can run code on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.child_process import python_variables
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.weights.weights_manifest import write_atomically
from crossover.serving.capacity.scheduler_settings import MAX_CPU_SLOTS, MAX_GPU_SLOTS
from crossover.serving.errors import EngineFailed, ServingError
from crossover.serving.hardware.machine_facts import allowed_cores
from crossover.serving.option_help import flags_of
from crossover.serving.server_options import Policy, ServeOptions

APPLICATION = "crossover"
# Options that need all engines in one process on one machine.
REFUSED = (
    "models_file",
    "memory_limit",
    "idle_unload_seconds",
    "admin_key_env",
    "cores",
    "api_cores",
    "engines",
)


def launch_on_ray(options: ServeOptions) -> int:
    """Serve until a signal arrives. Return the exit status."""
    check_options(options)
    (source,) = options.models
    if os.path.exists(source) and find_ladder_model(source) is None:
        # Replicas run in another folder.
        options = msgspec.structs.replace(options, models=(os.path.abspath(source),))
    from crossover.serving.cli.launch import key_of
    from crossover.serving.http.http_server import listen, url_of

    # Taken out of the environment now, before Ray's processes inherit it.
    api_key = key_of(options.api_key_env, "--api-key-env")
    # Fails now if the port is in use, and chooses one for --port 0. Ray's proxy then listens on it.
    with listen(options.host, options.port) as listener:
        url, port = url_of(listener), listener.getsockname()[1]
    nodes = connect()
    import ray
    from ray import serve

    try:
        cpus, gpus = share_of(nodes, options)
        slots = options.slots or (MAX_GPU_SLOTS if gpus else MAX_CPU_SLOTS)
        serve.start(http_options={"host": options.host, "port": port})
        replica = serve.deployment(
            serve.ingress(Ingress(options, api_key, cpus))(Replica),
            name=APPLICATION,
            num_replicas=options.replicas,
            max_ongoing_requests=slots + options.max_waiting,
            ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
            graceful_shutdown_timeout_s=options.drain_seconds,
            health_check_period_s=1.0,
        )
        try:
            serve.run(replica.bind(), name=APPLICATION, route_prefix="/")
        except RuntimeError as problem:  # its text is a traceback, whose last line says why
            why = str(problem).strip().rpartition("\n")[2].strip()
            raise ServingError(f"No replica could be started: {why}") from None
        print(f"ready: {url} ({options.replicas} replicas, {cpus} cores each)", flush=True)
        if options.ready_file:
            ready_record = json.dumps({"url": url, "pid": os.getpid()})
            write_atomically(Path(options.ready_file), ready_record.encode())
        stop_requested = threading.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda *_: stop_requested.set())
        stop_requested.wait()
        serve.delete(APPLICATION)  # each replica drains
        serve.shutdown()
    finally:
        ray.shutdown()
        if options.ready_file:
            Path(options.ready_file).unlink(missing_ok=True)
    return 0


def check_options(options: ServeOptions) -> None:
    """Raises ServingError for an option that does not work on Ray."""
    for field in msgspec.structs.fields(ServeOptions):
        if field.name in REFUSED and getattr(options, field.name) != field.default:
            flag = flags_of(ServeOptions)[field.name]
            raise ServingError(f"{flag} is not supported with --on ray and several engines")
    if len(options.models) != 1:
        raise ServingError(f"--on ray serves only one model, but {len(options.models)} are given")
    if importlib.util.find_spec("ray") is None:
        raise ServingError("--on ray needs Ray. Install it: pip install 'llm-crossover[scale]'")


def connect() -> list[dict[str, Any]]:
    """Join the cluster at RAY_ADDRESS, or start one on this machine with a token that only its own
    processes have. Return its living nodes, as `ray.nodes` describes them. Raises ServingError."""
    address = os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {"address": address}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reads these when it is imported
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keep 127.0.0.1
        os.environ.update(python_variables())  # workers import nothing from the current folder
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        settings = {"address": "local", "_node_ip_address": "127.0.0.1"}
        settings |= {"num_cpus": len(allowed_cores()), "include_dashboard": False}
    import ray

    try:
        with contextlib.chdir("/"):  # Ray's workers would import from the current folder
            ray.init(
                namespace=APPLICATION, log_to_driver=False, configure_logging=False, **settings
            )
    except (ConnectionError, RuntimeError, ValueError) as problem:
        where = f"The Ray cluster {address or 'of this machine'}"
        raise ServingError(f"{where} cannot be used: {problem}") from problem
    return [node for node in ray.nodes() if node["Alive"]]


def share_of(nodes: list[dict[str, Any]], options: ServeOptions) -> tuple[int, int]:
    """Return the cores and the GPUs (0 or 1) of each replica. Without --threads, the cores are
    divided evenly. Raises ServingError if the replicas do not fit."""
    cores_by_node = [int(node["Resources"].get("CPU", 0)) for node in nodes]
    gpus = sum(int(node["Resources"].get("GPU", 0)) for node in nodes)
    cores_each = options.threads or max(1, sum(cores_by_node) // options.replicas)
    max_replicas = sum(cores // cores_each for cores in cores_by_node)
    if max_replicas < options.replicas:
        request_text = f"--replicas {options.replicas}, --threads {cores_each} each"
        raise ServingError(f"{request_text}, do not fit: the nodes have {cores_by_node} cores")
    has_gpu_each = gpus >= options.replicas and options.policy is not Policy.cpu_only
    return cores_each, int(has_gpu_each)


_registry: Any = None  # the registry of this process, which is one replica


class Ingress:
    """The app of a replica, as an ASGI application for Ray Serve. The engine is started in the
    lifespan, since Ray waits for that."""

    def __init__(self, options: ServeOptions, api_key: str | None, cores: int) -> None:
        self._options = msgspec.structs.replace(options, threads=cores)
        self._api_key = api_key
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        try:
            await self._start()
        except Exception as problem:
            await send({"type": "lifespan.startup.failed", "message": str(problem)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await _registry.stop(True, self._options.drain_seconds)
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        """Start the engine and wait until it serves. Raises ServingError, ModelError."""
        global _registry
        from crossover.serving.cli.launch import make_registry
        from crossover.serving.http.routes import App
        from crossover.serving.logs import ConsoleLog

        log = ConsoleLog(sys.stderr)  # the replica's log, which Ray keeps
        _registry = await asyncio.to_thread(make_registry, self._options, log)
        self._app = App(
            _registry,
            self._api_key,
            cors_origins=self._options.cors_origin,
            has_open_metrics=self._options.open_metrics,
            requires_cache_salt=self._options.require_cache_salt,
        )
        await _registry.start()
        (model,) = _registry.models.values()
        await model.supervisor.wait_ready()


class Replica:
    """The class of a replica's actor. Ray Serve replaces an actor whose `check_health` raises."""

    def check_health(self) -> None:
        if _registry is None:
            return
        for model in _registry.models.values():
            if model.has_given_up:
                raise EngineFailed(model.supervisor.reason or "the engine failed")
