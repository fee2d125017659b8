"""Two runs side by side: where the second is faster or slower, beyond chance and noise.

    found = compare(read(Path("runs/a")), read(Path("runs/b")), noise=[read(Path("runs/a-again"))])
    found.verdict                     # "slower": at least one difference beyond chance and noise

Compared are the same cells at loads that both runs measured (alone, or a rate within 2 %): p50 and
p95 of TTFT, TPOT and E2E, and the capacity. Runs that differ in a fact (machine, workload,
settings: loadtests/records/comparability.py) are refused with both values; `allow` names facts
that may differ. The noise of a metric is the largest difference between runs of the same thing:
repeats given as `noise`, levels measured twice, else `floor`. p-values are corrected (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from loadtests.campaign.level import judge
from loadtests.capacity.estimate import Level, estimate
from loadtests.capacity.search_config import SearchConfig
from loadtests.comparison.quantile_test import (
    Array,
    Difference,
    Unknown,
    difference,
    holm,
    of_intervals,
)
from loadtests.errors import BadRunFolder, NotComparable
from loadtests.metrics.request_metrics import e2e_seconds, outcome, tpot_seconds, ttft_seconds
from loadtests.metrics.slo import Slo
from loadtests.records.comparability import CELL, FACTS, differences, versions_apart
from loadtests.records.events import Capacity, LevelStarted
from loadtests.records.run_folder import read_records
from loadtests.records.schema import RequestRecord, RunManifest

SAME_RATE = 0.02
FLOOR = 0.03  # where nothing says what the machine does by itself
ALPHA = 0.05

Verdict = Literal["faster", "slower", "no difference", "too few"]
_TIMES: dict[str, Callable[[RequestRecord], float | None]] = {
    "TTFT": ttft_seconds,
    "TPOT": tpot_seconds,
    "E2E": e2e_seconds,
}
_QUANTILES: dict[str, float] = {"p50": 0.50, "p95": 0.95}


class LevelSeries(msgspec.Struct, frozen=True):
    """One finished level that counts."""

    load: float | None  # requests/s; None: single-stream; below 0: users of a closed loop
    times: dict[str, Array]  # TTFT, TPOT, E2E in order of due time, seconds; inf: never came


class CellSeries(msgspec.Struct, frozen=True):
    """One cell: what it is, its levels, and its capacity under the run's SLO."""

    key: str
    facts: dict[str, str]  # of comparability.CELL, and the workload's name
    levels: list[LevelSeries]
    capacity: Capacity | None
    confidence: float
    left_out: int = 0  # levels that were cut short or not valid


class Run(msgspec.Struct, frozen=True):
    """A run as it is compared."""

    manifest: RunManifest
    cells: list[CellSeries]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell at one load."""

    cell: str
    load: float | None
    metric: str  # "TTFT p50" ..., "capacity"
    verdict: Verdict
    difference: Difference | None = None
    p_adjusted: float | None = None
    noise: float = FLOOR  # the largest |ratio - 1| that the machine shows by itself
    noise_pairs: int = 0  # pairs of the same thing it was seen in; 0: assumed
    reason: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict` is "different" where some metrics are faster and others slower."""

    first: str
    second: str
    verdict: Literal["faster", "slower", "different", "no difference", "too few"]
    rows: list[Row]
    notes: list[str]


def read(folder: Path) -> Run:
    """A run folder. Raises BadRunFolder for one that holds no finished level."""
    run = read_records(folder)
    manifest = run.manifest
    finished = run.levels()
    if not finished:
        raise BadRunFolder(f"{folder} has no finished level to compare")
    slo = msgspec.convert(manifest.campaign["slo"], Slo)
    config = msgspec.convert(manifest.campaign.get("search") or {}, SearchConfig)
    cells = []
    for cell in manifest.cells:
        levels: list[LevelSeries] = []
        seen: list[Level] = []
        left_out = 0
        for one in finished:
            if one.cell != cell["key"]:
                continue
            start, lasted = one.started, one.finished.window_seconds
            summary, level = judge(one.requests, one.samples, start, lasted, slo)
            if start.rate_per_second is not None or start.concurrency == 1:
                seen.append(level)
            if one.finished.cut_short is not None or not summary.is_valid:
                left_out += 1
                continue
            inside = [
                r
                for r in one.requests
                if start.warmup_seconds <= r.due_seconds < start.warmup_seconds + max(lasted, 1e-9)
            ]
            levels.append(LevelSeries(_load(start), series(inside)))
        capacity = estimate(seen, config, slo) if seen else None
        cells.append(
            CellSeries(
                str(cell["key"]), _cell_facts(cell), levels, capacity, config.confidence, left_out
            )
        )
    return Run(manifest, cells)


def series(records: Iterable[RequestRecord]) -> dict[str, Array]:
    """TTFT, TPOT and E2E in order of due time; a request that is not ok is infinitely late."""
    ordered = sorted(records, key=lambda r: (r.due_seconds, r.index))
    found: dict[str, Array] = {}
    for name, of in _TIMES.items():
        values = [of(r) if outcome(r) == "ok" else math.inf for r in ordered]
        found[name] = np.array([value for value in values if value is not None], dtype=np.float64)
    return found


def compare(
    first: Run,
    second: Run,
    *,
    noise: Sequence[Run] = (),
    allow: Sequence[str] = (),
    floor: float = FLOOR,
) -> Comparison:
    """The second run against the first. NotComparable: they differ in a fact not allowed to."""
    unknown = sorted(set(allow) - set(FACTS))
    if unknown:
        raise NotComparable(f"--allow {unknown[0]!r} is no fact; there are {', '.join(FACTS)}")
    notes = _check(first.manifest, second.manifest, allow)
    for repeat in noise:
        _check(first.manifest, repeat.manifest, ())
    pairs = _pairs(first, second, allow)
    rows: list[Row] = []
    for mine, theirs in pairs:
        again = [cell for repeat in noise for cell in repeat.cells if cell.facts == mine.facts]
        rows += _rows(mine, theirs, again, floor)
        if mine.left_out or theirs.left_out:
            notes.append(
                f"{mine.key}: {mine.left_out} and {theirs.left_out} levels were cut short "
                "or not valid and are left out"
            )
        if not any(row.cell == mine.key and row.load is not None and row.load > 0 for row in rows):
            notes.append(
                f"{mine.key}: no rate was measured in both ({_rates(mine)}; {_rates(theirs)}); "
                "`crossover campaign repeat` measures the same ones again"
            )
    tested = [i for i, row in enumerate(rows) if row.difference is not None]
    adjusted = holm([d.p for i in tested if (d := rows[i].difference) is not None])
    for i, p in zip(tested, adjusted, strict=True):
        rows[i] = _judged(rows[i], p)
    said = {row.verdict for row in rows}
    verdict: Any = next(
        (word for word in ("faster", "slower", "no difference") if word in said), "too few"
    )
    if {"faster", "slower"} <= said:
        verdict = "different"
    return Comparison(
        first=first.manifest.run_id,
        second=second.manifest.run_id,
        verdict=verdict,
        rows=rows,
        notes=notes,
    )


def _rates(cell: CellSeries) -> str:
    rates = sorted({level.load for level in cell.levels if level.load and level.load > 0})
    return ", ".join(f"{rate:.3g}" for rate in rates) or "none"


def _check(one: RunManifest, other: RunManifest, allow: Sequence[str]) -> list[str]:
    notes = []
    for apart in differences(one, other):
        if apart.fact not in allow:
            raise NotComparable(
                f"runs {one.run_id} and {other.run_id} differ in {apart.name}: "
                f"{apart.first} and {apart.second}; "
                f"compare them all the same with --allow {apart.fact}"
            )
        notes.append(f"{apart.name} differs: {apart.first} and {apart.second}")
    return notes + [f"versions differ: {line}" for line in versions_apart(one, other)]


def _cell_facts(cell: dict[str, Any]) -> dict[str, str]:
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


def _pairs(first: Run, second: Run, allow: Sequence[str]) -> list[tuple[CellSeries, CellSeries]]:
    """Cells that are the same thing but for what may differ."""
    keys = [fact for fact in (*CELL, "workload") if fact not in allow]
    found: list[tuple[CellSeries, CellSeries]] = []
    for mine in first.cells:
        alike = [
            theirs
            for theirs in second.cells
            if all(mine.facts[key] == theirs.facts[key] for key in keys)
        ]
        if (
            len(alike) > 1
        ):  # several differ only in what may differ: the one that is wholly the same, if any
            alike = [theirs for theirs in alike if theirs.facts == mine.facts]
        found += [(mine, theirs) for theirs in alike]
    if not found:
        a, b = first.cells[0], second.cells[0]
        fact = next(key for key in keys if a.facts[key] != b.facts[key])
        raise NotComparable(
            f"no cell of run {first.manifest.run_id} is in run {second.manifest.run_id}: "
            f"their first cells differ in {fact}, {a.facts[fact] or 'none'!r} and "
            f"{b.facts[fact] or 'none'!r}; compare them all the same with --allow {fact}"
        )
    return found


def _rows(
    mine: CellSeries, theirs: CellSeries, again: Sequence[CellSeries], floor: float
) -> list[Row]:
    rows: list[Row] = []
    for load in _loads(mine.levels):
        here, there = at_load(mine.levels, load), at_load(theirs.levels, load)
        if not there:
            continue
        same = [at_load(cell.levels, load) for cell in again]
        for name in _TIMES:
            for label, quantile in _QUANTILES.items():
                a, b = [level.times[name] for level in here], [level.times[name] for level in there]
                arms = [a, *([level.times[name] for level in levels] for levels in same)]
                noise, pairs = _noise(arms, quantile, floor)
                found = difference(a, b, quantile)
                row = Row(
                    cell=mine.key,
                    load=load,
                    metric=f"{name} {label}",
                    verdict="too few",
                    noise=noise,
                    noise_pairs=pairs,
                )
                rows.append(_with(row, found))
    rows.append(
        _with(
            Row(cell=mine.key, load=None, metric="capacity", verdict="too few", noise=floor),
            _capacities(mine, theirs),
        )
    )
    return rows


def _with(row: Row, found: Difference | Unknown) -> Row:
    if isinstance(found, Unknown):
        return msgspec.structs.replace(row, reason=found.reason)
    return msgspec.structs.replace(row, difference=found)


def _judged(row: Row, p: float) -> Row:
    assert row.difference is not None
    ratio = row.difference.ratio
    if p >= ALPHA or abs(math.log(ratio)) <= math.log1p(row.noise):
        reason = "within the noise" if p < ALPHA else ""
        return msgspec.structs.replace(row, verdict="no difference", p_adjusted=p, reason=reason)
    is_better = ratio > 1 if row.metric == "capacity" else ratio < 1
    return msgspec.structs.replace(row, verdict="faster" if is_better else "slower", p_adjusted=p)


def _noise(arms: Sequence[Sequence[Array]], quantile: float, floor: float) -> tuple[float, int]:
    """The largest relative difference between runs or levels of the same thing, and how many."""
    values = []
    for arm in arms:
        whole = [_nearest(level, quantile) for level in arm if len(level)]
        values.append([value for value in whole if math.isfinite(value) and value > 0])
    apart = [abs(math.log(a / b)) for arm in values for a, b in combinations(arm, 2)]
    means = [math.exp(sum(map(math.log, arm)) / len(arm)) for arm in values if arm]
    apart += [abs(math.log(a / b)) for a, b in combinations(means, 2)]
    return (math.expm1(max(apart)), len(apart)) if apart else (floor, 0)


def _nearest(values: Array, quantile: float) -> float:
    return float(np.sort(values)[max(0, math.ceil(quantile * len(values) - 1e-9) - 1)])


def _loads(levels: Sequence[LevelSeries]) -> list[float | None]:
    """Each load once; rates that are within SAME_RATE of an earlier one are that one."""
    found: list[float | None] = []
    for level in sorted(levels, key=lambda level: (level.load is not None, level.load or 0.0)):
        if not any(_same_load(level.load, other) for other in found):
            found.append(level.load)
    return found


def at_load(levels: Sequence[LevelSeries], load: float | None) -> list[LevelSeries]:
    return [level for level in levels if _same_load(level.load, load)]


def _same_load(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= SAME_RATE * abs(other)


def _load(start: LevelStarted) -> float | None:
    if start.rate_per_second is not None:
        return start.rate_per_second
    return None if start.purpose == "single_stream" else -float(start.concurrency or 1)


def _capacities(mine: CellSeries, theirs: CellSeries) -> Difference | Unknown:
    bounds = []
    for cell in (mine, theirs):
        found = cell.capacity
        if found is None or not found.low or not found.high or not found.estimate:
            return Unknown(found.reason if found is not None else "no level says anything about it")
        bounds.append((found.low, found.estimate, found.high))
    return of_intervals(bounds[0], bounds[1], mine.confidence)
