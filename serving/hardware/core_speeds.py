"""What the CPUs of this machine do together, measured: virtual machines may hide hyperthreads.

    speeds = measure_core_speeds((0, 1, 2, 3))      # under two seconds on a quiet machine
    speeds.equivalent_cores                         # 2: the four CPUs compute like two cores
    speeds.read_gigabytes_per_second                # {1: 12.4, 2: 24.1, 4: 25.0}

Threads that are pinned to one CPU each read memory, then compute in their own cache. Two CPUs that
are hyperthreads of one core share its units: together they compute hardly more than one of them
does. Memory alone does not tell: two real cores may already read all that the memory gives. A
thread's rate is that of its usual piece of work, so that other processes disturb it little. One
thread alone may have a higher clock, which is why all CPUs are compared with half of them.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.machine_limits import ROOT, read_text

MEASURING_SECONDS = 1.0  # of all parts together; memory is filled before
MAX_BUFFER_BYTES, MIN_BUFFER_BYTES = 1 << 30, 128 << 20  # read by all threads together
BLOCK_BYTES = 4 << 20  # read by one call, during which a thread does not hold the interpreter
CACHE_FLOATS, REPEATS = 4096, 1000  # of the computation: 16 KB, which any first-level cache holds
# All CPUs do less than this multiple of half of them: they are two threads of each core. Measured
# multiples are 1.9 to 2 for cores; the two threads of a core do 1.0 to 1.3 times what one does.
MAX_HYPERTHREAD_GAIN = 1.5

Work = Callable[[], int]  # does a piece of work, and returns how much it was


class CoreSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of threads that work at the same time, by their number."""

    cpus: int
    read_gigabytes_per_second: dict[int, float]
    compute: dict[int, float]  # relative to one thread
    half_compute: float | None  # of half of the CPUs, chosen so that they do most; None: one CPU

    @property
    def equivalent_cores(self) -> int:
        """Cores that would compute as much: half of the CPUs where the other half adds little."""
        if self.half_compute is None:
            return self.cpus
        is_shared = self.compute[self.cpus] < MAX_HYPERTHREAD_GAIN * self.half_compute
        return self.cpus // 2 if is_shared else self.cpus


def thread_counts(cpus: int) -> list[int]:
    """1, 2, 4 ... and all."""
    counts = [1]
    while counts[-1] * 2 < cpus:
        counts.append(counts[-1] * 2)
    return counts if cpus == 1 else [*counts, cpus]


def measure_core_speeds(
    cpus: Sequence[int], memory_bytes: int = MAX_BUFFER_BYTES, root: Path = ROOT
) -> CoreSpeeds:
    """Return the speeds of these CPUs, which this process must be allowed to run on.

    `memory_bytes`: at most so much is taken; twice the last cache is read, in turns by all threads.
    """
    cpus = list(cpus)
    counts = thread_counts(len(cpus))
    halves = [cpus[::2], cpus[: len(cpus) // 2]] if len(cpus) > 1 else []
    seconds = MEASURING_SECONDS / (2 * len(counts) + len(halves))
    buffer_bytes = max(MIN_BUFFER_BYTES, min(MAX_BUFFER_BYTES, 2 * last_cache_bytes(root)))
    memory = np.empty(
        max(len(cpus) * BLOCK_BYTES, min(buffer_bytes, memory_bytes)) // 4, np.float32
    )
    # Memory that was never written is all one page, which a cache holds.
    _rate_of(cpus, [_filling(part) for part in np.array_split(memory, len(cpus))], 0.0)
    reads = {}
    for count in counts:
        works = [_reading(part) for part in np.array_split(memory, count)]
        reads[count] = _rate_of(_spread(cpus, count), works, seconds) / 1e9
    del memory, works

    def compute(cpu_group: Sequence[int]) -> float:
        return _rate_of(cpu_group, [_computing() for _ in cpu_group], seconds)

    rates = {count: compute(_spread(cpus, count)) for count in counts}
    return CoreSpeeds(
        cpus=len(cpus),
        read_gigabytes_per_second=reads,
        compute={count: rate / rates[1] for count, rate in rates.items()},
        half_compute=max(compute(half) for half in halves) / rates[1] if halves else None,
    )


def last_cache_bytes(root: Path = ROOT) -> int:
    """Return the size of the first CPU's largest cache, as the kernel says it; 0: it does not."""
    size_files = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [read_text(file).strip() for file in size_files]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max(
        (int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0
    )


def _spread(cpus: Sequence[int], count: int) -> Sequence[int]:
    """Return so many of the CPUs, far from each other: neighbors may be threads of one core."""
    return cpus[:: len(cpus) // count][:count]


def _filling(part: npt.NDArray[np.float32]) -> Work:
    def fill() -> int:
        part.fill(1.0)
        return part.nbytes

    return fill


def _reading(part: npt.NDArray[np.float32]) -> Work:
    blocks = np.array_split(part, max(1, part.nbytes // BLOCK_BYTES))
    turn = iter(range(1 << 62))

    def read() -> int:
        block = blocks[next(turn) % len(blocks)]
        block.max()
        return block.nbytes

    return read


def _computing() -> Work:
    out = np.zeros(CACHE_FLOATS, np.float32)
    repeated = np.broadcast_to(np.ones(CACHE_FLOATS, np.float32), (REPEATS, CACHE_FLOATS))

    def compute() -> int:
        np.maximum.reduce(repeated, axis=0, out=out)
        return repeated.size

    return compute


def _rate_of(cpus: Sequence[int], works: Sequence[Work], seconds: float) -> float:
    """Work a second of threads that work for so many seconds at the same time, each pinned to its
    CPU, and each at least one piece."""
    rates: list[float] = []
    start = threading.Barrier(len(works))

    def run(cpu: int, work: Work) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread
        pieces: list[float] = []
        start.wait()
        deadline = time.perf_counter() + seconds
        while not pieces or time.perf_counter() < deadline:
            started = time.perf_counter()
            work_done = work()
            pieces.append(work_done / max(time.perf_counter() - started, 1e-9))
        rates.append(statistics.median(pieces))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(cpus, works, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)
