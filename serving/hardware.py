"""What this machine is: facts for placement, for reports and for `crossover doctor`. Read from the kernel; nothing heavy is imported.

    facts = hardware_facts()                  # some milliseconds; with a GPU the driver is asked in a subprocess
    facts = hardware_facts(bandwidth=True)    # about a second more: memory bandwidth is measured
    process_memory(os.getpid()).pss_bytes

Sizes are bytes, frequencies hertz. What the machine does not say is None, never 0.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import threading
import time
from pathlib import Path

import msgspec

ROOT = Path("/")
# Flags that decide how fast the engines' kernels are (x86: /proc/cpuinfo `flags`; ARM: `Features`).
ISA_FLAGS: tuple[str, ...] = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU as its driver describes it."""

    name: str
    vendor: str  # "nvidia" or "amd"
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None  # "9.0"; NVIDIA only
    index: int = 0


class HardwareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. `allowed_cores` are those that affinity leaves to this process; `cgroup_cores` is the quota of its control group."""

    cpu_model: str
    architecture: str
    isa: tuple[str, ...]
    logical_cores: int
    physical_cores: int | None
    allowed_cores: tuple[int, ...]
    cgroup_cores: float | None = None
    numa_nodes: int | None = None
    l2_bytes: int | None = None  # of one core
    l3_bytes: int | None = None  # of one socket
    max_hertz: float | None = None
    governor: str | None = None
    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_memory_bytes: int | None = None  # what the control group still leaves
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0
    bandwidth_bytes_per_second: float | None = None  # measured reading by all usable cores; None: not measured
    gpus: tuple[GpuFacts, ...] = ()
    gpu_cause: str | None = None  # a value of serving.placement.Cause where there is no usable GPU
    gpu_note: str | None = None
    system: str
    kernel: str
    python: str
    virtualisation: str | None = None
    hostname: str = ""

    @property
    def usable_cores(self) -> float:
        """Cores' worth of CPU time this process may have: affinity, cut down by the control group's quota."""
        allowed = float(len(self.allowed_cores))
        return min(allowed, self.cgroup_cores) if self.cgroup_cores is not None else allowed

    @property
    def usable_memory_bytes(self) -> int:
        """RAM that a new process can take without swapping or being killed."""
        if self.cgroup_memory_bytes is None:
            return self.memory_available_bytes
        return min(self.memory_available_bytes, self.cgroup_memory_bytes)


class ProcessMemory(msgspec.Struct, frozen=True):
    """One process's memory. PSS counts shared pages by share; None where the kernel does not say."""

    rss_bytes: int
    pss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    swap_bytes: int | None = None


def hardware_facts(*, bandwidth: bool = False, gpu_timeout_seconds: float = 10.0, root: Path = ROOT) -> HardwareFacts:
    """Everything above about this machine. `root` is where /proc and /sys hang (for tests and for containers with a host's mounts)."""
    from serving.probe import find_gpus

    cpu = _fields_of_first_cpu(_text(root / "proc/cpuinfo"))
    memory = _meminfo(_text(root / "proc/meminfo"))
    groups = _cgroups(root)
    allowed = allowed_cores()
    quota = cgroup_cores(root, groups)
    found = find_gpus(root=root, timeout_seconds=gpu_timeout_seconds)
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    usable = max(1, int(min(len(allowed), quota or len(allowed))))
    swap_total, swap_free = memory.get("SwapTotal", 0), memory.get("SwapFree", 0)
    return HardwareFacts(
        cpu_model=cpu.get("model name") or cpu.get("Model") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        logical_cores=os.cpu_count() or 1,
        physical_cores=_physical_cores(_text(root / "proc/cpuinfo")),
        allowed_cores=allowed,
        cgroup_cores=quota,
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        l2_bytes=_cache_bytes(root, 2),
        l3_bytes=_cache_bytes(root, 3),
        max_hertz=_max_hertz(root),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
        cgroup_memory_bytes=cgroup_memory_left(root, groups),
        swap_total_bytes=swap_total,
        swap_used_bytes=swap_total - swap_free,
        bandwidth_bytes_per_second=read_bandwidth(usable, array_bytes=_array_bytes(_cache_bytes(root, 3), usable)) if bandwidth else None,
        gpus=found.gpus,
        gpu_cause=found.cause,
        gpu_note=found.note,
        system=_system(root),
        kernel=platform.release(),
        python=platform.python_version(),
        virtualisation=_virtualisation(root, flags),
        hostname=platform.node(),
    )


def allowed_cores() -> tuple[int, ...]:
    """The cores this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def process_memory(pid: int, root: Path = ROOT) -> ProcessMemory | None:
    """Memory of one process now; None when there is no such process. PSS is None where its owner is somebody else."""
    folder = root / "proc" / str(pid)
    status = _sizes(_text(folder / "status"))
    if "VmRSS" not in status:
        return None
    rollup = _sizes(_text(folder / "smaps_rollup"))
    return ProcessMemory(
        rss_bytes=rollup.get("Rss", status["VmRSS"]),
        pss_bytes=rollup.get("Pss"),
        peak_rss_bytes=status.get("VmHWM"),
        swap_bytes=rollup.get("Swap", status.get("VmSwap")),
    )


def read_bandwidth(threads: int, seconds: float = 0.6, array_bytes: int = 64 << 20) -> float:
    """Bytes per second that `threads` threads together read from memory; each has an array far bigger than its share of the caches.

    Reading, not copying: a decode step streams the weights once and writes next to nothing. Numbers from one process with nothing else
    running; the best of the passes, since a neighbour can only slow one down.
    """
    import numpy as np

    arrays = [np.ones(array_bytes // 8, dtype=np.int64) for _ in range(threads)]
    passes: list[tuple[float, float]] = []
    gate = threading.Barrier(threads)

    def read(array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        gate.wait()
        until = time.perf_counter() + seconds
        while (started := time.perf_counter()) < until:
            np.bitwise_or.reduce(array)
            passes.append((started, time.perf_counter()))

    workers = [threading.Thread(target=read, args=(array,)) for array in arrays]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    quickest = sorted(end - start for start, end in passes)[: max(1, len(passes) // 2)]
    return threads * array_bytes / (sum(quickest) / len(quickest))


def _array_bytes(l3_bytes: int | None, threads: int) -> int:
    """An array for each thread such that all of them are four times the last-level cache, within what a small machine can spare."""
    return min(1 << 30, max(64 << 20, 4 * (l3_bytes or 0) // threads))


def cgroup_cores(root: Path = ROOT, groups: dict[str, list[Path]] | None = None) -> float | None:
    """The tightest CPU quota on the way from this process's control group up to the root, in cores; None: no quota."""
    groups = _cgroups(root) if groups is None else groups
    limits: list[float] = []
    for folder in groups.get("", []):  # v2: "max 100000" or "150000 100000"
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    for folder in groups.get("cpu", []):  # v1: -1 is no quota
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cgroup_memory_left(root: Path = ROOT, groups: dict[str, list[Path]] | None = None) -> int | None:
    """Bytes until the tightest memory limit above this process is reached; None: no limit. Page cache is counted as free."""
    groups = _cgroups(root) if groups is None else groups
    left: list[int] = []
    for kind, limit_name, use_name in (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in groups.get(kind, []):
            limit, used = _text(folder / limit_name).strip(), _text(folder / use_name).strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                cache = _sizes(_text(folder / "memory.stat"), unit=1)
                reclaimable = cache.get("inactive_file", 0) + cache.get("active_file", 0)
                left.append(max(0, int(limit) - max(0, int(used or 0) - reclaimable)))
    return min(left, default=None)


def _cgroups(root: Path) -> dict[str, list[Path]]:
    """Controller ("" for v2) -> this process's folder and those above it, innermost first."""
    found: dict[str, list[Path]] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(",") if controllers else [""]:
            base = root / "sys/fs/cgroup" / controller if controller else root / "sys/fs/cgroup"
            parts = [part for part in path.split("/") if part and part != ".."]
            found[controller] = [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found


def _fields_of_first_cpu(cpuinfo: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _physical_cores(cpuinfo: str) -> int | None:
    """Distinct (socket, core) pairs; None where the kernel names none (most ARM machines)."""
    pairs = set()
    for block in cpuinfo.split("\n\n"):
        fields = _fields_of_first_cpu(block)
        if "core id" in fields:
            pairs.add((fields.get("physical id"), fields["core id"]))
    return len(pairs) or None


def _meminfo(text: str) -> dict[str, int]:
    return _sizes(text)


def _sizes(text: str, unit: int = 1024) -> dict[str, int]:
    """Lines like `MemTotal:  16 kB` or `inactive_file 4096` -> bytes."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        found = re.match(r"(\S+?):?\s+(\d+)", line)
        if found:
            sizes[found[1]] = int(found[2]) * unit
    return sizes


def _cache_bytes(root: Path, level: int) -> int | None:
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if _text(index / "level").strip() == str(level):
            found = re.match(r"(\d+)([KM]?)", _text(index / "size"))
            if found:
                return int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]]
    return None


def _max_hertz(root: Path) -> float | None:
    kilohertz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    return float(kilohertz) * 1000 if kilohertz.isdigit() else None


def _system(root: Path) -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', _text(root / "etc/os-release"), re.MULTILINE)
    return found[1] if found else platform.system()


def _virtualisation(root: Path, flags: set[str]) -> str | None:
    """ "docker", "kvm", ... as far as files say; None on bare metal or where nothing tells."""
    layers = []
    if (root / ".dockerenv").exists():
        layers.append("docker")
    elif (root / "run/.containerenv").exists():
        layers.append("podman")
    elif "kubepods" in _text(root / "proc/self/cgroup"):
        layers.append("kubernetes")
    if "hypervisor" in flags:
        vendor = _text(root / "sys/class/dmi/id/sys_vendor").strip()
        layers.append(f"virtual machine ({vendor})" if vendor else "virtual machine")
    elif "microsoft" in _text(root / "proc/version").lower():
        layers.append("WSL")
    return ", ".join(layers) or None


def _text(path: Path) -> str:
    """The file's text, or "" where it cannot be read: absence is an answer here."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def disk_free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds `path`, or will hold it once it is made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
