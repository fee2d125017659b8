"""What the kernel reports about this machine: its instructions, memory and control groups.

Control groups (containers) may be of version 1 or 2. A limit may be set on this process's group or
on any group above it; the tightest one counts. `root` is the folder in which /proc and /sys are
mounted. Nothing heavy is imported.
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
    text = read_text(root / "proc/cpuinfo")
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*\S)", text, re.MULTILINE)
    return frozenset(match[1].split() if match else ())


def int8_bits() -> int:
    """Return how many bits int8 weights may use on this CPU: 8 on ARM and with VNNI, otherwise 7.

    x86 without VNNI adds two products of an unsigned and a signed byte in 16 bits, which saturate:
    255 x 64 x 2 fits, but 255 x 127 x 2 does not.
    """
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    has_vnni = bool({"avx512_vnni", "avx_vnni"} & cpu_flags())
    return 8 if is_arm or has_vnni else 7


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
    """Return the bytes of RAM that a process can allocate without swapping or being killed,
    considering both the machine's memory and the container's limit."""
    available = sizes(read_text(root / "proc/meminfo")).get("MemAvailable", 0)
    cgroup_bytes = cgroup_memory_left(root)
    return available if cgroup_bytes is None else min(available, cgroup_bytes)


def total_bytes(root: Path = ROOT) -> int:
    """Return the RAM of the machine, or the tightest limit on it."""
    total = sizes(read_text(root / "proc/meminfo")).get("MemTotal", 0)
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def cgroup_memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that are left below the memory limit, counting the page cache as free; None:
    there is no limit."""
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
    """Yield the limit in a file and what is left below it; nothing if there is no limit. `used`:
    the file with the used bytes, which include `cache_bytes` of page cache."""
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
    In a container, the path may be that of the host although only the container's own group is
    mounted. Then some of these folders do not exist, and so have no limits; the mounted folder is
    the last one.
    """
    # Lines are number:controllers:path; version 2 has no controllers.
    lines = [line.split(":", 2) for line in read_text(root / f"proc/{pid}/cgroup").splitlines()]
    mounted = root / "sys/fs/cgroup"
    for _, controllers, path in [line for line in lines if len(line) == 3]:
        group = Path(path.lstrip("/"))
        if controller is None and controllers == "":
            # In `unified` if hierarchies of version 1 are mounted too.
            tops = [mounted, mounted / "unified"]
            return [top / folder for top in tops for folder in (group, *group.parents)]
        if controller is not None and controller in controllers.split(","):
            shared_folder = mounted / controllers  # such as "cpu,cpuacct"
            top = shared_folder if shared_folder.is_dir() else mounted / controller
            return [top / folder for folder in (group, *group.parents)]
    return [mounted] if controller is None else []


def sizes(text: str, unit: int = 1024) -> dict[str, int]:
    """Return name -> bytes, from lines such as `MemTotal:  16 kB` or `inactive_file 4096`. `unit`:
    the bytes that a number counts."""
    lines = re.findall(r"^(\S+?):?[ \t]+(\d+)", text, re.MULTILINE)
    return {name: int(size) * unit for name, size in lines}


def read_text(path: Path) -> str:
    """Return the file's text; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
