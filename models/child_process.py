"""Runs work in child processes, so that their memory is freed and a crash ends only the child.

target = "crossover.models.weights.convert_to_onnx:make_onnx"
run_in_child(target, progress, "model.gguf", "folder", "int8")
result = run_python("-m", "crossover.serving.hardware.gpus", "nvml", timeout_seconds=10)

A child imports nothing from the folder it runs in and inherits no secrets, because it may parse or
run untrusted data.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import crossover
from crossover.models.errors import ModelError

PACKAGE_ROOT = Path(crossover.__file__).resolve().parents[1]
_PR_SET_PDEATHSIG = 1  # sys/prctl.h
STOP_SECONDS = 5.0  # maximum time that a child takes to clean up after SIGINT
# Variables with one of these words in their name, or a URL with a password as their value, are
# secrets.
SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|HEADERS)(_|$)",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def python_variables() -> dict[str, str]:
    """Return the environment variables with which a child imports these packages in any folder."""
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def start_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    secrets: bool = False,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start this Python interpreter with some arguments, as a child in its own session.

    `environment`: additional variables. `secrets`: the child needs API keys, so it inherits the
    variables that SECRET_NAME and SECRET_VALUE match. `options`: those of Popen.
    """
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL} | options
    variables = {
        name: value
        for name, value in os.environ.items()
        if secrets or not (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
    variables |= python_variables() | dict(environment or {})
    # In its own session, so that Ctrl-C in the terminal reaches only the parent.
    return subprocess.Popen(
        [sys.executable, *arguments], env=variables, start_new_session=True, **settings
    )


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends. A child calls this first."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        raise SystemExit(1)


class ChildResult(NamedTuple):
    """How a child ended."""

    status: int | None  # exit status; None: it was killed at its time limit
    output: bytes  # standard output
    error: str  # standard error

    @property
    def reason(self) -> str:
        """Return the last line of standard error, or else the exit status."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        if lines:
            return lines[-1]
        if self.status is not None and self.status < 0:
            return f"killed by signal {-self.status} ({signal.Signals(-self.status).name})"
        return f"exit status {self.status}"


def run_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
) -> ChildResult:
    """Run this Python interpreter with some arguments until it ends. At the time limit, kill it and
    everything that it started."""
    child = start_python(
        *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, error = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return ChildResult(None, b"", "")
    finally:
        _kill(child)
    return ChildResult(child.returncode, output, error.decode(errors="replace"))


def run_in_child(
    function: str, progress: Callable[[str, float | None], None] | None, *args: Any, **kwargs: Any
) -> None:
    """Call a function, "module:name", in a new interpreter and discard its result.

    The function also gets `progress`, which calls this one in the parent. Raises the ModelErrors of
    the function unchanged. If the child dies, raises ModelError with its last line of output.
    """
    # In memory: the root file system of a container may be read-only.
    with open(os.memfd_create("error-output"), "w+b") as error_output:
        child = start_python(
            "-m",
            "crossover.models.child_process",
            function,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_output,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(pickle.dumps((args, kwargs)))
            for line in child.stdout:
                kind, text, fraction = msgspec.json.decode(line, type=tuple[str, str, float | None])
                if kind == "done":
                    return
                if kind != "progress":  # the name of an error
                    error_types = {error.__name__: error for error in ModelError.__subclasses__()}
                    raise error_types.get(kind, ModelError)(text)
                if progress:
                    progress(text, fraction)
        except BaseException:
            child.send_signal(signal.SIGINT)  # if it is still working, it cleans up
            raise
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
            _kill(child)
        error_output.seek(0)
        error_text = error_output.read()[-4096:].decode(errors="replace")
        result = ChildResult(child.returncode, b"", error_text)
    why = "most likely out of memory" if result.status == -signal.SIGKILL else result.reason
    raise ModelError(f"{function.replace(':', '.')} died with status {result.status}: {why}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and everything it started, unless it has ended, and close its pipes."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: leave it
        child.wait(1.0)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _child(function: str) -> None:
    """Call the function in this process, a child, and send its progress and end to the parent.

    Arguments are pickled, since the parent is trusted. Messages to the parent are JSON, since the
    child is not.
    """
    end_with_parent()
    out = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the messages to the parent

    def send(kind: str, text: str = "", fraction: float | None = None) -> None:
        os.write(out, msgspec.json.encode((kind, text, fraction)) + b"\n")

    args, kwargs = pickle.load(sys.stdin.buffer)  # noqa: S301  # of the parent, over a pipe
    module, _, name = function.partition(":")
    try:
        work = getattr(importlib.import_module(module), name)
        work(*args, **kwargs, progress=lambda what, fraction: send("progress", what, fraction))
        send("done")
    except ModelError as problem:
        send(type(problem).__name__, str(problem))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    _child(sys.argv[1])
