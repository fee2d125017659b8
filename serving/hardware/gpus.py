"""The GPUs of this machine. NVML queries NVIDIA's driver in a thread, because it may hang.

    find_gpus()        # without driver files: no thread, microseconds

Drivers differ in what they report: a missing value is None, and a GPU that cannot be read is left
out with the reason. GPUs of other vendors are known from the probes of backends.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.child_process import Ran, run_python
from crossover.models.machine_limits import ROOT, read_text
from crossover.serving.errors import Cause, Unsupported

VULKAN = "vulkan"  # the vendor of any GPU that a build of llama.cpp drives through Vulkan
DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")  # any of them


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU as its driver describes it. Values that the driver does not report are None."""

    name: str
    vendor: str  # "nvidia", "amd" or VULKAN
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    index: int = 0  # in the driver's order, which differs from that of CUDA
    uuid: str | None = None  # selects this GPU for an engine
    power_limit_watts: float | None = None  # the limit that the driver enforces


class FoundGpus(msgspec.Struct, frozen=True):
    """The GPUs, or the cause why there are none; `note`: why, or which GPU cannot be read."""

    gpus: tuple[GpuFacts, ...] = ()
    cause: Cause | None = None
    note: str | None = None


_ASKING = threading.Lock()


def find_gpus(root: Path = ROOT, *, timeout_seconds: float = 10.0) -> FoundGpus:
    """Return the NVIDIA GPUs of this machine that this process may use. Never raises."""
    if not any((root / file).exists() for file in DRIVER_FILES):
        for device in (root / "sys/bus/pci/devices").glob("*"):
            is_display = read_text(device / "class").startswith("0x03")
            if is_display and read_text(device / "vendor").strip() == "0x10de":
                note = "there is an NVIDIA card, but its driver is not loaded"
                return FoundGpus((), Cause.no_driver, note)
        return FoundGpus((), Cause.no_device, "this machine has no NVIDIA GPU")
    answer: queue.SimpleQueue[FoundGpus] = queue.SimpleQueue()

    def ask() -> None:
        answer.put(list_gpus())
        _ASKING.release()

    try:
        if not _ASKING.acquire(timeout=timeout_seconds):  # the previous query hangs
            raise queue.Empty
        threading.Thread(target=ask, name="nvml", daemon=True).start()
        found = answer.get(timeout=timeout_seconds)
    except queue.Empty:
        note = f"the NVIDIA driver did not answer within {timeout_seconds:g} s"
        return FoundGpus((), Cause.health_timeout, note)
    shown = visible(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found.gpus and not shown:
        return FoundGpus((), Cause.no_device, "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU")
    return msgspec.structs.replace(found, gpus=shown)


def render_nodes(root: Path = ROOT) -> list[Path]:
    """Return the device files of GPUs of any vendor. Without NVIDIA's driver, only a backend's
    probe can tell what such a GPU can do."""
    return sorted((root / "dev/dri").glob("renderD*"))


def visible(gpus: tuple[GpuFacts, ...], variable: str | None) -> tuple[GpuFacts, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES (`variable`) allows. Numbers are indices in the
    driver's order (CUDA_DEVICE_ORDER=PCI_BUS_ID)."""
    if variable is None:
        return gpus
    entries = [entry.strip() for entry in variable.split(",") if entry.strip()]
    return tuple(
        gpu
        for gpu in gpus
        if any(entry == str(gpu.index) or (gpu.uuid or "").startswith(entry) for entry in entries)
    )


def run_probe(function: str, timeout_seconds: float) -> Ran:
    """Call "module:function" in a child process, because importing a backend's library may crash or
    hang. The result is JSON in `output`."""
    module, _, name = function.partition(":")
    say = f"print('', msgspec.json.encode(probed.{name}()).decode(), sep='\\n')"
    code = f"import msgspec, {module} as probed; {say}"
    ran = run_python("-c", code, timeout_seconds=timeout_seconds)
    # A library may print lines before the result.
    return ran._replace(output=b"".join(ran.output.splitlines()[-1:]))


def tell(ask: Callable[..., Any], *what: Any, **more: Any) -> Any:
    """Return the driver's answer; None if it raises anything: NVMLError, or an error of
    nvidia-ml-py if the driver is older than the package."""
    try:
        return ask(*what, **more)
    except Exception:
        return None


def memory_of(nvml: Any, handle: Any) -> Any:
    """Return total, used and free; newer drivers also report reserved, which `used` excludes."""
    newer = tell(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    return newer or nvml.nvmlDeviceGetMemoryInfo(handle)


def uuid_of(nvml: Any, handle: Any) -> str | None:
    """Return the UUID, "GPU-...", that CUDA_VISIBLE_DEVICES takes."""
    uuid = tell(lambda: nvml.nvmlDeviceGetUUID(handle))
    return None if uuid is None else str(uuid)


def list_gpus() -> FoundGpus:
    """Return the GPUs that NVML lists."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception as problem:  # NVMLError, or what an older driver makes of nvidia-ml-py
        return FoundGpus((), cause_of(str(problem)), f"NVML: {problem}")
    gpus: list[GpuFacts] = []
    trouble: list[str] = []
    for index in range(count):
        try:
            gpus.append(_read(pynvml, index))
        except Exception as problem:
            trouble.append(f"GPU {index} cannot be read: {problem}")
    tell(pynvml.nvmlShutdown)
    note = "; ".join(trouble)
    if not gpus:
        cause = cause_of(note) if note else Cause.no_device
        return FoundGpus((), cause, note or "the NVIDIA driver is loaded but lists no GPU")
    return FoundGpus(tuple(gpus), None, note or None)


def _read(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    if tell(lambda: nvml.nvmlDeviceGetMigMode(handle)[0]):  # CUDA cannot use it as a whole
        raise Unsupported("it is divided into MIG partitions, which are not supported")
    memory, driver = memory_of(nvml, handle), tell(nvml.nvmlSystemGetDriverVersion)
    return GpuFacts(
        name=str(nvml.nvmlDeviceGetName(handle)),
        vendor="nvidia",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=None if driver is None else str(driver),
        index=index,
        uuid=uuid_of(nvml, handle),
        power_limit_watts=tell(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    )


def cause_of(text: str) -> Cause:
    """Return the cause for an NVML message; "GPU is lost" comes from a driver that is loaded."""
    lowered = text.lower()
    if "mismatch" in lowered:
        return Cause.driver_mismatch
    is_gone = any(word in lowered for word in ("lost", "reset", "no device"))
    return Cause.no_device if is_gone else Cause.no_driver
