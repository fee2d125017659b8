"""Measures how fast the CPUs of this machine are together, to find hyperthreads.

    speeds = measure_core_speeds((0, 1, 2, 3))      # under two seconds on an idle machine
    speeds.equivalent_cores                         # 2: the four CPUs compute like two cores
    speeds.read_gigabytes_per_second                # {1: 12.4, 2: 24.1, 4: 25.0}

Virtual machines may hide which CPUs are hyperthreads of one core. Such CPUs share the core's units,
so that two of them compute hardly more than one. Threads that are pinned to one CPU each therefore
compute in their own cache. They also read memory, but its bandwidth does not show hyperthreads: two
real cores may already use all of it.

A thread's rate is the median over its pieces of work, so that other processes disturb it little.
All CPUs are compared with half of them and not with one, because a single busy CPU may have a
higher clock.
"""

from __future__ import annotations

import itertools
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
from crossover.serving.hardware.cpu_topology import physical_of

MEASURING_SECONDS = 1.0  # of all measurements together, without filling the memory
MAX_BUFFER_BYTES, MIN_BUFFER_BYTES = 4 << 30, 128 << 20  # memory that all threads read together
BLOCK_BYTES = 4 << 20  # read by one numpy call, during which a thread does not hold the GIL
CACHE_FLOATS = 4096  # of the computation: 16 KB, which fits in any first-level cache
REPEATS = 1000  # passes over them in one numpy call
# If all CPUs together compute less than this multiple of half of them, they are hyperthreads.
# Measured multiples are 1.9 to 2.0 for cores, and 1.0 to 1.3 for two hyperthreads of a core.
MAX_HYPERTHREAD_GAIN = 1.5

Work = Callable[[], int]  # does one piece of work and returns its amount: bytes, or numbers


class CoreSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of threads that work at the same time, by the number of threads."""

    cpus: int
    read_gigabytes_per_second: dict[int, float]  # of all threads together
    compute: dict[int, float]  # of all threads together, relative to one thread
    # As `compute`, of the faster of two halves of the CPUs; None: there is only one CPU.
    half_compute: float | None

    @property
    def equivalent_cores(self) -> int:
        """The number of cores that compute as much as these CPUs: half of the CPUs, if the other
        half adds little."""
        if self.half_compute is None:
            return self.cpus
        is_shared = self.compute[self.cpus] < MAX_HYPERTHREAD_GAIN * self.half_compute
        return self.cpus // 2 if is_shared else self.cpus


def thread_counts(cpus: int) -> list[int]:
    """Return the numbers of threads that are measured: 1, 2, 4, ... and `cpus` itself."""
    counts = []
    count = 1
    while count < cpus:
        counts.append(count)
        count *= 2
    return [*counts, cpus]


def measure_core_speeds(
    cpus: Sequence[int], memory_bytes: int = MAX_BUFFER_BYTES, root: Path = ROOT
) -> CoreSpeeds:
    """Return the speeds of these CPUs, which this process must be allowed to run on.

    The threads together read twice as much memory as the last caches of these CPUs have, but no
    more than `memory_bytes`.
    """
    cpus = list(cpus)
    counts = thread_counts(len(cpus))
    # Two ways to number hyperthreads: the two of a core are neighbors, or the second ones of all
    # cores follow the first ones. In either case one of these halves has a CPU of each core.
    halves = [cpus[::2], cpus[: len(cpus) // 2]] if len(cpus) > 1 else []
    seconds = MEASURING_SECONDS / (2 * len(counts) + len(halves))
    memory = np.empty(_buffer_bytes(cpus, memory_bytes, root) // 4, np.float32)
    # Pages that were never written are all the same page, which fits in a cache.
    _rate_of(cpus, [_filling(part) for part in np.array_split(memory, len(cpus))], 0.0)
    reads = {}
    for count in counts:
        works = [_reading(part) for part in np.array_split(memory, count)]
        reads[count] = _rate_of(spread_over_cores(cpus, count, root), works, seconds) / 1e9
    del memory, works

    def compute(cpu_group: Sequence[int]) -> float:
        return _rate_of(cpu_group, [_computing() for _ in cpu_group], seconds)

    rates = {count: compute(spread_over_cores(cpus, count, root)) for count in counts}
    half_compute = None
    if halves:
        half_compute = max(compute(half) for half in halves) / rates[1]
    return CoreSpeeds(
        cpus=len(cpus),
        read_gigabytes_per_second=reads,
        compute={count: rate / rates[1] for count, rate in rates.items()},
        half_compute=half_compute,
    )


def _buffer_bytes(cpus: Sequence[int], memory_bytes: int, root: Path) -> int:
    """Return the size of the memory to read, at least one block for each CPU."""
    wanted_bytes = max(MIN_BUFFER_BYTES, min(MAX_BUFFER_BYTES, 2 * last_cache_bytes(cpus, root)))
    return max(len(cpus) * BLOCK_BYTES, min(wanted_bytes, memory_bytes))


def last_cache_bytes(cpus: Sequence[int], root: Path = ROOT) -> int:
    """Return the size of all last caches of these CPUs together, of which an EPYC has one for each
    eight cores; 0 if the kernel does not report it."""
    units = {"K": 1 << 10, "M": 1 << 20}
    size_by_cpus: dict[str, int] = {}  # by the list of CPUs that share a cache
    for cpu in cpus:
        largest = (0, "")
        for folder in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            size = read_text(folder / "size").strip()  # such as "48K"
            if size[-1:] in units:
                cache_bytes = int(size[:-1]) * units[size[-1]]
                shared_by = read_text(folder / "shared_cpu_list").strip()
                largest = max(largest, (cache_bytes, shared_by))
        size_by_cpus[largest[1]] = largest[0]
    return sum(size_by_cpus.values())


def spread_over_cores(cpus: Sequence[int], count: int, root: Path = ROOT) -> list[int]:
    """Return `count` of the CPUs, far from each other: one CPU of each physical core, and further
    hyperthreads only if there are not enough cores."""
    physical = physical_of(cpus, root)
    first_cpus: dict[int, int] = {}
    for cpu in cpus:
        first_cpus.setdefault(physical[cpu], cpu)
    cores = [*first_cpus.values()]
    if count <= len(cores):
        return cores[:: len(cores) // count][:count]
    siblings = [cpu for cpu in cpus if cpu not in cores]
    return (cores + siblings)[:count]


def _filling(part: npt.NDArray[np.float32]) -> Work:
    """Return work that writes this memory."""

    def fill() -> int:
        part.fill(1.0)
        return part.nbytes

    return fill


def _reading(part: npt.NDArray[np.float32]) -> Work:
    """Return work that reads the next block of this memory, over and over."""
    blocks = np.array_split(part, max(1, part.nbytes // BLOCK_BYTES))
    next_blocks = itertools.cycle(blocks)

    def read() -> int:
        block = next(next_blocks)
        block.max()
        return block.nbytes

    return read


def _computing() -> Work:
    """Return work that computes in the first-level cache."""
    out = np.zeros(CACHE_FLOATS, np.float32)
    repeated = np.broadcast_to(np.ones(CACHE_FLOATS, np.float32), (REPEATS, CACHE_FLOATS))

    def compute() -> int:
        np.maximum.reduce(repeated, axis=0, out=out)
        return repeated.size

    return compute


def _rate_of(cpus: Sequence[int], works: Sequence[Work], seconds: float) -> float:
    """Return the work per second of one thread per CPU, all together. Each is pinned to its CPU,
    and does at least one piece of its work, or more for `seconds`."""
    rates: list[float] = []
    start = threading.Barrier(len(works))

    def run(cpu: int, work: Work) -> None:
        os.sched_setaffinity(0, {cpu})  # 0: this thread
        piece_rates: list[float] = []
        start.wait()
        deadline = time.perf_counter() + seconds
        while not piece_rates or time.perf_counter() < deadline:
            started = time.perf_counter()
            work_done = work()
            piece_rates.append(work_done / max(time.perf_counter() - started, 1e-9))
        rates.append(statistics.median(piece_rates))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(cpus, works, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)
