"""GPUs of this machine, asked of the driver in a child: a driver may hang or abort.

    find_gpus()    # no driver files: no child, microseconds

`python -m serving.hardware.gpu module:function` calls the function and prints its result as JSON;
run_probe runs it. AMD's GPUs are read from sysfs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from models.isolated import Ran, run_python
from models.machine import ROOT
from serving.errors import Cause

_NVIDIA_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU as its driver describes it."""

    name: str
    vendor: str  # "nvidia" or "amd"
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None  # "9.0"; NVIDIA only
    index: int = 0


class FoundGpus(msgspec.Struct, frozen=True):
    """The GPUs, or the cause and a sentence why there is none."""

    gpus: tuple[GpuFacts, ...] = ()
    cause: Cause | None = None
    note: str | None = None


class GpuMemory(msgspec.Struct, frozen=True):
    """One GPU's memory by NVML, in bytes, what other processes hold included."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int


def find_gpus(*, root: Path = ROOT, timeout_seconds: float = 10.0) -> FoundGpus:
    """The GPUs of this machine. Never raises, never takes longer than the limit."""
    amd = _amd_gpus(root)
    if amd:
        return FoundGpus(amd)
    if not any((root / file).exists() for file in _NVIDIA_FILES):
        if _has_nvidia_card(root):
            note = "an NVIDIA card is there, but its driver is not loaded"
            return FoundGpus((), Cause.no_driver, note)
        return FoundGpus((), Cause.no_device, "this machine has no GPU")
    ran = run_probe("serving.hardware.gpu:nvml", timeout_seconds)
    if ran.status is None:
        note = f"the NVIDIA driver did not answer within {timeout_seconds:g} s"
        return FoundGpus((), Cause.health_timeout, note)
    if ran.status != 0:
        note = f"asking the NVIDIA driver failed: {ran.reason}"
        return FoundGpus((), Cause.driver_mismatch, note)
    try:
        return msgspec.json.decode(ran.output, type=FoundGpus)
    except msgspec.DecodeError as problem:
        note = f"the NVIDIA probe answered nonsense: {problem}"
        return FoundGpus((), Cause.driver_mismatch, note)


def run_probe(function: str, timeout_seconds: float) -> Ran:
    """Call "module:function" in a child that may crash or hang; its result is JSON in `output`."""
    return run_python("-m", "serving.hardware.gpu", function, timeout_seconds=timeout_seconds)


def gpu_memory() -> list[GpuMemory]:
    """Every NVIDIA GPU's memory now; [] where the driver is not loaded or does not answer."""
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    import pynvml

    found: list[GpuMemory] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index, handle in enumerate(_handles(pynvml)):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                name = str(pynvml.nvmlDeviceGetName(handle))
                found.append(GpuMemory(index, name, int(memory.used), int(memory.total)))
        finally:
            pynvml.nvmlShutdown()
    return found


def nvml() -> FoundGpus:
    """What NVML lists. Runs in the child."""
    try:
        import pynvml
    except ImportError as problem:
        note = f"nvidia-ml-py is not installed: {problem}"
        return FoundGpus((), Cause.backend_missing, note)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return FoundGpus((), _nvml_cause(str(problem)), f"NVML: {problem}")
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    gpus = []
    for index, handle in enumerate(_handles(pynvml)):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        capability = "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        name = str(pynvml.nvmlDeviceGetName(handle))
        total, free = int(memory.total), int(memory.free)
        gpus.append(GpuFacts(name, "nvidia", total, free, driver, capability, index))
    pynvml.nvmlShutdown()
    if not gpus:
        return FoundGpus((), Cause.no_device, "the NVIDIA driver is there and lists no GPU")
    return FoundGpus(tuple(gpus))


def _handles(pynvml: Any) -> list[Any]:
    count = pynvml.nvmlDeviceGetCount()
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]


def _nvml_cause(text: str) -> Cause:
    lowered = text.lower()
    if "mismatch" in lowered:
        return Cause.driver_mismatch
    if "shared library" in lowered:
        return Cause.no_driver
    is_absent = "no device" in lowered or "not found" in lowered
    return Cause.no_device if is_absent else Cause.no_driver


def _amd_gpus(root: Path) -> tuple[GpuFacts, ...]:
    """AMD GPUs with a compute node (/dev/kfd), from sysfs."""
    if not (root / "dev/kfd").exists():
        return ()
    found = []
    sizes = sorted((root / "sys/class/drm").glob("card[0-9]*/device/mem_info_vram_total"))
    for index, file in enumerate(sizes):
        try:
            total = int(file.read_text())
            used = int((file.parent / "mem_info_vram_used").read_text())
        except (OSError, ValueError):
            continue
        name_file = file.parent / "product_name"
        name = name_file.read_text().strip() if name_file.exists() else ""
        found.append(GpuFacts(name or "AMD GPU", "amd", total, total - used, index=index))
    return tuple(found)


def _has_nvidia_card(root: Path) -> bool:
    """True when the PCI bus shows an NVIDIA display or 3D controller."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
    return False


def main(arguments: list[str]) -> int:
    """Print the function's result as JSON; what libraries print goes to standard error."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        print("usage: python -m serving.hardware.gpu module:function", file=sys.stderr)
        return 2
    answer_to = os.dup(1)
    os.dup2(2, 1)
    module_name, _, name = arguments[0].partition(":")
    answer = getattr(importlib.import_module(module_name), name)()
    with os.fdopen(answer_to, "wb") as out:
        out.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
