"""The GPUs of this machine. NVML queries NVIDIA's driver in a thread, because it may hang.

    find_gpus()        # without driver files: no thread, microseconds

Drivers differ in what they report. A value that one does not report is None, and a GPU that cannot
be read is left out, with the reason in the note. Only the probes of backends find GPUs of other
vendors.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.child_process import ChildResult, run_python
from crossover.models.machine_limits import ROOT, read_text
from crossover.serving.errors import Cause, Unsupported

VULKAN = "vulkan"  # the vendor of any GPU that a build of llama.cpp drives through Vulkan
# The driver is loaded if any of these exist; dxg is that of WSL.
DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
NVIDIA_PCI_VENDOR = "0x10de"


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
    """The GPUs of the machine, or why there are none."""

    gpus: tuple[GpuFacts, ...] = ()
    cause: Cause | None = None  # why there are none
    note: str | None = None  # the same in words; or which GPUs cannot be read


_QUERY_LOCK = threading.Lock()  # held while NVML is queried, and for good if a query hangs


def find_gpus(root: Path = ROOT, *, timeout_seconds: float = 10.0) -> FoundGpus:
    """Return the NVIDIA GPUs of this machine that this process may use. Never raises."""
    if not any((root / file).exists() for file in DRIVER_FILES):
        return _without_driver(root)
    results: queue.SimpleQueue[FoundGpus] = queue.SimpleQueue()

    def query() -> None:
        results.put(list_gpus())
        _QUERY_LOCK.release()

    try:
        if not _QUERY_LOCK.acquire(timeout=timeout_seconds):  # an earlier query hangs
            raise queue.Empty
        threading.Thread(target=query, name="nvml", daemon=True).start()
        found = results.get(timeout=timeout_seconds)
    except queue.Empty:
        note = f"the NVIDIA driver did not answer within {timeout_seconds:g} s"
        return FoundGpus((), Cause.health_timeout, note)
    visible_gpus = visible(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found.gpus and not visible_gpus:
        return FoundGpus((), Cause.no_device, "CUDA_VISIBLE_DEVICES hides every NVIDIA GPU")
    return msgspec.structs.replace(found, gpus=visible_gpus)


def _without_driver(root: Path) -> FoundGpus:
    """Return why there is no GPU on a machine without NVIDIA's driver: no card, or no driver."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        is_display = read_text(device / "class").startswith("0x03")  # the PCI class of displays
        if is_display and read_text(device / "vendor").strip() == NVIDIA_PCI_VENDOR:
            note = "there is an NVIDIA card, but its driver is not loaded"
            return FoundGpus((), Cause.no_driver, note)
    return FoundGpus((), Cause.no_device, "this machine has no NVIDIA GPU")


def render_nodes(root: Path = ROOT) -> list[Path]:
    """Return the device files of GPUs of any vendor. If NVIDIA's driver does not list a GPU, only
    a backend's probe can find out what it supports."""
    return sorted((root / "dev/dri").glob("renderD*"))


def visible(gpus: tuple[GpuFacts, ...], variable: str | None) -> tuple[GpuFacts, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES (`variable`; None: not set) allows.

    Its entries are indices, here in the driver's order (CUDA_DEVICE_ORDER=PCI_BUS_ID), or UUIDs,
    which may be cut short.
    """
    if variable is None:
        return gpus
    entries = [entry.strip() for entry in variable.split(",") if entry.strip()]

    def is_visible(gpu: GpuFacts) -> bool:
        uuid = gpu.uuid or ""
        return any(entry == str(gpu.index) or uuid.startswith(entry) for entry in entries)

    return tuple(gpu for gpu in gpus if is_visible(gpu))


def run_probe(function: str, timeout_seconds: float) -> ChildResult:
    """Call "module:function" in a child process, because importing a backend's library may crash or
    hang. `output` has the result as JSON."""
    module, _, name = function.partition(":")
    print_result = f"print('', msgspec.json.encode(probed.{name}()).decode(), sep='\\n')"
    code = f"import msgspec, {module} as probed; {print_result}"
    child = run_python("-c", code, timeout_seconds=timeout_seconds)
    # The result is the last line. A library may print lines before it.
    return child._replace(output=b"".join(child.output.splitlines()[-1:]))


def call_or_none(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call of a driver's library; None if it raises anything. NVML raises
    NVMLError, and other errors if the driver is older than the package nvidia-ml-py."""
    try:
        return function(*args, **kwargs)
    except Exception:
        return None


def memory_of(nvml: Any, handle: Any) -> Any:
    """Return a GPU's memory: an object with the bytes `total`, `used` and `free`. Newer drivers
    also report `reserved`, which `used` then excludes."""
    newer = call_or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    return newer or nvml.nvmlDeviceGetMemoryInfo(handle)


def uuid_of(nvml: Any, handle: Any) -> str | None:
    """Return the UUID, "GPU-...", that CUDA_VISIBLE_DEVICES takes; None if it is not reported."""
    uuid = call_or_none(lambda: nvml.nvmlDeviceGetUUID(handle))
    return None if uuid is None else str(uuid)


def list_gpus() -> FoundGpus:
    """Return the GPUs that NVML lists. Never raises, but may hang."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception as problem:  # NVMLError, or what an older driver makes of nvidia-ml-py
        return FoundGpus((), cause_of_nvml(str(problem)), f"NVML: {problem}")
    gpus: list[GpuFacts] = []
    problems: list[str] = []
    for index in range(count):
        try:
            gpus.append(_read(pynvml, index))
        except Exception as problem:
            problems.append(f"GPU {index} cannot be read: {problem}")
    call_or_none(pynvml.nvmlShutdown)
    note = "; ".join(problems)
    if not gpus:
        cause = cause_of_nvml(note) if note else Cause.no_device
        return FoundGpus((), cause, note or "the NVIDIA driver is loaded but lists no GPU")
    return FoundGpus(tuple(gpus), None, note or None)


def _read(nvml: Any, index: int) -> GpuFacts:
    """Return the facts of one GPU. Raises Unsupported, or what NVML raises."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    if call_or_none(lambda: nvml.nvmlDeviceGetMigMode(handle)[0]):  # CUDA cannot use it as a whole
        raise Unsupported("it is divided into MIG partitions, which are not supported")
    memory = memory_of(nvml, handle)
    driver = call_or_none(nvml.nvmlSystemGetDriverVersion)
    return GpuFacts(
        name=str(nvml.nvmlDeviceGetName(handle)),
        vendor="nvidia",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=None if driver is None else str(driver),
        index=index,
        uuid=uuid_of(nvml, handle),
        power_limit_watts=call_or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    )


def cause_of_nvml(text: str) -> Cause:
    """Return the cause for an error message of NVML."""
    lowered = text.lower()
    if "mismatch" in lowered:
        return Cause.driver_mismatch
    # A driver that reports "GPU is lost" is loaded, so it is the device that is missing.
    is_lost = any(word in lowered for word in ("lost", "reset", "no device"))
    return Cause.no_device if is_lost else Cause.no_driver
