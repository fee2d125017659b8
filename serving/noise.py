"""Random numbers that depend on nothing but their name: Philox-4x32-10, a counter-based generator, vectorised in numpy.

A sampler that draws from a shared stream gives a request other tokens when its batch mates change. Here a number is a pure function
of (seed, position, lane, index), so a seeded request repeats whatever else is in the batch, after preemption, and on another day.

    >>> gumbel(np.array([7], np.uint64), np.array([12]), np.array([0]), 4).shape
    (1, 4)

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants and known answers from Random123.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY_0 = np.uint64(0xD2511F53)
_MULTIPLY_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Philox-4x32-10. All arrays hold 32-bit values as uint64 and broadcast against each other; so do the four words returned."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1 = (product_1 >> _SHIFT) ^ c1 ^ k0, product_1 & _LOW
        c2, c3 = (product_0 >> _SHIFT) ^ c3 ^ k1, product_0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def gumbel(seeds: U64, positions: npt.NDArray[np.int64], lanes: npt.NDArray[np.int64], count: int) -> F64:
    """Standard Gumbel noise [rows, count]: row i's are those of indices 0 .. count - 1 of (seeds[i], positions[i], lanes[i])."""
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)[None, :]
    words = _words(seeds, positions, lanes, blocks)
    together = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(len(seeds), -1)
    return _to_gumbel(together[:, :count])


def gumbel_at(seeds: U64, positions: npt.NDArray[np.int64], lanes: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> F64:
    """The same noise at scattered indices [rows, n]: gumbel(..)[i, indices[i, j]] without making the rest."""
    words = _words(seeds, positions, lanes, (indices >> 2).astype(np.uint64))
    return _to_gumbel(np.choose(indices & 3, words))


def _words(seeds: U64, positions: npt.NDArray[np.int64], lanes: npt.NDArray[np.int64], index: U64) -> tuple[U64, U64, U64, U64]:
    key = ((seeds & _LOW)[:, None], (seeds >> _SHIFT)[:, None])
    lane = lanes.astype(np.uint64)[:, None]
    return philox((index, positions.astype(np.uint64)[:, None], lane & _LOW, lane >> _SHIFT), key)


def _to_gumbel(words: U64) -> F64:
    """-log(-log(u)), u in the middle of one of 2**32 equal cells, so neither 0 nor 1."""
    uniform = (words + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)), np.float64)
