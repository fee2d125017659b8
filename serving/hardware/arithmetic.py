"""Measures the arithmetic peak that a matrix product reaches on this machine's CPU."""

from __future__ import annotations

import time

SIDE = 1024  # rows and columns: 4 MiB a matrix, far more arithmetic than memory traffic


def gemm_rate(seconds: float = 0.4) -> float:
    """Float32 operations per second of square matrix products, by all cores of this process.

    2 n^3 operations a product (numpy's BLAS). The mean of the quicker half of the products counts,
    since neighbours only slow one down. Kernels that multiply 8-bit integers may be quicker.
    """
    import numpy as np  # takes 100 ms, and only this needs it

    one = np.ones((SIDE, SIDE), dtype=np.float32)
    out = np.empty_like(one)
    np.matmul(one, one, out=out)  # starts BLAS's threads
    took: list[float] = []
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        started = time.perf_counter()
        np.matmul(one, one, out=out)
        took.append(time.perf_counter() - started)
    quickest = sorted(took)[: max(1, len(took) // 2)]
    return 2.0 * SIDE**3 * len(quickest) / sum(quickest)
