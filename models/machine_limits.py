"""What the kernel reports about this machine: its CPU, its memory, the limits of control groups.

Control groups (containers) of versions 1 and 2: each function takes the tightest limit between this
process's group and the root of the hierarchy. `root` is where /proc and /sys are mounted. Nothing
heavy is imported.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Return the instruction sets as /proc/cpuinfo names them (`flags`; on ARM `Features`)."""
    return frozenset((_cpuinfo(root, "flags|Features") or "").split())


def int8_bits() -> int:
    """Bits of int8 weights here: 8 with VNNI (or on ARM), else 7.

    x86 without VNNI adds two products of an unsigned and a signed byte in 16 bits, which saturate:
    255 x 64 x 2 fits, 255 x 127 x 2 does not.
    """
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    return 8 if is_arm or {"avx512_vnni", "avx_vnni"} & cpu_flags() else 7


def cpu_name(root: Path = ROOT) -> str | None:
    """Return the CPU's model name; None where the kernel does not say."""
    return _cpuinfo(root, "model name|Model")


def _cpuinfo(root: Path, keys: str) -> str | None:
    text = read_text(root / "proc/cpuinfo")
    match = re.search(rf"^(?:{keys})\s*:\s*(.*\S)", text, re.MULTILINE)
    return match[1] if match else None


def cgroup_cores(root: Path = ROOT) -> float | None:
    """Return the CPU quota in cores, or None without a quota."""
    quotas = [read_text(folder / "cpu.max").split() for folder in cgroup_folders(root)]
    for folder in cgroup_folders(root, controller="cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quotas.append(" ".join(read_text(folder / name) for name in names).split())
    limits = [
        int(quota[0]) / int(quota[1])
        for quota in quotas
        if len(quota) == 2 and all(map(str.isdigit, quota)) and int(quota[1])
    ]
    return min(limits, default=None)  # "max" and -1 mean that there is no quota


def whole_cores(cores: int, quota: float | None) -> int:
    """Return how many threads can run at once on this many cores under a CPU quota, at least 1.

    With more threads than the quota allows, the kernel stops all of them for most of each period.
    """
    return cores if quota is None else max(1, min(cores, int(quota)))


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes of RAM that can be taken without swapping or being killed, by the machine's
    memory and the container's limit."""
    available = sizes(read_text(root / "proc/meminfo")).get("MemAvailable", 0)
    cgroup_bytes = cgroup_memory_left(root)
    return available if cgroup_bytes is None else min(available, cgroup_bytes)


def total_bytes(root: Path = ROOT) -> int:
    """Return the RAM of the machine, or the tightest limit on it."""
    total = sizes(read_text(root / "proc/meminfo")).get("MemTotal", 0)
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def cgroup_memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes until the memory limit is reached, page cache counted as free; None: no
    limit."""
    return min((left for _, left in _memory_limits(root)), default=None)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each memory limit, and how many of them are left."""
    for folder in cgroup_folders(root):
        stat = sizes(read_text(folder / "memory.stat"), unit=1)
        cache_bytes = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        for name in ("memory.max", "memory.high"):
            yield from _limit_of(folder / name, folder / "memory.current", cache_bytes)
    for folder in cgroup_folders(root, controller="memory"):
        stat = sizes(read_text(folder / "memory.stat"), unit=1)
        cache_bytes = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
        used = folder / "memory.usage_in_bytes"
        yield from _limit_of(folder / "memory.limit_in_bytes", used, cache_bytes)


def _limit_of(limit: Path, used: Path, cache_bytes: int) -> Iterator[tuple[int, int]]:
    text = read_text(limit).strip()
    if text.isdigit() and int(text) < UNLIMITED_BYTES:
        used_text = read_text(used).strip()
        used_bytes = int(used_text) if used_text.isdigit() else 0
        yield int(text), max(0, int(text) - max(0, used_bytes - cache_bytes))


def cgroup_folders(
    root: Path = ROOT, pid: int | str = "self", controller: str | None = None
) -> list[Path]:
    """Return the folder of a process's control group and of those above it, innermost first.

    `controller`: its hierarchy of version 1 ("cpu", "memory"); None: the hierarchy of version 2.
    A container may see the path that the host gives its group and, mounted, only its own group:
    folders that do not exist have no limits, and the mounted one is the last.
    """
    groups = [line.split(":", 2) for line in read_text(root / f"proc/{pid}/cgroup").splitlines()]
    mounted = root / "sys/fs/cgroup"
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controller is None and controllers == "":
            inner = Path(path.lstrip("/"))
            tops = [mounted, mounted / "unified"]  # `unified`: beside hierarchies of version 1
            return [top / folder for top in tops for folder in (inner, *inner.parents)]
        if controller is not None and controller in controllers.split(","):
            inner = Path(path.lstrip("/"))
            together = mounted / controllers  # as "cpu,cpuacct"
            top = together if together.is_dir() else mounted / controller
            return [top / folder for folder in (inner, *inner.parents)]
    return [mounted] if controller is None else []


def sizes(text: str, unit: int = 1024) -> dict[str, int]:
    """Return the bytes by name of lines such as `MemTotal:  16 kB` or `inactive_file 4096`."""
    lines = re.findall(r"^(\S+?):?[ \t]+(\d+)", text, re.MULTILINE)
    return {name: int(size) * unit for name, size in lines}


def read_text(path: Path) -> str:
    """Return the file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
