"""What one run says of each cell and load, one number a metric: the unit of a comparison.

run = read(Path("runs/2026-05-28-demo"))
run.cells[0].loads[2.0].values["TTFT p95"].value
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtests.analysis.level import Level, levels_of
from loadtests.analysis.percentiles import distribution
from loadtests.analysis.slo import Slo
from loadtests.errors import BadRunFolder
from loadtests.records.run_folder import MANIFEST, RunManifest, RunRecords, read_records
from loadtests.records.run_journal import (
    Capacity,
    CellFinished,
    EngineChosen,
    LevelPurpose,
    of_kind,
)

LEAST_ERROR = 1e-4  # standard deviation of ln(value) below which equal values are not believed
LIMIT = "limit"  # the capacity as it is estimated
GOOD = "good"
TOKENS = "output tokens/s"
MORE_IS_BETTER = frozenset({LIMIT, GOOD, TOKENS})
PERCENTILES = ("p50", "p95")


class Value(msgspec.Struct, frozen=True):
    """One metric of one run, above 0."""

    value: float
    error: float = LEAST_ERROR  # least standard deviation of its logarithm, by chance alone


Load = float | None  # requests/s, to four digits; None: single-stream; below 0: users


class CellValues(msgspec.Struct, frozen=True):
    """One cell of one run."""

    key: str
    facts: dict[str, str]  # of run_environment.CELL, and the workload's name
    values: dict[Load, dict[str, Value]]  # by load and metric
    seeds: dict[Load, frozenset[int]]  # of arrivals, lengths and prompts
    never: dict[Load, frozenset[str]] = {}  # percentiles that are infinite
    capacity: Capacity | None = None  # as the run ended; None: it did not
    left_out: int = 0  # levels that were cut short, not valid, or with requests missing

    @property
    def limit(self) -> float | None:
        """Requests/s, above 0."""
        return (self.capacity.limit or None) if self.capacity is not None else None

    @property
    def all_seeds(self) -> frozenset[int]:
        return frozenset().union(*self.seeds.values())


class RunValues(msgspec.Struct, frozen=True):
    """One run."""

    manifest: RunManifest
    cells: list[CellValues]


def read_arm(paths: Iterable[Path]) -> list[RunValues]:
    """The runs of one arm: run folders, or folders that hold some. Raises BadRunFolder."""
    found: list[RunValues] = []
    for path in paths:
        inside = sorted(path.glob(f"*/{MANIFEST}"))
        is_folder_of_runs = inside and not (path / MANIFEST).exists()
        found += map(read, [one.parent for one in inside] if is_folder_of_runs else [path])
    return found


def read(folder: Path) -> RunValues:
    """A run folder. Raises BadRunFolder for one that holds no finished level."""
    run = read_records(folder)
    levels = levels_of(run)
    if not levels:
        raise BadRunFolder(f"{folder} has no finished level to compare")
    cells = [
        _cell(run, cell, [level for level in levels if level.cell == cell["key"]])
        for cell in run.manifest.cells
        if any(level.cell == cell["key"] for level in levels)
    ]
    return RunValues(run.manifest, cells)


def _cell(run: RunRecords, cell: dict[str, Any], levels: Sequence[Level]) -> CellValues:
    key = str(cell["key"])
    for chosen in of_kind(run.events, EngineChosen, key):
        cell = {**cell, "backend": chosen.backend, "weight_format": chosen.weight_format}
    slo = msgspec.convert(run.manifest.campaign["slo"], Slo)
    asked = [one for one in levels if one.started.purpose is not LevelPurpose.CALIBRATION]
    kept = [one for one in asked if _counts(one)]
    ended = of_kind(run.events, CellFinished, key)
    by_load: dict[Load, list[Level]] = defaultdict(list)
    for level in sorted(kept, key=lambda level: (_load(level) is not None, _load(level) or 0.0)):
        by_load[_load(level)].append(level)
    told = {load: [values_of(level, slo) for level in same] for load, same in by_load.items()}
    return CellValues(
        key=key,
        facts=_facts(cell),
        values={load: _mean([values for values, _ in same]) for load, same in told.items()},
        seeds={
            load: frozenset(level.started.seed for level in same) for load, same in by_load.items()
        },
        never={
            load: frozenset().union(*(never for _, never in same)) for load, same in told.items()
        },
        capacity=ended[-1].capacities.get(slo.name) if ended else None,
        left_out=len(asked) - len(kept),
    )


def _counts(level: Level) -> bool:
    end = level.finished
    if end is None or not level.is_whole or end.cut_short is not None or not end.is_valid:
        return False
    return end.disturbance is None or not end.disturbance.is_set_aside


def values_of(level: Level, slo: Slo) -> tuple[dict[str, Value], frozenset[str]]:
    """The metrics of one level that its requests are enough for; percentiles that are infinite."""
    values: dict[str, Value] = {}
    never = []
    for name, column in (("TTFT", level.ttft), ("TPOT", level.tpot), ("E2E", level.e2e)):
        times = distribution(column[level.counted])
        for percentile in PERCENTILES:
            if (found := getattr(times, percentile)) is not None:
                values[f"{name} {percentile}"] = Value(found)
            elif percentile in times.never:
                never.append(f"{name} {percentile}")
        if times.p50 is None and times.mean is not None and not times.late:
            values[f"{name} mean"] = Value(times.mean)
    judged = level.judge(slo)
    if judged.due:
        values[GOOD] = good_share(judged.good, judged.due)
    if level.output_tokens_per_second:
        values[TOKENS] = Value(level.output_tokens_per_second)
    return {name: one for name, one in values.items() if one.value > 0}, frozenset(never)


def good_share(good: int, due: int) -> Value:
    """The share of good requests, with half a request added on either side, and its binomial error.

    So its logarithm is finite, and arms in which all were good are not certain to the last digit.
    """
    share = (good + 0.5) / (due + 1)
    return Value(share, math.sqrt((1 - share) / (share * (due + 1))))


def _mean(levels: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """Of levels at one load: the geometric mean of each metric that all of them have."""
    names = [name for name in levels[0] if all(name in values for values in levels)]
    found = {name: [values[name] for values in levels] for name in names}
    return {
        name: Value(
            math.exp(np.mean([math.log(one.value) for one in many])),
            math.sqrt(sum(one.error**2 for one in many)) / len(many),
        )
        for name, many in found.items()
    }


def _load(level: Level) -> Load:
    if level.rate is not None:
        return float(f"{level.rate:.4g}")
    return None if level.is_single_stream else -float(level.started.concurrency or 1)


def _facts(cell: dict[str, Any]) -> dict[str, str]:
    hardware = {
        key: value
        for key, value in (cell.get("hardware") or {}).items()
        if key != "name" and value is not None
    }
    return {
        "model": str(cell.get("model")),
        "format": str(cell.get("weight_format") or ""),
        "backend": str(cell.get("backend") or ""),
        "hardware": ", ".join(f"{key} {value}" for key, value in sorted(hardware.items())),
        "url": str(cell.get("url") or ""),
        "workload": str(cell.get("workload") or ""),
    }
