"""The server of a cell: a child process on its own cores, or an endpoint that is already running.

server = Server(cell, campaign, folder / "logs")
server.wait_ready(say)
server.target, server.ready(cell.key), server.trouble()
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from crossover.loadtests.campaign.campaign_file import Campaign, Cell, Engine
from crossover.loadtests.campaign.cell_selection import layout_of, placement_policy_of
from crossover.loadtests.errors import ServerFailed, ServerLost, TargetUnusable
from crossover.loadtests.host.child_processes import Child, last_line
from crossover.loadtests.host.cpu_pinning import Layout
from crossover.loadtests.host.resource_sampler import engine_pids, family
from crossover.loadtests.load_generator.endpoint_details import EndpointDetails, ask_details
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.load_generator.openai_endpoint import Target
from crossover.loadtests.records.journal_events import CellReady, EngineInfo
from crossover.models.errors import ModelError
from crossover.models.identify_model import ModelIdentity, identify
from crossover.models.resolve_model import resolve
from crossover.serving.capacity.scheduler_settings import DEFAULT_SETTINGS
from crossover.serving.hardware.cpu_topology import cores_text
from crossover.serving.server_options import arguments

Say = Callable[[str, float | None], None]  # what, fraction 0..1 or None
HOST = "127.0.0.1"  # of an engine of others
STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL: several processes free a GPU
ASK_SECONDS = 5.0
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/dxg")


class Server:
    """Whoever serves a cell: a `crossover serve` or an engine of others that it starts, or an
    endpoint that is there.
    """

    pid: int | None = None  # of a server that it started

    def __init__(self, cell: Cell, campaign: Campaign, logs: Path) -> None:
        """Starts nothing yet."""
        self.target = campaign.target or Target(url="")
        self.layout = layout_of(cell, campaign)
        self._cell, self._campaign = cell, campaign
        self._engine = campaign.engine_of(cell)
        self.is_ours = self.layout is not None and self._engine is None
        self.name = self._engine.name if self._engine else "the server"
        self.log = logs / f"{cell.key}.server.log"
        self._ready_file = logs / f"{cell.key}.ready.json"
        self._child: Child | None = None
        self._words: list[str] = []
        self._identity: ModelIdentity | None = None  # of a model that the ladder does not have

    def wait_ready(self, say: Say) -> None:
        """Starts it, where it is ours to start, and waits until it is loaded.

        Raises ServerFailed when it gives up or is late, ServerLost when it was killed.
        """
        if self.layout is None:
            return
        if self._engine is None:
            self._ready_file.unlink(missing_ok=True)
            # The engine takes its own cores; what the server may use must hold both.
            cores = tuple(sorted({*self.layout.engine, *self.layout.api}))
            self._words = serve_command(self._cell, self._campaign, self.layout, self._ready_file)

            def look() -> str:
                return "" if self._ready_file.exists() else "it loads"

            self._start(self._words, cores, look, say)
            url = msgspec.json.decode(self._ready_file.read_bytes())["url"]
        else:
            url = self._start_engine(self._engine, self.layout, say)
        self._identity = identity_now(self._cell)
        self.target = Target(
            url=url,
            api=api_of(self._campaign, self._identity),
            ignore_eos=self._campaign.ignore_eos,
        )

    def _start_engine(self, engine: Engine, layout: Layout, say: Say) -> str:
        """Makes or finds its weights, starts it, waits until `ready` answers 200; its URL.

        Raises ServerFailed where its program is not installed.
        """
        model, server = self._cell.source, self._campaign.server
        program = program_of(engine.command)
        if shutil.which(program) is None:
            how = f" Install it: {engine.install}" if engine.install else ""
            raise ServerFailed(f"{engine.name} needs the program {program!r}, not found.{how}")
        try:
            if engine.weights != "none":
                weights = {"kind": engine.weights, "weight_format": self._cell.weight_format}
                model = resolve(model, **weights, cache=server.cache, progress=say).path
        except ModelError as problem:
            raise ServerFailed(f"There are no weights for {engine.name}: {problem}") from problem
        with socket.socket() as one:  # a port that nobody listens on now
            one.bind((HOST, 0))
            port = one.getsockname()[1]
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
        self._words, url = filled(engine.command, values), f"http://{HOST}:{port}"
        ours = ["-u", "PYTHONPATH", "-u", "PYTHONSAFEPATH"]  # of our processes, not of its

        def look() -> str:
            try:
                status = fetch(pool, get_bytes(pool, engine.ready), ASK_SECONDS)[0]
            except TargetUnusable:
                return f"{url}{engine.ready} did not answer"
            return "" if status == 200 else f"{url}{engine.ready} answered {status}"

        with connect(url) as pool:
            self._start(["env", *ours, *self._words], layout.engine, look, say)
        return url + (engine.api_path or "")

    def _start(
        self, command: list[str], cores: tuple[int, ...], look: Callable[[], str], say: Say
    ) -> None:
        """Starts it and waits until `look` finds nothing missing any more."""
        began, seconds = time.monotonic(), self._campaign.server.ready_seconds
        self._child = child = Child(command, cores=cores, log=self.log)
        self.pid = child.pid
        until, said = began + seconds, f"its output is in logs/{self.log.name}"
        while missing := look():
            if (status := child.poll()) is not None:
                how = f"({child.how_it_ended()}); {said}"
                if status < 0:
                    raise ServerLost(f"{self.name} was killed while starting {how}")
                raise ServerFailed(f"{self.name} did not start {how}")
            if time.monotonic() > until:
                raise ServerFailed(
                    f"{self.name} was not ready within {seconds:g} s: {missing}; {said}"
                )
            say(last_line(self.log) or f"starting {self.name}", None)
            time.sleep(0.05)
        self._load_seconds = round(time.monotonic() - began, 3)

    def ready(self, cell: str) -> CellReady:
        """Of ours what /v1/placement says; of others their command as it was run; of an endpoint
        what it says of itself."""
        if self.layout is None:
            return ready_of_endpoint(
                cell, self.target, ask_details(self.target, self.target.model or self._cell.model)
            )
        load_seconds: float | None = self._load_seconds
        if self._engine is None:
            with connect(self.target.url) as pool:
                status, _, body = fetch(pool, get_bytes(pool, "/v1/placement"))
            if status != 200:
                raise TargetUnusable(f"{self.target.url}/v1/placement answered {status}")
            seen = msgspec.json.decode(body)
            info, load_seconds = info_of(seen), seen.get("load_seconds")
        else:
            has_gpu = any(holds_gpu(pid) for pid in family(self.pid or 0))
            info = EngineInfo(
                name=self.name,
                device="gpu" if has_gpu else "cpu",
                weight_format=self._cell.weight_format,
                command=shlex.join(self._words),
            )
        has_weights = self._engine is None or self._engine.weights != "none"
        own = self._identity
        return CellReady(
            cell=cell,
            info=info,
            load_seconds=load_seconds,
            synthetic=has_weights and (own.is_random if own is not None else True),
            spec=None if own is None else own.spec,
            url=self.target.url,
            layout=msgspec.to_builtins(self.layout),
        )

    def trouble(self) -> str | None:
        """Why a level cannot go on; None when all is well."""
        if self._child is not None and self._child.poll() is not None:
            return f"{self.name} ended ({self._child.how_it_ended()})"
        return None

    def engine_pids(self) -> list[int]:
        """Of ours: a level in which they change is none."""
        return engine_pids(self.pid or 0) if self.is_ours else []

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(STOP_SECONDS + 10.0)


def ready_of_endpoint(cell: str, target: Target, details: EndpointDetails) -> CellReady:
    """Return the event of an endpoint that serves, with all that it said of itself."""
    info = EngineInfo()
    if details.placement is not None:
        info = info_of(details.placement)
    elif details.software != "unknown":
        info = EngineInfo(
            name=details.software,
            slots=details.slots,
            context_tokens=details.context_tokens,
            kv_tokens=details.kv_tokens,
        )
    return CellReady(cell=cell, info=info, spec=details.spec, url=target.url)


def identity_now(cell: Cell) -> ModelIdentity | None:
    """What the model is, once its server has fetched it; None: it is of the ladder."""
    known = cell.identity
    if known is None or known.spec is not None:
        return known
    with contextlib.suppress(ModelError):
        found = identify(known.source)
        spec = found.spec and msgspec.structs.replace(found.spec, name=known.name)
        return msgspec.structs.replace(found, name=known.name, spec=spec)
    return known


def api_of(campaign: Campaign, model: ModelIdentity | None) -> Literal["completions", "chat"]:
    """The route that is measured on a server started here."""
    if campaign.api != "auto":
        return campaign.api
    if campaign.workload.has_sessions:
        return "chat"
    return "chat" if model is not None and model.has_chat_template else "completions"


def holds_gpu(pid: int, proc: Path = Path("/proc")) -> bool:
    """CUDA opens /dev/nvidia*, ROCm /dev/kfd, Vulkan on a GPU a render node."""
    try:
        held = [os.readlink(one) for one in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(name.startswith(GPU_FILES) for name in held)


def program_of(command: str) -> str:
    """The program that a command starts, behind `env` and its variables."""
    words = shlex.split(command)
    if words[0] == "env":
        words = [word for word in words[1:] if not re.match(r"\w+=", word)]
    return words[0] if words else "env"


def filled(command: str, values: Mapping[str, object]) -> list[str]:
    """The words of a command, split as a shell does, its places filled."""
    return [
        re.sub(r"\{([A-Za-z_]+)\}", lambda place: str(values.get(place[1], place[0])), word)
        for word in shlex.split(command)
    ]


def info_of(placement: Mapping[str, Any]) -> EngineInfo:
    """What /v1/placement says of the engine."""
    engine, memory = placement.get("engine") or {}, placement.get("memory") or {}
    more = {
        "name": engine.get("backend"),
        "device_name": placement.get("device_name"),
        "predicted": memory.get("predicted"),
        "prefix_reuse": placement.get("prefix_reuse"),
    }
    return msgspec.convert({**engine, **more}, EngineInfo)


def serve_command(cell: Cell, campaign: Campaign, layout: Layout, ready_file: Path) -> list[str]:
    """`crossover serve` as the cell wants it."""
    server = msgspec.structs.asdict(campaign.server)
    del server["ready_seconds"], server["gpu"]
    given = {
        **server,
        **msgspec.structs.asdict(campaign.server.settings_on(cell.device)),
        "backend": cell.backend,
        "weight_format": cell.weight_format or None,
        "policy": placement_policy_of(cell, campaign),
        "port": 0,
        "cores": cores_text(layout.engine),
        "api_cores": cores_text(layout.api),
        "threads": campaign.server.threads or cell.threads or layout.engine_threads,
        "ready_file": ready_file.absolute(),
        "served_name": None if cell.identity is None else cell.model,
    }
    return [sys.executable, "-m", "crossover", "serve", *arguments(given), "--", cell.source]
