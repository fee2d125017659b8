"""NVIDIA GPUs by NVML (nvidia-ml-py). Drivers differ in what they tell: a value that one does not
tell is None, and a GPU that cannot be read at all is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from models.machine import ROOT
from serving.errors import Cause
from serving.hardware.gpu_facts import FoundGpus, GpuFacts, GpuMemory

FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")  # a driver has one of these


def tell(ask: Callable[..., Any], *what: Any) -> Any:
    """What the driver says; None where it does not, whatever it raises: NVMLError, or an error of
    nvidia-ml-py's own where the driver is older than the package."""
    try:
        return ask(*what)
    except Exception:
        return None


def memory_of(nvml: Any, handle: Any) -> Any:
    """total, used, free and, of newer drivers, reserved, which is then not in used."""
    found = tell(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    return found if found is not None else nvml.nvmlDeviceGetMemoryInfo(handle)


def uuid_of(nvml: Any, handle: Any) -> str | None:
    """What CUDA_VISIBLE_DEVICES takes: "GPU-..." or, of a part of one, "MIG-..."."""
    found = tell(lambda: nvml.nvmlDeviceGetUUID(handle))
    return None if found is None else str(found)


def is_there() -> bool:
    """Whether files say that a driver is loaded; no library is."""
    return any((ROOT / file).exists() for file in FILES)


def memory_now() -> list[GpuMemory]:
    """Every NVIDIA GPU's memory; [] where the driver is not loaded or does not answer."""
    if not is_there():
        return []
    import pynvml

    found: list[GpuMemory] = []
    try:
        pynvml.nvmlInit()
    except Exception:  # no library, no driver, one that does not fit
        return []
    try:
        for index in range(tell(pynvml.nvmlDeviceGetCount) or 0):
            handle = tell(pynvml.nvmlDeviceGetHandleByIndex, index)
            memory = tell(memory_of, pynvml, handle)
            if handle is None or memory is None:
                continue
            name, uuid = tell(pynvml.nvmlDeviceGetName, handle), uuid_of(pynvml, handle)
            used, total = int(memory.used), int(memory.total)
            found.append(GpuMemory(index, str(name or "NVIDIA GPU"), used, total, uuid))
    finally:
        tell(pynvml.nvmlShutdown)
    return found


def list_gpus() -> FoundGpus:
    """What NVML lists. Runs in a child: a driver may hang or abort."""
    try:
        import pynvml
    except ImportError as problem:
        note = f"nvidia-ml-py is not installed: {problem}"
        return FoundGpus((), Cause.backend_missing, note)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return FoundGpus((), cause_of(str(problem)), f"NVML: {problem}")
    driver = tell(pynvml.nvmlSystemGetDriverVersion)
    gpus: list[GpuFacts] = []
    trouble: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus += _parts(pynvml, handle, index, None if driver is None else str(driver))
        except Exception as problem:
            trouble.append(f"GPU {index} cannot be read: {problem}")
    tell(pynvml.nvmlShutdown)
    told = "; ".join(trouble)
    if not gpus:
        cause = cause_of(told) if told else Cause.no_device
        return FoundGpus((), cause, told or "the NVIDIA driver is there and lists no GPU")
    return FoundGpus(tuple(gpus), None, told or None)


def _parts(nvml: Any, handle: Any, index: int, driver: str | None) -> Iterator[GpuFacts]:
    """The GPU, or its parts where it is divided (MIG): CUDA cannot use such a GPU as a whole."""
    capability = tell(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    whole = GpuFacts(
        name=str(nvml.nvmlDeviceGetName(handle)),
        vendor="nvidia",
        driver=driver,
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        index=index,
        power_limit_watts=_scaled(tell(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)), 1e-3),
        memory_hertz=_clock(nvml, handle, "NVML_CLOCK_MEM"),
        core_hertz=_clock(nvml, handle, "NVML_CLOCK_SM"),
        pcie_generation=tell(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        pcie_lanes=tell(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
        has_ecc=tell(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
    )
    is_divided = tell(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    parts = tell(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) if is_divided else 0
    handles = [handle]
    if is_divided:
        found = (
            tell(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, part)
            for part in range(parts or 0)
        )
        handles = [one for one in found if one is not None]
    for one in handles:
        memory = memory_of(nvml, one)
        yield msgspec.structs.replace(
            whole,
            name=str(tell(nvml.nvmlDeviceGetName, one) or whole.name),
            uuid=uuid_of(nvml, one),
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            is_part=bool(is_divided),
        )


def _clock(nvml: Any, handle: Any, kind: str) -> float | None:
    megahertz = tell(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, getattr(nvml, kind)))
    return _scaled(megahertz, 1e6)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def cause_of(text: str) -> Cause:
    """The cause in NVML's words. "GPU is lost" is of a driver that is there."""
    lowered = text.lower()
    if "mismatch" in lowered:
        return Cause.driver_mismatch
    if "shared library" in lowered:
        return Cause.no_driver
    if "lost" in lowered or "reset" in lowered:
        return Cause.no_device
    is_absent = "no device" in lowered or "not found" in lowered
    return Cause.no_device if is_absent else Cause.no_driver
