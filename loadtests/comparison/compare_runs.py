"""Two arms of runs: where the second is faster or slower, beyond what differs from run to run.

    found = compare(read_arm(Path("A")), read_arm(Path("B")))
    found.verdict                     # "slower": at least one metric is, beyond chance

The unit is the run: a metric of a cell at a load is one number a run, so that what differs from run
to run (memory layout, clocks, neighbours) is in the variance; requests within a run share all that
and say nothing about it. Welch's t-test on the logarithms asks whether the arms' means differ,
corrected for the number of metrics (Holm). Below three runs an arm the difference is shown and the
verdict is "not known". Runs that differ in a fact (machine, workload, settings: run_environment.py)
are refused with both values; `allow` names facts that may differ between the arms.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from crossover.loadtests.comparison.run_environment import CELL, FACTS, differences
from crossover.loadtests.errors import BadRunFolder, NotComparable
from crossover.loadtests.levels.level_columns import Level, levels_of
from crossover.loadtests.levels.percentiles import distribution
from crossover.loadtests.records.journal_events import (
    CellFinished,
    CellReady,
    EngineChosen,
    device_of,
    of_kind,
)
from crossover.loadtests.records.run_folder import MANIFEST, RunManifest, RunRecords, read_records
from crossover.models import formatting

ALPHA = 0.05
MIN_RUNS = 3  # of an arm
MIN_SHARE = 0.01  # smaller differences are of no use to anybody
MIN_SPREAD = 1e-4  # standard deviation of ln(value) below which equal values are not believed
LIMIT, TOKENS = "limit", "output tokens/s"

Verdict = Literal["faster", "slower", "no difference shown", "not known"]
Values = dict[tuple[str, str], list[float]]  # (load, metric) -> above 0; load "": of the cell
Facts = tuple[str, ...]  # of a cell: those of run_environment.CELL


class RunValues(msgspec.Struct, frozen=True):
    """One run: of each cell one number a metric and load."""

    manifest: RunManifest
    values: dict[Facts, dict[tuple[str, str], float]]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell at one load, in two arms. None: too few runs to say."""

    cell: str
    load: str  # "" for the limit
    metric: str  # "TTFT p50" ..., "output tokens/s", "limit"
    runs: tuple[int, int]  # of each arm, that have the metric
    first: float  # geometric mean of the runs
    second: float
    low: float | None = None  # of second / first, 95 % interval
    high: float | None = None
    p: float | None = None  # of no difference, before the correction for several tests
    verdict: Verdict = "not known"

    @property
    def ratio(self) -> float:
        """Second over first."""
        return self.second / self.first


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict` is "different" where some metrics are faster and others slower."""

    verdict: Verdict | Literal["different"]
    reason: str  # why it is not known
    rows: list[Row]
    notes: list[str]


def read_arm(path: Path) -> list[RunValues]:
    """The runs of one arm: a run folder, or a folder that holds some. Raises BadRunFolder."""
    inside = sorted(one.parent for one in path.glob(f"*/{MANIFEST}"))
    return list(map(read, inside if inside and not (path / MANIFEST).exists() else [path]))


def read(folder: Path) -> RunValues:
    """A run folder. Raises BadRunFolder for one that holds no finished level."""
    run = read_records(folder)
    levels = levels_of(run)
    if not levels:
        raise BadRunFolder(f"{folder} has no finished level to compare")
    values = {}
    for cell in run.manifest.cells:
        if own := [one for one in levels if one.cell == cell["key"]]:
            values[_facts(run, cell)] = _values(run, cell["key"], own)
    return RunValues(run.manifest, values)


def _facts(run: RunRecords, cell: dict[str, Any]) -> Facts:
    """Those of CELL. The device is what served: of a run whose campaign names none, as the engine
    said."""
    for chosen in of_kind(run.events, EngineChosen, cell["key"]):
        cell = {**cell, "backend": chosen.backend, "weight_format": chosen.weight_format}
    ready = of_kind(run.events, CellReady, cell["key"])
    device = device_of(cell.get("device"), ready[-1] if ready else None)
    said = {**cell, "format": cell.get("weight_format"), "device": device}
    return tuple(str(said.get(name) or "") for name in CELL)


def _values(run: RunRecords, key: str, levels: Sequence[Level]) -> dict[tuple[str, str], float]:
    """The metrics that the requests of levels that count are enough for."""
    seen: Values = defaultdict(list)
    for level in levels:
        if not level.counts or level.started.is_burst:
            continue
        load = formatting.load(level.rate, level.started.concurrency, 4)
        found: dict[str, float | None] = {TOKENS: level.output_tokens_per_second}
        for name, column in (("TTFT", level.ttft), ("TPOT", level.tpot), ("E2E", level.e2e)):
            times = distribution(column[level.counted])
            found |= {f"{name} p50": times.p50, f"{name} p95": times.p95}
            if times.p50 is None and not level.failures:
                found[f"{name} mean"] = times.mean
        for name, value in found.items():
            if value and value < math.inf:
                seen[load, name].append(value)
    for ended in of_kind(run.events, CellFinished, key)[-1:]:
        if ended.capacity.estimated_rate:
            seen["", LIMIT].append(ended.capacity.estimated_rate)
    return {name: _geometric(values) for name, values in seen.items()}


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def compare(
    first: Sequence[RunValues], second: Sequence[RunValues], *, allow: Sequence[str] = ()
) -> Comparison:
    """The second arm against the first. NotComparable: runs differ in a fact not allowed to."""
    notes = _check(first, second, allow)
    rows: list[Row] = []
    for mine, theirs in _pairs(first, second, allow):
        cell = _in_words(mine, theirs)
        ours, others = _of_arm(first, mine), _of_arm(second, theirs)
        own = [_row(cell, at, ours[at], others[at]) for at in ours if at in others]
        if not any(row.load not in ("", formatting.SINGLE_STREAM) for row in own):
            notes.append(f"{cell}: no rate was measured on both sides; set `search.rates`")
        rows += own
    rows = _judged(rows)
    said = {row.verdict for row in rows}
    order: tuple[Verdict, ...] = ("faster", "slower", "no difference shown")
    verdict: Verdict | Literal["different"] = next((w for w in order if w in said), "not known")
    if {"faster", "slower"} <= said:
        verdict = "different"
    few = f"{len(first)} and {len(second)} runs; each side needs {MIN_RUNS} with the same metric"
    reason = few if verdict == "not known" else ""
    return Comparison(verdict=verdict, reason=reason, rows=rows, notes=notes)


def _check(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[str]:
    """Notes of what differs, and may. Raises NotComparable for what may not."""
    if unknown := sorted(set(allow) - set(FACTS)):
        raise NotComparable(f"--allow {unknown[0]!r} is not a fact. Facts are {', '.join(FACTS)}")
    run_id, times = Counter(run.manifest.run_id for run in (*first, *second)).most_common(1)[0]
    if times > 1:
        raise NotComparable(f"Run {run_id} is given {times} times. Give each run once")
    notes: list[str] = []
    within = [(arm[0], run) for arm in (first, second) for run in arm[1:]]
    for one, other in [*within, (first[0], second[0])]:
        for apart in differences(one.manifest, other.manifest):
            what = f"{apart.name}: {apart.first} and {apart.second}"
            how = f"To compare them anyway, add --allow {apart.fact}"
            if (one, other) in within:  # the same thing, measured twice
                how = f"Runs of one side must have the same {apart.name}"
            elif apart.fact in allow:
                notes.append(f"differs: {what}")
                continue
            ids = f"{one.manifest.run_id} and {other.manifest.run_id}"
            raise NotComparable(f"Runs {ids} differ in {what}. {how}.")
    return notes


def _pairs(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[tuple[Facts, Facts]]:
    """Cells that are the same thing but for what may differ; the very same where there is one."""
    ours, others = (
        dict.fromkeys(facts for run in arm for facts in run.values) for arm in (first, second)
    )

    def fixed(facts: Facts) -> list[str]:
        return [fact for name, fact in zip(CELL, facts, strict=True) if name not in allow]

    found: list[tuple[Facts, Facts]] = []
    for mine in ours:
        alike = [theirs for theirs in others if fixed(theirs) == fixed(mine)]
        found += [(mine, theirs) for theirs in ([mine] if mine in alike else alike)]
    if found:
        return found
    both = zip(CELL, next(iter(ours)), next(iter(others)), strict=True)
    name, one, other = next(one for one in both if one[1] != one[2] and one[0] not in allow)
    raise NotComparable(
        f"No cell of run {first[0].manifest.run_id} is in run {second[0].manifest.run_id}: their "
        f"first cells differ in {name}, {one!r} and {other!r}. To allow it, add --allow {name}."
    )


def _in_words(mine: Facts, theirs: Facts) -> str:
    """`llama-3.2-1b int8 onnx cpu`; of a fact in which the arms differ both: `cpu and gpu`."""
    both = zip(mine, theirs, strict=True)
    words = (one if one == other else f"{one or '-'} and {other or '-'}" for one, other in both)
    return " ".join(filter(None, words))


def _of_arm(arm: Sequence[RunValues], cell: Facts) -> Values:
    """Every metric at every load of a cell, in the runs that have it."""
    found: Values = defaultdict(list)
    for run in arm:
        for at, value in run.values.get(cell, {}).items():
            found[at].append(value)
    return found


def _row(cell: str, at: tuple[str, str], first: Sequence[float], second: Sequence[float]) -> Row:
    """One metric, tested by itself where there are runs enough."""
    found: dict[str, Any] = {}
    if min(len(first), len(second)) >= MIN_RUNS:
        from scipy import stats  # takes a second to import

        logs = []
        for values in (second, first):  # no nearer to each other than is believed
            each, even = np.log(values), np.linspace(-1, 1, len(values))
            logs.append(each if each.std() > MIN_SPREAD else each.mean() + MIN_SPREAD * even)
        test = stats.ttest_ind(*logs, equal_var=False)
        low, high = map(math.exp, test.confidence_interval(1 - ALPHA))
        found = {"low": low, "high": high, "p": float(test.pvalue)}
    return Row(
        cell=cell,
        load=at[0],
        metric=at[1],
        runs=(len(first), len(second)),
        first=_geometric(first),
        second=_geometric(second),
        **found,
    )


def _judged(rows: Sequence[Row]) -> list[Row]:
    """With verdicts: p-values are corrected for their number (Holm 1979)."""
    found = list(rows)
    tested = sorted((row.p, i) for i, row in enumerate(rows) if row.p is not None)
    corrected = 0.0
    for rank, (p, at) in enumerate(tested):
        row = rows[at]
        corrected = max(corrected, (len(tested) - rank) * p)
        verdict: Verdict = "no difference shown"
        if corrected < ALPHA and abs(row.ratio - 1) > MIN_SHARE:
            verdict = "faster" if (row.ratio > 1) == (row.metric in (LIMIT, TOKENS)) else "slower"
        found[at] = msgspec.structs.replace(row, verdict=verdict)
    return found
