"""Samples the machine's resources once a second during a load: memory, swap, GPU, power, and who
else used the engine's cores.

    with Sampler("cell", run_folder.append_sample, server=server_pid) as sampler:
        sampler.level = "cell#3.1"       # samples from now on are of this level
        ...
        sampler.level = None             # returns when all samples of the level are handed over
        sampler.cores                    # list of CoresSample, from the level's start to its end

A thread takes the samples. What a machine does not report is None. CPU times are differences of
kernel counters, so that nothing that ran between two samples is missed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from crossover.loadtests.host.cpu_time_taken import CoreWatch
from crossover.loadtests.records.resource_sample import CoresSample, ProcessSample, ResourceSample
from crossover.models.machine_limits import ROOT, read_text
from crossover.serving.hardware.gpus import call_or_none, memory_of, uuid_of

INTERVAL_SECONDS = 1.0
# The name of a power sensor (hwmon) that measures cores or their SoC: "CPU Power Socket 0" on
# Grace, "power1 CORE VRD" and "power2 SoC" on Altra. Grace's other sensors include the first one.
CPU_SENSOR = re.compile(r"\b(CPU|CORE|SOC)\b", re.IGNORECASE)
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that lower a clock, except idling.
THROTTLE_REASONS = {0x4: "power cap", 0x60: "thermal", 0x98: "hardware slowdown"}


class Sampler:
    """Takes samples until its `with` block ends, and calls `sink` with each, in its own thread."""

    def __init__(
        self,
        cell: str,
        sink: Callable[[ResourceSample], None],
        *,
        server: int | None = None,
        is_crossover: bool = True,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """`server`: process id of the server; None: it runs on another machine. `is_crossover`: its
        engine is a child process of it; otherwise the server and all its descendants count as the
        engine.
        """
        self.cores: list[CoresSample] = []  # of the level: one per sample, and one at its end
        self.failure: Exception | None = None  # why no samples are taken any more
        self._cell = cell
        self._sink = sink
        self._server = server
        self._is_crossover = is_crossover
        self._interval_seconds = interval_seconds
        self._watch = CoreWatch(self._engine_pids, os.getpid())
        self._gpu = GpuMeter()
        self._cpu_power = CpuPower()
        self._level: str | None = None
        self._lock = threading.Lock()  # held during a sample, and at a level's start and end
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)

    def __enter__(self) -> Sampler:
        self._sample()  # so that the differences of the next one are known
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join(5)

    @property
    def level(self) -> str | None:
        """Name of the level that runs now; None: none."""
        return self._level

    @level.setter
    def level(self, name: str | None) -> None:
        with self._lock:
            # The counters are read at the start of a level too, where its differences begin.
            since_last_sample = self._watch.read()
            if self._level is not None and since_last_sample is not None:
                self.cores.append(since_last_sample)
            if name is not None:
                self.cores = []
            self._level = name

    def _engine_pids(self) -> list[int]:
        """Return the engine's processes; [] if they cannot be seen."""
        if self._server is None:
            return []
        return engine_pids(self._server) if self._is_crossover else family(self._server)

    def _sample(self) -> None:
        with self._lock:
            cores = self._watch.read()
            if self._level is not None and cores is not None:
                self.cores.append(cores)
            server_fields: dict[str, Any] = {}
            if self._server is not None:
                pids = self._engine_pids()
                server_fields = self._gpu.read(pids)
                server_fields["cpu_watts"] = self._cpu_power.read()
                server_fields["engine"] = _memory_of(pids)
            self._sink(
                ResourceSample(
                    cell=self._cell,
                    level=self._level,
                    unix_seconds=round(time.time(), 3),
                    swap_used_bytes=psutil.swap_memory().used,
                    cores=cores,
                    **server_fields,
                )
            )

    def _run(self) -> None:
        try:
            while not self._is_closed.wait(self._interval_seconds):
                self._sample()
        except Exception as problem:  # such as a full disk; the runner checks `failure`
            self.failure = problem


def _memory_of(pids: Sequence[int]) -> ProcessSample | None:
    """Return the memory of some processes together; None: none of them exists."""
    rss_bytes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            rss_bytes.append(psutil.Process(pid).memory_info().rss)
    return ProcessSample(rss_bytes=sum(rss_bytes)) if rss_bytes else None


def family(pid: int) -> list[int]:
    """Return a process and all its descendants, itself first; [] if it does not exist."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def engine_pids(server: int) -> list[int]:
    """Return the engine processes of a Crossover server."""
    pids = []
    for pid in family(server)[1:]:
        with contextlib.suppress(psutil.Error):
            command = psutil.Process(pid).cmdline()
            if any(word.startswith("crossover.serving.engine.") for word in command):
                pids.append(pid)
    return pids


def visible_devices(pid: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a process, which is a GPU's UUID for Crossover's engines;
    None: it is not set, or cannot be read."""
    value: str | None = call_or_none(lambda: psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"])
    return value


class GpuMeter:
    """Reads the engine's NVIDIA GPU through NVML. What the driver does not report is None.

    NVML and CUDA number GPUs differently, so the GPU is found by the UUID in the engine's
    environment; without one, the first GPU is read. The power is a mean over about a second; the
    energy counter has no gaps.
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
            return [name for bits, name in THROTTLE_REASONS.items() if reasons & bits]

        return {
            "gpu_memory_bytes": call_or_none(lambda: int(memory_of(nvml, gpu).used)),
            "gpu_watts": call_or_none(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "gpu_energy_joules": call_or_none(
                lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
            ),
            "gpu_throttled": call_or_none(throttled),
        }


class CpuPower:
    """Reads the power of all CPU packages, in watts: from their energy counters (RAPL of x86), or
    from the sensors of servers that have no counters (hwmon, as on Grace and Altra)."""

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        """`root`: where /sys is mounted."""
        self._clock = clock
        # intel-rapl:0 is a package, and intel-rapl:0:1 a part of it. psys is the whole system,
        # which includes the packages.
        self._packages = [
            path
            for path in sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
            if path.name.count(":") == 1 and read_text(path / "name").strip() != "psys"
        ]
        self._sensors = [] if self._packages else _cpu_sensors(root)
        self._previous: tuple[float, list[float]] | None = None  # seconds, joules of each package

    def read(self) -> float | None:
        """Return the watts: the mean since the last call of counters, of sensors what they show.
        None: there are neither, it is the first call, or a counter was reset."""
        try:
            if self._sensors:
                return sum(int(path.read_text()) for path in self._sensors) / 1e6
            joules = [int((path / "energy_uj").read_text()) / 1e6 for path in self._packages]
        except (OSError, ValueError):
            return None
        now = self._clock()
        previous, self._previous = self._previous, (now, joules)
        if not joules or previous is None:
            return None
        previous_time, previous_joules = previous
        used = [new - old for new, old in zip(joules, previous_joules, strict=True)]
        return None if min(used) < 0 else round(sum(used) / (now - previous_time), 3)


def _cpu_sensors(root: Path) -> list[Path]:
    """Return the files of the power sensors of all CPUs, which have microwatts."""
    sensors: list[Path] = []
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        numbers = {re.sub(r"_(input|average)$", "", path.name) for path in folder.glob("power*")}
        for number in sorted(name for name in numbers if re.fullmatch(r"power\d+", name)):
            # A power meter of ACPI (Grace) has its name in a file of the device, and only a mean.
            label = read_text(folder / f"{number}_label") or read_text(
                folder / f"device/{number}_oem_info"
            )
            values = [folder / f"{number}_average", folder / f"{number}_input"]
            value = next((path for path in values if path.exists()), None)
            if value is not None and CPU_SENSOR.search(label):
                sensors.append(value)
    return sensors
