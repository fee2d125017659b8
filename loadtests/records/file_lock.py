"""The lock of a file, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take_lock(path: Path, what: str) -> int | str:
    """A file descriptor that holds the lock of a file until it is closed; what its holder said,
    where another has it. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # /tmp is everybody's
    lock = os.open(path, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 4096, 0).decode(errors="replace").strip()
        os.close(lock)
        return holder or "another process"
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{what}\n".encode(), 0)
    return lock
