"""Servers whose capacity is known exactly or to the third digit, on a simulated clock: what a
search is held against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from loadtests.capacity.estimate import Level
from loadtests.capacity.search import Finished, Measure, next_step
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.distribution import correlation, runs_of
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Policy, simulate
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Arrivals, due_times

Array = npt.NDArray[np.float64]
World = Callable[
    [float, int, np.random.Generator], tuple[Array, Array, npt.NDArray[np.bool_]]
]  # rate, n -> due, latency, good
WARM_UP = 0.25  # of a level's duration, as SearchConfig.overhead


def waits_md_c(
    rate: float, n: int, rng: np.random.Generator, servers: int = 4, service_seconds: float = 0.51
) -> tuple[Array, Array]:
    """Arrival and waiting times of an M/D/c queue, first come first served, from empty (each server
    takes every c-th: Kiefer-Wolfowitz).
    """
    due = np.cumsum(rng.exponential(1 / rate, n))
    free_at = deque([-1.0] * servers)
    waits = []
    for t in due.tolist():
        start = max(t, free_at.popleft())
        waits.append(start - t)
        free_at.append(start + service_seconds)
    return due, np.array(waits)


def md4(limit_seconds: float) -> World:
    """Four slots of 0.51 s; good is who waits no longer than the limit."""

    def world(
        rate: float, n: int, rng: np.random.Generator
    ) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
        due, waits = waits_md_c(rate, n, rng)
        return due, waits, waits <= limit_seconds

    return world


def batching(
    law: StepLaw,
    policy: Policy,
    pairs: npt.NDArray[np.int64],
    slo: Slo,
    arrivals: Arrivals | None = None,
) -> World:
    """Continuous batching with a known step law; each request draws its lengths from `pairs`."""

    def world(
        rate: float, n: int, rng: np.random.Generator
    ) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
        if arrivals is None or rate < 1e-3:  # one request at a time
            due = np.cumsum(rng.exponential(1 / rate, n))
        else:
            seed = int(rng.integers(2**31))
            due = due_times(arrivals, rate, 2 * n / rate + 100.0, seed)[:n]
        played = simulate(law, policy, due, pairs[rng.integers(len(pairs), size=len(due))])
        return due, played.ttft_seconds, played.good(slo)

    return world


def capacity(
    world: World, target: float, low: float, high: float, n: int = 120_000, halvings: int = 11
) -> float:
    """The rate at which the long-run share of good requests is the target, by bisection with common
    random numbers.
    """
    for _ in range(halvings):
        middle = (low + high) / 2
        _, _, good = world(middle, n, np.random.default_rng(99))
        low, high = (middle, high) if good[n // 50 :].mean() >= target else (low, middle)
    return (low + high) / 2


def measure(
    world: World, step: Measure, rng: np.random.Generator, single_stream_seconds: float
) -> Level:
    """One level on the simulated clock: warm-up from an idle server, then the window."""
    if step.rate is None:
        count = step.requests or 1
        _, _, good = world(1e-4, count, rng)
        return Level(
            rate=None,
            due=count,
            good=int(good.sum()),
            duration_seconds=count * single_stream_seconds,
            mean_e2e_seconds=single_stream_seconds,
        )
    seconds = step.duration_seconds
    warm = WARM_UP * seconds
    due, latency, good = world(step.rate, int(step.rate * (seconds + warm) * 1.3 + 60), rng)
    inside = (due >= warm) & (due < warm + seconds)
    return Level(
        rate=step.rate,
        due=int(inside.sum()),
        good=int(good[inside].sum()),
        duration_seconds=seconds,
        runs=runs_of(good[inside].tolist()),
        correlated=correlation(latency[inside].tolist()),
    )


def search(
    world: World, config: SearchConfig, slo: Slo, seed: int, single_stream_seconds: float
) -> tuple[Finished, list[Level], float]:
    """A whole search on the simulated clock: its end, its levels, and the seconds it would have
    taken.
    """
    rng = np.random.default_rng(seed)
    levels: list[Level] = []
    elapsed = 0.0
    while isinstance(step := next_step(levels, config, slo, elapsed), Measure):
        levels.append(measure(world, step, rng, single_stream_seconds))
        elapsed += levels[-1].duration_seconds * (1.0 if step.rate is None else 1 + WARM_UP)
        assert len(levels) < 100, "the search does not end"
    return step, levels, elapsed
