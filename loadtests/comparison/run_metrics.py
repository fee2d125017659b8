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

from loadtests.analysis.capacity_text import in_words
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
from models import formatting

SAME_RATE = 0.001
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


class LoadValues(msgspec.Struct, frozen=True):
    """One load of one cell; of a load that was measured several times, the geometric mean."""

    load: float | None  # requests/s; None: single-stream; below 0: users of a closed loop
    seeds: frozenset[int]  # of arrivals, lengths and prompts
    values: dict[str, Value]
    never: frozenset[str] = frozenset()  # percentiles that are infinite


class CellValues(msgspec.Struct, frozen=True):
    """One cell of one run."""

    key: str
    facts: dict[str, str]  # of run_environment.CELL, and the workload's name
    loads: list[LoadValues]
    capacity: Capacity | None = None  # as the run ended; None: it did not
    left_out: int = 0  # levels that were cut short, not valid, or with requests missing

    @property
    def limit(self) -> float | None:
        """Requests/s, above 0."""
        return (self.capacity.limit or None) if self.capacity is not None else None

    @property
    def capacity_words(self) -> str:
        return in_words(self.capacity)

    @property
    def seeds(self) -> frozenset[int]:
        return frozenset(seed for load in self.loads for seed in load.seeds)

    def at(self, load: float | None) -> LoadValues | None:
        return next((one for one in self.loads if same_load(one.load, load)), None)


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
    return CellValues(
        key=key,
        facts=_facts(cell),
        loads=_each_once([values_of(level, slo) for level in kept]),
        capacity=ended[-1].capacities.get(slo.name) if ended else None,
        left_out=len(asked) - len(kept),
    )


def _counts(level: Level) -> bool:
    end = level.finished
    if end is None or not level.is_whole or end.cut_short is not None or not end.is_valid:
        return False
    return end.disturbance is None or not end.disturbance.is_set_aside


def values_of(level: Level, slo: Slo) -> LoadValues:
    """The metrics of one level that its requests are enough for."""
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
    positive = {name: one for name, one in values.items() if one.value > 0}
    return LoadValues(_load(level), frozenset({level.started.seed}), positive, frozenset(never))


def good_share(good: int, due: int) -> Value:
    """The share of good requests, with half a request added on either side, and its binomial error.

    So its logarithm is finite, and arms in which all were good are not certain to the last digit.
    """
    share = (good + 0.5) / (due + 1)
    return Value(share, math.sqrt((1 - share) / (share * (due + 1))))


def _each_once(levels: Sequence[LoadValues]) -> list[LoadValues]:
    """Levels of the same load as one, by the mean logarithm of what all of them have."""
    groups: list[list[LoadValues]] = []
    for level in levels:
        group = next((one for one in groups if same_load(one[0].load, level.load)), None)
        if group is None:
            groups.append([level])
        else:
            group.append(level)
    return [_mean(group) if len(group) > 1 else group[0] for group in groups]


def _mean(levels: Sequence[LoadValues]) -> LoadValues:
    parts: dict[str, list[Value]] = defaultdict(list)
    for level in levels:
        for name, value in level.values.items():
            parts[name].append(value)
    return LoadValues(
        levels[0].load,
        frozenset(seed for level in levels for seed in level.seeds),
        {
            name: Value(
                math.exp(np.mean([math.log(one.value) for one in found])),
                math.sqrt(sum(one.error**2 for one in found)) / len(found),
            )
            for name, found in parts.items()
            if len(found) == len(levels)
        },
        frozenset(name for level in levels for name in level.never),
    )


def same_load(one: float | None, other: float | None) -> bool:
    """Rates of different searches are never the same; those of a repeat are, to rounding."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= SAME_RATE * abs(other)


def load_words(load: float | None) -> str:
    """`1.8/s`, `alone`, `8 users`."""
    if load is None or load > 0:
        return formatting.load(load, digits=3)
    return formatting.load(None, round(-load))


def _load(level: Level) -> float | None:
    if level.rate is not None:
        return level.rate
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
