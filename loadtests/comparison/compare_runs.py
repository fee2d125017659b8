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
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.comparison.run_environment import (
    CELL,
    FACTS,
    MACHINE,
    differences,
    versions_apart,
)
from loadtests.comparison.run_metrics import (
    LEAST_ERROR,
    LIMIT,
    MORE_IS_BETTER,
    CellValues,
    Load,
    RunValues,
    Value,
)
from loadtests.errors import NotComparable
from loadtests.records.run_folder import RunManifest

ALPHA = 0.05
POWER = 0.80
CONFIDENCE = 0.95
LEAST_RUNS = 3  # of an arm
LEAST_SHARE = 0.01  # smaller differences are of no use to anybody
CONFOUNDED = "the arms' requests were drawn by different seeds, each arm's by its own"

Verdict = Literal["faster", "slower", "no difference", "not known"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one metric in two arms. Without an interval where an arm has too few runs."""

    first: float  # geometric mean of the runs
    second: float
    ratio: float  # second over first
    low: float | None = None  # of the ratio, 95 % interval
    high: float | None = None
    p: float | None = None  # of no difference, before the correction for several tests
    # The difference, as a share, that is found in 80 % of such comparisons after the correction.
    detectable: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell at one load."""

    cell: str
    load: Load  # None for the limit too
    metric: str  # "TTFT p50" ..., "good", "output tokens/s", "limit"
    verdict: Verdict
    runs: tuple[int, int]  # of each arm, that have the metric
    difference: Difference | None = None  # None: an arm has no run with the metric
    reason: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict` is "different" where some metrics are faster and others slower."""

    first: list[str]  # run ids
    second: list[str]
    verdict: Verdict | Literal["different"]
    reason: str  # why it is not known
    rows: list[Row]
    notes: list[str]


def compare(
    first: Sequence[RunValues],
    second: Sequence[RunValues],
    *,
    allow: Sequence[str] = (),
    least: float = LEAST_SHARE,
) -> Comparison:
    """The second arm against the first. NotComparable: runs differ in a fact not allowed to.

    Differences below `least` (a share) are no difference.
    """
    notes = _check(first, second, allow)
    pairs = _pairs(first, second, allow)
    found = [_rows(mine, theirs) for mine, theirs in pairs]
    rows = _judged([row for rows in found for row in rows], least)
    for (mine, theirs), own in zip(pairs, found, strict=True):
        notes += _notes(mine, theirs, own)
    said = {row.verdict for row in rows}
    order: tuple[Verdict, ...] = ("faster", "slower", "no difference", "not known")
    verdict: Verdict | Literal["different"] = next(
        (word for word in order if word in said), order[-1]
    )
    if {"faster", "slower"} <= said:
        verdict = "different"
    return Comparison(
        first=[run.manifest.run_id for run in first],
        second=[run.manifest.run_id for run in second],
        verdict=verdict,
        reason=_why_not_known(len(first), len(second), rows) if verdict == "not known" else "",
        rows=rows,
        notes=notes,
    )


def _why_not_known(first: int, second: int, rows: Sequence[Row]) -> str:
    if first == second == 1:
        return "one run an arm"
    if min(first, second) < LEAST_RUNS:
        return f"{first} and {second} runs; {LEAST_RUNS} an arm are needed"
    reasons = Counter(row.reason for row in rows if row.reason)
    return reasons.most_common(1)[0][0] if reasons else "no metric is in both arms"


def _check(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[str]:
    unknown = sorted(set(allow) - set(FACTS))
    if unknown:
        raise NotComparable(f"--allow {unknown[0]!r} is no fact; there are {', '.join(FACTS)}")
    if not first or not second:
        raise NotComparable("two arms are compared: name at least one run for each")
    run_id, times = Counter(run.manifest.run_id for run in (*first, *second)).most_common(1)[0]
    if times > 1:
        raise NotComparable(f"run {run_id} is named {times} times: a run is one value of one arm")
    notes: list[str] = []
    for arm in (first, second):
        for run in arm[1:]:
            notes += _apart(arm[0].manifest, run.manifest, None)
    notes += _apart(first[0].manifest, second[0].manifest, allow)
    order = in_time([run.manifest.created for run in first], [r.manifest.created for r in second])
    if not is_interleaved(order):
        notes.append(
            f"the runs are not interleaved in time ({' '.join(order)}): a drift of the machine "
            "looks like a difference; measure in turns: crossover campaign repeat A B --times 3"
        )
    return list(dict.fromkeys(notes))


def _apart(one: RunManifest, other: RunManifest, allow: Sequence[str] | None) -> list[str]:
    """Notes of what may differ between two runs. Raises NotComparable for what may not.

    `allow`: None for two runs of one arm, which are the same thing measured twice.
    """
    notes = []
    for apart in differences(one, other):
        if allow is None or apart.fact not in allow:
            how = f"compare them all the same with --allow {apart.fact}"
            if allow is None:
                thing = "machine" if apart.fact in MACHINE else apart.name
                how = f"an arm is of one {thing}: name them in different arms"
            raise NotComparable(
                f"runs {one.run_id} and {other.run_id} differ in {apart.name}: "
                f"{apart.first} and {apart.second}; {how}"
            )
        notes.append(f"{apart.name} differs: {apart.first} and {apart.second}")
    return notes + [f"versions differ: {line}" for line in versions_apart(one, other)]


def in_time(first: Sequence[str], second: Sequence[str]) -> str:
    """The order in which the runs of two arms were begun: "ABAB"."""
    stamps = [(at, "A") for at in first] + [(at, "B") for at in second]
    return "".join(arm for _, arm in sorted(stamps))


def is_interleaved(order: str) -> bool:
    """Whether a steady drift shifts the arms by at most half of what it does to A A A B B B."""
    places = {arm: [i for i, one in enumerate(order) if one == arm] for arm in "AB"}
    means = [sum(own) / len(own) for own in places.values()]
    return len(order) <= 2 or abs(means[1] - means[0]) <= len(order) / 4


Cells = list[CellValues]  # one cell in the runs of an arm that have it


def _pairs(
    first: Sequence[RunValues], second: Sequence[RunValues], allow: Sequence[str]
) -> list[tuple[Cells, Cells]]:
    """Cells that are the same thing but for what may differ."""
    keys = [fact for fact in (*CELL, "workload") if fact not in allow]
    found: list[tuple[Cells, Cells]] = []
    ours, others = _cells(first), _cells(second)
    for mine in ours:
        alike = [
            theirs
            for theirs in others
            if all(mine[0].facts[key] == theirs[0].facts[key] for key in keys)
        ]
        if len(alike) > 1:  # several differ only in what may differ: the one that is the same
            alike = [theirs for theirs in alike if theirs[0].facts == mine[0].facts]
        found += [(mine, theirs) for theirs in alike]
    if found:
        return found
    one, other = ours[0][0], others[0][0]
    why = (
        f"{one.key} could be any of {', '.join(cells[0].key for cells in others)}; leave out an "
        "--allow, or name runs of one of them"
    )
    for fact in keys:
        if one.facts[fact] != other.facts[fact]:
            why = (
                f"their first cells differ in {fact}, {one.facts[fact] or 'none'!r} and "
                f"{other.facts[fact] or 'none'!r}; compare them all the same with --allow {fact}"
            )
            break
    raise NotComparable(
        f"no cell of run {first[0].manifest.run_id} is in run {second[0].manifest.run_id}: {why}"
    )


def _cells(arm: Sequence[RunValues]) -> list[Cells]:
    """The cells of an arm, each with all runs that measured it."""
    found: dict[tuple[tuple[str, str], ...], Cells] = {}
    for cell in (cell for run in arm for cell in run.cells):
        found.setdefault(tuple(sorted(cell.facts.items())), []).append(cell)
    return list(found.values())


def _rows(mine: Cells, theirs: Cells) -> list[_Row]:
    """Every metric at every load that is in both arms, then the limit, before the test."""
    found: list[_Row] = []
    arms = (mine, theirs)
    for load in dict.fromkeys(load for cell in mine for load in cell.values):
        at = [[cell for cell in arm if load in cell.values] for arm in arms]
        if not all(at):
            continue
        is_confounded = confounded(*([cell.seeds[load] for cell in arm] for arm in at))
        names = dict.fromkeys(name for arm in at for cell in arm for name in cell.values[load])
        for name in names:
            values = [[v for cell in arm if (v := cell.values[load].get(name))] for arm in at]
            never = [sum(name in cell.never.get(load, ()) for cell in arm) for arm in at]
            why = CONFOUNDED if is_confounded else ""
            if not why and any(never):
                why = f"infinite in {never[0]} and {never[1]} runs: too many requests failed"
            found.append(_Row(mine[0].key, load, name, (values[0], values[1]), why))
    limits = [[Value(cell.limit) for cell in arm if cell.limit] for arm in arms]
    why = ""
    if confounded(*([cell.all_seeds for cell in arm] for arm in arms)):
        why = CONFOUNDED
    elif missing := sum(not cell.limit for arm in arms for cell in arm):
        why = f"no limit in {missing} runs"
    return [*found, _Row(mine[0].key, None, LIMIT, (limits[0], limits[1]), why)]


class _Row(NamedTuple):
    """One metric before it is tested: what each run that has it says."""

    cell: str
    load: Load
    metric: str
    values: tuple[list[Value], list[Value]]
    why_not: str  # it cannot be tested


def confounded(first: Sequence[frozenset[int]], second: Sequence[frozenset[int]]) -> bool:
    """Whether runs of an arm share arrivals, lengths and prompts that the other arm does not have.

    Then what these happened to be looks like a difference of the arms, however many runs there are.
    Each item holds the seeds of one run. Runs that share nothing, or all the same, are comparable.
    """
    for mine, theirs in ((first, second), (second, first)):
        times = Counter(seed for seeds in mine for seed in seeds)
        shared = {seed for seed, count in times.items() if count > 1}
        if 2 * len(shared & frozenset().union(*theirs)) < len(shared):
            return True
    return False


def _judged(rows: Sequence[_Row], least: float) -> list[Row]:
    """All metrics, tested together."""
    runs = [(len(row.values[0]), len(row.values[1])) for row in rows]
    is_tested = [
        not row.why_not and min(own) >= LEAST_RUNS for row, own in zip(rows, runs, strict=True)
    ]
    tests = max(1, sum(is_tested))
    found = []
    for row, own, tested in zip(rows, runs, is_tested, strict=True):
        why = row.why_not
        if not why and not tested:
            why = "one run an arm" if own == (1, 1) else f"{own[0]} and {own[1]} runs have it"
        apart = difference(*row.values, tests=tests if tested else 0) if min(own) else None
        found.append(
            Row(
                cell=row.cell,
                load=row.load,
                metric=row.metric,
                verdict="not known",
                runs=own,
                difference=apart,
                reason=why,
            )
        )
    places = [place for place, tested in enumerate(is_tested) if tested]
    p_values = [apart.p or 0.0 for at in places if (apart := found[at].difference) is not None]
    for at, p in zip(places, holm(p_values), strict=True):
        found[at] = msgspec.structs.replace(found[at], verdict=_verdict(found[at], p, least))
    return found


def _verdict(row: Row, p: float, least: float) -> Verdict:
    ratio = row.difference.ratio if row.difference is not None else 1.0
    if p >= ALPHA or abs(ratio - 1) <= least:
        return "no difference"
    return "faster" if (ratio > 1) == (row.metric in MORE_IS_BETTER) else "slower"


def _notes(mine: Cells, theirs: Cells, found: Sequence[_Row]) -> list[str]:
    key = mine[0].key
    notes = []
    left_out = [sum(cell.left_out for cell in cells) for cells in (mine, theirs)]
    if any(left_out):
        notes.append(
            f"{key}: {left_out[0]} and {left_out[1]} levels were cut short or not valid and are "
            "left out"
        )
    if not any(row.load is not None for row in found):
        rates = "; ".join(
            ", ".join(sorted({f"{load:.3g}" for cell in arm for load in cell.values if load}))
            or "none"
            for arm in (mine, theirs)
        )
        notes.append(
            f"{key}: no rate was measured in both arms ({rates}): "
            "`crossover campaign repeat` measures a run's rates again, `search.rates` gives some"
        )
    return notes


def difference(first: Sequence[Value], second: Sequence[Value], tests: int) -> Difference:
    """Of two arms; `tests` are made in all, of which this is one; 0: it is not tested."""
    logs = [_spread(arm) for arm in (first, second)]
    means = [float(arm.mean()) for arm in logs]
    plain = Difference(
        first=math.exp(means[0]),
        second=math.exp(means[1]),
        ratio=math.exp(means[1] - means[0]),
    )
    if not tests or min(len(first), len(second)) < LEAST_RUNS:
        return plain
    from scipy import stats  # takes a second to import

    found = stats.ttest_ind(logs[1], logs[0], equal_var=False)
    ends = found.confidence_interval(CONFIDENCE)
    free = stats.t(found.df)
    error = (ends.high - ends.low) / 2 / free.ppf(0.5 + CONFIDENCE / 2)
    needed = (free.ppf(1 - ALPHA / tests / 2) + free.ppf(POWER)) * error
    return msgspec.structs.replace(
        plain,
        low=math.exp(ends.low),
        high=math.exp(ends.high),
        p=float(found.pvalue),
        detectable=math.expm1(needed),
    )


def _spread(arm: Sequence[Value]) -> npt.NDArray[np.float64]:
    """ln(value) of each run, no nearer to each other than chance alone leaves them."""
    logs = np.log([one.value for one in arm])
    least = max(LEAST_ERROR, *(one.error for one in arm))
    if len(arm) > 1 and logs.std(ddof=1) < least:
        even = np.linspace(-1, 1, len(arm))
        logs = logs.mean() + even * (least / even.std(ddof=1))
    return logs


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    ranked = np.minimum(1.0, np.sort(p_values) * np.arange(len(order), 0, -1))
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(ranked)
    return [float(p) for p in adjusted]
