"""The constants of the step-time model, chosen on recorded runs; half of the cells are held out.

    python -m tests.bench.law_constants RUN.tar.xz...          # archives of tests/bench/runs

For each cell that has a calibration and levels near its capacity it computes three things: the
step-time model that crossover.loadtests.capacity fits to the recorded timestamps; the capacity
simulated from it, before any level and with the factor of each single level; and the truth. The
truth is the factor on all step times at which the other levels, simulated with their own arrivals
and lengths, have together as many requests that meet the SLO as were measured.
"""

from __future__ import annotations

import json
import math
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crossover.loadtests.capacity import step_observation
from crossover.loadtests.capacity.step_observation import level_factor, merged_steps, observed_steps
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import LevelFinished, LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    Lengths,
    Server,
    common_factor,
    lengths_of,
    sd_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import (
    StepObservation,
    StepTimeModel,
    fit_step_times,
)
from crossover.serving.workload.request_lengths import Workload

Z_90 = 1.645  # standard deviations to either end of a 90 % interval
NEAR = (0.5, 0.985)  # shares of good requests that tell where the limit is
HOW = ("steps", "tpot")  # a level's factor is told
MIN_REQUESTS = 200  # of a cell; 40 of a level


class Cell(msgspec.Struct):
    """What was recorded of one cell."""

    name: str
    slo: Slo
    policy: SchedulerSettings
    lengths: Lengths
    single_streams: list[Level]
    bursts: list[Level]
    levels: list[Level]
    taken: list[float]  # of each level, share of the engine's CPU time that others took


def cells_in(path: Path) -> Iterable[Cell]:
    """Yield the cells of one archive that have a calibration."""
    files: dict[str, list[bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if (stream := archive.extractfile(member)) is not None:
                files[Path(member.name).name] = stream.read().splitlines()
    manifest = json.loads(b"".join(files["manifest.json"]))
    events = [json.loads(line) for line in files["events.jsonl"]]
    records: dict[str, list[RequestRecord]] = defaultdict(list)
    for line in files["requests.jsonl"]:
        record = msgspec.json.decode(line, type=RequestRecord)
        records[record.level].append(record)
    slo = msgspec.convert(manifest["campaign"]["slo"], Slo)
    written = manifest["campaign"]["workload"]  # runs of old have keys that are gone, at defaults
    known = {name: written[name] for name in Workload.__struct_fields__ if name in written}
    if isinstance(known.get("turns"), float):  # the mean of an earlier format, always 1
        del known["turns"], known["think_seconds"]
    workload = msgspec.convert(known, Workload)
    for made in events:
        if made["kind"] != "calibrated" or not made.get("policy"):
            continue
        key = made["cell"]
        policy = msgspec.convert(made["policy"], SchedulerSettings)
        bursts: dict[int, list[RequestRecord]] = defaultdict(list)
        for record in records[f"{key}#calibration"]:
            bursts[record.index // 1000].append(record)
        single_streams, levels, taken = [], [], []
        for one in events:
            if one["kind"] != "level_finished" or one["cell"] != key:
                continue
            started = next(
                e for e in events if e["kind"] == "level_started" and e["level"] == one["level"]
            )
            level = _level(started, one, records[one["level"]])
            # A run of version 5 or later says no purpose.
            if started.get("purpose") == "single_stream" or started.get("concurrency") == 1:
                single_streams.append(level)
            elif len(level.due) >= 20:
                levels.append(level)
                taken.append((one.get("disturbance") or {}).get("share") or 0.0)
        lengths = lengths_of(workload, 8_000, 3)
        groups = [_level({"cell": key, "level": key}, {}, each) for each in bursts.values()]
        name = f"{path.name[:18]} {key}"
        yield Cell(name, slo, policy, lengths, single_streams, groups, levels, taken)


def _level(begun: dict[str, Any], ended: dict[str, Any], records: list[RequestRecord]) -> Level:
    """Return a level whose requests count from its start to the moment at which all scheduled ones
    could have ended."""
    warm_up = begun.get("warmup_seconds") or 0.0
    end = warm_up + (ended.get("window_seconds") or 60.0)
    end = min(end, max((r.scheduled_seconds for r in records), default=0.0))
    took = [r.last_content_seconds - r.scheduled_seconds for r in records if r.last_content_seconds]
    end = max(end - 0.5 - (float(np.median(took)) if took else 0.0), end / 2) + 1e-9
    started = LevelStarted(
        cell=begun["cell"],
        level=begun["level"],
        plan=LevelPlan(rate=(begun.get("plan") or begun).get("rate"), window_seconds=end),
    )
    finished = LevelFinished(
        cell=begun["cell"],
        level=begun["level"],
        due=len(records),
        window_seconds=end,
    )
    return msgspec.structs.replace(Level.of(records, started, finished), window=(0.0, end))


def step_times_of(cell: Cell) -> StepTimeModel:
    """Return the step-time model that a calibration fits."""
    seen: list[StepObservation] = []
    for level in (*cell.single_streams, *cell.bursts):
        seen += merged_steps(observed_steps(level, cell.policy.slots)[0])
    return fit_step_times(seen)


def good_factor(cell: Cell, step_times: StepTimeModel, levels: Sequence[Level]) -> float:
    """Return the factor on step times at which as many requests of the simulated levels meet the
    SLO as were measured."""
    seen = sum(int(cell.slo.met_by(one)[one.counted].sum()) for one in levels)

    def good(factor: float) -> int:
        slower, found = step_times.slower(factor), 0
        for one in levels:
            prompt, output, cached = requested_lengths(one)
            played = simulate(slower, cell.policy, one.due, prompt, output, cached)
            found += int(cell.slo.met_by(played)[one.counted].sum())
        return found

    low, high = 0.4, 2.5
    for _ in range(11):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) > seen else (low, middle)
    return math.sqrt(low * high)


def requested_lengths(level: Level) -> tuple[Any, Any, Any]:
    """Return the prompt, output and cached tokens of a level's requests."""
    prompt = np.where(
        np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
    )
    output = np.where(
        np.isnan(level.output_tokens), level.requested_output_tokens, level.output_tokens
    )
    return np.nan_to_num(prompt, nan=1), np.nan_to_num(output, nan=1), level.cached_tokens


def is_near(level: Level, slo: Slo, least: int) -> bool:
    """Whether a level is near the capacity, so that its SLO attainment tells where that is."""
    good = slo.met_by(level)[level.counted]
    return len(good) >= least and NEAR[0] < good.mean() < NEAR[1]


def figures(path: Path) -> list[dict[str, Any]]:
    """Return one dict for each cell: the first estimate, the truth, and the estimate with each
    level."""
    found = []
    for cell in cells_in(path):
        counted = sum(int(one.counted.sum()) for one in cell.levels)
        if counted < MIN_REQUESTS or not any(is_near(one, cell.slo, 60) for one in cell.levels):
            continue
        step_times = step_times_of(cell)

        def of(
            factor: float, cell: Cell = cell, step_times: StepTimeModel = step_times
        ) -> tuple[float, float]:
            made = Server(step_times.slower(factor), cell.policy, cell.lengths).capacity(cell.slo)
            return made.rate, made.steepness

        first, first_steep = of(1.0)
        truth, _ = of(good_factor(cell, step_times, cell.levels))
        one: dict[str, Any] = {"cell": cell.name, "first": first, "steep": first_steep}
        one |= {"truth": truth, "error": step_times.error, "levels": []}
        for level, taken in zip(cell.levels, cell.taken, strict=True):
            others = [other for other in cell.levels if other is not level]
            if level.counted.sum() < 40 or not any(is_near(each, cell.slo, 40) for each in others):
                continue
            factors = {"steps": level_factor(step_times, level, cell.policy)}
            least = step_observation.MIN_COVERED_SHARE
            step_observation.MIN_COVERED_SHARE = 2.0  # never: by TPOT
            factors["tpot"] = level_factor(step_times, level, cell.policy)
            step_observation.MIN_COVERED_SHARE = least
            by_others, _ = of(good_factor(cell, step_times, others))
            row: dict[str, Any] = {"rate": level.rate, "n": int(level.counted.sum())}
            row |= {"truth": by_others, "taken": taken}
            for name, factor_value in factors.items():
                if factor_value is not None:
                    rate, steep = of(factor_value)
                    row |= {name: rate, f"{name}_steep": steep, f"{name}_factor": factor_value}
            one["levels"].append(row)
        found.append(one)
        print(json.dumps(one), file=sys.stderr, flush=True)  # minutes a cell
    return found


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Print what every second cell chooses, and how well it describes the others. Errors are of
    ln(simulated / true), divided by the steepness. Levels of which other processes took more than 3
    % are left out."""
    lines = [
        "| cells | n | steps under load over law (median) | calibration x 1.05: rms, within 90 % "
        "| levels, of that limit | n | rms by steps | rms by TPOT | with the calibration: rms, "
        "within 90 % | rms of several levels of a cell with it |",
        "|---" * 10 + "|",
    ]
    for name, half in (("chosen on", 0), ("held out", 1)):
        part = sorted(cells, key=lambda one: str(one["cell"]))[half::2]
        steep = np.array([one["steep"] for one in part])
        errors = np.log([one["first"] / one["truth"] for one in part]) / steep
        first = errors - math.log(LOADED)
        within = np.mean(np.abs(first) < Z_90 * sd_of(0))
        loaded = math.exp(float(np.median(errors)))
        of_cells = f"| {name} | {len(part)} | {loaded:.2f} | {_rms(first):.3f}, {within:.0%} |"
        for low, high in ((0.4, 0.7), (0.7, 1.0), (1.0, 1.4)):
            near = [_near(one, low, high) for one in part]
            steps, tpot = (_rms([_error(row, how) for own in near for row in own]) for how in HOW)
            with_it = [_with_calibration([row]) for own in near for row in own]
            within = np.mean([abs(error) < Z_90 * sd for error, sd in with_it])
            several = [_with_calibration(own)[0] for own in near if len(own) > 1]
            rms = _rms([error for error, _ in with_it])
            lines.append(
                f"{of_cells} {low}-{high} | {len(with_it)} | {steps:.3f} | {tpot:.3f} "
                f"| {rms:.3f}, {within:.0%} | {_rms(several):.3f} of {len(several)} |"
            )
            of_cells = "| | | | |"
    return "\n".join(lines)


def _near(cell: dict[str, Any], low: float, high: float) -> list[dict[str, Any]]:
    """Return the undisturbed levels of a cell whose rates lie between these multiples of the
    calibration's estimate. A campaign chooses the rate of its first level by that estimate."""
    limit = cell["first"] / LOADED ** cell["steep"]
    rows = [row for row in cell["levels"] if row["taken"] <= 0.03]
    return [row for row in rows if low <= row["rate"] / limit < high]


def _error(row: dict[str, Any], how: str) -> float:
    return math.log(row[how] / row["truth"]) / float(row[f"{how}_steep"])


def _with_calibration(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the error of these levels' factor together with the calibration, and its expected
    size."""
    factor, counts = common_factor([row["steps_factor"] for row in rows])
    each = [_error(row, "steps") + math.log(row["steps_factor"]) for row in rows]
    return float(np.mean(each)) - math.log(factor), sd_of(counts)


def _rms(errors: Any) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def main(paths: Sequence[str]) -> None:
    with ProcessPoolExecutor(max_workers=2) as pool:
        cells = [one for each in pool.map(figures, map(Path, paths)) for one in each]
    print(table(cells))


if __name__ == "__main__":
    main(sys.argv[1:])
