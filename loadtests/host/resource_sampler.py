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
from models.machine import read_text
from serving.hardware.gpus import memory_of, tell, uuid_of

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
        self.missing: dict[str, str] = {}  # what cannot be read here, and why
        self._cell = cell
        self._sink = sink
        self._interval_seconds = interval_seconds
        subject: Pids = self._client_pids
        self._groups = {"client": ProcessGroup(subject)}
        if server is not None:
            subject = (lambda: engine_pids(server)) if is_ours else lambda: family(server)
            self._groups["engine"] = ProcessGroup(subject)
        if server is not None and is_ours:
            api: Pids = lambda: [pid for pid in family(server) if not _is_engine(pid)]  # noqa: E731
            self._groups["api"] = ProcessGroup(api)
        self._watch = CoreWatch(subject, os.getpid())
        self._gpu = None if server is None else Gpu()
        self._rapl = None if server is None else Rapl()
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
        if not self._lock.acquire(timeout=ANSWER_SECONDS):  # a driver that hangs
            self.failure = LoadError("the sampler of resources does not answer")
            return
        try:
            # the rest of the level that ends, or the mark that one which begins counts from
            rest = self._watch.read(scan=True)
            if self._level is not None and rest is not None:
                self.cores.append(rest)
            if name is not None:
                self.cores = []
            self._level = name
        finally:
            self._lock.release()

    def _client_pids(self) -> list[int]:
        """The runner itself, without its children, where it sends no load."""
        return [self.client] if self.client == os.getpid() else family(self.client)

    def _sample(self) -> None:
        with self._lock:
            self.latest = self._watch.read()
            if self._level is not None and self.latest is not None:
                self.cores.append(self.latest)
            found: dict[str, Any] = {name: one.sample() for name, one in self._groups.items()}
            if self._gpu is not None and self._rapl is not None:
                found |= self._gpu.read(self._groups["engine"].pids)
                found["cpu_watts"] = self._rapl.read()
                self.missing |= self._gpu.missing
                self.missing |= {"cpu_watts": self._rapl.reason} if self._rapl.reason else {}
            self._sink(
                ResourceSample(
                    cell=self._cell,
                    level=self._level,
                    unix_seconds=round(time.time(), 3),
                    swap_used_bytes=psutil.swap_memory().used,
                    cores=self.latest,
                    **found,
                )
            )

    def _run(self) -> None:
        due = time.monotonic() + self._interval_seconds
        try:
            while not self._over.wait(max(0.0, due - time.monotonic())):
                self._sample()
                due = max(due + self._interval_seconds, time.monotonic())
        except Exception as problem:  # a full disk: the runner asks between levels
            self.failure = problem


class ProcessGroup:
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
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    cpu[pid] = times.user + times.system
                    rss += process.memory_info().rss
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
        self._engine: Sequence[int] = ()
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._all = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            self._device = self._all[0]
        except Exception as problem:  # no package, no driver, no device
            self.missing["gpu"] = f"no NVIDIA GPU to be read: {problem}"

    def read(self, engine: Sequence[int] = ()) -> dict[str, Any]:
        """The gpu_* fields of a ResourceSample. `engine`: the engine's processes."""
        if self._device is None:
            return {}
        if engine != self._engine:
            self._engine = engine
            self._device = self._engines_gpu()
        nvml, one = self._nvml, self._device

        def throttled() -> list[str]:
            bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(one)
            return [name for bit, name in THROTTLES.items() if bits & bit]

        found = {
            "gpu_memory_bytes": tell(lambda: int(memory_of(nvml, one).used)),
            "gpu_utilisation": tell(lambda: nvml.nvmlDeviceGetUtilizationRates(one).gpu / 100),
            "gpu_watts": tell(lambda: nvml.nvmlDeviceGetPowerUsage(one) / 1000),
            "gpu_energy_joules": tell(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(one) / 1000),
            "gpu_throttled": tell(throttled),
        }
        self.missing = {
            name: "this driver does not tell" for name, value in found.items() if value is None
        }
        return found

    def _engines_gpu(self) -> Any:
        """The one whose UUID an engine was given (a container hides who runs there), or runs on."""
        given = [told for pid in self._engine if (told := _visible(pid)).startswith("GPU-")]
        named = [one for one in self._all if uuid_of(self._nvml, one) in given]

        def runs_here(device: Any) -> bool:
            running = tell(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(device)) or []
            return bool({process.pid for process in running} & set(self._engine))

        return [*named, *filter(runs_here, self._all), self._device][0]


def _visible(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get("CUDA_VISIBLE_DEVICES", "")
    except (psutil.Error, OSError):
        return ""


class Rapl:
    """Watts of all CPU packages, from energy counters; `reason`: why they cannot be read."""

    def __init__(self, root: Path = RAPL, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # intel-rapl:0 is a package, intel-rapl:0:1 a part of it; psys holds the packages once more
        self._packages = [
            path
            for path in sorted(root.glob("intel-rapl:*"))
            if path.name.count(":") == 1 and read_text(path / "name").strip() != "psys"
        ]
        self._before: tuple[float, list[int]] | None = None
        self.reason = ""
        if not self._packages:
            self.reason = f"{root} has no intel-rapl: a virtual machine, or a CPU without counters"

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
