"""How often the search's interval covers the capacity, on worlds whose capacity is known, on a
simulated clock.

    python -m tests.bench.search_coverage --runs 24

The worlds are those of tests/loadtests/capacity/known_worlds.py: queues, CPUs from 135M to 8B,
uneven lengths, uneven arrivals, a machine whose speed changes, limits of 30 s, and a server on
which nothing holds. Each is searched from no aim, and from aims that are a third to three times the
truth.

A row: finite intervals that cover the truth; what was said to hold at more than 1.05 times the
truth; the median of held / truth; the median error of the estimates of narrow intervals; how the
searches ended (confirmed / at least / alone only / none / unresolved); how many intervals were as
narrow as asked; median levels and seconds of a search.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from loadtests.capacity.search_config import SearchConfig
from loadtests.records.events import Capacity, CapacityStatus
from tests.loadtests.capacity.known_worlds import World, search, worlds

AIMS = (0.0, 1 / 3, 0.5, 1.0, 1.57, 2.0, 3.0)  # 0: none
SLOW = {"1B on a CPU": 16, "3B on a CPU": 16, "8B on a CPU": 32, "360M on a CPU": 4}
SLOW |= {"TTFT limit 30 s": 4, "whole ShareGPT lengths": 4}  # times the budget
HEADS = ("covers", "held>1.05", "held/truth", "error", "c/al/ao/n/u", "narrow", "levels", "seconds")
End = tuple[Capacity, int, float]


def one(name: str, budget_seconds: float, aim: float, seed: int) -> End:
    """A search: what it found, its levels, and the seconds it would have taken."""
    world = next(world for world in worlds() if world.name == name)
    start = aim * world.capacity() if aim and world.has_capacity else None
    config = SearchConfig(budget_seconds=budget_seconds, start_rate=start)
    step, levels, seconds = search(world, config, seed)
    return step.capacity, len(levels), seconds


def row(world: World, ends: list[End]) -> list[str]:
    """The figures of a world and aim as text."""
    truth = world.capacity() if world.has_capacity else 0.0
    found = [capacity for capacity, _, _ in ends]
    finite = [
        (c.low, c.high, c.estimate, c.is_narrow)
        for c in found
        if c.low is not None and c.high is not None and c.status is not CapacityStatus.NONE
    ]
    covers = sum(low <= truth <= high for low, high, _, _ in finite)
    held = [c.held for c in found if c.held]
    errors = [abs(middle / truth - 1) for _, _, middle, narrow in finite if middle and narrow]
    counts = "/".join(str(sum(c.status is status for c in found)) for status in CapacityStatus)
    return [
        f"{covers}/{len(finite)}",
        f"{sum(rate > 1.05 * truth for rate in held)}/{len(ends)}",
        f"{np.median(held) / truth:.2f}" if held and truth else "-",
        f"{np.median(errors):.1%}" if errors else "-",
        counts,
        f"{sum(c.is_narrow for c in found if c.held)}",
        f"{np.median([levels for _, levels, _ in ends]):.0f}",
        f"{np.median([seconds for _, _, seconds in ends]):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--budget", type=float, default=900.0, help="seconds, of a quick world")
    parser.add_argument("--aims", type=float, nargs="+", default=list(AIMS))
    parser.add_argument("--worlds", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    print(
        f"{'world':28} {'truth/s':>8} {'budget':>7} {'aim':>5}" + "".join(f"{h:>13}" for h in HEADS)
    )
    everything: list[tuple[int, int]] = []
    with ProcessPoolExecutor(asked.processes) as pool:
        for world in worlds():
            if asked.worlds and not any(part in world.name for part in asked.worlds):
                continue
            budget = asked.budget * SLOW.get(world.name, 1)
            for aim in asked.aims if world.has_capacity else [0.0]:
                jobs = [(world.name, budget, aim, seed) for seed in range(asked.runs)]
                ends = list(pool.map(one, *zip(*jobs, strict=True)))
                figures = row(world, ends)
                covers, of = figures[0].split("/")
                everything.append((int(covers), int(of)))
                truth = f"{world.capacity():8.4f}" if world.has_capacity else "    none"
                shown = "".join(f"{figure:>13}" for figure in figures)
                print(f"{world.name:28} {truth} {budget:7.0f} {aim:5.2f}{shown}", flush=True)
    covered, of = (sum(column) for column in zip(*everything, strict=True))
    print(f"all finite intervals: {covered} of {of} cover the truth ({covered / max(1, of):.1%})")


if __name__ == "__main__":
    main()
