"""Child processes of the runner: they run on given cores, write a log and end with their parent.

with Child(["locust", ...], cores=layout.client, log=path) as child:
    child.wait(60)
with signals_interrupt(): ...       # SIGTERM and SIGHUP end a measurement as Ctrl-C does
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossover.models.child_process import start_python
from crossover.models.machine_limits import read_text

DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """One running program. Leaving the `with` block ends it and everything that it started."""

    def __init__(
        self,
        command: list[str],
        *,
        cores: tuple[int, ...] = (),
        log: Path | None = None,
        urgent: bool = False,
        **options: Any,
    ) -> None:
        """Start the program.

        `cores`: logical CPUs; (): all. `log`: file for its output; None: the output of this
        process. `urgent`: it runs before other processes on its cores, if the kernel allows that.
        `options`: those of start_python.
        """
        self.log = log
        with open(log, "ab") if log is not None else contextlib.nullcontext() as output:
            self._process = start_python(
                "-I",
                "-S",
                str(DIE_WITH_PARENT),
                str(os.getpid()),
                ",".join(map(str, cores)) or "-",
                str(int(urgent)),
                *command,
                secrets=True,  # a server's token of the hub, a load generator's key
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                **options,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status; None: it runs."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """Return the exit status; None: it still runs after `timeout_seconds`."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Send SIGTERM, wait, and then send SIGKILL to it and to all processes that it left
        behind."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self.wait(timeout_seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def how_it_ended(self) -> str:
        """Return exit status or signal, and the last line of its log, as a phrase for messages."""
        status = self.poll()
        if status is None:
            return "still running"
        how = f"exit status {status}"
        if status < 0:
            how = f"killed by signal {-status} ({signal.Signals(-status).name})"
        if self.log is None:
            return how
        words = last_line(self.log)
        # A Crossover server that gave up ends its log with "stopped ..."; the reason is in the line
        # "giving up: ..." before.
        if words.startswith("stopped"):
            words = last_line(self.log, "giving up: ") or words
        return f"{how}: {words}" if words else how

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def last_line(log: Path, start: str = "") -> str:
    """Return the last line of a log that starts with `start` and is not blank; "": there is
    none."""
    lines = read_text(log)[-4096:].split("\n")
    for line in reversed(lines):
        if line.startswith(start) and line.strip():
            return line.strip()
    return ""


def ignore_signals() -> None:
    """Ignore the signals that end a measurement.

    Once it is ending, a second exception would interrupt the handlers that stop processes and
    record the interruption.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, the first of these signals raises KeyboardInterrupt; later ones are ignored."""

    def interrupt(*_: Any) -> None:
        ignore_signals()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
