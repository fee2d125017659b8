"""The server of a cell: a child process on its own cores, or an endpoint that is already running.

server = CellServer(cell, campaign, folder / "logs")
server.wait_ready(report)
server.target, server.ready(), server.trouble()
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from crossover.loadtests.campaign.campaign_file import Campaign, Cell, ThirdPartyEngine
from crossover.loadtests.campaign.cell_selection import (
    layout_of,
    placement_policy_of,
    settings_of,
    split_of,
)
from crossover.loadtests.errors import ServerFailed, ServerLost, TargetUnusable
from crossover.loadtests.host.child_processes import Child, last_line
from crossover.loadtests.host.cpu_pinning import Layout
from crossover.loadtests.host.resource_sampler import engine_pids, family
from crossover.loadtests.load_generator.endpoint_details import EndpointDetails, ask_details
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.journal_events import CellReady, EngineInfo
from crossover.models.errors import ModelError
from crossover.models.identity.identify_model import ModelIdentity, identify, renamed
from crossover.models.identity.resolve_model import find_files
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS
from crossover.serving.hardware.cpu_topology import cores_text
from crossover.serving.server_options import arguments

Report = Callable[[str, float | None], None]  # (what is done now, fraction of it 0..1 or None)
HOST = "127.0.0.1"  # of another project's engine
STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL: several processes free a GPU
READY_TIMEOUT_SECONDS = 5.0  # of one request that asks whether an engine is ready
# Device files that a process which uses a GPU has open: CUDA opens /dev/nvidia*, ROCm /dev/kfd,
# Vulkan a render node, and a GPU in Windows' Linux subsystem is /dev/dxg.
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/dxg")


class CellServer:
    """The server of a cell: a `crossover serve` or another project's engine, which this class
    starts, or an endpoint that is already running."""

    pid: int | None = None  # None: it was not started here

    def __init__(self, cell: Cell, campaign: Campaign, logs: Path) -> None:
        """Start nothing yet. `logs`: the folder for its output."""
        self.target = campaign.target or Target(url="")
        is_endpoint = cell.url is not None
        self.layout = None if is_endpoint else layout_of(cell, campaign)
        self._cell, self._campaign = cell, campaign
        self._engine = campaign.engine_of(cell)
        self.is_crossover = self.layout is not None and self._engine is None
        self.name = self._engine.name if self._engine else "the server"
        self.log = logs / f"{cell.key}.server.log"
        self._ready_file = logs / f"{cell.key}.ready.json"
        self._child: Child | None = None
        self._command: list[str] = []
        self._identity: ModelIdentity | None = None  # None: a ladder model

    def wait_ready(self, report: Report) -> None:
        """Start the server, unless it is an endpoint, and wait until it has loaded its model.

        Raises ServerFailed if it does not start or takes too long, ServerLost if it was killed.
        """
        if self.layout is None:
            return
        if self._engine is None:
            url = self._start_crossover(self.layout, report)
        else:
            url = self._start_engine(self._engine, self.layout, report)
        self._identity = identity_now(self._cell)
        self.target = Target(
            url=url,
            api=api_of(self._campaign, self._identity),
            ignore_eos=self._campaign.ignore_eos,
        )

    def _start_crossover(self, layout: Layout, report: Report) -> str:
        """Start `crossover serve`, wait until its model is loaded, and return its URL."""
        self._ready_file.unlink(missing_ok=True)
        self._command = serve_command(self._cell, self._campaign, layout, self._ready_file)
        # The server pins its engine and its API to their own cores, so it needs both.
        cores = tuple(sorted({*layout.engine, *layout.api}))

        def missing() -> str:
            return "" if self._ready_file.exists() else "it loads"

        self._start(self._command, cores, missing, report)
        url: str = msgspec.json.decode(self._ready_file.read_bytes())["url"]
        return url

    def _start_engine(self, engine: ThirdPartyEngine, layout: Layout, report: Report) -> str:
        """Make or find the weights of another project's engine, start it, wait until its `ready`
        path answers 200, and return its URL.

        Raises ServerFailed if it has no weights.
        """
        model, server = self._cell.source, self._campaign.server
        try:
            if engine.weights != "none":
                model = find_files(
                    self._cell.model_identity,
                    kind=engine.weights,
                    weight_format=self._cell.weight_format,
                    cache=server.cache,
                    progress=report,
                ).path
        except ModelError as problem:
            raise ServerFailed(f"There are no weights for {engine.name}: {problem}") from problem
        with socket.socket() as free:  # the kernel chooses a free port
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        settings = server.filled(DEFAULT_SETTINGS["cpu"])
        values = {
            "model": model,
            "host": HOST,
            "port": port,
            "slots": settings.slots,
            "context": settings.context_tokens,
            "kv_tokens": settings.pool_tokens,
            "threads": server.threads or layout.engine_threads,
            "cores": cores_text(layout.engine),
        }
        self._command = filled(engine.command, values)
        # Variables of Crossover's own Python, which another project's Python must not inherit.
        unset = ["-u", "PYTHONPATH", "-u", "PYTHONSAFEPATH"]
        url = f"http://{HOST}:{port}"

        def missing() -> str:
            try:
                status, _, _ = fetch(pool, get_bytes(pool, engine.ready), READY_TIMEOUT_SECONDS)
            except TargetUnusable:
                return f"{url}{engine.ready} did not answer"
            return "" if status == 200 else f"{url}{engine.ready} answered {status}"

        with connect(url) as pool:
            self._start(["env", *unset, *self._command], layout.engine, missing, report)
        return url + (engine.api_path or "")

    def _start(
        self,
        command: list[str],
        cores: tuple[int, ...],
        missing: Callable[[], str],
        report: Report,
    ) -> None:
        """Start the server and wait until it is ready.

        `missing`: returns what the server still lacks, for an error's text; "": it is ready.
        """
        started_at, seconds = time.monotonic(), self._campaign.server.ready_seconds
        self._child = child = Child(command, cores=cores, log=self.log)
        self.pid = child.pid
        where = f"its output is in logs/{self.log.name}"
        while what := missing():
            if (status := child.poll()) is not None:
                how = f"({child.how_it_ended()}); {where}"
                if status < 0:
                    raise ServerLost(f"{self.name} was killed while starting {how}")
                raise ServerFailed(f"{self.name} did not start {how}")
            if time.monotonic() > started_at + seconds:
                raise ServerFailed(
                    f"{self.name} was not ready within {seconds:g} s: {what}; {where}"
                )
            report(last_line(self.log) or f"starting {self.name}", None)
            time.sleep(0.05)
        self._load_seconds = round(time.monotonic() - started_at, 3)

    def ready(self) -> CellReady:
        """Return the event that says what serves the cell: by /v1/placement for a Crossover server,
        by its command for another project's engine, and by its own routes for an endpoint.

        Raises TargetUnusable.
        """
        if self.layout is None:
            details = ask_details(self.target, self.target.model or self._cell.model)
            info = info_of_endpoint(details)
            return CellReady(cell=self._cell.key, info=info, spec=details.spec, url=self.target.url)
        load_seconds: float | None = self._load_seconds
        if self._engine is None:
            with connect(self.target.url) as pool:
                status, _, body = fetch(pool, get_bytes(pool, "/v1/placement"))
            if status != 200:
                raise TargetUnusable(f"{self.target.url}/v1/placement answered {status}")
            placement = msgspec.json.decode(body)
            info, load_seconds = info_of(placement), placement.get("load_seconds")
        else:
            uses_gpu = any(holds_gpu(pid) for pid in family(self.pid or 0))
            info = EngineInfo(
                name=self.name,
                device="gpu" if uses_gpu else "cpu",
                weight_format=self._cell.weight_format,
                command=shlex.join(self._command),
            )
        identity = self._identity
        has_weights = self._engine is None or self._engine.weights != "none"
        is_random = identity is None or identity.is_random  # a ladder model has random weights
        return CellReady(
            cell=self._cell.key,
            info=info,
            load_seconds=load_seconds,
            synthetic=has_weights and is_random,
            spec=None if identity is None else identity.spec,
            url=self.target.url,
            layout=msgspec.to_builtins(self.layout),
        )

    def trouble(self) -> str | None:
        """Return why a level cannot go on; None: the server runs, or was not started here."""
        if self._child is not None and self._child.poll() is not None:
            return f"{self.name} ended ({self._child.how_it_ended()})"
        return None

    def engine_pids(self) -> list[int]:
        """Return the engine processes of a Crossover server; [] for any other.

        If they change during a level, the engine was restarted, and the level does not count.
        """
        return engine_pids(self.pid or 0) if self.is_crossover else []

    def stop(self) -> None:
        """Stop the server, if it was started here."""
        if self._child is not None:
            self._child.stop(STOP_SECONDS + 10.0)


def info_of_endpoint(details: EndpointDetails) -> EngineInfo:
    """Return what an endpoint that is already running reports about its engine."""
    if details.placement is not None:
        return info_of(details.placement)
    if details.software == "unknown":
        return EngineInfo()
    return EngineInfo(
        name=details.software,
        slots=details.slots,
        context_tokens=details.context_tokens,
        kv_tokens=details.kv_tokens,
    )


def identity_now(cell: Cell) -> ModelIdentity | None:
    """Return what the cell's model is; None: a ladder model.

    The shape of a model of the hub is known only after the server has fetched it, so the model is
    identified again if the cell does not have its shape.
    """
    identity = cell.identity
    if identity is None or identity.spec is not None:
        return identity
    with contextlib.suppress(ModelError):
        return renamed(identify(identity.source), identity.name)
    return identity


def api_of(campaign: Campaign, model: ModelIdentity | None) -> Literal["completions", "chat"]:
    """Return the route that is measured on a server that the campaign starts. `model` None: a
    ladder model."""
    if campaign.api != "auto":
        return campaign.api
    if campaign.workload.has_sessions:
        return "chat"
    return "chat" if model is not None and model.has_chat_template else "completions"


def holds_gpu(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process has a GPU's device file open; False if it cannot be read."""
    try:
        open_files = [os.readlink(link) for link in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(name.startswith(GPU_FILES) for name in open_files)


def filled(command: str, values: Mapping[str, object]) -> list[str]:
    """Return the words of a command, split as by a shell, with the values in place of {name}.

    A name without a value stays as it is.
    """

    def value(match: re.Match[str]) -> str:
        return str(values.get(match[1], match[0]))

    return [re.sub(r"\{([A-Za-z_]+)\}", value, word) for word in shlex.split(command)]


def info_of(placement: Mapping[str, Any]) -> EngineInfo:
    """Return what the answer of /v1/placement says about the engine."""
    engine, memory = placement.get("engine") or {}, placement.get("memory") or {}
    fields = {
        **engine,
        "name": engine.get("backend"),
        "device_name": placement.get("device_name"),
        "predicted": memory.get("predicted"),
        "memory_share_on_nodes": memory.get("share_on_nodes"),
        "prefix_reuse": placement.get("prefix_reuse"),
    }
    return msgspec.convert(fields, EngineInfo)


def serve_command(cell: Cell, campaign: Campaign, layout: Layout, ready_file: Path) -> list[str]:
    """Return the `crossover serve` command for a cell. The server writes its URL to `ready_file`
    once its model is loaded."""
    server = msgspec.structs.asdict(campaign.server)
    del server["ready_seconds"], server["gpu"]  # of the campaign, not of `serve`
    options = {
        **server,
        **msgspec.structs.asdict(settings_of(cell, campaign)),
        "slots": cell.slots,
        "backend": cell.backend,
        "weight_format": cell.weight_format or None,
        "policy": placement_policy_of(cell),
        "port": 0,
        "sampling_defaults": "openai",  # requests say what they ask for
        "cores": cores_text(layout.engine),
        "api_cores": cores_text(layout.api),
        "threads": split_of(cell, campaign, layout).threads,
        "ready_file": ready_file.absolute(),
        "served_name": None if cell.identity is None else cell.model,
    }
    return [sys.executable, "-m", "crossover", "serve", *arguments(options), "--", cell.source]
