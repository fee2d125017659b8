"""What load costs, once a second beside it: memory, swap, GPU, watts, and who else had the cores.

    with Sampler("cell", folder.sample, server=server_pid) as sampler:
        sampler.level = "cell#3.1"       # samples carry it until it is None again
        ...
        sampler.level = None             # returns when all samples of the level are handed over
        sampler.cores                    # CoresSample of the level, from its begin to its end

A thread samples. What a machine does not tell is None. CPU is the difference of kernel counters, so
nothing that ran between two samples is missed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from crossover.loadtests.host.cpu_time_taken import CoreWatch
from crossover.loadtests.records.resource_sample import CoresSample, ProcessSample, ResourceSample
from crossover.models.machine_limits import read_text
from crossover.serving.hardware.gpus import memory_of, tell, uuid_of

INTERVAL_SECONDS = 1.0
RAPL = Path("/sys/class/powercap")
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that hold a clock down; not idling.
THROTTLES = {0x4: "power cap", 0x60: "thermal", 0x98: "hardware slowdown"}


class Sampler:
    """Samples until its `with` block ends. `sink` takes each sample, in a thread of ours."""

    def __init__(
        self,
        cell: str,
        sink: Callable[[ResourceSample], None],
        *,
        server: int | None = None,
        is_ours: bool = True,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """`server`: process id of one that we started; None: somebody else's endpoint. `is_ours`:
        its engine is a child; else it and all below it are the engine.
        """
        self.cores: list[CoresSample] = []  # of the level: one of each sample, and one at its end
        self.failure: Exception | None = None
        self._cell = cell
        self._sink = sink
        self._server, self._is_ours = server, is_ours
        self._interval_seconds = interval_seconds
        self._watch = CoreWatch(self._subject, os.getpid())
        self._gpu, self._rapl = Gpu(), Rapl()
        self._level: str | None = None
        self._lock = threading.Lock()  # of a sample, or of a level's begin or end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)

    def __enter__(self) -> Sampler:
        self._sample()  # nothing is measured before it looks
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)

    @property
    def level(self) -> str | None:
        return self._level

    @level.setter
    def level(self, name: str | None) -> None:
        with self._lock:
            # the rest of the level that ends, or the mark that one which begins counts from
            rest = self._watch.read()
            if self._level is not None and rest is not None:
                self.cores.append(rest)
            if name is not None:
                self.cores = []
            self._level = name

    def _subject(self) -> list[int]:
        """Whose cores are watched: the engine's; nobody's where it is not ours to see."""
        if self._server is None:
            return []
        return engine_pids(self._server) if self._is_ours else family(self._server)

    def _sample(self) -> None:
        with self._lock:
            cores = self._watch.read()
            if self._level is not None and cores is not None:
                self.cores.append(cores)
            found: dict[str, Any] = {}
            if self._server is not None:
                engine = self._subject()
                found = self._gpu.read(engine)
                found["cpu_watts"] = self._rapl.read()
                found["engine"] = _memory_of(engine)
            self._sink(
                ResourceSample(
                    cell=self._cell,
                    level=self._level,
                    unix_seconds=round(time.time(), 3),
                    swap_used_bytes=psutil.swap_memory().used,
                    cores=cores,
                    **found,
                )
            )

    def _run(self) -> None:
        try:
            while not self._over.wait(self._interval_seconds):
                self._sample()
        except Exception as problem:  # a full disk: the runner asks between levels
            self.failure = problem


def _memory_of(pids: Sequence[int]) -> ProcessSample | None:
    """Of some processes that are one to us; None: none is there."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid).memory_info().rss)
    return ProcessSample(rss_bytes=sum(found)) if found else None


def family(pid: int) -> list[int]:
    """The process and all that it started, itself first; empty when it is gone."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def engine_pids(server: int) -> list[int]:
    """The engine children below a server process of ours."""
    found = []
    for pid in family(server)[1:]:
        with contextlib.suppress(psutil.Error):
            if any(
                part.startswith("crossover.serving.engine.")
                for part in psutil.Process(pid).cmdline()
            ):
                found.append(pid)
    return found


def visible_devices(pid: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a process, which is a GPU's UUID for our engines; None: it is
    not set, or cannot be read."""
    value: str | None = tell(lambda: psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"])
    return value


class Gpu:
    """The engine's NVIDIA GPU by NVML: what its driver does not tell is None.

    Drivers and CUDA count GPUs differently, so the one that is read is that whose UUID the engine
    was given, else the first. Power is a mean of about a second; the energy counter has no gaps.
    """

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: a module with pynvml's functions; None: pynvml itself."""
        self._gpus: list[Any] = []  # NVML's handles
        with contextlib.suppress(Exception):  # no package, no driver, no device
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]

    def read(self, engine: Sequence[int] = ()) -> dict[str, Any]:
        """Return the gpu_* fields of a ResourceSample; {} if there is no GPU.

        `engine`: process ids of the engine.
        """
        if not self._gpus:
            return {}
        nvml = self._nvml
        engine_uuids = [visible_devices(pid) for pid in engine]
        gpu = next((gpu for gpu in self._gpus if uuid_of(nvml, gpu) in engine_uuids), self._gpus[0])

        def throttled() -> list[str]:
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
            return [name for bits, name in THROTTLES.items() if reasons & bits]

        return {
            "gpu_memory_bytes": tell(lambda: int(memory_of(nvml, gpu).used)),
            "gpu_watts": tell(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "gpu_energy_joules": tell(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
            "gpu_throttled": tell(throttled),
        }


class Rapl:
    """Watts of all CPU packages, from energy counters."""

    def __init__(self, root: Path = RAPL, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # intel-rapl:0 is a package, intel-rapl:0:1 a part of it; psys holds the packages once more
        self._packages = [
            path
            for path in sorted(root.glob("intel-rapl:*"))
            if path.name.count(":") == 1 and read_text(path / "name").strip() != "psys"
        ]
        self._before: tuple[float, list[float]] | None = None

    def read(self) -> float | None:
        """Return the mean watts since the last call. None: it is the first call, there are no
        counters, or one of them was reset."""
        try:
            joules = [int((path / "energy_uj").read_text()) / 1e6 for path in self._packages]
        except (OSError, ValueError):
            return None
        before, self._before = self._before, (self._clock(), joules)
        if not joules or before is None:
            return None
        used = [new - old for new, old in zip(joules, before[1], strict=True)]
        return None if min(used) < 0 else round(sum(used) / (self._before[0] - before[0]), 3)
