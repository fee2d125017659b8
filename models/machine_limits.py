"""What the kernel says of this machine: its CPU, its memory, the limits of control groups.

Control groups (containers) of version 2: each function takes the tightest limit on the way from
this process's group to the root. `root` is where /proc and /sys are mounted. Nothing heavy is
imported.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction sets as /proc/cpuinfo names them (`flags`; on ARM `Features`)."""
    return frozenset((_cpuinfo(root, "flags|Features") or "").split())


def int8_bits() -> int:
    """Bits of int8 weights here: 8 with VNNI (or on ARM), else 7.

    x86 without VNNI adds two products of an unsigned and a signed byte in 16 bits, which saturate:
    255 x 64 x 2 fits, 255 x 127 x 2 does not.
    """
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    return 8 if is_arm or {"avx512_vnni", "avx_vnni"} & cpu_flags() else 7


def cpu_name(root: Path = ROOT) -> str | None:
    """The CPU's model name; None where the kernel does not say."""
    return _cpuinfo(root, "model name|Model")


def _cpuinfo(root: Path, keys: str) -> str | None:
    text = read_text(root / "proc/cpuinfo")
    found = re.search(rf"^(?:{keys})\s*:\s*(.*\S)", text, re.MULTILINE)
    return found[1] if found else None


def cgroup_cores(root: Path = ROOT) -> float | None:
    """CPU quota in cores; None: no quota."""
    quotas = [read_text(folder / "cpu.max").split() for folder in cgroup_folders(root)]
    limits = [int(two[0]) / int(two[1]) for two in quotas if two and two[0] != "max"]
    return min(limits, default=None)


def available_bytes(root: Path = ROOT) -> int:
    """RAM that can be taken without swapping or being killed: the machine's, the container's."""
    available = sizes(read_text(root / "proc/meminfo")).get("MemAvailable", 0)
    left = cgroup_memory_left(root)
    return available if left is None else min(available, left)


def total_bytes(root: Path = ROOT) -> int:
    """RAM of the machine, or the tightest limit on it."""
    total = sizes(read_text(root / "proc/meminfo")).get("MemTotal", 0)
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def cgroup_memory_left(root: Path = ROOT) -> int | None:
    """Bytes until the memory limit is reached, page cache counted as free; None: no limit."""
    return min((left for _, left in _memory_limits(root)), default=None)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes of each limit, and how many of them are left."""
    for folder in cgroup_folders(root):
        limit = read_text(folder / "memory.max").strip()
        if limit.isdigit():
            stat = sizes(read_text(folder / "memory.stat"), unit=1)
            cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            used = int(read_text(folder / "memory.current") or 0) - cache
            yield int(limit), max(0, int(limit) - max(0, used))


def cgroup_folders(root: Path = ROOT, pid: int | str = "self") -> list[Path]:
    """The control group of a process and those above, innermost first."""
    found = re.search("^0::/(.*)$", read_text(root / f"proc/{pid}/cgroup"), re.MULTILINE)
    inner = Path(found[1] if found else ".")
    return [root / "sys/fs/cgroup" / folder for folder in (inner, *inner.parents)]


def sizes(text: str, unit: int = 1024) -> dict[str, int]:
    """Lines such as `MemTotal:  16 kB` or `inactive_file 4096` -> bytes."""
    found = re.findall(r"^(\S+?):?[ \t]+(\d+)", text, re.MULTILINE)
    return {name: int(size) * unit for name, size in found}


def read_text(path: Path) -> str:
    """The file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
