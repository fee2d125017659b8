"""The servers that a comparison over HTTP starts: `crossover serve` with any backend, llama.cpp's
llama-server.

    with server(PEERS["llama-server"](setup), setup.port, "/health", log) as url: ...

Every one is given the same engine threads, slots and context. They end with the process that
started them, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PARENT_BOUND = HERE.parents[2] / "loadtests" / "host" / "parent_bound.py"


class Setup(NamedTuple):
    """What a server is to serve, and with what.

    Cores: the engine's threads, and where HTTP and the client run.
    """

    model: str  # as resolved for `crossover serve`: a rung, a folder, a file
    backend: str  # of ours only
    weight_format: str
    path: str  # the weights, for the peers
    port: int
    slots: int
    context_tokens: int
    engine_cores: tuple[int, ...]
    client_cores: tuple[int, ...]
    extra: tuple[str, ...] = ()  # more arguments
    checkout: str = ""  # of ours: a folder with another state of the code

    @property
    def threads(self) -> str:
        return str(len(self.engine_cores))


class Launcher(NamedTuple):
    """How a server is started, where it says that it is ready, and which weights it takes."""

    command: Callable[[Setup], list[str]]
    ready: str
    backend: str | None  # whose kind of weights; None: the setup's
    name: str


def mask(cores: tuple[int, ...] | list[int]) -> str:
    return hex(sum(1 << core for core in cores))


def built(script: str) -> str:
    """The last line that a build script prints; what it says goes to our stderr."""
    found = subprocess.run(
        ["bash", str(HERE / script)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    return found.stdout.strip().splitlines()[-1]


def words(text: str) -> list[str]:
    return text.split()


def crossover(setup: Setup) -> list[str]:
    """Our server, of this state of the code or of another checkout."""
    another = ["env", "-C", setup.checkout, f"PYTHONPATH={setup.checkout}"]
    cores = ",".join(map(str, setup.engine_cores))
    api_cores = ",".join(map(str, setup.client_cores))
    return [
        *(another if setup.checkout else ()),
        *(sys.executable, "-m", "crossover", "serve", setup.model),
        *words(f"--backend {setup.backend} --format {setup.weight_format} --port {setup.port}"),
        *words(f"--slots {setup.slots} --context {setup.context_tokens}"),
        *words(f"--cores {cores} --api-cores {api_cores}"),
        *setup.extra,
    ]


def llama_server(setup: Setup) -> list[str]:
    threads = f"-t {setup.threads} -tb {setup.threads}"
    return [
        *(built("build.sh") + "/llama-server", "-m", setup.path),
        *words(f"--port {setup.port} --no-webui {threads}"),
        *words(f"--cpu-mask {mask(setup.engine_cores)} --cpu-strict 1"),
        *words(f"-np {setup.slots} -c {setup.slots * setup.context_tokens}"),
        *setup.extra,
    ]


OURS = Launcher(crossover, "/ready", None, "crossover")
PEERS = {
    "llama-server": Launcher(llama_server, "/health", "llama_cpp", "llama-server"),
}


@contextlib.contextmanager
def server(command: list[str], port: int, ready: str, log: Path) -> Iterator[str]:
    """A server process for as long as the block runs; waits until it says that it is ready.

    Yields its URL. It is killed when this process
    ends, even by SIGKILL; SIGTERM ends this process as Ctrl-C does, so that the servers get to end
    in order.
    """
    url = f"http://127.0.0.1:{port}"
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    wrapper = [sys.executable, "-I", "-S", str(PARENT_BOUND), str(os.getpid()), "-", "0"]
    with log.open("w") as out:
        process = subprocess.Popen([*wrapper, *command], stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 600
            while not _answers(url + ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{' '.join(command[:5])} did not start:\n{log.read_text()[-2000:]}"
                    )
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=2).status == 200)
    except OSError:
        return False
