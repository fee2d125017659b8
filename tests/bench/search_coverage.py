"""How often the interval of a campaign contains the capacity, in worlds whose capacity is known.
The whole runner (journal, budget, waiting for a quiet machine) runs on a simulated clock.

    python -m tests.bench.search_coverage --runs 24

A row is a world: its capacity; how many intervals with two ends contain it; how many runs confirmed
a rate above 1.05 times the truth; how many found that the SLO is missed unloaded; how many
confirmed a rate; then medians: confirmed rate / truth, estimated capacity / truth, high / low end
of the interval, number of levels, seconds of measuring. A star marks a missed criterion. The last
lines are the criteria. In worlds whose speed wanders, an interval is compared with two truths: that
of the long run, and that of the minutes (and the start of the server) that the campaign measured,
as if they came again and again.
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
    NeverQuiet,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records
from tests.bench.known_worlds import STARTS, World, worlds
from tests.bench.paired import parser_of
from tests.loadtests.campaign.simulated import Simulated, with_experts

# Columns after the name of the world and its capacity (see the module's docstring).
HEADS = (
    "covers",
    "conf.>1.05",
    "unloaded",
    "confirmed",
    "conf./truth",
    "est./truth",
    "high/low",
    "levels",
    "seconds",
)
# The criteria: shares, and the ratio of an interval's ends.
COVERED, COVERED_OVER_ALL, MAX_ABOVE, MAX_FALSE, MAX_RATIO = 0.85, 0.90, 0.02, 0.02, 1.5


@dataclass(frozen=True)
class End:
    """A campaign of one cell that has ended."""

    found: Capacity
    truth: float  # capacity in the long run, requests/s; 0.0: no rate meets the SLO
    truth_of_minutes: float  # capacity of the minutes that were measured, requests/s
    levels: int
    seconds: float  # of measuring
    is_disturbed: bool  # it reported that the speed changed, or that the machine was never quiet

    @property
    def is_finite(self) -> bool:
        """Whether the interval has two ends."""
        return bool(self.found.low and self.found.high)

    def contains(self, truth: float) -> bool:
        """Whether the interval contains a capacity."""
        return (self.found.low or 0.0) <= truth <= (self.found.high or math.inf)

    @property
    def covers(self) -> bool:
        """Whether the interval contains the capacity in the long run."""
        return self.contains(self.truth)

    @property
    def is_confirmed_above(self) -> bool:
        """Whether the confirmed rate is more than 5 % above the capacity."""
        return bool(self.found.confirmed_rate and self.found.confirmed_rate > 1.05 * self.truth)


def plan_of(world: World, seed: int) -> Plan:
    """A campaign of one cell under the world's load."""
    text = f'name = "w"\nmodels = ["135m"]\nbackends = ["fake"]\ndevices = ["cpu"]\nseed = {seed}\n'
    text += "server.slots = 8\n"  # the worlds have their own numbers, which are not chosen
    plan = parse_campaign(text + f"budget_seconds = {world.budget}")
    old = plan.campaign
    campaign = Campaign(
        **{name: getattr(old, name) for name in old.__struct_fields__}
        | {"slo": world.slo, "workload": world.workload, "arrivals": world.arrivals}
    )
    made = Plan(campaign, plan.cells, plan.text)
    return made if world.spec is None else with_experts(made, world.spec)


def one(name: str, seed: int) -> End:
    """Run one campaign in a world and return its outcome."""
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
    truth = truth_of_minutes = 0.0
    if world.has_capacity:
        truth = world.capacity(100 * seed + STARTS if world.start_spread else 1)
        truth_of_minutes = world.met(began, simulated.now, 100 * seed + 1)
    was_never_quiet = bool(of_kind(run.events, NeverQuiet))
    return End(
        ended.capacity,
        truth,
        truth_of_minutes,
        levels=len(of_kind(run.events, LevelFinished)),
        seconds=simulated.now - began,
        is_disturbed=ended.capacity.speed_moved is not None or was_never_quiet,
    )


def share(marks: Iterable[bool]) -> float:
    """Return the share of marks that are true; nan: there is no mark."""
    found = list(marks)
    return sum(found) / len(found) if found else math.nan


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values) or [math.nan]))


def row(world: World, ends: list[End]) -> list[str]:
    """Return the figures of a world as text, in the order of HEADS."""
    finite = [end for end in ends if end.is_finite]
    covered = [end.covers or (not world.is_stationary and end.is_disturbed) for end in finite]
    above = sum(end.is_confirmed_above for end in ends)
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
    """Return a line for each criterion: what is required, what was found, whether it is met."""
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

    def line(what: str, required: str, found: float, is_met: bool, where: str = "") -> str:
        verdict = "met" if is_met else "NOT MET"
        if math.isnan(found):
            verdict = "not measured"
        place = f" ({where})" if where else ""
        return f"{what}: required {required}, found {found:.3g}{place}: {verdict}"

    over_all = share(end.covers for end in ends if end.is_finite)
    least = steady.get(worst, math.nan)
    above = share(end.is_confirmed_above for end in ends if end.found.is_confirmed)
    false = share(bool(end.found.confirmed_rate) for end in nothing)
    ratio = median((e.found.high or 0) / (e.found.low or 1) for e in ends if e.is_finite)
    long_run = share(end.covers or end.is_disturbed for end in moving)
    minutes = share(end.contains(end.truth_of_minutes) or end.is_disturbed for end in moving)
    return [
        line("intervals cover, over all", ">= 0.90", over_all, over_all >= COVERED_OVER_ALL),
        line("intervals cover, least steady world", ">= 0.85", least, least >= COVERED, worst),
        line(
            "wandering, minutes measured: cover or report it",
            ">= 0.85",
            minutes,
            minutes >= COVERED,
        ),
        line("wandering, long run: cover or report it", ">= 0.85", long_run, long_run >= COVERED),
        line("confirmed rates above 1.05 x the truth", "<= 0.02", above, above <= MAX_ABOVE),
        line("confirmed where no rate meets the SLO", "<= 0.02", false, false <= MAX_FALSE),
        line("median ratio of the interval's ends", "<= 1.5", ratio, ratio <= MAX_RATIO),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=24, help="of each world")
    parser.add_argument("--worlds", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    print(f"{'world':32} {'truth/s':>8}" + "".join(f"{head:>12}" for head in HEADS))
    by_world: dict[str, list[End]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for name, world in worlds().items():
            if options.worlds and not any(part in name for part in options.worlds):
                continue
            jobs = range(1, options.runs + 1)
            ends = by_world[name] = list(pool.map(one, [name] * options.runs, jobs))
            truth = (
                f"{median(end.truth for end in ends):8.4f}" if world.has_capacity else "    none"
            )
            shown = "".join(f"{figure:>12}" for figure in row(world, ends))
            print(f"{name:32} {truth}{shown}", flush=True)
    print(*criteria(by_world), sep="\n")


if __name__ == "__main__":
    main()
