"""Child processes of the runner: on given cores, with a log, ended with their parent.

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
    """One running program. Leaving the `with` block ends it and everything that it started.

    Without a log it writes where this process does.
    """

    def __init__(
        self,
        command: list[str],
        *,
        cores: tuple[int, ...] = (),
        log: Path | None = None,
        urgent: bool = False,
        **options: Any,
    ) -> None:
        """`urgent`: before anybody else on its cores, where possible. `options`: start_python's."""
        self.log = log
        bound = [str(os.getpid()), ",".join(map(str, cores)) or "-", str(int(urgent))]
        with open(log, "ab") if log is not None else contextlib.nullcontext() as output:
            self._process = start_python(
                *("-I", "-S", str(DIE_WITH_PARENT), *bound, *command),
                secrets=True,  # a server's token of the hub, a load generator's key
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                **options,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit status, or None when it still runs after `timeout_seconds`."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """SIGTERM, and SIGKILL to the whole group when that did not do."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self.wait(timeout_seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what it left behind
        self._process.wait()

    def how_it_ended(self) -> str:
        """For messages: exit status or signal, and the last line it printed that says why."""
        status = self.poll()
        if status is None:
            return "still running"
        how = f"exit status {status}"
        if status < 0:
            how = f"killed by signal {-status} ({signal.Signals(-status).name})"
        words = "" if self.log is None else last_line(self.log)
        if self.log is not None and words.startswith("stopped"):  # a server of ours, in order
            words = last_line(self.log, "giving up: ") or words
        return f"{how}: {words}" if words else how

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def last_line(log: Path, start: str = "") -> str:
    """The last line of a log that begins so and is not empty; "" where there is none."""
    lines = read_text(log)[-4096:].split("\n")
    kept = (line.strip() for line in reversed(lines) if line.startswith(start))
    return next(filter(None, kept), "")


def ignore_signals() -> None:
    """Ignore the signals that end a measurement.

    A second exception would break off what the first one's handlers end and write down.
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
