"""Two arms of runs: where the second is faster or slower, beyond what differs from run to run.

    found = compare(read_arm([a1, a2, a3]), read_arm([b1, b2, b3]))
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.analysis.level import Level, levels_of
from loadtests.analysis.percentiles import distribution
from loadtests.comparison.run_environment import CELL, FACTS, differences, versions_apart
from loadtests.errors import BadRunFolder, NotComparable
from loadtests.records.run_folder import MANIFEST, RunManifest, RunRecords, read_records
from loadtests.records.run_journal import CellFinished, EngineChosen, of_kind
from models import formatting

ALPHA = 0.05
POWER = 0.80
CONFIDENCE = 0.95
LEAST_RUNS = 3  # of an arm
LEAST_SHARE = 0.01  # smaller differences are of no use to anybody
LEAST_SPREAD = 1e-4  # standard deviation of ln(value) below which equal values are not believed
LIMIT, TOKENS = "limit", "output tokens/s"

Verdict = Literal["faster", "slower", "no difference", "not known"]


class CellValues(msgspec.Struct, frozen=True):
    """One cell of one run: one number a metric, above 0, by load ("alone", "2.000/s", "")."""

    key: str
    facts: dict[str, str]  # of run_environment.CELL
    values: dict[str, dict[str, float]]
    left_out: int = 0  # levels that were not valid, or with requests missing


class RunValues(msgspec.Struct, frozen=True):
    """One run."""

    manifest: RunManifest
    cells: list[CellValues]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell at one load, in two arms. None: too few runs to say."""

    cell: str
    load: str  # "" for the limit
    metric: str  # "TTFT p50" ..., "output tokens/s", "limit"
    runs: tuple[int, int]  # of each arm, that have the metric
    first: float | None = None  # geometric mean of the runs
    second: float | None = None
    ratio: float | None = None  # second over first
    low: float | None = None  # of the ratio, 95 % interval
    high: float | None = None
    p: float | None = None  # of no difference, before the correction for several tests
    # The difference, as a share, that is found in 80 % of such comparisons after the correction.
    detectable: float | None = None
    verdict: Verdict = "not known"
    reason: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict` is "different" where some metrics are faster and others slower."""

    verdict: Verdict | Literal["different"]
    reason: str  # why it is not known
    rows: list[Row]
    notes: list[str]


# What one run says.


def read_arm(paths: Iterable[Path]) -> list[RunValues]:
    """The runs of one arm: run folders, or folders that hold some. Raises BadRunFolder."""
    found: list[RunValues] = []
    for path in paths:
        inside = sorted(one.parent for one in path.glob(f"*/{MANIFEST}"))
        found += map(read, inside if inside and not (path / MANIFEST).exists() else [path])
    return found


def read(folder: Path) -> RunValues:
    """A run folder. Raises BadRunFolder for one that holds no finished level."""
    run = read_records(folder)
    levels: dict[str, list[Level]] = defaultdict(list)
    for level in levels_of(run):
        levels[level.cell].append(level)
    if not levels:
        raise BadRunFolder(f"{folder} has no finished level to compare")
    cells = [
        _cell(run, cell, levels[cell["key"]])
        for cell in run.manifest.cells
        if cell["key"] in levels
    ]
    return RunValues(run.manifest, cells)


def _cell(run: RunRecords, cell: dict[str, Any], levels: Sequence[Level]) -> CellValues:
    key = str(cell["key"])
    for chosen in of_kind(run.events, EngineChosen, key):
        cell = {**cell, "backend": chosen.backend, "weight_format": chosen.weight_format}
    asked = [one for one in levels if not one.started.is_burst]
    by_load: dict[str, list[Level]] = defaultdict(list)
    for level in (one for one in asked if one.counts):
        by_load[formatting.load(level.rate, level.started.concurrency, 4)].append(level)
    values = {load: _mean([_values_of(one) for one in same]) for load, same in by_load.items()}
    ended = of_kind(run.events, CellFinished, key)
    if ended and ended[-1].capacity.limit:
        values[""] = {LIMIT: ended[-1].capacity.limit}
    return CellValues(
        key=key,
        facts={
            **{name: str(cell.get(name) or "") for name in ("model", "backend", "url")},
            "format": str(cell.get("weight_format") or ""),
        },
        values=values,
        left_out=len(asked) - sum(map(len, by_load.values())),
    )


def _values_of(level: Level) -> dict[str, float]:
    """The metrics that the level's requests are enough for."""
    found: dict[str, float | None] = {TOKENS: level.output_tokens_per_second}
    for name, column in (("TTFT", level.ttft), ("TPOT", level.tpot), ("E2E", level.e2e)):
        times = distribution(column[level.counted])
        found |= {f"{name} p50": times.p50, f"{name} p95": times.p95}
        if times.p50 is None and not times.late:
            found[f"{name} mean"] = times.mean
    return {name: value for name, value in found.items() if value}


def _mean(levels: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of levels at one load: the geometric mean of each metric that all of them have."""
    names = [name for name in levels[0] if all(name in values for values in levels)]
    return {name: _geometric([values[name] for values in levels]) for name in names}


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# Two arms.


def compare(
    first: Sequence[RunValues], second: Sequence[RunValues], *, allow: Sequence[str] = ()
) -> Comparison:
    """The second arm against the first. NotComparable: runs differ in a fact not allowed to."""
    notes = _check(first, second, allow)
    found: list[tuple[Row, list[list[float]]]] = []
    for mine, theirs in _pairs(first, second, allow):
        own = _rows(mine, theirs)
        found += own
        if left_out := sum(cell.left_out for cell in mine + theirs):
            notes.append(f"{mine[0].key}: {left_out} levels were not valid")
        if not any(row.load not in ("", "alone") for row, _ in own):
            notes.append(
                f"{mine[0].key}: no rate was measured in both arms: `search.rates` gives some"
            )
    rows = _judged(found)
    said = {row.verdict for row in rows}
    order: tuple[Verdict, ...] = ("faster", "slower", "no difference")
    verdict: Verdict | Literal["different"] = next((w for w in order if w in said), "not known")
    if {"faster", "slower"} <= said:
        verdict = "different"
    reason = ""
    if verdict == "not known":
        reason = next((row.reason for row in rows if row.reason), "no metric is in both arms")
        if min(len(first), len(second)) < LEAST_RUNS:
            reason = f"{len(first)} and {len(second)} runs; {LEAST_RUNS} an arm are needed"
    return Comparison(verdict=verdict, reason=reason, rows=rows, notes=notes)


def _check(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[str]:
    """Notes of what differs, and may. Raises NotComparable for what may not."""
    if unknown := sorted(set(allow) - set(FACTS)):
        raise NotComparable(f"--allow {unknown[0]!r} is no fact; there are {', '.join(FACTS)}")
    if not first or not second:
        raise NotComparable("two arms are compared: name at least one run for each")
    run_id, times = Counter(run.manifest.run_id for run in (*first, *second)).most_common(1)[0]
    if times > 1:
        raise NotComparable(f"run {run_id} is named {times} times: a run is one value of one arm")
    notes: list[str] = []
    within = [(arm[0], run) for arm in (first, second) for run in arm[1:]]
    for one, other in [*within, (first[0], second[0])]:
        for apart in differences(one.manifest, other.manifest):
            what = f"{apart.name}: {apart.first} and {apart.second}"
            how = f"compare them all the same with --allow {apart.fact}"
            if (one, other) in within:  # the same thing, measured twice
                how = f"an arm is of one {apart.name}: name them in different arms"
            elif apart.fact in allow:
                notes.append(f"differs: {what}")
                continue
            ids = f"{one.manifest.run_id} and {other.manifest.run_id}"
            raise NotComparable(f"runs {ids} differ in {what}; {how}")
        notes += [f"versions differ: {v}" for v in versions_apart(one.manifest, other.manifest)]
    stamps = [
        (run.manifest.created, arm)
        for arm, of in zip("AB", (first, second), strict=True)
        for run in of
    ]
    begun = "".join(arm for _, arm in sorted(stamps))
    if not is_interleaved(begun):
        notes.append(
            f"the runs are not interleaved in time ({' '.join(begun)}): a drift of the machine "
            "looks like a difference; measure in turns"
        )
    return list(dict.fromkeys(notes))


def is_interleaved(begun: str) -> bool:
    """Whether a steady drift shifts the arms by at most half of what it does to A A A B B B."""
    places = [[i for i, one in enumerate(begun) if one == arm] for arm in "AB"]
    first, second = (sum(own) / len(own) for own in places)
    return len(begun) <= 2 or abs(second - first) <= len(begun) / 4


Cells = list[CellValues]  # one cell in the runs of an arm that have it


def _pairs(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[tuple[Cells, Cells]]:
    """Cells that are the same thing but for what may differ; the very same where there is one."""
    keys = [fact for fact in (*CELL,) if fact not in allow]
    ours, others = _cells(first), _cells(second)
    found: list[tuple[Cells, Cells]] = []
    for mine in ours:
        facts = mine[0].facts
        alike = [one for one in others if all(facts[key] == one[0].facts[key] for key in keys)]
        same = [one for one in alike if facts == one[0].facts]
        found += [(mine, theirs) for theirs in same or alike]
    if found:
        return found
    one, other = ours[0][0].facts, others[0][0].facts
    fact = next(key for key in keys if one[key] != other[key])
    raise NotComparable(
        f"no cell of run {first[0].manifest.run_id} is in run {second[0].manifest.run_id}: their "
        f"first cells differ in {fact}, {one[fact]!r} and {other[fact]!r}; compare them all the "
        f"same with --allow {fact}"
    )


def _cells(arm: Sequence[RunValues]) -> list[Cells]:
    """The cells of an arm, each with all runs that measured it."""
    found: dict[tuple[tuple[str, str], ...], Cells] = {}
    for cell in (cell for run in arm for cell in run.cells):
        found.setdefault(tuple(sorted(cell.facts.items())), []).append(cell)
    return list(found.values())


def _rows(mine: Cells, theirs: Cells) -> list[tuple[Row, list[list[float]]]]:
    """Every metric at every load that is in both arms, before the test, with its values."""
    arms = [defaultdict[tuple[str, str], list[float]](list) for _ in range(2)]
    for arm, cells in zip(arms, (mine, theirs), strict=True):
        for cell in cells:
            for load, values in cell.values.items():
                for metric, value in values.items():
                    arm[load, metric].append(value)
    found = []
    for load, metric in arms[0]:
        if (load, metric) in arms[1]:
            both = [arm[load, metric] for arm in arms]
            runs = len(both[0]), len(both[1])
            few = f"{runs[0]} and {runs[1]} runs have it" if min(runs) < LEAST_RUNS else ""
            row = Row(cell=mine[0].key, load=load, metric=metric, runs=runs, reason=few)
            found.append((row, both))
    return found


def _judged(found: Sequence[tuple[Row, list[list[float]]]]) -> list[Row]:
    """All metrics, tested together: p-values are corrected for their number (Holm 1979)."""
    tests = sum(not row.reason for row, _ in found)
    rows = [
        msgspec.structs.replace(row, **difference(mine, theirs, 0 if row.reason else tests))
        for row, (mine, theirs) in found
    ]
    tested = [i for i, row in enumerate(rows) if row.p is not None]
    corrected = 0.0
    for rank, at in enumerate(sorted(tested, key=lambda i: rows[i].p or 0.0)):
        row = rows[at]
        corrected = max(corrected, (tests - rank) * (row.p or 0.0))
        verdict: Verdict = "no difference"
        if corrected < ALPHA and row.ratio and abs(row.ratio - 1) > LEAST_SHARE:
            verdict = "faster" if (row.ratio > 1) == (row.metric in (LIMIT, TOKENS)) else "slower"
        rows[at] = msgspec.structs.replace(row, verdict=verdict)
    return rows


def difference(first: Sequence[float], second: Sequence[float], tests: int) -> dict[str, float]:
    """Of two arms, as fields of a Row; `tests` are made in all, of which this is one; 0: none."""
    means = _geometric(first), _geometric(second)
    found = {"first": means[0], "second": means[1], "ratio": means[1] / means[0]}
    if not tests:
        return found
    from scipy import stats  # takes a second to import

    test = stats.ttest_ind(_logs(second), _logs(first), equal_var=False)
    ends = test.confidence_interval(CONFIDENCE)
    free = stats.t(test.df)
    error = (ends.high - ends.low) / 2 / free.ppf(0.5 + CONFIDENCE / 2)
    needed = (free.ppf(1 - ALPHA / tests / 2) + free.ppf(POWER)) * error
    return found | {
        "low": math.exp(ends.low),
        "high": math.exp(ends.high),
        "p": float(test.pvalue),
        "detectable": math.expm1(needed),
    }


def _logs(arm: Sequence[float]) -> npt.NDArray[np.float64]:
    """ln(value) of each run, no nearer to each other than is believed."""
    logs = np.log(arm)
    even = np.linspace(-1, 1, len(arm))
    return logs if logs.std() > LEAST_SPREAD else logs.mean() + LEAST_SPREAD * even
