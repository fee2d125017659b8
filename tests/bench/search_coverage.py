"""How often a campaign's interval covers the capacity, on worlds whose capacity is known, on a
simulated clock: the whole runner, with journal, budget and waiting for a quiet machine.

    python -m tests.bench.search_coverage --runs 24

A row is a world: its capacity; how many intervals with two ends cover it; runs that confirmed more
than 1.05 times the truth; that said "not even alone"; that confirmed a rate at all; medians of
held / truth, of limit / truth, of the interval's ends' ratio, of levels and of seconds measured. A
star marks what misses its criterion. The last lines are the criteria. Where the speed wanders, an
interval is held to two truths: that of the long run, and that of the minutes (and the start of the
server) that the campaign measured, as if they came again and again.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossover.loadtests.campaign.campaign_file import Campaign, Plan, parse_campaign
from crossover.loadtests.records.journal_events import (
    Capacity,
    CellFinished,
    LevelFinished,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records
from tests.bench.known_worlds import STARTS, World, worlds
from tests.bench.paired import parser_of
from tests.loadtests.campaign.simulated import Simulated, with_experts

HEADS = (
    *("covers", "held>1.05", "not alone", "confirmed"),
    *("held/truth", "limit/truth", "high/low", "levels", "seconds"),
)
COVERED, COVERED_OVER_ALL, MAX_ABOVE, MAX_FALSE, MAX_RATIO = 0.85, 0.90, 0.02, 0.02, 1.5


@dataclass(frozen=True)
class End:
    """A campaign of one cell that has ended."""

    found: Capacity
    truth: float  # requests/s; 0.0: nothing holds
    met: float  # the truth of the minutes that were measured
    levels: int
    seconds: float
    is_disturbed: bool  # it said so: the machine's speed moved, or was never quiet

    @property
    def is_finite(self) -> bool:
        return bool(self.found.low and self.found.high)

    def holds(self, truth: float) -> bool:
        return (self.found.low or 0.0) <= truth <= (self.found.high or math.inf)

    @property
    def covers(self) -> bool:
        return self.holds(self.truth)

    @property
    def is_held_above(self) -> bool:
        return bool(self.found.confirmed_rate and self.found.confirmed_rate > 1.05 * self.truth)


def plan_of(world: World, seed: int) -> Plan:
    """A campaign of one cell under the world's load."""
    text = f'name = "w"\nmodels = ["135m"]\nbackends = ["fake"]\ndevices = ["cpu"]\nseed = {seed}\n'
    plan = parse_campaign(text + f"budget_seconds = {world.budget}")
    old = plan.campaign
    campaign = Campaign(
        **{name: getattr(old, name) for name in old.__struct_fields__}
        | {"slo": world.slo, "workload": world.workload, "arrivals": world.arrivals}
    )
    made = Plan(campaign, plan.cells, plan.text)
    return made if world.spec is None else with_experts(made, world.spec)


def one(name: str, seed: int) -> End:
    """A campaign: what it found, its levels, and the seconds it would have taken."""
    world = worlds()[name]
    rng = np.random.default_rng(seed)
    simulated = Simulated(
        serving=lambda s, at, start: world.serving(s, at, 100 * seed + start),
        policy=world.policy,
        taken=world.taken,
        now=float(rng.uniform(0, 3600)),
    )
    began = simulated.now
    with tempfile.TemporaryDirectory() as out:
        os.environ["XDG_RUNTIME_DIR"] = out  # a machine of its own, to the machine's lock
        run = read_records(simulated.run(plan_of(world, seed), Path(out)))
        (ended,) = of_kind(run.events, CellFinished)
    truth = met = 0.0
    if world.has_capacity:
        truth = world.capacity(100 * seed + STARTS if world.start_spread else 1)
        met = world.met(began, simulated.now, 100 * seed + 1)
    said = ended.capacity.speed_moved is not None or "never quiet" in simulated.said.getvalue()
    levels = len(of_kind(run.events, LevelFinished))
    return End(ended.capacity, truth, met, levels, simulated.now - began, said)


def share(marks: Iterable[bool]) -> float:
    """Of those that are true; nan of none."""
    found = list(marks)
    return sum(found) / len(found) if found else math.nan


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values) or [math.nan]))


def row(world: World, ends: list[End]) -> list[str]:
    """The figures of a world as text."""
    finite = [end for end in ends if end.is_finite]
    covered = [end.covers or (not world.is_stationary and end.is_disturbed) for end in finite]
    above = sum(end.is_held_above for end in ends)
    nowhere = sum(end.found.state == "misses_slo_unloaded" for end in ends)
    real = world.has_capacity
    marks = (
        bool(real and finite and share(covered) < COVERED),
        above > MAX_ABOVE * len(ends),
        real and nowhere > MAX_FALSE * len(ends),
    )
    figures = (
        f"{sum(covered)}/{len(finite)}" if real else "-",
        f"{above}/{len(ends)}",
        f"{nowhere}/{len(ends)}",
        f"{sum(end.found.is_confirmed for end in ends)}/{len(ends)}",
        f"{median(rate / e.truth for e in ends if (rate := e.found.confirmed_rate) and real):.2f}",
        f"{median(rate / e.truth for e in ends if (rate := e.found.estimated_rate) and real):.2f}",
        f"{median((e.found.high or 0) / (e.found.low or 1) for e in finite):.2f}",
        f"{median(end.levels for end in ends):.0f}",
        f"{median(end.seconds for end in ends):.0f}",
    )
    starred = [f"{text}*" if missed else text for text, missed in zip(figures, marks, strict=False)]
    return [*starred, *figures[len(marks) :]]


def criteria(by_world: dict[str, list[End]]) -> list[str]:
    """Each criterion: asked, found, met or not."""
    known = worlds()
    real = {name: ends for name, ends in by_world.items() if known[name].has_capacity}
    ends = [end for own in real.values() for end in own]
    nothing = [e for name, own in by_world.items() if not known[name].has_capacity for e in own]
    steady = {
        name: share(end.covers for end in own if end.is_finite)
        for name, own in real.items()
        if known[name].is_stationary and any(end.is_finite for end in own)
    }
    wandering = [name for name in real if not known[name].is_stationary]
    moving = [end for name in wandering for end in real[name] if end.is_finite]
    worst = min(steady, key=lambda name: steady[name], default="")

    def said(what: str, asked: str, found: float, is_met: bool, where: str = "") -> str:
        word = "not measured" if math.isnan(found) else "met" if is_met else "NOT MET"
        return f"{what}: asked {asked}, found {found:.3g}{f' ({where})' if where else ''}: {word}"

    over_all = share(end.covers for end in ends if end.is_finite)
    least = steady.get(worst, math.nan)
    above = share(end.is_held_above for end in ends if end.found.is_confirmed)
    false = share(bool(end.found.confirmed_rate) for end in nothing)
    ratio = median((e.found.high or 0) / (e.found.low or 1) for e in ends if e.is_finite)
    long_run = share(end.covers or end.is_disturbed for end in moving)
    minutes = share(end.holds(end.met) or end.is_disturbed for end in moving)
    return [
        said("intervals cover, over all", ">= 0.90", over_all, over_all >= COVERED_OVER_ALL),
        said("intervals cover, least steady world", ">= 0.85", least, least >= COVERED, worst),
        said("wandering, minutes measured: cover or say", ">= 0.85", minutes, minutes >= COVERED),
        said("wandering, long run: cover or say", ">= 0.85", long_run, long_run >= COVERED),
        said("confirmed rates above 1.05 x the truth", "<= 0.02", above, above <= MAX_ABOVE),
        said("confirmed where nothing holds", "<= 0.02", false, false <= MAX_FALSE),
        said("median ratio of the interval's ends", "<= 1.5", ratio, ratio <= MAX_RATIO),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=24, help="of each world")
    parser.add_argument("--worlds", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    print(f"{'world':32} {'truth/s':>8}" + "".join(f"{head:>12}" for head in HEADS))
    by_world: dict[str, list[End]] = {}
    with ProcessPoolExecutor(asked.processes) as pool:
        for name, world in worlds().items():
            if asked.worlds and not any(part in name for part in asked.worlds):
                continue
            jobs = range(1, asked.runs + 1)
            ends = by_world[name] = list(pool.map(one, [name] * asked.runs, jobs))
            truth = (
                f"{median(end.truth for end in ends):8.4f}" if world.has_capacity else "    none"
            )
            shown = "".join(f"{figure:>12}" for figure in row(world, ends))
            print(f"{name:32} {truth}{shown}", flush=True)
    print(*criteria(by_world), sep="\n")


if __name__ == "__main__":
    main()
