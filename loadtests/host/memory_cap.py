"""A kernel memory limit for one server: a control group of its own.

    cap = MemoryCap.make("cell", 4 << 30)      # raises CapUnavailable
    cap.add(server_pid)                        # before it has children, which inherit the group
    cap.kills()                                # processes that the kernel has killed in it
    cap.close()

Control groups of version 2 (cgroup.controllers) and version 1 (memory hierarchy). Where neither
can be made, the samples are watched instead (loadtests/campaign/site.py), and the run says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


class CapUnavailable(Exception):
    """No control group can be made here; the message says why."""


class MemoryCap:
    """One control group. Made by `make`."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version

    @classmethod
    def make(
        cls,
        name: str,
        limit_bytes: int,
        *,
        root: Path = CGROUP,
        own: Path = Path("/proc/self/cgroup"),
    ) -> MemoryCap:
        """A new group below this process's own. Swap does not extend it. Raises CapUnavailable."""
        try:
            lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        except OSError as problem:
            raise CapUnavailable(f"{own} cannot be read: {problem.strerror}") from problem
        one = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), None)
        two = next((path for number, _, path in lines if number == "0"), None)
        version, parent = (
            (1, root / "memory" / one.strip("/"))
            if one is not None
            else (2, root / (two or "").strip("/"))
        )
        if one is None and not (parent / "cgroup.controllers").is_file():
            raise CapUnavailable(f"{parent} is no control group that accounts for memory")
        folder = parent / f"crossover-{os.getpid()}-{name}"
        try:
            folder.mkdir()
        except OSError as problem:
            raise CapUnavailable(
                f"no control group can be made below {parent}: {problem.strerror}"
            ) from problem
        cap = cls(folder, version)
        limits = (
            {"memory.limit_in_bytes": True, "memory.memsw.limit_in_bytes": False}
            if version == 1
            else {"memory.max": True, "memory.swap.max": False}
        )
        for file, needed in limits.items():
            value = "0" if file == "memory.swap.max" else str(limit_bytes)
            try:
                (folder / file).write_text(value)
            except OSError as problem:
                if needed:
                    cap.close()
                    raise CapUnavailable(
                        f"{folder / file} cannot be set: {problem.strerror}"
                    ) from problem
        return cap

    def add(self, pid: int) -> None:
        """Moves a process into the group. Raises CapUnavailable."""
        try:
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError as problem:
            raise CapUnavailable(
                f"process {pid} cannot be moved into {self.folder}: {problem.strerror}"
            ) from problem

    def kills(self) -> int:
        """How many processes the kernel has killed because memory ran out in this group."""
        file = self.folder / ("memory.oom_control" if self.version == 1 else "memory.events")
        try:
            found = dict(line.split() for line in file.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(found.get("oom_kill", 0))

    def close(self) -> None:
        """Removes the group, once its last process is gone."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            if not self.folder.exists():
                return
            time.sleep(0.02)
