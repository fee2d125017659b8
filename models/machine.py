"""What the kernel says of this machine: its CPU, its memory, the limits of control groups.

Control groups (containers) of versions 1 and 2: each function takes the tightest limit on the way
from this process's group to the root. `root` is where /proc and /sys are mounted. Nothing heavy is
imported.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge number


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
    groups = cgroup_folders(root)
    quotas = [read_text(folder / "cpu.max").split() for folder in groups.get("", [])]
    quotas += [
        [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for folder in groups.get("cpu", [])
    ]
    limits = [
        int(quota[0]) / int(quota[1])
        for quota in quotas
        if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1])
    ]
    return min(limits, default=None)


def available_bytes(root: Path = ROOT) -> int:
    """RAM that can be taken without swapping or being killed: the machine's, the container's."""
    memory = sizes(read_text(root / "proc/meminfo"))
    available = memory.get("MemAvailable", memory.get("MemFree", 0))
    left = cgroup_memory_left(root)
    return available if left is None else min(available, left)


def total_bytes(root: Path = ROOT) -> int:
    """RAM of the machine, or the tightest limit on it."""
    total = sizes(read_text(root / "proc/meminfo")).get("MemTotal", 0)
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def cgroup_memory_left(root: Path = ROOT) -> int | None:
    """Bytes until the memory limit is reached, page cache counted as free; None: no limit."""
    return min((left for _, left in _memory_limits(root)), default=None)


def disk_free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes of each limit, and how many of them are left."""
    groups = cgroup_folders(root)
    for controller, limit_name, use_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in groups.get(controller, []):
            limit = read_text(folder / limit_name).strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                used = int(read_text(folder / use_name).strip() or 0)
                cache = sizes(read_text(folder / "memory.stat"), unit=1)
                reclaimable = cache.get("inactive_file", 0) + cache.get("active_file", 0)
                yield int(limit), max(0, int(limit) - max(0, used - reclaimable))


def cgroup_folders(root: Path, pid: int | str = "self") -> dict[str, list[Path]]:
    """Controller ("" for version 2) -> a process's folder and those above, innermost first."""
    found: dict[str, list[Path]] = {}
    for line in read_text(root / f"proc/{pid}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part and part != ".."]
        for controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
            depths = range(len(parts), -1, -1)
            found[controller] = [base.joinpath(*parts[:depth]) for depth in depths]
    return found


def sizes(text: str, unit: int = 1024) -> dict[str, int]:
    """Lines such as `MemTotal:  16 kB` or `inactive_file 4096` -> bytes."""
    return {
        name: int(size) * unit
        for name, size in re.findall(r"^(\S+?):?[ \t]+(\d+)", text, re.MULTILINE)
    }


def read_text(path: Path) -> str:
    """The file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
