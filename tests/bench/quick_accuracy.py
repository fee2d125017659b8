"""How near `crossover quick` comes to the capacity of servers whose capacity is known. Campaign,
calibration and estimate run on a simulated clock.

    python -m tests.bench.quick_accuracy --runs 4

A row is a world of tests/bench/known_worlds.py: its capacity; the median of estimate / truth; how
many runs are within 25 %; how many intervals contain the truth; the median seconds of measuring.
The server reports its slots, as Crossover and llama-server do. With `--unsaid` it does not, and
bursts find them. Worlds whose speed wanders are left out, because 90 seconds cannot show it. So are
worlds whose step times cannot be seen (several tokens a chunk, a plain queue): there `quick` says
that it gives no estimate. The last lines are the criteria.
"""

from __future__ import annotations

import math
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_file import Campaign, Plan
from crossover.loadtests.campaign.quick_campaign import DEFAULT_SECONDS, QuickQuestion, quick_plan
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.journal_events import Capacity, CellFinished, of_kind
from crossover.loadtests.records.run_folder import read_records
from tests.bench.known_worlds import World, worlds
from tests.bench.paired import parser_of
from tests.loadtests.campaign.simulated import Simulated

NEAR = 0.25  # of the truth
MIN_NEAR_WORLDS = 0.9  # of the worlds: their median estimate is as near
MIN_COVERED = 0.85
# Worlds of which no step-time model can be made, so that `quick` must say that it cannot tell.
WITHOUT_STEPS = ("4 slots of 0.51 s", "new: 4 tokens a chunk")


class End(msgspec.Struct, frozen=True):
    """The outcome of a run in a world."""

    found: Capacity
    truth: float  # requests/s
    seconds: float  # of measuring, by the simulated clock

    @property
    def ratio(self) -> float:
        """Return estimate over truth; nan: no estimate."""
        return (self.found.estimated_rate or math.nan) / self.truth

    @property
    def is_near(self) -> bool:
        return abs(self.ratio - 1) <= NEAR

    @property
    def covers(self) -> bool:
        return (self.found.low or 0.0) <= self.truth <= (self.found.high or math.inf)


def plan_of(world: World, seed: int) -> Plan:
    """The plan of `crossover quick` under the world's load."""
    target = Target(url="http://127.0.0.1:1", model="m")
    plan = quick_plan(QuickQuestion(target=target, slo=world.slo))
    old = plan.campaign
    changed = {
        "slo": world.slo,
        "workload": world.workload,
        "arrivals": world.arrivals,
        "seed": seed,
    }
    campaign = Campaign(**{name: getattr(old, name) for name in old.__struct_fields__} | changed)
    return Plan(campaign, plan.cells, plan.text)


def run_once(name: str, seed: int, reports_slots: bool) -> End:
    """Run `quick` once in a world."""
    world = worlds()[name]
    simulated = Simulated(
        serving=lambda s, at, start: world.serving(s, at, 100 * seed + start),
        policy=None,
        reported_slots=(8 if world.policy is None else world.policy.slots)
        if reports_slots
        else None,
        now=float(np.random.default_rng(seed).uniform(0, 3600)),
    )
    began = simulated.now
    with tempfile.TemporaryDirectory() as out:
        os.environ["XDG_RUNTIME_DIR"] = out  # a machine of its own, to the machine's lock
        run = read_records(simulated.run(plan_of(world, seed), Path(out)))
        (ended,) = of_kind(run.events, CellFinished)
    truth = world.capacity() if world.has_capacity else math.nan
    return End(ended.capacity, truth, simulated.now - began)


def has_truth(world: World) -> bool:
    """Whether the estimate of `quick` can be compared with a world's capacity."""
    is_steady = world.is_stationary and world.speed is None and not world.start_spread
    return is_steady and world.has_capacity and world.name not in WITHOUT_STEPS


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=4, help="of each world")
    parser.add_argument("--worlds", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--unsaid", action="store_true", help="the server does not say its slots")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = [
        name
        for name, world in worlds().items()
        if has_truth(world) and (not options.worlds or any(one in name for one in options.worlds))
    ]
    heads = ("truth/s", "ratio", "near", "covers", "no estimate", "seconds")
    print(f"{'world':32}" + "".join(f"{head:>12}" for head in heads))
    by_world: dict[str, list[End]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for name in names:
            ends = by_world[name] = list(
                pool.map(
                    run_once,
                    [name] * options.runs,
                    range(1, options.runs + 1),
                    [not options.unsaid] * options.runs,
                )
            )
            print(f"{name:32}" + "".join(f"{each:>12}" for each in row_of(ends)), flush=True)
    print(*criteria(by_world), sep="\n")


def row_of(ends: list[End]) -> tuple[str, ...]:
    """Return the figures of a world."""
    estimated = [end for end in ends if end.found.estimated_rate]
    return (
        f"{ends[0].truth:.4f}",
        f"{median(end.ratio for end in estimated):.2f}" if estimated else "-",
        f"{sum(end.is_near for end in ends)}/{len(ends)}",
        f"{sum(end.covers for end in estimated)}/{len(estimated)}",
        str(len(ends) - len(estimated)),
        f"{median(end.seconds for end in ends):.0f}",
    )


def criteria(by_world: dict[str, list[End]]) -> list[str]:
    """Return a line for each criterion: what is required, what was found, whether it is met."""
    estimated = {
        name: [end for end in ends if end.found.estimated_rate] for name, ends in by_world.items()
    }
    near = [
        bool(ends) and abs(median(end.ratio for end in ends) - 1) <= NEAR
        for ends in estimated.values()
    ]
    runs = [end for ends in by_world.values() for end in ends]
    covered = [end.covers for ends in estimated.values() for end in ends]
    slowest = max(end.seconds for end in runs)

    def verdict_line(what: str, bound: str, found: float, is_met: bool) -> str:
        return f"{what}: asked {bound}, found {found:.3g}: {'met' if is_met else 'NOT MET'}"

    near_share, covered_share = sum(near) / len(near), sum(covered) / max(1, len(covered))
    all_near = sum(end.is_near for end in runs) / len(runs)
    return [
        verdict_line(
            f"worlds whose median is within {NEAR:.0%}",
            f">= {MIN_NEAR_WORLDS}",
            near_share,
            near_share >= MIN_NEAR_WORLDS,
        ),
        verdict_line(
            f"runs within {NEAR:.0%}",
            f">= {MIN_NEAR_WORLDS}",
            all_near,
            all_near >= MIN_NEAR_WORLDS,
        ),
        verdict_line(
            "intervals cover", f">= {MIN_COVERED}", covered_share, covered_share >= MIN_COVERED
        ),
        verdict_line(
            "most seconds of measuring",
            f"<= {DEFAULT_SECONDS:g}",
            slowest,
            slowest <= DEFAULT_SECONDS,
        ),
    ]


if __name__ == "__main__":
    main()
