"""One NVIDIA GPU beside the load, by NVML. Survives any driver.

    gpu = Gpu()
    gpu.read(engine_pids)     # the gpu_* fields of a ResourceSample
    gpu.missing               # {"gpu_watts": "this driver does not tell"}

Drivers and CUDA count GPUs differently, so the one that is read is that of the engine: by the UUID
that its process was given, else by its being listed there, else the first. Power is a mean of about
a second; the energy counter has no gaps, and a level's energy is made of it where there is one.
Utilisation is the share of time in which some kernel ran: a slow decode has 99 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

from serving.hardware.gpus import memory_of, tell, uuid_of

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that hold a clock down; not idling.
THROTTLES: dict[int, str] = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
_NAMES_DEVICE = ("CUDA_VISIBLE_DEVICES",)
_NOT_TOLD = "this driver does not tell"


class Gpu:
    """The engine's GPU. `reason`: why there is none to read; `doubts`: of the last reading."""

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: a module with pynvml's functions; None: pynvml itself."""
        self.reason: str | None = None
        self.missing: dict[str, str] = {}
        self.doubts: list[str] = []
        self._nvml: Any = nvml
        self._device: Any = None
        self._engine: tuple[int, ...] = ()
        try:
            if nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._device = self._nvml.nvmlDeviceGetHandleByIndex(0)
        except Exception as problem:  # no package, no driver, no device
            self._nvml = None
            self.reason = f"no NVIDIA GPU to be read: {problem}"

    def read(self, engine: Sequence[int] = ()) -> dict[str, Any]:
        """The gpu_* fields of a ResourceSample. `engine`: the engine's processes."""
        self.doubts = []
        if self._nvml is None:
            return {}
        self._choose(tuple(engine))
        found = self._by_nvml(engine)
        if all(value is None for value in found.values()):
            self.doubts = ["the GPU's driver tells nothing"]
        else:
            self.missing = {name: _NOT_TOLD for name, value in found.items() if value is None}
        return found | {"gpu_by": "NVML"}

    def _choose(self, engine: tuple[int, ...]) -> None:
        """The device of these processes, looked for again when they are others."""
        if engine == self._engine or not engine:
            return
        self._engine = engine
        nvml, wanted = self._nvml, device_named(engine)
        count = tell(lambda: int(nvml.nvmlDeviceGetCount())) or 1
        handles = [
            one
            for index in range(count)
            if (one := tell(nvml.nvmlDeviceGetHandleByIndex, index)) is not None
        ]
        named = [one for one in handles if wanted and uuid_of(nvml, one) == wanted]
        if wanted and wanted.startswith("MIG-"):
            part = tell(lambda: nvml.nvmlDeviceGetHandleByUUID(wanted))
            named = [] if part is None else [part]
        listed = [one for one in handles if {p.pid for p in _processes(nvml, one)} & set(engine)]
        self._device = next(iter([*named, *listed, *handles]), self._device)

    def _by_nvml(self, engine: Sequence[int]) -> dict[str, Any]:
        nvml, device = self._nvml, self._device
        memory = tell(lambda: memory_of(nvml, device))
        reserved = getattr(memory, "reserved", None)
        own = [p.usedGpuMemory for p in _processes(nvml, device) if p.pid in engine]
        bits = tell(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device)))
        millijoules = tell(lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(device)))
        return {
            "gpu_memory_bytes": None if memory is None else int(memory.used),
            "gpu_reserved_bytes": None if reserved is None else int(reserved),
            "gpu_engine_bytes": sum(map(int, own))
            if own and None not in own
            else None,  # None in a container: the driver hides it
            "gpu_utilisation": tell(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
            "gpu_watts": tell(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
            "gpu_energy_joules": None if millijoules is None else millijoules / 1000,
            "gpu_clock_hertz": tell(
                lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM) * 1e6
            ),
            "gpu_memory_clock_hertz": tell(
                lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM) * 1e6
            ),
            "gpu_throttled": None
            if bits is None
            else [name for bit, name in THROTTLES.items() if bits & bit],
        }

    def close(self) -> None:
        if self._nvml is not None:
            tell(self._nvml.nvmlShutdown)
            self._nvml = None


def device_named(engine: Sequence[int]) -> str | None:
    """The GPU's UUID that an engine's process was given; None: it was given none, or a number."""
    for pid in engine:
        try:
            variables = psutil.Process(pid).environ()
        except (psutil.Error, OSError):
            continue
        for name in _NAMES_DEVICE:
            if variables.get(name, "").startswith(("GPU-", "MIG-")):
                return variables[name]
    return None


def _processes(nvml: Any, device: Any) -> list[Any]:
    """Of the driver's newest list that it has: drivers before 510 have no third version."""
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
        found = tell(lambda name=name: getattr(nvml, name)(device))
        if found is not None:
            return list(found)
    return []
