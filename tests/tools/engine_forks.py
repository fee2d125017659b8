"""Engine processes of the fake backend without an interpreter's start: forks of one process that
has imported what `python -m serving.engine.engine_loop` imports.

    with forked_engines():                  # the fixture of that name in tests/serving/conftest.py
        ...                                 # supervisors of this process start their engines so

Starting Python and its imports take 0.4 s of CPU; a fork takes 0.02 s, and a test of the supervisor
starts up to five engines. Everything else is real: a process with its own pid and session, the
worker's main(), sockets, signals, exit statuses. tests/serving/supervisor/test_process.py and all
tests of `python -m serving` start engines as the product does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from models.isolated import start_python
from serving.engine.ipc_messages import CONFIG_VARIABLE, SOCKET_VARIABLE

_MODULE = "tests.tools.engine_forks"
_CONTROL = "CROSSOVER_TESTS_CONTROL"


class Fork:
    """What serving.supervisor.engine_process uses of a Popen: pid, stdout, wait()."""

    def __init__(self, pid: int, output: int, status: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(output, "rb")
        self._status = status
        self._returned: int | None = None

    def wait(self) -> int:
        """The exit status, or minus the signal's number."""
        if self._returned is None:
            with os.fdopen(self._status, "rb") as pipe:  # nothing: its parent was killed too
                self._returned = int(pipe.read() or -signal.SIGKILL)
        return self._returned


class Forks:
    """The process that forks. Engines end with it, and it ends with this object."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_python(
                *("-m", _MODULE),
                environment={
                    _CONTROL: str(theirs.fileno()),
                    "OPENBLAS_NUM_THREADS": "1",  # a process with threads is no good to fork
                    "TOKENIZERS_PARALLELISM": "false",
                },
                pass_fds=(theirs.fileno(),),
            )
        self._control = ours
        self._lock = threading.Lock()

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Fork | subprocess.Popen[bytes]:
        """start_python: a fork where it is an engine of the fake backend, else as the product."""
        variables = dict(environment or {})
        config = json.loads(variables.get(CONFIG_VARIABLE, "{}"))
        if config.get("backend") != "fake":
            return start_python(*arguments, environment=environment, **options)
        assert arguments == ("-m", "serving.engine.engine_loop")
        (wire,) = options["pass_fds"]
        output, output_end = os.pipe()
        status, status_end = os.pipe()
        with self._lock:
            message = json.dumps(variables).encode()
            head = len(message).to_bytes(4, "big")
            socket.send_fds(self._control, [head], [wire, output_end, status_end])
            self._control.sendall(message)
            pid = int.from_bytes(_exactly(self._control, 4), "big")
        os.close(output_end)
        os.close(status_end)
        return Fork(pid, output, status)

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)


@contextlib.contextmanager
def forked_engines() -> Iterator[Forks]:
    """Engines of the fake backend that this process starts are forks from now on."""
    forks = Forks()
    try:
        with mock.patch("serving.supervisor.engine_process.start_python", forks.start):
            yield forks
    finally:
        forks.close()


# --- in the process that forks


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _serve(control: socket.socket) -> None:
    """Fork when asked; write the status of each fork that ended to its pipe."""
    statuses: dict[int, int] = {}
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while statuses:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                pipe = statuses.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # nobody asks
                    os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(pipe)
        if control in ready:
            head, descriptors, _, _ = socket.recv_fds(control, 4, 3)
            if not head:
                return
            head += _exactly(control, 4 - len(head))
            variables = json.loads(_exactly(control, int.from_bytes(head, "big")))
            wire, output, status_end = descriptors
            pid = os.fork()
            if pid == 0:
                control.close()
                for number in (woken, waker, status_end, *statuses.values()):
                    os.close(number)
                _engine(variables, wire, output)
            os.close(wire)
            os.close(output)
            statuses[pid] = status_end
            control.sendall(pid.to_bytes(4, "big"))


def _engine(variables: Mapping[str, str], wire: int, output: int) -> None:
    """In the fork: the worker's main(), as `python -m serving.engine.engine_loop` runs it."""
    from serving.engine import engine_loop

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ |= {**variables, SOCKET_VARIABLE: str(wire)}
    status = 1
    try:
        status = engine_loop.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _main() -> None:
    import serving.engine.engine_loop  # noqa: F401 - all that an engine imports

    gc.collect()
    gc.freeze()  # or each fork's own collection copies every page
    with socket.socket(fileno=int(os.environ.pop(_CONTROL))) as control:
        _serve(control)


if __name__ == "__main__":
    _main()
