"""Cores that one process has for itself among the processes that ask here, while it lives.

    cores = take_cores(2)       # (4, 5), or () where fewer are free

Each core has a file lock, which ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from serving.hardware.machine_facts import allowed_cores

_held: list[int] = []  # the descriptors of the locks: closed by the process's end


def take_cores(count: int, folder: Path | None = None) -> tuple[int, ...]:
    """Take so many of the cores that this process may use; all or none of them, ascending."""
    where = folder or Path(tempfile.gettempdir())
    taken: dict[int, int] = {}
    for core in allowed_cores():
        if len(taken) == count:
            break
        lock = _locked(where / f"crossover-core-{os.getuid()}-{core}.lock")
        if lock is not None:
            taken[core] = lock
    if len(taken) < count:
        for lock in taken.values():
            os.close(lock)
        return ()
    _held.extend(taken.values())
    return tuple(taken)


def _locked(path: Path) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # /tmp is everybody's
    try:
        lock = os.open(path, flags, 0o600)
    except OSError:  # another user's
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
