"""An exclusive lock on a file, which the kernel releases when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take_lock(path: Path, what: str) -> int | str:
    """Lock a file, and write into it who holds the lock (`what`).

    Returns a file descriptor that holds the lock until it is closed. If another process holds the
    lock, returns the text that this process wrote. Raises OSError.
    """
    # In /tmp, another user could have placed a link under this name.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
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
