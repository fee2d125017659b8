"""What load costs: memory, CPU, swap, GPU and watts, sampled once a second beside it.

    with Sampler("cell", {"engine": find_engine, "client": lambda: [pid]}, folder.sample) as sampler:
        sampler.level = "cell-3"

A thread of the runner, which sleeps while load runs, on the runner's cores; a sample takes some milliseconds. What this machine does not
tell is None: a GPU that is not there, watts that need root. CPU is counted from the kernel's own counters between two samples, so
nothing that ran between them is missed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from loadtests.records import ProcessSample, ResourceSample

INTERVAL_SECONDS = 1.0
PSS_EVERY = 10  # samples: the kernel walks all pages for it
ENGINE_MODULE = "serving.engine"
RAPL = Path("/sys/class/powercap")

Pids = Callable[[], list[int]]


class Sampler:
    """Samples until its `with` block ends. `groups` maps "engine", "api" and "client" to functions that return process ids now."""

    def __init__(
        self,
        cell: str,
        groups: Mapping[str, Pids],
        sink: Callable[[ResourceSample], None],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        local_server: bool = True,
    ) -> None:
        """`local_server`: the machine-wide readings (swap, GPU, watts) are taken where the engine runs too."""
        self.level: str | None = None
        self._cell = cell
        self._groups = {name: _Group(pids) for name, pids in groups.items()}
        self._sink = sink
        self._interval = interval_seconds
        self._gpu = Gpu() if local_server else None
        self._watts = Rapl()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="resources", daemon=True)
        self.failure: Exception | None = None

    def __enter__(self) -> Sampler:
        psutil.cpu_percent()  # the first call only sets the mark that the next one counts from
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._gpu is not None:
            self._gpu.close()

    def _loop(self) -> None:
        try:
            due, number, before = time.monotonic(), 0, time.monotonic()
            while not self._end.wait(max(0.0, due - time.monotonic())):
                now = time.monotonic()
                self._sink(self.sample(with_pss=number % PSS_EVERY == 0, late_seconds=now - before - self._interval))
                number, before = number + 1, now
                due = max(due + self._interval, now)
        except Exception as problem:  # a full disk: the runner asks for it between levels
            self.failure = problem

    def sample(self, with_pss: bool = False, late_seconds: float = 0.0) -> ResourceSample:
        """One sample, now."""
        reasons: list[str] = []
        processes = {name: group.sample(with_pss, name, reasons) for name, group in self._groups.items()}
        if late_seconds > 2 * self._interval:
            reasons.append(f"taken {late_seconds:.1f} s late")
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        gpu = self._gpu.read() if self._gpu is not None else (None, None, None)
        return ResourceSample(
            cell=self._cell,
            level=self.level,
            unix_seconds=round(time.time(), 3),
            engine=processes.get("engine"),
            api=processes.get("api"),
            client=processes.get("client"),
            machine_cpu_share=psutil.cpu_percent() / 100,
            available_bytes=memory.available,
            swap_used_bytes=swap.used,
            gpu_memory_bytes=gpu[0],
            gpu_utilisation=gpu[1],
            gpu_watts=gpu[2],
            cpu_watts=self._watts.read(),
            valid=not reasons,
            reasons=reasons,
        )


class _Group:
    """Some processes that are one to us. Their CPU share is known from the second sample on."""

    def __init__(self, pids: Pids) -> None:
        self._pids = pids
        self._cpu: dict[int, float] = {}
        self._at: float | None = None

    def sample(self, with_pss: bool, name: str, reasons: list[str]) -> ProcessSample | None:
        now = time.monotonic()
        rss = threads = 0
        pss: int | None = 0 if with_pss else None
        cpu: dict[int, float] = {}
        for pid in self._pids():
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    cpu[pid] = times.user + times.system
                    rss += process.memory_info().rss
                    threads += process.num_threads()
            except psutil.Error:
                continue
            if pss is not None:
                part = _pss(pid)
                pss = None if part is None else pss + part
        seconds = now - self._at if self._at is not None else None
        used = sum(total - self._cpu[pid] for pid, total in cpu.items() if pid in self._cpu)
        known = bool(cpu) and cpu.keys() <= self._cpu.keys()
        if self._cpu and name == "engine" and cpu.keys() != self._cpu.keys():
            reasons.append("engine process changed" if cpu else "engine process gone")
        self._cpu, self._at = cpu, now
        if not cpu:
            return None
        share = round(used / seconds, 4) if known and seconds else None
        return ProcessSample(rss_bytes=rss, pss_bytes=pss, cpu_share=share, threads=threads)


def _pss(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return None


def family(pid: int) -> list[int]:
    """The process and all that it started, itself first; empty when it is gone."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def engine_pids(server: int) -> list[int]:
    """The engine children below a server process."""
    return [pid for pid in family(server)[1:] if _is_engine(pid)]


def api_pids(server: int) -> list[int]:
    """A server's processes without its engine children."""
    return [pid for pid in family(server) if not _is_engine(pid)]


def _is_engine(pid: int) -> bool:
    try:
        return any(part == ENGINE_MODULE or part.endswith("serving/engine.py") for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


class Gpu:
    """The first NVIDIA GPU by NVML: (memory used in bytes, utilisation 0..1, watts); None for each where there is none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._device: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no package, no driver, no device: NVML has an exception class for each, and all mean None
            self._nvml = None

    def read(self) -> tuple[int | None, float | None, float | None]:
        if self._nvml is None:
            return None, None, None
        return (
            self._try(lambda: int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)),
            self._try(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100),
            self._try(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1000),
        )

    def _try(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._nvml.NVMLError:  # not every device tells everything
            return None

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()


class Rapl:
    """Watts of all CPU packages from the kernel's energy counters; None where they cannot be read (most machines: root only)."""

    def __init__(self, root: Path = RAPL) -> None:
        self._packages = sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)
        self._before: tuple[float, list[int]] | None = None

    def read(self) -> float | None:
        """Mean since the last call; None at the first."""
        if not self._packages:
            return None
        try:
            now = time.monotonic(), [int((path / "energy_uj").read_text()) for path in self._packages]
            ranges = [int((path / "max_energy_range_uj").read_text()) for path in self._packages]
        except (OSError, ValueError):
            self._packages = []
            return None
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        used = sum((new - old) % (limit + 1) for new, old, limit in zip(now[1], before[1], ranges, strict=True))
        return round(used / 1e6 / (now[0] - before[0]), 3)
