"""Facts of this machine for placement, reports and `crossover doctor`.

    facts = hardware_facts()                # milliseconds; the GPU driver is asked in a child
    facts = hardware_facts(bandwidth=True)  # a second more: bandwidth and arithmetic are measured

Sizes are bytes, frequencies hertz. What the machine does not say is None, never 0.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import msgspec

from models.machine import (
    ROOT,
    cgroup_cores,
    cgroup_memory_left,
    cpu_flags,
    cpu_name,
    read_text,
    sizes,
)
from serving.hardware.arithmetic import gemm_rate
from serving.hardware.bandwidth import array_bytes, read_bandwidth
from serving.hardware.gpu import find_gpus
from serving.hardware.gpu_facts import GpuFacts

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
    l2_bytes: int | None = None  # of one core
    l3_bytes: int | None = None  # of one socket
    max_hertz: float | None = None
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
    facts = HardwareFacts(
        cpu_model=cpu_name(root) or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        logical_cores=os.cpu_count() or 1,
        physical_cores=_physical_cores(read_text(root / "proc/cpuinfo")),
        allowed_cores=allowed_cores(),
        cgroup_cores=cgroup_cores(root),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        l2_bytes=_cache_bytes(root, 2),
        l3_bytes=_cache_bytes(root, 3),
        max_hertz=_max_hertz(root),
        governor=_cpufreq(root, "scaling_governor"),
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
    return _with_peaks(facts) if bandwidth else facts


def _with_peaks(facts: HardwareFacts) -> HardwareFacts:
    threads = max(1, int(facts.usable_cores))
    measured = read_bandwidth(threads, array_bytes=array_bytes(facts.l3_bytes, threads))
    return msgspec.structs.replace(
        facts, bandwidth_bytes_per_second=measured, gemm_flops_per_second=gemm_rate()
    )


def allowed_cores() -> tuple[int, ...]:
    """The cores this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _physical_cores(cpuinfo: str) -> int | None:
    """Distinct (socket, core) pairs; None where the kernel names none (most ARM machines)."""
    pairs = set()
    for block in cpuinfo.split("\n\n"):
        fields = dict(re.findall(r"^(physical id|core id)\s*:\s*(\d+)", block, re.MULTILINE))
        if "core id" in fields:
            pairs.add((fields.get("physical id"), fields["core id"]))
    return len(pairs) or None


def _cache_bytes(root: Path, level: int) -> int | None:
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.match(r"(\d+)([KM]?)", read_text(index / "size"))
        if size and read_text(index / "level").strip() == str(level):
            return int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
    return None


def _cpufreq(root: Path, name: str) -> str | None:
    return read_text(root / "sys/devices/system/cpu/cpu0/cpufreq" / name).strip() or None


def _max_hertz(root: Path) -> float | None:
    kilohertz = _cpufreq(root, "cpuinfo_max_freq") or ""
    return float(kilohertz) * 1000 if kilohertz.isdigit() else None


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
