"""How often the search's interval covers the capacity, on worlds whose capacity is known, on a
simulated clock.

    python -m tests.bench.search_coverage --runs 24

The worlds are those of tests/loadtests/capacity/known_worlds.py: queues, CPUs from 135M to 8B,
uneven lengths, uneven arrivals, a machine whose speed changes, a server whose starts differ, limits
of 30 s, and a server on which nothing holds. Each is searched from no aim (0), and from aims that
are a third to three times the truth; every search has a machine, starts and arrivals of its own.

A row is a world with all its aims: finite intervals that cover the truth; searches that said of
more than 1.05 times the truth that it holds; that said "at no rate"; resolved ones (confirmed, with
a finite interval), and the median error of their estimates; how many intervals were as narrow as
asked; medians of held / truth, of half the interval's width over the estimate, of levels and of
seconds. A star marks what misses its criterion. The last lines are the criteria.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from loadtests.capacity.search_config import SearchConfig
from loadtests.records.events import Capacity, CapacityStatus
from tests.loadtests.capacity.known_worlds import worlds
from tests.loadtests.capacity.searched import search

AIMS = (0.0, 1 / 3, 0.5, 1.0, 1.57, 2.0, 3.0)  # 0: none
SLOW = {"1B on a CPU": 16, "3B on a CPU": 16, "8B on a CPU": 32, "360M on a CPU": 4}
SLOW |= {"TTFT limit 30 s": 4, "whole ShareGPT lengths": 4}  # times the budget
HEADS = (
    *("covers", "held>1.05", "no rate", "resolved", "error", "narrow"),
    *("held/truth", "width", "levels", "seconds"),
)
COVERED, COVERED_OVER_ALL, MOST_WRONG, MOST_FALSE, MOST_ERROR = 0.85, 0.90, 0.05, 0.02, 0.15


@dataclass(frozen=True)
class End:
    """A search that has ended."""

    found: Capacity
    truth: float  # requests/s; 0.0: nothing holds
    levels: int
    seconds: float

    @property
    def is_finite(self) -> bool:
        known = self.found.low is not None and self.found.high is not None
        return known and self.found.status is not CapacityStatus.NONE

    @property
    def is_resolved(self) -> bool:
        return self.is_finite and self.found.status is CapacityStatus.CONFIRMED

    @property
    def covers(self) -> bool:
        low, high = self.found.low, self.found.high
        return low is not None and high is not None and low <= self.truth <= high

    @property
    def is_held_above(self) -> bool:
        return bool(self.found.held and self.found.held > 1.05 * self.truth)


def one(name: str, budget_seconds: float, aim: float, seed: int) -> End:
    """A search: what it found, its levels, and the seconds it would have taken."""
    world = next(world for world in worlds() if world.name == name)
    start = aim * world.capacity() if aim and world.has_capacity else None
    config = SearchConfig(budget_seconds=budget_seconds, start_rate=start)
    step, levels, seconds = search(world, config, seed)
    truth = world.truth(seed) if world.has_capacity else 0.0
    return End(step.capacity, truth, len(levels), seconds)


def share(marks: Iterable[bool]) -> float:
    """Of those that are true; nan of none."""
    return float(np.mean(list(marks) or [math.nan]))


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values) or [math.nan]))


def error(ends: list[End]) -> float:
    """The median error of the resolved estimates; nan without one."""
    resolved = [end for end in ends if end.is_resolved]
    return median(abs((end.found.estimate or 0.0) / end.truth - 1) for end in resolved)


def row(ends: list[End]) -> list[str]:
    """The figures of a world as text."""
    finite = [end for end in ends if end.is_finite]
    real = ends[0].truth > 0
    covered = [end.covers for end in finite]
    above = sum(end.is_held_above for end in ends)
    nowhere = sum(end.found.status is CapacityStatus.NONE for end in ends)
    marks = (
        real and share(covered) < COVERED,
        above > (MOST_WRONG if real else MOST_FALSE) * len(ends),
        real and nowhere > MOST_FALSE * len(ends),
        False,
        error(ends) > MOST_ERROR,
    )
    held = [end.found.held / end.truth for end in ends if end.found.held and real]
    widths = [
        (c.high - c.low) / 2 / c.estimate
        for c in (end.found for end in finite)
        if c.high is not None and c.low is not None and c.estimate
    ]
    figures = (
        f"{sum(covered)}/{len(finite)}" if real else "-",
        f"{above}/{len(ends)}",
        f"{nowhere}/{len(ends)}",
        f"{sum(end.is_resolved for end in ends)}/{len(ends)}",
        f"{error(ends):.1%}",
        f"{sum(end.found.is_narrow for end in finite)}",
        f"{median(held):.2f}",
        f"{median(widths):.2f}",
        f"{median(end.levels for end in ends):.0f}",
        f"{median(end.seconds for end in ends):.0f}",
    )
    starred = [f"{text}*" if missed else text for text, missed in zip(figures, marks, strict=False)]
    return [*starred, *figures[len(marks) :]]


def criteria(by_world: dict[str, list[End]]) -> Iterator[str]:
    """Each criterion: asked, found, met or not."""
    real = {name: ends for name, ends in by_world.items() if ends[0].truth > 0}
    everything = [end for ends in real.values() for end in ends]
    nothing = [end for ends in by_world.values() for end in ends if not end.truth]

    def said(what: str, asked: float, found: float, is_met: bool, where: str = "") -> str:
        worst = f" ({where})" if where else ""
        word = "not measured" if math.isnan(found) else "met" if is_met else "NOT MET"
        return f"{what}: asked {asked:.0%}, found {found:.1%}{worst}: {word}"

    def worst(figure: Callable[[list[End]], float], sign: int) -> tuple[float, str]:
        known = [(figure(ends), name) for name, ends in real.items()]
        known = [one for one in known if not math.isnan(one[0])]
        return max(known, key=lambda one: sign * one[0]) if known else (math.nan, "")

    least, where = worst(lambda ends: share(e.covers for e in ends if e.is_finite), -1)
    yield said("finite intervals cover, least of a world", COVERED, least, least >= COVERED, where)
    over_all = share(end.covers for end in everything if end.is_finite)
    is_met = over_all >= COVERED_OVER_ALL
    yield said("finite intervals cover, over all", COVERED_OVER_ALL, over_all, is_met)
    most, where = worst(lambda ends: share(e.is_held_above for e in ends), 1)
    what = "held above 1.05 x the truth, most of a world"
    yield said(what, MOST_WRONG, most, most <= MOST_WRONG, where)
    false = share(bool(end.found.held) for end in nothing)
    yield said("a capacity where nothing holds", MOST_FALSE, false, false <= MOST_FALSE)
    nowhere = share(end.found.status is CapacityStatus.NONE for end in everything)
    what = '"at no rate" where something holds'
    yield said(what, MOST_FALSE, nowhere, nowhere <= MOST_FALSE)
    largest, where = worst(error, 1)
    what = "median error of resolved estimates, most of a world"
    yield said(what, MOST_ERROR, largest, largest <= MOST_ERROR, where)
    resolved = share(end.is_resolved for end in everything)
    yield f"resolved: {resolved:.0%} of {len(everything)} searches"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=24, help="of each world and aim")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds, of a quick world")
    parser.add_argument("--aims", type=float, nargs="+", default=list(AIMS))
    parser.add_argument("--worlds", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    print(f"{'world':28} {'truth/s':>8} {'budget':>7}" + "".join(f"{h:>11}" for h in HEADS))
    by_world: dict[str, list[End]] = {}
    with ProcessPoolExecutor(asked.processes) as pool:
        for world in worlds():
            if asked.worlds and not any(part in world.name for part in asked.worlds):
                continue
            budget = asked.budget * SLOW.get(world.name, 1)
            aims = asked.aims if world.has_capacity else [0.0]
            jobs = [
                (world.name, budget, aim, number * asked.runs + run)
                for number, aim in enumerate(aims)
                for run in range(asked.runs)
            ]
            ends = by_world[world.name] = list(pool.map(one, *zip(*jobs, strict=True)))
            truth = f"{world.capacity():8.4f}" if world.has_capacity else "    none"
            shown = "".join(f"{figure:>11}" for figure in row(ends))
            print(f"{world.name:28} {truth} {budget:7.0f}{shown}", flush=True)
    print(*criteria(by_world), sep="\n")


if __name__ == "__main__":
    main()
