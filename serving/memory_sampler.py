"""Memory of engine processes and GPUs for a scrape: read in a thread, with a time limit, since both can take long.

Walking the pages of a big process for its PSS takes tens of milliseconds, and a driver that hangs never answers: neither may hold up the
event loop. A sample that is not there in time leaves the last one out rather than repeating it; the thread that hangs is not joined by
another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from serving.hardware import ProcessMemory, process_memory

PATIENCE_SECONDS = 2.0


class GpuMemory(msgspec.Struct, frozen=True):
    """One GPU's memory as NVML says it, in bytes; what other processes hold is in `used_bytes` too."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int


class MemorySampler:
    """`engines`: (model, pid, memory) of each process that still lived; `gpus`: empty where there is no NVIDIA driver."""

    def __init__(self) -> None:
        self.engines: list[tuple[str, int, ProcessMemory]] = []
        self.gpus: list[GpuMemory] = []
        self._thread: threading.Thread | None = None

    async def sample(self, engines: Mapping[int, str], patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Read both now. `engines`: pid -> model. Never raises, never takes longer than the limit."""
        self.engines, self.gpus = [], []
        if self._thread is not None and self._thread.is_alive():
            return  # it hangs in the driver
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[list[tuple[str, int, ProcessMemory]], list[GpuMemory]]] = loop.create_future()

        def read() -> None:
            found = [(model, pid, use) for pid, model in engines.items() if (use := process_memory(pid)) is not None]
            answer = found, gpu_memory()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(answer))

        self._thread = threading.Thread(target=read, daemon=True, name="memory-sampler")
        self._thread.start()
        with contextlib.suppress(TimeoutError):
            self.engines, self.gpus = await asyncio.wait_for(done, patience_seconds)


def gpu_memory() -> list[GpuMemory]:
    """Every NVIDIA GPU's memory now; empty where no driver is loaded or it does not answer as it should."""
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    import pynvml

    found: list[GpuMemory] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                memory: Any = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found.append(GpuMemory(index, str(pynvml.nvmlDeviceGetName(handle)), int(memory.used), int(memory.total)))
        finally:
            pynvml.nvmlShutdown()
    return found
