"""What load costs, once a second beside it: CPU, memory, swap, GPU, watts.

    with Sampler("cell", folder.sample, server=server_pid) as sampler:
        sampler.client = locust_pid
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

from loadtests.errors import LoadError
from loadtests.host.core_watch import CoreWatch, Pids
from loadtests.records.resource_sample import CoresSample, ProcessSample, ResourceSample

INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # that a sample may take
RAPL = Path("/sys/class/powercap")
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that hold a clock down; not idling.
THROTTLES: dict[int, str] = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


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
        self.client = os.getpid()  # the process whose family is the load generator
        self.cores: list[CoresSample] = []  # of the level: one of each sample, and one at its end
        self.latest: CoresSample | None = None  # of the last sample, level or not
        self.failure: Exception | None = None
        self._sink = sink
        self._interval_seconds = interval_seconds
        groups: dict[str, Pids] = {"client": self._client_pids}
        subject: Pids = self._client_pids
        if server is not None and is_ours:
            groups["engine"] = subject = lambda: engine_pids(server)
            groups["api"] = lambda: [pid for pid in family(server) if not _is_engine(pid)]
        elif server is not None:
            groups["engine"] = subject = lambda: family(server)
        self._watch = CoreWatch(subject, os.getpid())
        self._readings = Readings(cell, groups, is_local=server is not None)
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
    def missing(self) -> dict[str, str]:
        """What cannot be read here, and why."""
        return self._readings.missing

    @property
    def level(self) -> str | None:
        return self._readings.level

    @level.setter
    def level(self, name: str | None) -> None:
        if not self._lock.acquire(timeout=ANSWER_SECONDS):  # a driver that hangs
            self.failure = LoadError("the sampler of resources does not answer")
            return
        try:
            # the rest of the level that ends, or the mark that one which begins counts from
            rest = self._watch.read(scan=True)
            if self._readings.level is not None and rest is not None:
                self.cores.append(rest)
            if name is not None:
                self.cores = []
            self._readings.level = name
        finally:
            self._lock.release()

    def _client_pids(self) -> list[int]:
        """The runner itself, without its children, where it sends no load."""
        return [self.client] if self.client == os.getpid() else family(self.client)

    def _sample(self) -> None:
        with self._lock:
            self.latest = self._watch.read()
            sample = self._readings.sample(self.latest)
            if sample.level is not None and self.latest is not None:
                self.cores.append(self.latest)
            self._sink(sample)

    def _run(self) -> None:
        due = time.monotonic() + self._interval_seconds
        try:
            while not self._over.wait(max(0.0, due - time.monotonic())):
                self._sample()
                due = max(due + self._interval_seconds, time.monotonic())
        except Exception as problem:  # a full disk: the runner asks between levels
            self.failure = problem


class Readings:
    """Reads everything. `groups`: "engine", "api" and "client" -> process ids now."""

    def __init__(
        self, cell: str, groups: dict[str, Pids], *, is_local: bool, gpu: Gpu | None = None
    ) -> None:
        self.level: str | None = None
        self.missing: dict[str, str] = {}
        self._cell = cell
        self._groups = {name: _Group(pids) for name, pids in groups.items()}
        self._gpu = (gpu or Gpu()) if is_local else None
        self._rapl = Rapl() if is_local else None

    def sample(self, cores: CoresSample | None = None) -> ResourceSample:
        """One sample, now."""
        found: dict[str, Any] = {name: one.sample() for name, one in self._groups.items()}
        gpu: dict[str, Any] = {}
        if self._gpu is not None:
            engine = self._groups["engine"].pids if "engine" in self._groups else ()
            gpu = self._gpu.read(engine)
            self.missing |= self._gpu.missing
        cpu_watts = None
        if self._rapl is not None:
            cpu_watts = self._rapl.read()
            if self._rapl.reason:
                self.missing["cpu_watts"] = self._rapl.reason
        return ResourceSample(
            cell=self._cell,
            level=self.level,
            unix_seconds=round(time.time(), 3),
            swap_used_bytes=psutil.swap_memory().used,
            cpu_watts=cpu_watts,
            cores=cores,
            **found,
            **gpu,
        )


class _Group:
    """Some processes that are one to us. Their CPU share is known from the second sample on."""

    def __init__(self, pids: Pids) -> None:
        self._now = pids
        self._cpu: dict[int, float] = {}
        self._at = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the last sample."""
        return tuple(self._cpu)

    def sample(self) -> ProcessSample | None:
        now, rss = time.monotonic(), 0
        cpu: dict[int, float] = {}
        for pid in self._now():
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    cpu[pid] = times.user + times.system
                    rss += process.memory_info().rss
            except psutil.Error:
                continue
        used = sum(total - self._cpu[pid] for pid, total in cpu.items() if pid in self._cpu)
        is_known = bool(cpu) and cpu.keys() <= self._cpu.keys() and now > self._at
        share = round(used / (now - self._at), 4) if is_known else None
        self._cpu, self._at = cpu, now
        return ProcessSample(rss_bytes=rss, cpu_share=share) if cpu else None


def family(pid: int) -> list[int]:
    """The process and all that it started, itself first; empty when it is gone."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def engine_pids(server: int) -> list[int]:
    """The engine children below a server process of ours."""
    return [pid for pid in family(server)[1:] if _is_engine(pid)]


def _is_engine(pid: int) -> bool:
    try:
        return any(part.startswith("serving.engine.") for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


class Gpu:
    """The engine's NVIDIA GPU by NVML: what its driver does not tell is None.

    Drivers and CUDA count GPUs differently, so the one that is read is that of the engine: where
    its processes are listed, else the first. Power is a mean of about a second; the energy counter
    has no gaps. Utilisation is the share of time in which some kernel ran: a slow decode has 99 %.
    """

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: a module with pynvml's functions; None: pynvml itself."""
        self.missing: dict[str, str] = {}
        self._device: Any = None
        self._engine: tuple[int, ...] = ()
        try:
            if nvml is None:
                nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._all = [
                nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
            ]
            self._device = self._all[0]
        except Exception as problem:  # no package, no driver, no device
            self.missing["gpu"] = f"no NVIDIA GPU to be read: {problem}"
        self._nvml = nvml

    def read(self, engine: Sequence[int] = ()) -> dict[str, Any]:
        """The gpu_* fields of a ResourceSample. `engine`: the engine's processes."""
        if self._device is None:
            return {}
        nvml, ask = self._nvml, self._told
        if tuple(engine) != self._engine:
            self._engine = tuple(engine)
            given = _given(engine)
            named = [one for one in self._all if given and self._uuid(one) == given]
            mine = [one for one in self._all if {p.pid for p in self._running(one)} & set(engine)]
            self._device = [*named, *mine, self._device][0]
        # Version 2 counts apart what driver and firmware keep back; drivers before 510 have it not.
        memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", 0))
        memory = memory or ask("nvmlDeviceGetMemoryInfo")
        rates, watts = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
        joules = ask("nvmlDeviceGetTotalEnergyConsumption")
        bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
        found = {
            "gpu_memory_bytes": None if memory is None else int(memory.used),
            "gpu_utilisation": None if rates is None else rates.gpu / 100,
            "gpu_watts": None if watts is None else watts / 1000,
            "gpu_energy_joules": None if joules is None else joules / 1000,
            "gpu_throttled": None
            if bits is None
            else [name for bit, name in THROTTLES.items() if bits & bit],
        }
        self.missing = {
            name: "this driver does not tell" for name, value in found.items() if value is None
        }
        return found

    def _told(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._device, *arguments)
        except Exception:  # of any driver: NVMLError, or no such function
            return None

    def _uuid(self, device: Any) -> str:
        try:
            found = self._nvml.nvmlDeviceGetUUID(device)
        except Exception:
            return ""
        return found.decode() if isinstance(found, bytes) else str(found)

    def _running(self, device: Any) -> list[Any]:
        try:
            return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(device))
        except Exception:
            return []


def _given(engine: Sequence[int]) -> str | None:
    """The UUID of the GPU that an engine's process was given: a container hides who runs there."""
    for pid in engine:
        with contextlib.suppress(psutil.Error, OSError):
            told = psutil.Process(pid).environ().get("CUDA_VISIBLE_DEVICES", "")
            if told.startswith("GPU-"):
                return told
    return None


class Rapl:
    """Watts of all CPU packages, from energy counters; `reason`: why they cannot be read."""

    def __init__(self, root: Path = RAPL, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # intel-rapl:0 is a package, intel-rapl:0:1 a part of it; psys holds the packages once more
        self._packages = [
            path
            for path in sorted(root.glob("intel-rapl:*"))
            if path.name.count(":") == 1 and not _reads(path / "name", "psys")
        ]
        self._before: tuple[float, list[int]] | None = None
        self.reason = (
            None
            if self._packages
            else f"{root} has no intel-rapl: a virtual machine, or a CPU without energy counters"
        )

    def read(self) -> float | None:
        """Mean since the last call; None at the first, and where the counters do not say it."""
        if not self._packages:
            return None
        try:
            joules = [int((path / "energy_uj").read_text()) for path in self._packages]
            ranges = [int((path / "max_energy_range_uj").read_text()) for path in self._packages]
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or problem
            self.reason = f"{self._packages[0].name} cannot be read: {why}"
            self._packages = []
            return None
        before, self._before = self._before, (self._clock(), joules)
        if before is None or self._before[0] <= before[0]:
            return None
        counted = zip(joules, before[1], ranges, strict=True)
        used = [((new - old) % (limit + 1), limit) for new, old, limit in counted]
        if any(one > limit / 2 for one, limit in used):
            return None  # a counter that was set back, or a gap of more than one wrap-around
        return round(sum(one for one, _ in used) / 1e6 / (self._before[0] - before[0]), 3)


def _reads(file: Path, text: str) -> bool:
    try:
        return file.read_text().strip() == text
    except OSError:
        return False
