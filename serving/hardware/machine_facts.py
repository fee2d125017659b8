"""Facts of this machine for placement, reports and `crossover doctor`.

    facts = hardware_facts()                # milliseconds; the GPU driver is asked in a child
    facts = hardware_facts(bandwidth=True)  # a second more: bandwidth and arithmetic are measured

Sizes are bytes, frequencies hertz. What the machine does not say is None, never 0.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from models.formatting import size
from models.machine import (
    ROOT,
    available_bytes,
    cgroup_cores,
    cgroup_memory_left,
    cpu_flags,
    cpu_name,
    read_text,
    sizes,
)
from serving.errors import OutOfMemory
from serving.hardware.gpus import GpuFacts, find_gpus


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


SIDE = 1024  # rows and columns: 4 MiB a matrix, far more arithmetic than memory traffic


def gemm_rate(seconds: float = 0.4) -> float:
    """Float32 operations per second of square matrix products, by all cores of this process.

    2 n^3 operations a product (numpy's BLAS). Kernels that multiply 8-bit integers may be quicker.
    """
    import numpy as np  # takes 100 ms, and only this needs it

    one = np.ones((SIDE, SIDE), dtype=np.float32)
    out = np.empty_like(one)
    np.matmul(one, one, out=out)  # starts BLAS's threads
    return 2.0 * SIDE**3 / _quick_seconds(_timed(lambda: np.matmul(one, one, out=out), seconds))


def read_bandwidth(threads: int, seconds: float = 0.6, array_bytes: int = 64 << 20) -> float:
    """Bytes per second that `threads` threads, with an array each, together read from memory.

    A decode step reads the weights once and writes next to nothing.
    """
    import numpy as np  # takes 100 ms, and only this needs it

    arrays = [np.ones(array_bytes // 8, dtype=np.int64) for _ in range(threads)]
    gate = threading.Barrier(threads)

    def passes(array: Any) -> list[float]:
        gate.wait()
        return _timed(lambda: np.bitwise_or.reduce(array), seconds)

    with ThreadPoolExecutor(threads) as pool:
        took = sum(pool.map(passes, arrays), [])
    return threads * array_bytes / _quick_seconds(took)


def _timed(work: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each call, for so long."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return took


def _quick_seconds(took: list[float]) -> float:
    """The mean of the quicker half: neighbours only slow one down."""
    quickest = sorted(took)[: max(1, len(took) // 2)]
    return sum(quickest) / len(quickest)


AUTOGROUP = Path("/proc/self/autogroup")
_WAIT_SECONDS = 0.11  # the kernel takes one such write in 100 ms from those without rights


def lower_priority(nice: int, autogroup: Path = AUTOGROUP) -> str | None:
    """By `nice`: of this thread, of those that it starts from now on, and of its session.

    None when done; why not, where sessions are groups and this one's cannot be lowered.
    """
    os.nice(nice)
    problem = ""
    for _ in range(3):
        try:
            autogroup.write_text(str(nice))
            return None
        except FileNotFoundError:  # this kernel has no such groups
            return None
        except OSError as error:
            problem = str(error)
            time.sleep(_WAIT_SECONDS)
    return f"the priority of the engine's session cannot be lowered: {problem}"


# CPU flags that decide how fast the engines' kernels are.
ISA_FLAGS: tuple[str, ...] = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


class HardwareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine."""

    cpu_model: str
    architecture: str
    isa: tuple[str, ...]
    logical_cores: int
    physical_cores: int | None
    allowed_cores: tuple[int, ...]  # by this process's affinity
    cgroup_cores: float | None = None  # CPU quota of its control group
    numa_nodes: int | None = None
    l3_bytes: int | None = None  # of one socket
    governor: str | None = None
    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_memory_bytes: int | None = None  # what the control group still leaves
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0
    bandwidth_bytes_per_second: float | None = None  # read by all usable cores, if measured
    gemm_flops_per_second: float | None = None  # float32 products on all usable cores, if measured
    gpus: tuple[GpuFacts, ...] = ()
    gpu_cause: str | None = None  # a serving.errors.Cause where there is no usable GPU
    gpu_note: str | None = None
    system: str
    kernel: str
    python: str
    virtualisation: str | None = None
    hostname: str = ""

    @property
    def usable_cores(self) -> float:
        """Cores' worth of CPU time for this process: its affinity, cut by the quota."""
        allowed = float(len(self.allowed_cores))
        return min(allowed, self.cgroup_cores) if self.cgroup_cores is not None else allowed

    @property
    def usable_memory_bytes(self) -> int:
        """RAM that a new process can take without swapping or being killed."""
        if self.cgroup_memory_bytes is None:
            return self.memory_available_bytes
        return min(self.memory_available_bytes, self.cgroup_memory_bytes)


def hardware_facts(*, bandwidth: bool = False, root: Path = ROOT) -> HardwareFacts:
    """The facts of this machine. `root` is where /proc and /sys are mounted."""
    memory = sizes(read_text(root / "proc/meminfo"))
    flags = cpu_flags(root)
    found = find_gpus(root=root)
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    facts = HardwareFacts(
        cpu_model=cpu_name(root) or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        logical_cores=os.cpu_count() or 1,
        physical_cores=_physical_cores(read_text(root / "proc/cpuinfo")),
        allowed_cores=allowed_cores(),
        cgroup_cores=cgroup_cores(root),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        l3_bytes=_l3_bytes(root),
        governor=read_text(cpu0 / "cpufreq/scaling_governor").strip() or None,
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
        cgroup_memory_bytes=cgroup_memory_left(root),
        swap_total_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        gpus=found.gpus,
        gpu_cause=found.cause,
        gpu_note=found.note,
        system=_system(root),
        kernel=platform.release(),
        python=platform.python_version(),
        virtualisation=_virtualisation(root, flags),
        hostname=platform.node(),
    )
    if not bandwidth:
        return facts
    threads = max(1, int(facts.usable_cores))
    # Together four times the last-level cache, at most 1 GiB each.
    array_bytes = min(1 << 30, max(64 << 20, 4 * (facts.l3_bytes or 0) // threads))
    return msgspec.structs.replace(
        facts,
        bandwidth_bytes_per_second=read_bandwidth(threads, array_bytes=array_bytes),
        gemm_flops_per_second=gemm_rate(),
    )


def allowed_cores() -> tuple[int, ...]:
    """The cores this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _physical_cores(cpuinfo: str) -> int | None:
    """Distinct (socket, core) pairs; None where the kernel names none (most ARM machines)."""
    pairs = set()
    for block in cpuinfo.split("\n\n"):
        fields = dict(re.findall(r"^(physical id|core id)\s*:\s*(\d+)", block, re.MULTILINE))
        if "core id" in fields:
            pairs.add((fields.get("physical id"), fields["core id"]))
    return len(pairs) or None


def _l3_bytes(root: Path) -> int | None:
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.match(r"(\d+)([KM]?)", read_text(index / "size"))
        if size and read_text(index / "level").strip() == "3":
            return int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
    return None


def _system(root: Path) -> str:
    release = read_text(root / "etc/os-release")
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', release, re.MULTILINE)
    return found[1] if found else platform.system()


def _virtualisation(root: Path, flags: frozenset[str]) -> str | None:
    """Container and virtual machine as far as files say; None on bare metal."""
    layers = []
    if (root / ".dockerenv").exists():
        layers.append("docker")
    elif (root / "run/.containerenv").exists():
        layers.append("podman")
    elif "kubepods" in read_text(root / "proc/self/cgroup"):
        layers.append("kubernetes")
    if "hypervisor" in flags:
        vendor = read_text(root / "sys/class/dmi/id/sys_vendor").strip()
        layers.append(f"virtual machine ({vendor})" if vendor else "virtual machine")
    elif "microsoft" in read_text(root / "proc/version").lower():
        layers.append("WSL")
    return ", ".join(layers) or None
