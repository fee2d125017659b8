"""The server of a cell: a child process on cores of its own, ours or not, or an endpoint.

    server = server_of(cell, campaign, layout, folder / "logs")
    server.wait_ready(say)
    server.target, server.ready(cell.key), server.mark()

`mark()` says which engine serves: a level between two different marks was not served by one.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadtests.campaign.campaign_file import Campaign, Cell
from loadtests.campaign.cell_selection import engine_values
from loadtests.campaign.external_servers import (
    HOST,
    Say,
    StartedEngine,
    argv,
    free_port,
    told_version,
)
from loadtests.errors import ServerFailed, ServerLost, TargetUnusable
from loadtests.host.child_processes import Child, last_line
from loadtests.host.cpu_pinning import Layout
from loadtests.host.resource_sampler import engine_pids
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.load_generator.openai_endpoint import Target
from loadtests.records.run_journal import CellReady, EngineInfo
from models.errors import ModelError
from models.resolve import resolve
from serving.hardware.cpu_topology import cores_text
from serving.server_options import arguments


class Server(ABC):
    """What the runner knows of whoever serves a cell; nothing is known of one that others run."""

    target: Target
    layout: Layout | None = None
    pid: int | None = None  # of a server that we started
    most_bytes: int | None = None  # that it and its engine may use

    @abstractmethod
    def wait_ready(self, say: Say) -> None: ...

    def ready(self, cell: str) -> CellReady:
        return CellReady(cell=cell, url=self.target.url)

    def mark(self) -> tuple[Any, ...]:
        return ()

    def trouble(self) -> str | None:
        """Why a level cannot go on; None when all is well."""
        return None

    def engine_pids(self) -> list[int]:
        return []

    def stop(self) -> None:
        return


class Endpoint(Server):
    """An endpoint that somebody else runs."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def wait_ready(self, say: Say) -> None:
        """Waits until it answers at all. Raises TargetUnusable after `ready_seconds`."""
        until = time.monotonic() + self.target.ready_seconds
        with connect(self.target.url, verify_tls=self.target.verify_tls) as pool:
            while True:
                try:
                    fetch(pool, get_bytes(pool, "/v1/models"), timeout_seconds=10)
                    return
                except TargetUnusable:
                    if time.monotonic() > until:
                        raise
                say(f"waiting for {self.target.url}", None)
                time.sleep(0.5)


class Started(Server):
    """One that we start."""

    layout: Layout

    def __init__(self, cell: Cell, layout: Layout) -> None:
        self.layout = layout
        self.target = Target(url="")
        limit = cell.hardware.memory_gib
        self.most_bytes = None if limit is None else int(limit * 2**30)


class Local(Started):
    """A `crossover serve` of our own."""

    def __init__(self, cell: Cell, campaign: Campaign, layout: Layout, logs: Path) -> None:
        super().__init__(cell, layout)
        self.log = logs / f"{cell.key}.server.log"
        self._synthetic = cell.synthetic
        self._ready_seconds = campaign.server.ready_seconds
        self._ready_file = logs / f"{cell.key}.ready.json"
        self._ready_file.unlink(missing_ok=True)
        command = serve_command(cell, campaign, layout, self._ready_file)
        # The engine takes its own cores; what the server may use must hold both.
        cores = tuple(sorted({*layout.engine, *layout.api}))
        self._child = Child(command, cores=cores, log=self.log)
        self.pid = self._child.pid

    def wait_ready(self, say: Say) -> None:
        """Raises ServerFailed when it gives up or is late, ServerLost when it was killed."""
        until = time.monotonic() + self._ready_seconds
        said = f"all it said is in logs/{self.log.name}"
        while not self._ready_file.exists():
            status = self._child.poll()
            if status is not None:
                how = f"({self._child.how_it_ended()}); {said}"
                if status < 0:
                    raise ServerLost(f"the server was killed while it started {how}")
                raise ServerFailed(f"the server did not start {how}")
            if time.monotonic() > until:
                limit = f"{self._ready_seconds:g} s"
                raise ServerFailed(f"the server was not ready within {limit}; {said}")
            say(last_line(self.log) or "starting the server", None)
            time.sleep(0.05)
        self.target = Target(url=msgspec.json.decode(self._ready_file.read_bytes())["url"])

    def ready(self, cell: str) -> CellReady:
        """What /v1/placement says, and where everything runs."""
        seen = self._placement()
        memory = seen.get("memory") or {}
        return CellReady(
            cell=cell,
            info=info_of(seen),
            load_seconds=seen.get("load_seconds"),
            rss_bytes=memory.get("rss_bytes"),
            peak_rss_bytes=memory.get("peak_rss_bytes"),
            synthetic=self._synthetic,
            url=self.target.url,
            layout=msgspec.to_builtins(self.layout),
            placement=seen.get("explanation"),
        )

    def mark(self) -> tuple[Any, ...]:
        """Which engine process serves, and how often the server has changed it."""
        try:
            seen = self._placement()
        except TargetUnusable:
            return ("no answer", time.monotonic())  # equal to no other mark
        changes = [seen.get(name) for name in ("restarts", "fallbacks", "returns", "state")]
        return (self.engine_pids(), *changes)

    def trouble(self) -> str | None:
        if self._child.poll() is not None:
            return f"the server ended ({self._child.how_it_ended()})"
        return None

    def engine_pids(self) -> list[int]:
        return engine_pids(self._child.pid)

    def stop(self) -> None:
        self._child.stop()

    def _placement(self) -> dict[str, Any]:
        with connect(self.target.url) as pool:
            status, _, body = fetch(pool, get_bytes(pool, "/v1/placement"))
        if status != 200:
            raise TargetUnusable(f"{self.target.url}/v1/placement answered {status}")
        found: dict[str, Any] = msgspec.json.decode(body)
        return found


class Command(Started):
    """An engine of others, started by its command (`engines` of the campaign)."""

    def __init__(self, cell: Cell, campaign: Campaign, layout: Layout, logs: Path) -> None:
        super().__init__(cell, layout)
        self._cell = cell
        self._server = campaign.server
        self._engine = campaign.engines[cell.engine]
        self._logs = logs
        self._running: StartedEngine | None = None
        self._load_seconds: float | None = None
        self._words: list[str] = []
        self._device = cell.device
        self._version: str | None = None

    def wait_ready(self, say: Say) -> None:
        """Makes or finds its weights, starts it and waits.

        Raises ServerFailed when it gives up or is late, ServerLost when it was killed.
        """
        cell, engine = self._cell, self._engine
        missing = [name for name in engine.variables if name not in os.environ]
        if missing:
            raise ServerFailed(f"{engine.name} needs {missing[0]}, a variable that is not set")
        try:
            values = engine_values(cell, self._server, self.layout, self._weights(say))
        except ModelError as problem:
            raise ServerFailed(f"no weights for {engine.name}: {problem}") from problem
        values["port"] = free_port()
        url = f"http://{HOST}:{values['port']}"
        self._words = argv(engine.command, values)
        began = time.monotonic()
        log = self._logs / f"{cell.key}.server.log"
        self._running = StartedEngine(engine, self._words, self.layout.engine, log)
        self.pid = self._running.pid
        self._running.wait_ready(url, say, self._server.ready_seconds)
        self._load_seconds = round(time.monotonic() - began, 3)
        self.target = Target(url=url, api=engine.api)
        say(f"{engine.name}: asking for its version", None)
        self._device = self._device or self._running.device()
        self._version = told_version(url)

    def _weights(self, say: Say) -> str:
        cell, engine = self._cell, self._engine
        if (name := engine.names.get(cell.model)) is not None or engine.weights == "none":
            return name or cell.model
        return resolve(
            cell.model,
            kind=engine.weights,
            weight_format=cell.weight_format,
            cache=self._server.cache,
            progress=say,
        ).path

    def ready(self, cell: str) -> CellReady:
        """Its command as it was run, its version, and where it runs."""
        return CellReady(
            cell=cell,
            info=EngineInfo(
                name=self._engine.name,
                device=self._device,
                weight_format=self._cell.weight_format,
                details={"command": shlex.join(self._words), "version": self._version},
            ),
            load_seconds=self._load_seconds,
            synthetic=self._cell.synthetic,
            url=self.target.url,
            layout=msgspec.to_builtins(self.layout),
        )

    def mark(self) -> tuple[Any, ...]:
        return tuple(self.engine_pids())

    def trouble(self) -> str | None:
        return self._running.trouble() if self._running is not None else "it was not started"

    def engine_pids(self) -> list[int]:
        """Its first process: the others may come and go without a restart."""
        return self._running.pids()[:1] if self._running is not None else []

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()


def server_of(cell: Cell, campaign: Campaign, layout: Layout | None, logs: Path) -> Server:
    """The server of a cell: one of ours is starting already."""
    if campaign.target is not None or layout is None:
        assert campaign.target is not None
        return Endpoint(campaign.target)
    return (Command if cell.engine else Local)(cell, campaign, layout, logs)


def info_of(placement: Mapping[str, Any]) -> EngineInfo:
    """What /v1/placement says of the engine."""
    engine, memory = placement.get("engine") or {}, placement.get("memory") or {}
    found = {
        **engine,
        "name": engine.get("backend"),
        "device_name": placement.get("device_name"),
        "predicted": memory.get("predicted"),
        "measured": memory.get("measured"),
        "gpu": memory.get("gpu"),
        "details": placement.get("details"),
    }
    return msgspec.convert(found, EngineInfo)


def serve_command(cell: Cell, campaign: Campaign, layout: Layout, ready_file: Path) -> list[str]:
    """`crossover serve` as the cell wants it."""
    server = msgspec.structs.asdict(campaign.server)
    server["step_seconds_target"] = server.pop("step_seconds")
    del server["ready_seconds"]
    if cell.is_best:  # it was chosen for the CPU
        server["policy"] = "cpu-only"
    given = {
        "backend": cell.backend,
        "weight_format": cell.weight_format or None,
        "port": 0,
        "cores": cores_text(layout.engine),
        "api_cores": cores_text(layout.api),
        "threads": cell.hardware.threads or layout.engine_threads,
        "ready_file": ready_file.absolute(),
        **server,
    }
    return [sys.executable, "-m", "crossover", "serve", *arguments(given), "--", cell.model]
