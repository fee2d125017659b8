"""A lock that allows one measurement at a time on one machine, since two would disturb each other.

    with machine_lock("runs/2026-05-28-demo"):
        ...                            # a second one gets MachineBusy, which names the first

It is a file lock in $XDG_RUNTIME_DIR, or in /tmp, and is released when the process ends, however it
ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from crossover.loadtests.errors import MachineBusy
from crossover.loadtests.records.file_lock import take_lock
from crossover.models.errors import printable
from crossover.models.temporary_folder import temporary_folder


def lock_file() -> Path:
    """Return the path of the lock of this machine and user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "crossover-measuring.lock"
    return Path(temporary_folder()) / f"crossover-measuring-{os.getuid()}.lock"


@contextlib.contextmanager
def machine_lock(what: str, *, file: Path | None = None) -> Iterator[None]:
    """Hold the lock during the block. Raises MachineBusy if another process has it.

    `what`: the measurement, for the message of others that are refused meanwhile.
    """
    path = file or lock_file()
    try:
        lock = take_lock(path, _holder(what))
    except OSError as problem:
        raise MachineBusy(
            f"The lock file of this machine, {path}, cannot be opened: {problem.strerror}"
        ) from problem
    if isinstance(lock, str):
        raise MachineBusy(
            f"Another measurement is running on this machine: {lock}. Two at once would disturb "
            "each other. Wait until it ends; `campaign show`, `report` and `plan` work meanwhile."
        )
    try:
        yield
    finally:
        os.close(lock)


def _holder(what: str) -> str:
    """Return what is measured, by which process and command, and since when."""
    words = [Path(sys.argv[0]).name or "python", *sys.argv[1:]]
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"{what} (process {os.getpid()}, `{printable(shlex.join(words))}`, started {started})"
