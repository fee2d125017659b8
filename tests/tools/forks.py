"""Programs in processes of their own for the price of one start: forks of one process that has
imported what they need.

    forks = Forks("crossover", "crossover.serving.cli.launch")
    done = forks.run("crossover:main", "serve", "--help", COLUMNS="80")     # a CompletedProcess
    forks.close()

    with forked_engines():                  # the fixture of that name in tests/serving/conftest.py
        ...                 # engines of the fake backend that this process starts are forks

Starting Python and its imports take 0.4 s of CPU, a fork takes 0.02 s, and a test of the supervisor
starts up to five engines. Everything else is real: a process with its own pid and session, the
program's main(), output, signals, exit statuses. tests/serving/supervisor/test_process.py and all
tests of `crossover serve` start engines as the product does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from crossover.models.child_process import start_python
from crossover.serving.engine.ipc_messages import (
    CONFIG_VARIABLE,
    RECEIVED_VARIABLE,
    SOCKET_VARIABLE,
)

ROOT = Path(__file__).parents[2]
ENGINE = "crossover.serving.engine.engine_loop"


class Fork:
    """What crossover.serving.supervisor.engine_process uses of a Popen: pid, stdout, wait()."""

    def __init__(self, pid: int, status: int, output: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(output, "rb")
        self._status = status
        self._returned: int | None = None

    def wait(self) -> int:
        """The exit status, or minus the signal's number."""
        if self._returned is None:
            self._returned = _status_from(self._status)
        return self._returned


class Forks:
    """The process that forks. Programs that it started end with their own wires, not with it."""

    def __init__(self, *imports: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_python(
                *("-m", "tests.tools.forks", str(theirs.fileno()), *imports),
                # A process with threads is no good to fork.
                environment={"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
            )
        self._control = ours
        self._lock = threading.Lock()

    def run(
        self, program: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`program`, "module:function", to its end."""
        wide = {"COLUMNS": "200", "NO_COLOR": "1", **environment}
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
            outputs = output.fileno(), error.fileno()
            status = _status_from(self._start(program, arguments, wide, outputs)[1])
            output.seek(0)
            error.seek(0)
            return subprocess.CompletedProcess(arguments, status, output.read(), error.read())

    def start_python(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Fork | subprocess.Popen[bytes]:
        """A fork where it is an engine of the fake backend, else as the product does."""
        variables = dict(environment or {})
        if json.loads(variables.get(CONFIG_VARIABLE, "{}")).get("backend") != "fake":
            return start_python(*arguments, environment=environment, **options)
        assert arguments == ("-m", ENGINE)
        wires = {name: int(variables[name]) for name in (SOCKET_VARIABLE, RECEIVED_VARIABLE)}
        output, end = os.pipe()
        pid, status = self._start(f"{ENGINE}:main", (), variables, (end, end), wires)
        os.close(end)
        return Fork(pid, status, output)

    def _start(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: tuple[int, int],
        wires: Mapping[str, int] | None = None,
    ) -> tuple[int, int]:
        """The pid, and a pipe that tells the status. `wires`: descriptors, whose numbers over there
        it finds in variables of these names.
        """
        status, end = os.pipe()
        wires = wires or {}
        message = json.dumps([program, arguments, environment, list(wires)]).encode()
        with self._lock:
            head = len(message).to_bytes(4, "big")
            socket.send_fds(self._control, [head], [*outputs, end, *wires.values()])
            self._control.sendall(message)
            pid = int.from_bytes(_exactly(self._control, 4), "big")
        os.close(end)
        return pid, status

    def close(self) -> None:
        self._control.close()
        self._process.wait(20)


@contextlib.contextmanager
def forked_engines() -> Iterator[Forks]:
    """Engines of the fake backend that this process starts are forks from now on."""
    forks = Forks(ENGINE)
    try:
        with mock.patch(
            "crossover.serving.supervisor.engine_process.start_python", forks.start_python
        ):
            yield forks
    finally:
        forks.close()


def _status_from(status: int) -> int:
    with os.fdopen(status, "rb") as pipe:  # nothing: who would have said it was killed too
        return int(pipe.read() or -signal.SIGKILL)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


# --- in the process that forks


def _serve(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, 4, 8)
        if not head:
            return
        head += _exactly(control, 4 - len(head))
        request = json.loads(_exactly(control, int.from_bytes(head, "big")))
        if os.fork() == 0:
            _mind(control, descriptors, *request)
        for one in descriptors:
            os.close(one)


def _mind(
    control: socket.socket,
    descriptors: list[int],
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    names: list[str],
) -> NoReturn:
    """In a fork: forks the program, tells its pid, and at its end its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, error, end, *wires = descriptors
    pid = os.fork()
    if pid == 0:
        control.close()
        os.close(end)
        os.setsid()
        for number, one in enumerate((output, error), 1):
            os.dup2(one, number)
            os.close(one)
        os.environ |= environment
        os.environ |= {name: str(wire) for name, wire in zip(names, wires, strict=True)}
        _run(program, arguments)
    control.sendall(pid.to_bytes(4, "big"))
    control.close()
    for one in (output, error, *wires):
        os.close(one)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody asks
        os.write(end, str(status).encode())
    os._exit(0)


def _run(program: str, arguments: list[str]) -> NoReturn:
    """In the program's process: its function, and the end as an interpreter makes it."""
    module, _, function = program.partition(":")
    sys.argv = [module, *arguments]
    status = 1
    try:
        code = getattr(importlib.import_module(module), function)()
        status = code if isinstance(code, int) else 0
    except SystemExit as done:
        if isinstance(done.code, int | None):
            status = done.code or 0
        else:
            print(done.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def _main() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork's own collection copies every page
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _serve(control)


if __name__ == "__main__":
    _main()
