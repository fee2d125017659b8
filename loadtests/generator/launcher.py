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

from loadtests.host.processes import Child
from models.isolated import PACKAGE_ROOT, python_variables

CHANNEL_VARIABLE = "CROSSOVER_CHANNEL"  # the number of its file descriptor
# Locust takes modules and a locust.conf from the folder it starts in: it starts in ours, and goes
# to this one once it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
LOCUST = (
    *("-m", "loadtests.generator.fast_locust", "-f", str(LOCUSTFILE)),
    *("--headless", "--only-summary", "--loglevel", "WARNING"),
)


class GeneratorProcess:
    """The process and our end of the pipe. `users` are those of a closed loop."""

    def __init__(
        self, *, log: Path, users: int = 1, processes: int = 1, cores: tuple[int, ...] = ()
    ) -> None:
        self.pipe, its = socket.socketpair()
        command = [sys.executable, *LOCUST, "-u", str(users), "-r", str(users)]
        if processes > 1:
            command += processes_options(processes)
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


def processes_options(processes: int) -> list[str]:
    """Locust's options for several processes that talk over a port which nobody else uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    return ["--processes", str(processes), *place]


@contextlib.contextmanager
def spare(users: int = 1) -> Iterator[GeneratorProcess]:
    """A load generator started before its level is known, on no cores of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="crossover-spare-") as folder,
        GeneratorProcess(log=Path(folder) / "log", users=users) as process,
    ):
        yield process


def client_environment() -> dict[str, str]:
    """For load generators: our packages first, and one thread for whatever numpy does."""
    return python_variables() | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }
