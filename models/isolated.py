"""Work in other processes: their memory is given back, and native code that aborts ends only them.

path = run_aside("models.convert.gguf:make_gguf", progress, "folder", "out.gguf", "Q4_0")
ran = run_python("-m", "serving.hardware.gpu", "nvml", timeout_seconds=10)
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import ModelError

PACKAGE_ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """PYTHONPATH with these packages first."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(PACKAGE_ROOT), *filter(None, given)])


def python_variables() -> dict[str, str]:
    """Environment variables with which a child imports these packages in whatever folder it is."""
    return {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}


def start_python(
    *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a Python of this environment in a session of its own. `options` are Popen's."""
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL} | options
    variables = os.environ | python_variables() | dict(environment or {})
    # A session of its own: Ctrl-C in the terminal is the parent's to handle.
    return subprocess.Popen(
        [sys.executable, *arguments], env=variables, start_new_session=True, **settings
    )


class Ran(NamedTuple):
    """How a child ended. `status` is None where it was killed at its time limit."""

    status: int | None
    output: bytes
    error: str

    @property
    def reason(self) -> str:
        """The last line of standard error, else the exit status."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        if lines:
            return lines[-1]
        if self.status is not None and self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


def run_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
) -> Ran:
    """Run a Python to its end; at the time limit it is killed with everything it started."""
    child = start_python(
        *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, error = child.communicate(timeout=timeout_seconds)
        return Ran(child.returncode, output, error.decode(errors="replace"))
    except BaseException as problem:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if not isinstance(problem, subprocess.TimeoutExpired):
            raise
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: leave it
            child.communicate(timeout=1.0)
        return Ran(None, b"", "")


def run_aside(
    function: str, progress: Callable[[str, float | None], None] | None, *args: Any, **kwargs: Any
) -> Any:
    """Call "module:name" in a fresh interpreter; return its result, pass its progress on.

    Raises errors of models.errors as they are; ModelError with the exit status for a dead child.
    """
    import multiprocessing  # 20 ms that not every command needs

    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_child, args=(theirs, function, args, kwargs), daemon=True)
    child.start()
    theirs.close()
    try:
        while True:
            what, content = ours.recv()
            if what == "done":
                return content
            if what == "error":
                raise content
            if progress:
                progress(*content)
    except EOFError:
        child.join()
        why = ", most likely because memory ran out" if child.exitcode == -9 else ""
        raise ModelError(
            f"{function.replace(':', '.')} died with status {child.exitcode}{why}"
        ) from None
    finally:
        ours.close()
        if child.is_alive():
            child.terminate()
        child.join()


def _child(connection: Any, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def progress(what: str, fraction: float | None) -> None:
        connection.send(("progress", (what, fraction)))

    module_name, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
        connection.send(("done", found(*args, **kwargs, progress=progress)))
    except ModelError as problem:
        connection.send(("error", problem))
