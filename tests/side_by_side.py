"""Many runs that do not depend on each other, on all cores that the tests may use: a hundred searches take half as long on two cores.

covered = sum(side_by_side(covers, range(100)))       # covers: a function of a module, so that other processes find it
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def side_by_side(work: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
    """[work(n) for n in numbers]. What one of them raises is raised here."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        return [work(number) for number in numbers]
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, numbers, chunksize=5))
