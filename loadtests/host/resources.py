"""What load costs: memory, CPU, swap, clocks, GPU and watts, one reading at a time.

    readings = Readings("cell", {"engine": lambda: engine_pids(server), "client": lambda: [pid]})
    readings.sample()            # a ResourceSample; CPU shares from the second one on
    readings.missing             # {"gpu": "no NVIDIA driver ..."}: what cannot be read, and why

What a machine does not tell is None. CPU is the difference of kernel counters, so nothing that
ran between two samples is missed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from loadtests.host.disturbance import Pids, clock_hertz, throttled_seconds
from loadtests.host.gpu import Gpu
from loadtests.records.schema import ProcessSample, RemoteSample, ResourceSample

PSS_EVERY = 10  # samples: the kernel walks all pages for it
ENGINE_MODULE = "serving.engine.engine_loop"
RAPL = Path("/sys/class/powercap")

Clock = Callable[[], float]


class Readings:
    """Reads everything. `groups`: "engine", "api" and "client" -> their process ids now."""

    def __init__(
        self,
        cell: str,
        groups: Mapping[str, Pids],
        *,
        interval_seconds: float = 1.0,
        local_server: bool = True,
        remote: Callable[[], RemoteSample | str] | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """`local_server`: read GPU and watts too. `remote`: a sample, or why there is none."""
        self.level: str | None = None
        self.missing: dict[str, str] = {}
        self._cell = cell
        self._groups = {name: _Group(pids) for name, pids in groups.items()}
        self._interval = interval_seconds
        self._gpu = (gpu or Gpu()) if local_server else None
        self._rapl = Rapl() if local_server else None
        self._steal = Steal()
        self._quota = Quota()
        self._remote = remote
        self._number = 0
        self._before: float | None = None
        if self._gpu is not None and self._gpu.reason:
            self.missing["gpu"] = self._gpu.reason
        if self._rapl is not None and self._rapl.reason:
            self.missing["cpu_watts"] = self._rapl.reason
        psutil.cpu_percent()  # the first call only sets the mark that the next one counts from

    def sample(self) -> ResourceSample:
        """One sample, now."""
        reasons: list[str] = []
        now = time.monotonic()
        if self._before is not None and now - self._before > 3 * self._interval:
            reasons.append(f"taken {now - self._before - self._interval:.1f} s late")
        self._before = now
        with_pss = self._number % PSS_EVERY == 0
        self._number += 1
        processes = {
            name: group.sample(with_pss, name, reasons) for name, group in self._groups.items()
        }
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        engine = self._groups["engine"].now if "engine" in self._groups else ()
        gpu = self._gpu.read(engine) if self._gpu is not None else {}
        if self._gpu is not None:
            reasons += self._gpu.doubts
        remote = self._remote() if self._remote is not None else None
        if isinstance(remote, str):
            reasons.append(remote)
            remote = None
        sample = ResourceSample(
            cell=self._cell,
            level=self.level,
            unix_seconds=round(time.time(), 3),
            engine=processes.get("engine"),
            api=processes.get("api"),
            client=processes.get("client"),
            machine_cpu_share=psutil.cpu_percent() / 100,
            available_bytes=memory.available,
            swap_used_bytes=swap.used,
            cpu_watts=self._rapl.read() if self._rapl is not None else None,
            cpu_clock_hertz=clock_hertz(range(os.cpu_count() or 1)),
            steal_share=self._steal.read(),
            quota_share=self._quota.read(),
            remote=remote,
            valid=not reasons,
            reasons=reasons,
            **gpu,
        )
        if self._rapl is not None and self._rapl.reason:
            self.missing.setdefault("cpu_watts", self._rapl.reason)
        if self._gpu is not None:
            self.missing |= self._gpu.missing
        return sample

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()


class _Group:
    """Some processes that are one to us. Their CPU share is known from the second sample on."""

    def __init__(self, pids: Pids) -> None:
        self._pids = pids
        self._cpu: dict[int, float] = {}
        self._at: float | None = None

    @property
    def now(self) -> tuple[int, ...]:
        """The processes of the last sample."""
        return tuple(self._cpu)

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
        self._cpu = cpu
        self._at = now
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
        return any(
            part == ENGINE_MODULE or part.endswith("serving/engine/engine_loop.py")
            for part in psutil.Process(pid).cmdline()
        )
    except psutil.Error:
        return False


class Rapl:
    """Watts of all CPU packages, from energy counters; `reason`: why they cannot be read."""

    def __init__(self, root: Path = RAPL, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._packages = sorted(
            path
            for path in root.glob("intel-rapl:*")
            if path.name.count(":") == 1 and not _is_platform(path)
        )
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
            now = (
                self._clock(),
                [int((path / "energy_uj").read_text()) for path in self._packages],
            )
            ranges = [int((path / "max_energy_range_uj").read_text()) for path in self._packages]
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or problem
            self.reason = f"{self._packages[0].name} cannot be read: {why}"
            self._packages = []
            return None
        before = self._before
        self._before = now
        if before is None or now[0] <= before[0]:
            return None
        counted = zip(now[1], before[1], ranges, strict=True)
        used = [((new - old) % (limit + 1), limit) for new, old, limit in counted]
        if any(one > limit / 2 for one, limit in used):
            return None  # a counter that was set back, or a gap of more than one wrap-around
        return round(sum(one for one, _ in used) / 1e6 / (now[0] - before[0]), 3)


def _is_platform(zone: Path) -> bool:
    """The zone `psys` holds the packages once more."""
    try:
        return (zone / "name").read_text().strip() == "psys"
    except OSError:
        return False


class Steal:
    """The share of all cores' time that a hypervisor gave to other machines (psutil)."""

    def __init__(self, cpu_times: Callable[[], Any] = psutil.cpu_times) -> None:
        self._cpu_times = cpu_times
        self._before = self._counters()

    def read(self) -> float | None:
        """Since the last call."""
        before = self._before
        self._before = self._counters()
        if self._before[0] is None or before[0] is None or self._before[1] <= before[1]:
            return None
        return round((self._before[0] - before[0]) / (self._before[1] - before[1]), 4)

    def _counters(self) -> tuple[float | None, float]:
        """Seconds stolen, and of all kinds; guest time is part of user time."""
        seconds = self._cpu_times()._asdict()
        guest = seconds.get("guest", 0.0) + seconds.get("guest_nice", 0.0)
        return seconds.get("steal"), sum(seconds.values()) - guest


def _throttled() -> float | None:
    return throttled_seconds(os.getpid())


class Quota:
    """The share of time in which a CPU quota of this process's control groups held cores back."""

    def __init__(
        self, throttled: Callable[[], float | None] = _throttled, clock: Clock = time.monotonic
    ) -> None:
        self._throttled = throttled
        self._clock = clock
        self._before = self._seconds()

    def read(self) -> float | None:
        """Since the last call."""
        before = self._before
        self._before = self._seconds()
        if before is None or self._before is None or self._before[0] <= before[0]:
            return None
        return round((self._before[1] - before[1]) / (self._before[0] - before[0]), 4)

    def _seconds(self) -> tuple[float, float] | None:
        throttled = self._throttled()
        return None if throttled is None else (self._clock(), throttled)
