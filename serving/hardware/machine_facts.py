"""Facts of this machine for placement, reports and `crossover doctor`.

    facts = hardware_facts()        # milliseconds

Sizes are in bytes. A value that the machine does not report is None, never 0.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from crossover.models.cpu_names import cpu_name, vendor_and_product
from crossover.models.machine_limits import (
    ROOT,
    cgroup_cores,
    cgroup_memory_left,
    cpu_flags,
    read_text,
    sizes,
)
from crossover.serving.hardware.cpu_topology import physical_of
from crossover.serving.hardware.gpus import GpuFacts, find_gpus


def resident_bytes(pid: int | None = None) -> int | None:
    """Return the RSS of a process (None: this one) in bytes; None if it does not exist. Takes
    microseconds."""
    name = "self" if pid is None else str(pid)
    pages = read_text(ROOT / f"proc/{name}/statm").split()  # total, resident, ...
    return int(pages[1]) * resource.getpagesize() if pages else None


def peak_resident_bytes(pid: int | None = None) -> int | None:
    """Return the peak RSS of a process (None: this one) in bytes; None if it does not exist."""
    if pid is None:  # the kernel reports KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return sizes(read_text(ROOT / f"proc/{pid}/status")).get("VmHWM")


def lower_priority(nice: int) -> None:
    """Lower the priority of this thread, of threads it starts later, and of its session by
    `nice`."""
    os.nice(nice)
    # With autogroups the kernel divides CPU time among sessions, by a niceness of the session.
    with suppress(OSError):  # there are no autogroups, or the container lacks the permission
        Path("/proc/self/autogroup").write_text(str(nice))


# CPU flags that decide how fast the engines' kernels are, as /proc/cpuinfo names them.
ISA_FLAGS: tuple[str, ...] = (
    "sse4_2",
    "avx",
    "f16c",
    "fma",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "asimdhp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
    "sme",
)


class HardwareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine."""

    cpu_model: str
    architecture: str
    isa: tuple[str, ...]
    logical_cores: int
    physical_cores: int | None
    allowed_cores: tuple[int, ...]  # by this process's affinity
    cgroup_cores: float | None = None  # the CPU quota of the control group; None: unlimited
    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_memory_bytes: int | None = None  # left of the control group's limit; None: no limit
    swap_used_bytes: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    gpu_cause: str | None = None  # a crossover.serving.errors.Cause if there is no usable GPU
    gpu_note: str | None = None
    system: str
    kernel: str
    python: str
    virtualisation: str | None = None
    hostname: str = ""

    @property
    def usable_cores(self) -> float:
        """Return the cores that this process can use at once: its affinity within the quota."""
        allowed = float(len(self.allowed_cores))
        return min(allowed, self.cgroup_cores) if self.cgroup_cores is not None else allowed

    @property
    def usable_memory_bytes(self) -> int:
        """Return the RAM that a new process can take without swapping or being killed."""
        if self.cgroup_memory_bytes is None:
            return self.memory_available_bytes
        return min(self.memory_available_bytes, self.cgroup_memory_bytes)


def hardware_facts(*, root: Path = ROOT) -> HardwareFacts:
    """Return the facts of this machine. `root` is where /proc and /sys are mounted."""
    memory = sizes(read_text(root / "proc/meminfo"))
    flags, found = cpu_flags(root), find_gpus(root)
    system = platform.system()
    with suppress(OSError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    core_folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
    cores = [int(folder.name.removeprefix("cpu")) for folder in core_folders]
    return HardwareFacts(
        cpu_model=cpu_name(root) or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        logical_cores=os.cpu_count() or 1,
        physical_cores=len(set(physical_of(cores, root).values())) or None,
        allowed_cores=allowed_cores(),
        cgroup_cores=cgroup_cores(root),
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
        cgroup_memory_bytes=cgroup_memory_left(root),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        gpus=found.gpus,
        gpu_cause=found.cause,
        gpu_note=found.note,
        system=system,
        kernel=platform.release(),
        python=platform.python_version(),
        virtualisation=_virtualisation(flags, root),
        hostname=platform.node(),
    )


# Vendors in the firmware of virtual machines. Only x86 has a CPU flag for them.
VIRTUAL_VENDORS = (
    "Amazon EC2",
    "Apple Inc.",
    "Google",
    "KVM",
    "Microsoft Corporation",
    "OpenStack",
    "QEMU",
)


def _virtualisation(flags: Collection[str], root: Path) -> str | None:
    """Return "virtual machine", with its vendor if the firmware names one; None: it is none."""
    vendor, product = vendor_and_product(root)
    is_virtual_vendor = vendor.startswith(VIRTUAL_VENDORS) and not product.endswith(".metal")
    has_hypervisor_node = (root / "proc/device-tree/hypervisor").is_dir()
    is_x86 = "fpu" in flags
    is_virtual = "hypervisor" in flags or (
        not is_x86 and (is_virtual_vendor or has_hypervisor_node)
    )
    if not is_virtual:
        return None
    return f"virtual machine ({vendor})" if vendor else "virtual machine"


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))
