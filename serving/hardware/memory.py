"""Memory that this process holds and that is left. Sizes in bytes.

Imports little: every engine process starts with it.
"""

from __future__ import annotations

import resource

from models.formatting import size
from models.machine import ROOT, available_bytes, read_text
from serving.errors import OutOfMemory


def resident_bytes(pid: int | None = None) -> int | None:
    """RSS of a process (None: this one); None when there is no such process. Microseconds."""
    pages = _pages("self" if pid is None else pid)
    return None if pages is None else pages[1] * resource.getpagesize()


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    pages = _pages("self")
    assert pages is not None  # this process exists
    return (pages[1] - pages[2]) * resource.getpagesize()


def _pages(process: int | str) -> list[int] | None:
    """/proc/PID/statm in pages: virtual, resident, shared, ...; None: there is no such process."""
    text = read_text(ROOT / f"proc/{process}/statm")
    return [int(word) for word in text.split()] or None


def peak_resident_bytes() -> int:
    """The highest RSS that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refuse_shortage(needed_bytes: int, what: str) -> None:
    """Raises OutOfMemory where `what` needs more than is available."""
    available = available_bytes()
    if needed_bytes > available:
        raise OutOfMemory(
            f"{what} need {size(needed_bytes)} and {size(available)} are available; "
            "fewer slots or a shorter context need less"
        )
