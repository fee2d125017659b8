"""An engine of others that runs: started on given cores, waited for, asked for its version, ended.

    running = StartedEngine(engine, argv, cores, log)
    running.wait_ready(url, say, 600, check)  # raises ServerFailed, ServerLost
    told_version(url)
    running.stop()

Between it and this process stands keeper.py, which cleans its log and ends all that it started.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from loadtests.engines.command import HOST, INHERITED, Engine, argv
from loadtests.errors import ServerFailed, ServerLost, TargetUnusable
from loadtests.generator.http_client import connect, fetch, get_bytes
from loadtests.host.processes import Child, last_line
from loadtests.host.resources import family

KEEPER = Path(__file__).with_name("keeper.py")
STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL: several processes free a GPU
VERSION_SECONDS = 60.0
MOST_VERSION = 200  # characters
# Where servers say their version: vLLM, Ollama, TGI, SGLang (new and old), llama-server.
VERSIONS = (
    *(("/version", "version"), ("/api/version", "version"), ("/info", "version")),
    *(("/server_info", "version"), ("/get_server_info", "version"), ("/props", "build_info")),
)
ASK_SECONDS = 5.0
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/dxg")

Say = Callable[[str, float | None], None]  # what, fraction 0..1 or None


class StartedEngine:
    """The processes of one engine. Raises ServerFailed where a variable that it needs is not set.

    `pid` is the keeper's: the engine is all that is below it.
    """

    def __init__(
        self,
        engine: Engine,
        words: Sequence[str],
        cores: Sequence[int],
        log: Path,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.engine = engine
        self._log = log
        self._stop_seconds = stop_seconds
        self._child = _keep(engine, words, cores, log, stop_seconds)
        self.pid = self._child.pid

    def wait_ready(
        self, url: str, say: Say, ready_seconds: float, check: Callable[[], None]
    ) -> None:
        """Until `ready` answers 200, from one of its processes; `check` may end it before.

        Raises ServerFailed when it gives up or is late, ServerLost when it was killed.
        """
        until = time.monotonic() + ready_seconds
        name, path = self.engine.name, self.engine.ready
        said = f"all it said is in logs/{self._log.name}"
        with connect(url) as pool:
            while True:
                check()
                status = self._child.poll()
                if status is not None:
                    how = f"({self._child.how_it_ended()}); {said}"
                    if status < 0:
                        raise ServerLost(f"{name} was killed while it started {how}")
                    raise ServerFailed(f"{name} did not start {how}")
                try:
                    answered = f"answered {fetch(pool, get_bytes(pool, path), ASK_SECONDS)[0]}"
                except TargetUnusable:
                    answered = "did not answer"
                port = int(url.rpartition(":")[2])
                if answered == "answered 200" and self._answers_itself(port):
                    return
                if time.monotonic() > until:
                    raise ServerFailed(
                        f"{name} was not ready within {ready_seconds:g} s: {url}{path} "
                        f"{answered}{self._elsewhere(port)}; {said}"
                    )
                say(f"{name}: {last_line(self._log) or 'starting'}", None)
                time.sleep(0.2)

    def _answers_itself(self, port: int) -> bool:
        """Whether the port is one of its own: another server may have taken it."""
        ports = self.ports()
        return ports is None or port in ports

    def _elsewhere(self, port: int) -> str:
        """Where it listens in place of the port that it was given."""
        ports = self.ports()
        if ports is None or port in ports:
            return ""
        if not ports:
            return f", and none of its processes listens on port {port}"
        listed = ", ".join(map(str, sorted(ports)))
        return f", and it listens on {listed} in place of {port}"

    def ports(self) -> set[int] | None:
        """TCP ports that its processes listen on; None where the kernel does not tell."""
        found = set()
        for pid in self.pids():
            try:
                for one in psutil.Process(pid).net_connections(kind="tcp"):
                    if one.status == psutil.CONN_LISTEN:
                        found.add(one.laddr.port)
            except psutil.NoSuchProcess:
                continue
            except psutil.Error:
                return None
        return found

    def pids(self) -> list[int]:
        """All its processes, the first one first."""
        return family(self.pid)[1:]

    def device(self) -> str:
        """ "gpu" where one of its processes holds the device file of one open, else "cpu"."""
        return "gpu" if any(holds_gpu(pid) for pid in self.pids()) else "cpu"

    def trouble(self) -> str | None:
        """Why a level cannot go on; None when all is well."""
        if self._child.poll() is not None:
            return f"{self.engine.name} ended ({self._child.how_it_ended()})"
        return None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to all that it started."""
        self._child.stop(self._stop_seconds + 10.0)


def _keep(
    engine: Engine, words: Sequence[str], cores: Sequence[int], log: Path, stop_seconds: float
) -> Child:
    settings = {
        "command": list(words),
        "cores": list(cores),
        "inherited": INHERITED,
        "hidden": engine.variables,
        "environment": engine.environment,
        "stop_seconds": stop_seconds,
    }
    text = msgspec.json.encode(settings).decode()
    return Child([sys.executable, "-I", "-S", str(KEEPER), text], log=log)


def holds_gpu(pid: int, proc: Path = Path("/proc")) -> bool:
    """CUDA opens /dev/nvidia*, ROCm /dev/kfd, Vulkan on a GPU a render node."""
    try:
        held = [os.readlink(one) for one in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(name.startswith(GPU_FILES) for name in held)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def version_of(engine: Engine, url: str, log: Path) -> str | None:
    """By its own command, else as it says over HTTP; None where neither tells."""
    if engine.version is None:
        return told_version(url)
    child = _keep(engine, argv(engine.version, {}), (), log, 1.0)
    try:
        child.wait(VERSION_SECONDS)
    finally:
        child.stop()
    return last_line(log)[:MOST_VERSION] or None


def told_version(url: str) -> str | None:
    """What the server says where servers say their version; None where it does not."""
    with connect(url) as pool:
        for path, key in VERSIONS:
            try:
                status, _, body = fetch(pool, get_bytes(pool, path), ASK_SECONDS)
            except TargetUnusable:
                continue
            found = _member(body, key) if status == 200 else None
            if found:
                return found[:MOST_VERSION]
    return None


def _member(body: bytes, key: str) -> str | None:
    try:
        value = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get(key)
        return None if value is None else msgspec.json.decode(value, type=str)
    except msgspec.MsgspecError:
        return None
