"""Measures memory bandwidth."""

from __future__ import annotations

import threading
import time
from typing import Any


def read_bandwidth(threads: int, seconds: float = 0.6, array_bytes: int = 64 << 20) -> float:
    """Bytes per second that `threads` threads together read from memory.

    A decode step reads the weights once and writes next to nothing. Each thread has an array;
    the mean of the quicker half of the passes counts, since neighbours only slow a pass down.
    """
    import numpy as np  # takes 100 ms, and only this needs it

    arrays = [np.ones(array_bytes // 8, dtype=np.int64) for _ in range(threads)]
    passes: list[float] = []
    gate = threading.Barrier(threads)

    def read(array: Any) -> None:
        gate.wait()
        until = time.perf_counter() + seconds
        while (started := time.perf_counter()) < until:
            np.bitwise_or.reduce(array)
            passes.append(time.perf_counter() - started)

    workers = [threading.Thread(target=read, args=(array,)) for array in arrays]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    quickest = sorted(passes)[: max(1, len(passes) // 2)]
    return threads * array_bytes * len(quickest) / sum(quickest)


def array_bytes(l3_bytes: int | None, threads: int) -> int:
    """Bytes of each thread's array: together four times the last-level cache, at most 1 GiB."""
    return min(1 << 30, max(64 << 20, 4 * (l3_bytes or 0) // threads))
