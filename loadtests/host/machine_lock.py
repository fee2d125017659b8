"""One measurement at a time on one machine: two would disturb each other.

    with machine_lock("runs/2026-05-28-demo"):
        ...                            # MachineBusy for the second, naming the first

A file lock in $XDG_RUNTIME_DIR, else /tmp: it ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loadtests.errors import MachineBusy


def lock_file() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "crossover-measuring.lock"
    return Path(tempfile.gettempdir()) / f"crossover-measuring-{os.getuid()}.lock"


def take_lock(path: Path, what: str) -> int | str:
    """A file descriptor that holds the lock of a file until it is closed; what its holder said,
    where another has it. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # /tmp is everybody's
    lock = os.open(path, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 4096, 0).decode(errors="replace").strip()
        os.close(lock)
        return holder or "another process"
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{what}\n".encode(), 0)
    return lock


@contextlib.contextmanager
def machine_lock(what: str, *, file: Path | None = None) -> Iterator[None]:
    """Holds the lock for the block. Raises MachineBusy when another process has it."""
    path = file or lock_file()
    try:
        lock = take_lock(path, f"process {os.getpid()} ({what})")
    except OSError as problem:
        raise MachineBusy(
            f"{path}, the lock of this machine, cannot be opened: {problem.strerror}"
        ) from problem
    if isinstance(lock, str):
        raise MachineBusy(
            f"{lock} measures on this machine now, and two campaigns at once would measure each "
            "other: wait for it"
        )
    try:
        yield
    finally:
        os.close(lock)
