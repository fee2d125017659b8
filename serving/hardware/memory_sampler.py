"""Memory of engine processes and of GPUs, read for a scrape. Sizes in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping

import msgspec
import psutil

from serving.hardware.gpu import gpu_memory
from serving.hardware.gpu_facts import GpuMemory

PATIENCE_SECONDS = 2.0


class ProcessMemory(msgspec.Struct, frozen=True):
    """Memory of one process; PSS divides shared pages among those who share them."""

    rss_bytes: int
    pss_bytes: int | None = None  # None: the process is somebody else's


def process_memory(pid: int) -> ProcessMemory | None:
    """Memory of a process now; None: there is none. Takes tens of ms for a big one."""
    try:
        process = psutil.Process(pid)
        try:
            full = process.memory_full_info()
        except psutil.AccessDenied:
            return ProcessMemory(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return None
    return ProcessMemory(full.rss, full.pss)


Sample = tuple[list[tuple[str, int, ProcessMemory]], list[GpuMemory]]


class MemorySampler:
    """Memory of engine processes and GPUs for a scrape, read in a thread with a time limit.

    `engines`: (model, pid, memory) of each process that lives; `gpus`: [] without NVIDIA's driver.
    A sample that is late is left out. A thread that hangs in the driver gets no second one.
    """

    def __init__(self) -> None:
        self.engines: list[tuple[str, int, ProcessMemory]] = []
        self.gpus: list[GpuMemory] = []
        self._thread: threading.Thread | None = None
        self._reading: asyncio.Future[Sample] | None = None

    async def sample(
        self, engines: Mapping[int, str], patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Read both now, or join the read under way. `engines`: pid -> model. Never raises."""
        told = self._reading is not None and self._reading.done()  # its thread may not have ended
        if told or self._thread is None or not self._thread.is_alive():
            self._reading = self._begin(engines)
        answer: Sample = ([], [])
        if self._reading is not None:
            try:
                answer = await asyncio.wait_for(asyncio.shield(self._reading), patience_seconds)
            except TimeoutError:
                self._reading = None  # the next ones do not wait for it
        self.engines, self.gpus = answer

    def _begin(self, engines: Mapping[int, str]) -> asyncio.Future[Sample]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Sample] = loop.create_future()

        def tell(answer: Sample) -> None:
            if not done.done():
                done.set_result(answer)

        def read() -> None:
            used = [(model, pid, process_memory(pid)) for pid, model in engines.items()]
            found = [(model, pid, use) for model, pid, use in used if use is not None]
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, (found, gpu_memory()))

        self._thread = threading.Thread(target=read, daemon=True, name="memory-sampler")
        self._thread.start()
        return done
