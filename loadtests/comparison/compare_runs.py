"""Compares two sets of runs (the arms): in which metrics the second is faster or slower.

    comparison = compare(read_arm(Path("A")), read_arm(Path("B")))
    comparison.verdict                     # "slower": at least one metric is, beyond chance

The unit of observation is the run: each metric of a cell at a load is one number per run. So the
variance includes all that differs from run to run, such as memory layout, clocks and other virtual
machines. Requests within a run share these conditions, so they say nothing about them.

Welch's t-test on the logarithms decides whether the means of the arms differ. The p-values are
corrected for the number of metrics (Holm 1979). With fewer than three runs in an arm, differences
are shown, but the verdict is "not known".

Runs that differ in a fact (machine, workload, settings: run_environment.py) are refused, with both
values; `allow` names facts that may differ between the arms.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.comparison.run_environment import (
    CELL,
    FACTS,
    FactDifference,
    differences,
)
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

ALPHA = 0.05  # significance level
MIN_RUNS = 3  # in each arm, for a test
MIN_CHANGE = 0.01  # smaller differences have no practical importance
# Smallest standard deviation of ln(value) that is assumed. Runs with nearly equal values, for
# example because times are rounded, would make any difference significant.
MIN_SPREAD = 1e-4
CAPACITY, TOKENS_PER_SECOND = (
    "estimated capacity",
    "output tokens/s",
)  # metrics of which more is better

Verdict = Literal["faster", "slower", "no difference shown", "not known"]
CellFacts = tuple[str, ...]  # the values of run_environment.CELL, in that order


class Measurand(NamedTuple):
    """What one value of a cell is of."""

    load: str  # "2/s"; "": the whole cell
    metric: str  # "TTFT p50" ..., TOKENS_PER_SECOND, CAPACITY


class RunValues(msgspec.Struct, frozen=True):
    """The values of one run, all above 0."""

    manifest: RunManifest
    values: dict[CellFacts, dict[Measurand, float]]


class ComparedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell at one load, in both arms. None: too few runs for a test."""

    cell: str
    load: str  # "" for the capacity
    metric: str  # "TTFT p50" ..., "output tokens/s", "estimated capacity"
    runs: tuple[int, int]  # number of runs with the metric, in each arm
    first: float  # geometric mean of the first arm's runs
    second: float
    low: float | None = None  # 95 % confidence interval of second / first
    high: float | None = None
    p: float | None = None  # p-value, not corrected for several tests
    verdict: Verdict = "not known"

    @property
    def ratio(self) -> float:
        """Second divided by first."""
        return self.second / self.first


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `verdict` is "different" if some metrics are faster and others slower."""

    verdict: Verdict | Literal["different"]
    reason: str  # why the verdict is not known
    rows: list[ComparedMetric]
    notes: list[str]


def read_arm(path: Path) -> list[RunValues]:
    """Return the runs of one arm. `path`: a run folder, or a folder of run folders. Raises
    BadRunFolder."""
    run_folders = sorted(manifest.parent for manifest in path.glob(f"*/{MANIFEST}"))
    if not run_folders or (path / MANIFEST).exists():
        run_folders = [path]
    return [read(folder) for folder in run_folders]


def read(folder: Path) -> RunValues:
    """Return the values of a run. Raises BadRunFolder if it has no finished level."""
    run = read_records(folder)
    levels = levels_of(run)
    if not levels:
        raise BadRunFolder(f"{folder} has no finished level to compare")
    values = {}
    for cell in run.manifest.cells:
        cell_levels = [level for level in levels if level.cell == cell["key"]]
        if cell_levels:
            values[_cell_facts(run, cell)] = _values(run, cell["key"], cell_levels)
    return RunValues(run.manifest, values)


def _cell_facts(run: RunRecords, cell: dict[str, Any]) -> CellFacts:
    """Return the facts of a cell in a manifest: with the engine that was chosen for it, and the
    device that its engine reported if the campaign names none."""
    for chosen in of_kind(run.events, EngineChosen, cell["key"]):
        cell = {**cell, "backend": chosen.backend, "weight_format": chosen.weight_format}
    ready = of_kind(run.events, CellReady, cell["key"])
    device = device_of(cell.get("device"), ready[-1] if ready else None)
    facts = {**cell, "format": cell.get("weight_format"), "device": device}
    return tuple(str(facts.get(name) or "") for name in CELL)


def _values(run: RunRecords, key: str, levels: Sequence[Level]) -> dict[Measurand, float]:
    """Return the values of a cell, from the levels that count. If several levels have the same
    load, a value is their geometric mean."""
    collected: dict[Measurand, list[float]] = defaultdict(list)
    for level in levels:
        if not level.counts or level.has_chosen_requests:
            continue
        load = formatting.load(level.rate, level.concurrency, 4)
        for metric, value in _metrics(level).items():
            if value and value < math.inf:
                collected[Measurand(load, metric)].append(value)
    finished = of_kind(run.events, CellFinished, key)
    if finished and finished[-1].capacity.estimated_rate:
        collected[Measurand("", CAPACITY)].append(finished[-1].capacity.estimated_rate)
    return {measurand: _geometric_mean(values) for measurand, values in collected.items()}


def _metrics(level: Level) -> dict[str, float | None]:
    """Return the metrics of a level: medians and 95th percentiles, or means if there are too few
    requests for a median. None or inf: it has no such value."""
    metrics: dict[str, float | None] = {TOKENS_PER_SECOND: level.output_tokens_per_second}
    for name, column in (("TTFT", level.ttft), ("TPOT", level.tpot), ("E2E", level.e2e)):
        times = distribution(column[level.counted])
        metrics[f"{name} p50"] = times.p50
        metrics[f"{name} p95"] = times.p95
        if times.p50 is None and not level.failures:
            metrics[f"{name} mean"] = times.mean
    return metrics


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def compare(
    first: Sequence[RunValues], second: Sequence[RunValues], *, allow: Sequence[str] = ()
) -> Comparison:
    """Compare the second arm with the first. Raises NotComparable if runs differ in a fact that is
    not in `allow`."""
    notes = _check_facts(first, second, allow)
    rows: list[ComparedMetric] = []
    for first_cell, second_cell in _matching_cells(first, second, allow):
        words = _cell_words(first_cell, second_cell)
        first_values = _values_of_arm(first, first_cell)
        second_values = _values_of_arm(second, second_cell)
        cell_rows = [
            _row(words, measurand, first_values[measurand], second_values[measurand])
            for measurand in first_values
            if measurand in second_values
        ]
        if all(row.load in ("", formatting.SINGLE_STREAM) for row in cell_rows):
            notes.append(f"{words}: no rate was measured on both sides; set `search.rates`")
        rows += cell_rows
    rows = _with_verdicts(rows)
    verdict = _overall_verdict(rows)
    reason = ""
    if verdict == "not known":
        reason = (
            f"{len(first)} and {len(second)} runs; each side needs {MIN_RUNS} with the same metric"
        )
    return Comparison(verdict=verdict, reason=reason, rows=rows, notes=notes)


def _overall_verdict(rows: Sequence[ComparedMetric]) -> Verdict | Literal["different"]:
    verdicts = {row.verdict for row in rows}
    if {"faster", "slower"} <= verdicts:
        return "different"
    order: tuple[Verdict, ...] = ("faster", "slower", "no difference shown")
    return next((verdict for verdict in order if verdict in verdicts), "not known")


def _check_facts(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[str]:
    """Return notes about facts that differ between the arms and are in `allow`. Raises
    NotComparable for all other differences, and for differences within an arm."""
    if unknown := sorted(set(allow) - set(FACTS)):
        raise NotComparable(f"--allow {unknown[0]!r} is not a fact. Facts are {', '.join(FACTS)}")
    run_id, times = Counter(run.manifest.run_id for run in (*first, *second)).most_common(1)[0]
    if times > 1:
        raise NotComparable(f"Run {run_id} is given {times} times. Give each run once")
    for arm in (first, second):
        for run in arm[1:]:
            for difference in differences(arm[0].manifest, run.manifest):
                advice = f"Runs of one side must have the same {difference.name}"
                raise _not_comparable(arm[0], run, difference, advice)
    notes: list[str] = []
    for difference in differences(first[0].manifest, second[0].manifest):
        if difference.fact not in allow:
            advice = f"To compare them anyway, add --allow {difference.fact}"
            raise _not_comparable(first[0], second[0], difference, advice)
        notes.append(f"differs: {_difference_words(difference)}")
    return notes


def _not_comparable(
    one: RunValues, other: RunValues, difference: FactDifference, advice: str
) -> NotComparable:
    ids = f"{one.manifest.run_id} and {other.manifest.run_id}"
    return NotComparable(f"Runs {ids} differ in {_difference_words(difference)}. {advice}.")


def _difference_words(difference: FactDifference) -> str:
    return f"{difference.name}: {difference.first} and {difference.second}"


def _matching_cells(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[tuple[CellFacts, CellFacts]]:
    """Return the pairs of a cell of the first arm and one of the second that differ only in facts
    of `allow`. A cell that the second arm has too is paired only with itself. Raises NotComparable
    if there are no pairs."""
    first_cells = dict.fromkeys(cell for run in first for cell in run.values)
    second_cells = dict.fromkeys(cell for run in second for cell in run.values)

    def fixed_facts(cell: CellFacts) -> list[str]:
        return [value for name, value in zip(CELL, cell, strict=True) if name not in allow]

    pairs: list[tuple[CellFacts, CellFacts]] = []
    for cell in first_cells:
        if cell in second_cells:
            pairs.append((cell, cell))
            continue
        matches = [other for other in second_cells if fixed_facts(other) == fixed_facts(cell)]
        pairs += [(cell, other) for other in matches]
    if pairs:
        return pairs
    first_cell, second_cell = next(iter(first_cells)), next(iter(second_cells))
    for name, one, other in zip(CELL, first_cell, second_cell, strict=True):
        if one != other and name not in allow:
            raise NotComparable(
                f"No cell of run {first[0].manifest.run_id} is in run "
                f"{second[0].manifest.run_id}: their first cells differ in {name}, {one!r} and "
                f"{other!r}. To allow it, add --allow {name}."
            )
    raise AssertionError("cells with the same fixed facts are a pair")


def _cell_words(first_cell: CellFacts, second_cell: CellFacts) -> str:
    """Return `llama-3.2-1b int8 onnx cpu`. Of a fact in which the cells differ it has both values:
    `cpu and gpu`."""
    words = []
    for one, other in zip(first_cell, second_cell, strict=True):
        words.append(one if one == other else f"{one or '-'} and {other or '-'}")
    return " ".join(filter(None, words))


def _values_of_arm(arm: Sequence[RunValues], cell: CellFacts) -> dict[Measurand, list[float]]:
    """Return the values of a cell, one per run that has them."""
    collected: dict[Measurand, list[float]] = defaultdict(list)
    for run in arm:
        for measurand, value in run.values.get(cell, {}).items():
            collected[measurand].append(value)
    return collected


def _row(
    cell: str, measurand: Measurand, first: Sequence[float], second: Sequence[float]
) -> ComparedMetric:
    """Return the row of one metric, with Welch's test if there are enough runs. `first`, `second`:
    one value per run."""
    load, metric = measurand
    row = ComparedMetric(
        cell=cell,
        load=load,
        metric=metric,
        runs=(len(first), len(second)),
        first=_geometric_mean(first),
        second=_geometric_mean(second),
    )
    if min(row.runs) < MIN_RUNS:
        return row
    from scipy import stats  # takes a second to import

    test = stats.ttest_ind(_spread_logs(second), _spread_logs(first), equal_var=False)
    low, high = map(math.exp, test.confidence_interval(1 - ALPHA))
    return msgspec.structs.replace(row, low=low, high=high, p=float(test.pvalue))


def _spread_logs(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the logarithms of the values, spread evenly around their mean if they vary by less
    than MIN_SPREAD."""
    logs: npt.NDArray[np.float64] = np.log(values)
    if logs.std() > MIN_SPREAD:
        return logs
    spread: npt.NDArray[np.float64] = logs.mean() + MIN_SPREAD * np.linspace(-1, 1, len(values))
    return spread


def _with_verdicts(rows: Sequence[ComparedMetric]) -> list[ComparedMetric]:
    """Return the rows with verdicts, by p-values that are corrected for their number (Holm)."""
    judged = list(rows)
    by_p_value = sorted((row.p, index) for index, row in enumerate(rows) if row.p is not None)
    corrected = 0.0
    for rank, (p_value, index) in enumerate(by_p_value):
        row = rows[index]
        corrected = max(corrected, (len(by_p_value) - rank) * p_value)
        verdict: Verdict = "no difference shown"
        if corrected < ALPHA and abs(row.ratio - 1) > MIN_CHANGE:
            more_is_better = row.metric in (CAPACITY, TOKENS_PER_SECOND)
            verdict = "faster" if (row.ratio > 1) == more_is_better else "slower"
        judged[index] = msgspec.structs.replace(row, verdict=verdict)
    return judged
