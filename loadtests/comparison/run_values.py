"""What one run says of each cell and load, one number a metric: the unit of a comparison.

    run = read(Path("runs/2026-05-28-demo"))
    run.cells[0].loads[2.0].values["TTFT p95"].value

The numbers are those of the run's report: summaries of levels, and the estimate of the capacity.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests.capacity.estimate import estimate
from loadtests.capacity.levels import Level, judged
from loadtests.capacity.search_config import SearchConfig
from loadtests.capacity.words import in_short
from loadtests.comparison.welch import LEAST_ERROR
from loadtests.errors import BadRunFolder
from loadtests.metrics.energy import Energy, energy_of
from loadtests.metrics.level_summary import Summary
from loadtests.metrics.slo import Slo
from loadtests.records.events import EngineChosen, LevelStarted, of_kind
from loadtests.records.old_run_folder import MANIFEST, LevelRecords, read_records
from loadtests.records.schema import RunManifest
from models import formatting

SAME_RATE = 0.001
CAPACITY = "capacity"
GOOD = "good"
TOKENS = "output tokens/s"
MORE_IS_BETTER = frozenset({CAPACITY, GOOD, TOKENS})
_TIMES = {"TTFT": "ttft", "TPOT": "tpot", "E2E": "e2e"}
_PERCENTILES = ("p50", "p95")


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
    facts: dict[str, str]  # of comparability.CELL, and the workload's name
    loads: list[LoadValues]
    capacity: float | None  # requests/s, the estimate by the levels
    capacity_reason: str = ""
    capacity_words: str = formatting.NOT_MEASURED  # what is confirmed
    left_out: int = 0  # levels that were cut short, not valid, or with requests missing
    peak_tokens_per_second: float | None = None  # of output: the most of a level that counts
    peak_watts: float | None = None  # of CPU and GPU during it, as far as measured
    peak_watts_by: str = ""  # what measured them, as in Energy

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
        folders = [one.parent for one in inside] if is_folder_of_runs else [path]
        found += [read(folder) for folder in folders]
    return found


def read(folder: Path) -> RunValues:
    """A run folder. Raises BadRunFolder for one that holds no finished level."""
    run = read_records(folder)
    manifest = run.manifest
    finished = run.levels()
    if not finished:
        raise BadRunFolder(f"{folder} has no finished level to compare")
    cells = []
    for cell in manifest.cells:
        for chosen in of_kind(run.events, EngineChosen, str(cell["key"])):
            engine = {"backend": chosen.backend, "weight_format": chosen.weight_format}
            cell = {**cell, **engine}
        own = [level for level in finished if level.cell == cell["key"]]
        if own:
            cells.append(_cell(cell, own, manifest))
    return RunValues(manifest, cells)


def _cell(
    cell: dict[str, Any], levels: Sequence[LevelRecords], manifest: RunManifest
) -> CellValues:
    slo = msgspec.convert(manifest.campaign["slo"], Slo)
    config = msgspec.convert(manifest.campaign.get("search") or {}, SearchConfig)
    measured: list[LoadValues] = []
    seen: list[Level] = []
    left_out = 0
    peak_tokens: float | None = None
    peak_energy: Energy | None = None
    for one in levels:
        if not one.is_whole:
            left_out += 1
            continue
        start = one.started
        summary, level = judged(one, slo)
        if start.rate_per_second is not None or start.concurrency == 1:
            seen.append(level)
        if one.finished.cut_short is not None or one.finished.is_disturbed or not summary.is_valid:
            left_out += 1
        else:
            measured.append(values_of(_load(start), start.seed, summary))
            tokens = summary.throughput.output_tokens_per_second
            if tokens is not None and tokens > (peak_tokens or 0.0):
                peak_tokens, peak_energy = tokens, _energy(one, summary)
    capacity = estimate(seen, config, slo) if seen else None
    return CellValues(
        key=str(cell["key"]),
        facts=_facts(cell),
        loads=_each_once(measured),
        capacity=(capacity.estimate or None) if capacity is not None else None,
        capacity_reason=capacity.reason if capacity is not None else "",
        capacity_words=in_short(capacity),
        left_out=left_out,
        peak_tokens_per_second=peak_tokens,
        peak_watts=peak_energy.watts if peak_energy is not None else None,
        peak_watts_by=peak_energy.measured_by if peak_energy is not None else "",
    )


def _energy(level: LevelRecords, summary: Summary) -> Energy | None:
    begin = level.started.started_unix_seconds
    window = summary.window
    return energy_of(level.samples, begin + window.start_seconds, begin + window.end_seconds)


def values_of(load: float | None, seed: int, summary: Summary) -> LoadValues:
    """The metrics of one level that its requests are enough for."""
    values: dict[str, Value] = {}
    never = []
    for name, attribute in _TIMES.items():
        times = getattr(summary.latencies, attribute)
        for percentile in _PERCENTILES:
            if (found := getattr(times, percentile)) is not None:
                values[f"{name} {percentile}"] = Value(found)
            elif percentile in times.never:
                never.append(f"{name} {percentile}")
        if times.p50 is None and times.mean is not None and not times.late:
            values[f"{name} mean"] = Value(times.mean)
    if summary.counts.due:
        values[GOOD] = good_share(summary.counts.good, summary.counts.due)
    if summary.throughput.output_tokens_per_second:
        values[TOKENS] = Value(summary.throughput.output_tokens_per_second)
    positive = {name: one for name, one in values.items() if one.value > 0}
    return LoadValues(load, frozenset({seed}), positive, frozenset(never))


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
                math.exp(sum(math.log(one.value) for one in found) / len(found)),
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


def _load(start: LevelStarted) -> float | None:
    if start.rate_per_second is not None:
        return start.rate_per_second
    return None if start.purpose == "single_stream" else -float(start.concurrency or 1)


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
