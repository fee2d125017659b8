"""Levels of a run, played by its own step law, beside what was measured: simulated over measured.

    python -m tests.bench.replayed_levels tests/bench/runs/demo-*.tar.xz FOLDER

Each level at a rate is simulated with its own due times and lengths, by the law that today's code
fits to the run's calibration, and by that law at the speed that the levels' own steps had: what is
left then is the simulation's. Levels that ended early by a stranger on the machine are left out.
Printed for each run: the capacity that is predicted over the measured one, with its interval, and
the speed of its levels (0.8: steps took 1.25 x what the calibration saw); for each model: the
median over its levels of simulated over measured TTFT and TPOT (p50, p90).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np

from loadtests.records.events import Calibrated, CellFinished, LevelFinished, LevelStarted, of_kind
from loadtests.records.old_run_folder import RunRecords, read_records
from loadtests.records.schema import RequestRecord
from loadtests.simulation.batching import Array, Pairs, Policy, simulate
from loadtests.simulation.old_simulated_capacity import predict
from loadtests.simulation.speed_under_load import speed_under_load, usual_speed
from loadtests.simulation.step_observations import observations_of_burst
from loadtests.simulation.step_replay import ReplayedSteps, Residuals, residuals_of
from loadtests.simulation.step_time import StepLaw, StepObservation, fit
from loadtests.workload.request_lengths import Workload, draw
from reports.reference.archive import opened
from reports.run import slo_of

REQUESTS = 20_000
LEAST_REQUESTS = 20


BY_CALIBRATION = "by its calibration"
BY_LEVELS = "at its levels' speed"


class Laws(msgspec.Struct):
    """Today's law of a calibration, and the same as slow as the levels' steps."""

    by_name: dict[str, StepLaw]
    residuals: Residuals
    policy: Policy
    speeds: list[float]  # of each level


def laws_of(run: RunRecords, cell: str) -> Laws | None:
    made = of_kind(run.events, Calibrated, cell)
    if not made or made[0].law is None or made[0].policy is None:
        return None
    policy = msgspec.convert(made[0].policy, Policy)
    seen = msgspec.convert(made[0].observations, list[StepObservation])
    bursts = [r for r in run.requests if r.level == f"{cell}#calibration"]
    bursts.sort(key=lambda r: r.index)
    together = [
        one
        for first in range(0, len(bursts), policy.slots)
        for one in observations_of_burst(bursts[first : first + policy.slots], first + 1)
        if one.passes > 1
    ]
    seen = [*(one for one in seen if one.passes == 1), *together]
    law = fit(seen)
    residuals = residuals_of(seen, law)
    levels = list(levels_of(run, cell))
    speeds = [speed_under_load(law, residuals, each) for each in levels]
    usual = usual_speed(law, residuals, levels)
    laws = {BY_CALIBRATION: law}
    if usual is not None:
        laws[BY_LEVELS] = law.slower(1 / usual)
    return Laws(laws, residuals, policy, [speed for speed in speeds if speed is not None])


def levels_of(run: RunRecords, cell: str) -> Iterator[list[RequestRecord]]:
    """The requests of each level at a rate that ended in order."""
    started = {one.level: one for one in of_kind(run.events, LevelStarted, cell)}
    for ended in of_kind(run.events, LevelFinished, cell):
        is_stopped = "CPU time that the engine wanted" in (ended.cut_short or "")
        if started[ended.level].rate_per_second and not is_stopped:
            found = [r for r in run.requests if r.level == ended.level]
            if len(found) >= LEAST_REQUESTS:
                yield sorted(found, key=lambda r: r.due_seconds)


def quantiles(ttft: Array, tpot: Array) -> Array:
    """TTFT p50, p90, TPOT p50, p90: float64 [4]."""
    return np.concatenate([np.nanquantile(each, (0.5, 0.9)) for each in (ttft, tpot)])


def measured(level: Sequence[RequestRecord]) -> Array:
    first = np.array([r.first_content_seconds or np.nan for r in level])
    last = np.array([r.last_content_seconds or np.nan for r in level])
    due = np.array([r.due_seconds for r in level])
    later = np.array([(r.output_tokens or 0) - 1.0 for r in level])
    return quantiles(first - due, (last - first) / np.where(later > 0, later, np.nan))


def simulated(level: Sequence[RequestRecord], laws: Laws, name: str) -> Array:
    pairs: Pairs = np.array(
        [
            (
                r.prompt_tokens or r.asked_prompt_tokens or 1,
                r.output_tokens or r.asked_output_tokens or 1,
            )
            for r in level
        ]
    )
    steps = ReplayedSteps(laws.by_name[name], laws.residuals, 1)
    played = simulate(steps, laws.policy, [r.due_seconds for r in level], pairs)
    return quantiles(played.ttft_seconds, played.tpot_seconds)


def capacities(run: RunRecords, cell: str, laws: Laws) -> str:
    slo = slo_of(run.manifest)
    workload = msgspec.convert(run.manifest.campaign["workload"], Workload)
    pairs = np.array([(a.prompt_tokens, a.output_tokens) for a in draw(workload, REQUESTS, 1)])
    found = of_kind(run.events, CellFinished, cell)[0].capacities[slo.name]
    if not (found.estimate and found.low and found.high):
        return "not measured"
    parts = [f"measured {found.estimate:.2f} ({found.low:.2f}-{found.high:.2f})/s"]
    for name, law in laws.by_name.items():
        rate = predict(law, laws.policy, pairs, slo, seed=1, residuals=laws.residuals).rate
        parts.append(f"{name}: {rate:.2f}, {rate / found.estimate:.2f} x")
    speeds = ", ".join(f"{speed:.2f}" for speed in laws.speeds)
    return "; ".join([*parts, f"levels' speeds {speeds}"])


def main() -> None:
    ratios: dict[tuple[str, str], list[Array]] = defaultdict(list)
    for archive in map(Path, sys.argv[1:]):
        with opened(archive) if archive.is_file() else nullcontext(archive) as folder:
            run = read_records(folder)
        for cell in dict.fromkeys(one.cell for one in of_kind(run.events, Calibrated)):
            laws = laws_of(run, cell)
            if laws is None:
                continue
            print(f"{archive.name:18} {cell:20} {capacities(run, cell, laws)}")
            for level in levels_of(run, cell):
                true = measured(level)
                for name in laws.by_name:
                    ratios[cell, name].append(simulated(level, laws, name) / true)
    print(f"\n{'simulated / measured, medians':41} levels TTFT p50   p90 TPOT p50   p90")
    for (cell, name), each in ratios.items():
        shown = " ".join(f"{value:8.2f}" for value in np.median(each, axis=0))
        print(f"{cell:20} {name:20} {len(each):6} {shown}")


if __name__ == "__main__":
    main()
