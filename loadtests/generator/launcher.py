"""The load generator's process: Locust, headless, with our locustfile and one end of a pipe.

Imports nothing heavy: importing Locust takes half a second, and a process that was started first
(`spare`) does it while its parent imports what it needs itself and probes the endpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadtests.errors import LoadError
from loadtests.host.processes import Child
from models.isolated import PACKAGE_ROOT, python_variables

CHANNEL_VARIABLE = "CROSSOVER_CHANNEL"  # the number of its file descriptor
# Locust takes modules and a locust.conf from the folder it starts in: it starts in ours, and goes
# to this one once it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
OWN_TARGET_VARIABLE = "CROSSOVER_OWN_TARGET"  # of a worker that joined from elsewhere
LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
LOCUST = (
    *("-m", "loadtests.generator.fast_locust", "-f", str(LOCUSTFILE)),
    *("--headless", "--only-summary", "--loglevel", "WARNING"),
)
PORT = 5557  # Locust's own


class Listening(msgspec.Struct, frozen=True):
    """A master of workers that are started elsewhere: where it listens, and for how many."""

    workers: int
    host: str = "127.0.0.1"
    port: int = PORT

    @property
    def place(self) -> str:
        return f"{_shown(self.host)}:{self.port}"


class GeneratorProcess:
    """The process and our end of the pipe. `users` are those of a closed loop.

    `processes` work on this machine beside a master where there are several; `listening` makes it
    the master of others. Raises LoadError where nothing can listen there.
    """

    def __init__(
        self,
        *,
        log: Path,
        users: int = 1,
        processes: int = 1,
        cores: tuple[int, ...] = (),
        listening: Listening | None = None,
    ) -> None:
        command = [sys.executable, *LOCUST, "-u", str(users), "-r", str(users)]
        if listening is not None:
            command += _master_options(listening)
        elif processes > 1:
            command += processes_options(processes)
        self.processes = processes
        self.listening = listening
        self.pipe, its = socket.socketpair()
        with its:
            self.child = Child(
                command,
                cores=cores,
                log=log,
                environment=client_environment()
                | {CHANNEL_VARIABLE: str(its.fileno()), FOLDER_VARIABLE: os.getcwd()},
                urgent=True,
                pass_fds=(its.fileno(),),
                folder=PACKAGE_ROOT,
            )

    def __enter__(self) -> GeneratorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self.child.stop()


def _master_options(listening: Listening) -> list[str]:
    """Locust's options for a master. Tried first: Locust would say it in its log alone."""
    try:
        family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
        socket.create_server((listening.host, listening.port), family=family).close()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise LoadError(f"the master cannot listen on {listening.place}: {reason}") from problem
    host, port = _shown(listening.host), str(listening.port)
    place = ["--master-bind-host", host, "--master-bind-port", port]
    return ["--master", *place, "--expect-workers", str(listening.workers)]


def processes_options(processes: int) -> list[str]:
    """Locust's options for several processes that talk over a port which nobody else uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    return ["--processes", str(processes), *place]


def worker(host: str, port: int, target: bytes) -> Child:
    """A worker of the master there, which sends to `target` alone (a Target as JSON)."""
    command = [sys.executable, *LOCUST, "--worker", "--master-host", _shown(host)]
    return Child(
        [*command, "--master-port", str(port)],
        environment=client_environment()
        | {OWN_TARGET_VARIABLE: target.decode(), FOLDER_VARIABLE: os.getcwd()},
        urgent=True,
        folder=PACKAGE_ROOT,
    )


def run_worker(host: str, port: int, target: bytes) -> None:
    """Be a worker until its master ends. Raises LoadError where it ends before."""
    with worker(host, port, target) as child:
        status = None
        while status is None:
            status = child.wait(1.0)
    if status != 0:
        how = child.how_it_ended()
        raise LoadError(f"the worker of {_shown(host)}:{port} ended early ({how})")


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def spare(
    users: int = 1, processes: int = 1, listening: Listening | None = None
) -> Iterator[GeneratorProcess]:
    """A load generator started before its level is known, on no cores of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="crossover-spare-") as folder,
        GeneratorProcess(
            log=Path(folder) / "log", users=users, processes=processes, listening=listening
        ) as process,
    ):
        yield process


def client_environment() -> dict[str, str]:
    """For load generators: our packages first, and one thread for whatever numpy does."""
    return python_variables() | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }
