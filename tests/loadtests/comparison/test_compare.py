"""Two arms of runs: how often equal ones are called different, which differences are found, and
what is refused.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from crossover import app
from loadtests.capacity.words import in_short
from loadtests.comparison.compare import (
    CONFOUNDED,
    compare,
    confounded,
    in_time,
    is_interleaved,
)
from loadtests.comparison.run_values import (
    CellValues,
    LoadValues,
    RunValues,
    Value,
    read,
)
from loadtests.comparison.welch import Arm, holm, welch
from loadtests.errors import BadRunFolder, NotComparable
from loadtests.records.comparability import FACTS, differences, versions_apart
from loadtests.terminal.comparison import show_comparison
from reports.run import read_run
from tests.loadtests.comparison.worlds import CAMPAIGN, CELL, MACHINE, Servers, manifest
from tests.reports.example_run import RUNGS, Law, write_example_run

TRIALS = 200


@pytest.mark.parametrize("runs", [3, 5])
@pytest.mark.parametrize("sd", [0.02, 0.04, 0.07])
def test_equal_servers_are_seldom_called_different(sd: float, runs: int) -> None:
    """Some twenty metrics a comparison, no least difference: at most 5 % and what chance adds."""
    wrong = 0
    for trial in range(TRIALS):
        servers = Servers(sd, seed=trial)
        found = compare(servers.arm("a", runs), servers.arm("b", runs), least=0.0)
        assert len(found.rows) > 15
        wrong += found.verdict != "no difference"
    assert wrong <= 0.07 * TRIALS


@pytest.mark.parametrize("runs", [3, 5])
def test_a_fifth_is_found(runs: int) -> None:
    verdicts = []
    for trial in range(TRIALS):
        servers = Servers(0.02, seed=trial)
        found = compare(servers.arm("a", runs), servers.arm("b", runs, slower=1.2))
        verdicts.append(found.verdict)
    assert verdicts.count("slower") >= 0.8 * TRIALS
    assert not {"faster", "different"} & set(verdicts)
    servers = Servers(0.02, seed=1)
    back = compare(servers.arm("a", 5, slower=1.2), servers.arm("b", 5))
    assert back.verdict == "faster"
    capacity = next(row for row in back.rows if row.metric == "capacity")
    assert capacity.difference is not None and capacity.difference.ratio > 1.1


def test_what_is_called_detectable_is_detected() -> None:
    """In 80 % of comparisons, as it says, where the true difference is as large."""
    rng = np.random.default_rng(1)
    said = np.mean(
        [
            welch(*(Arm.of(np.exp(0.03 * rng.normal(size=4)).tolist()) for _ in "ab"), 5).detectable
            for _ in range(300)
        ]
    )
    found = 0
    for _ in range(1000):
        a, b = np.exp(0.03 * rng.normal(size=(2, 4)))
        p = welch(Arm.of(a.tolist()), Arm.of((b * (1 + said)).tolist()), 5).p
        found += p is not None and 5 * p < 0.05
    assert 0.70 <= found / 1000 <= 0.95


def test_the_interval_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(1000):
        a, b = np.exp(0.05 * rng.normal(size=(2, 3)))
        found = welch(Arm.of(a.tolist()), Arm.of((1.2 * b).tolist()), 1)
        assert found.low is not None and found.high is not None
        covered += found.low <= 1.2 <= found.high
    assert 0.93 <= covered / 1000 <= 0.99


def test_welch_agrees_with_scipy() -> None:
    from scipy import stats

    a, b = [1.0, 1.1, 0.9, 1.05], [1.2, 1.5, 1.1]
    theirs = stats.ttest_ind(np.log(a), np.log(b), equal_var=False)
    assert welch(Arm.of(a), Arm.of(b), 1).p == pytest.approx(float(theirs.pvalue))


def test_without_repeats_nothing_is_known() -> None:
    servers = Servers(0.02, seed=3)
    one, other = servers.arm("a", 1), servers.arm("b", 1, slower=2.0)
    found = compare(one, other)
    assert (found.verdict, found.reason) == ("not known", "one run an arm")
    assert {row.verdict for row in found.rows} == {"not known"}
    row = next(row for row in found.rows if row.metric == "TPOT mean")
    assert row.difference is not None and row.difference.ratio == pytest.approx(2.0, rel=0.1)
    assert (row.difference.p, row.difference.low, row.difference.detectable) == (None,) * 3
    found = compare(servers.arm("a", 2), servers.arm("b", 4, slower=2.0))
    assert (found.verdict, found.reason) == ("not known", "2 and 4 runs; 3 an arm are needed")


def test_runs_that_share_their_arrivals_are_compared_with_such_as_share_them_too() -> None:
    """Three repeats of one draw of requests against three of another differ by the draws."""
    servers = Servers(0.005, seed=4)
    repeats = servers.arm("a", 3, seeds=[3, 3, 3])
    others = servers.arm("b", 3, seeds=[8, 8, 8])
    found = compare(repeats, others)
    assert (found.verdict, found.reason) == ("not known", CONFOUNDED)
    assert compare(repeats, servers.arm("b", 3, seeds=[3, 3, 3])).verdict == "no difference"
    assert compare(repeats, servers.arm("b", 3)).reason == CONFOUNDED, "their own spread is missing"
    one, two, three = (frozenset({seed}) for seed in (1, 2, 3))
    assert not confounded([one, two], [three]) and not confounded([one, one], [one, two])
    assert confounded([one, one], [two]) and confounded([two, three], [one, one])


@pytest.mark.parametrize(
    ("order", "is_fine"),
    [("ABABAB", True), ("ABBAAB", True), ("AABBAB", False), ("AAABBB", False), ("BBAA", False)],
)
def test_runs_begun_one_arm_after_the_other_are_said_to_be(order: str, is_fine: bool) -> None:
    stamps = {arm: [str(i) for i, one in enumerate(order) if one == arm] for arm in "AB"}
    assert in_time(stamps["A"], stamps["B"]) == order and is_interleaved(order) is is_fine
    servers = Servers(0.02, seed=5)
    arms = servers.arm("a", len(stamps["A"])), servers.arm("b", len(stamps["B"]))
    dated = [
        [
            RunValues(manifest(run.manifest.run_id, at=int(at)), run.cells)
            for run, at in zip(arm, stamps[name], strict=True)
        ]
        for arm, name in zip(arms, "AB", strict=True)
    ]
    notes = [note for note in compare(dated[0], dated[1]).notes if "not interleaved" in note]
    assert bool(notes) is not is_fine and all(" ".join(order) in note for note in notes)


def run(name: str, facts: dict[str, str] = CELL, rate: float = 1.0, **changes: Any) -> RunValues:
    loads = [LoadValues(rate, frozenset({1}), {"TTFT p50": Value(1.0)})]
    return RunValues(manifest(name, **changes), [CellValues("c", facts, loads, None, "too few")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"machine": MACHINE | {"isa": ["avx2"]}},
            "differ in instruction sets: not known and avx2; .* --allow isa",
        ),
        (
            {"machine": MACHINE | {"cpu_model": "Xeon"}},
            "differ in CPU: EPYC and Xeon; .* --allow cpu_model",
        ),
        ({"machine": MACHINE | {"memory_total_bytes": 8 << 30}}, "differ in memory: 24.* and 8"),
        (
            {"campaign": CAMPAIGN | {"workload": {"preset": "code"}}},
            "differ in workload: preset 'chat' and preset 'code'",
        ),
        (
            {"campaign": CAMPAIGN | {"server": {"slots": 4, "context_tokens": 256}}},
            "differ in server.slots: 8 and 4; .* --allow slots",
        ),
    ],
)
def test_runs_that_differ_in_a_fact_are_refused_with_both_values(
    changes: dict, message: str
) -> None:
    a, b = run("a"), run("b", **changes)
    with pytest.raises(NotComparable, match=message):
        compare([a], [b])
    (apart,) = differences(a.manifest, b.manifest)
    found = compare([a], [b], allow=[apart.fact])
    assert any(apart.name in note for note in found.notes)
    with pytest.raises(NotComparable, match="differ in"):
        compare([a, b], [run("c")], allow=[apart.fact])


def test_a_run_counts_once() -> None:
    with pytest.raises(NotComparable, match="run a is named 2 times"):
        compare([run("a"), run("b")], [run("a")])
    with pytest.raises(NotComparable, match="name at least one run for each"):
        compare([run("a")], [])


def test_cells_are_matched_by_what_they_are() -> None:
    a, b = run("a"), run("b", facts=CELL | {"format": "Q8_0"})
    with pytest.raises(NotComparable, match="differ in format, 'Q4_0' and 'Q8_0'"):
        compare([a], [b])
    assert compare([a], [b], allow=["format"]).verdict == "not known"
    with pytest.raises(NotComparable, match="--allow 'colour' is no fact; there are cpu_model"):
        compare([a], [b], allow=["colour"])
    assert {"format", "slots", "cpu_model", "workload"} <= set(FACTS)


def test_one_cell_that_matches_loosely_and_none_exactly_is_compared_with_all() -> None:
    """Q4_0 against a run of Q8_0 and F16, with formats allowed to differ."""
    theirs = run("b", facts=CELL | {"format": "Q8_0"})
    both = RunValues(
        theirs.manifest, [*theirs.cells, *run("c", facts=CELL | {"format": "F16"}).cells]
    )
    with pytest.raises(NotComparable, match="c could be any of c, c; leave out an --allow"):
        compare([run("a")], [both], allow=["format"])


def test_rates_that_only_one_arm_measured_are_left_out_and_said() -> None:
    found = compare([run("a")], [run("b", rate=1.01)])
    assert {row.metric for row in found.rows} == {"capacity"}
    assert any("no rate was measured in both arms (1; 1.01)" in note for note in found.notes)
    near = compare([run("a")], [run("b", rate=1.0000001)])
    assert {row.load for row in near.rows} == {1.0, None}


def test_what_never_came_is_said() -> None:
    def late(name: str) -> RunValues:
        load = LoadValues(1.0, frozenset({1}), {"TTFT p50": Value(1.0)}, frozenset({"TTFT p95"}))
        return RunValues(manifest(name), [CellValues("c", CELL, [load], None, "too few")])

    def whole(name: str) -> RunValues:
        values = {"TTFT p50": Value(1.0), "TTFT p95": Value(2.0)}
        load = LoadValues(1.0, frozenset({1}), values)
        return RunValues(manifest(name), [CellValues("c", CELL, [load], None, "too few")])

    found = compare([whole("a"), whole("b"), whole("c")], [late("d"), late("e"), whole("f")])
    row = next(row for row in found.rows if row.metric == "TTFT p95")
    assert (row.verdict, row.runs) == ("not known", (3, 1))
    assert row.reason == "infinite in 0 and 2 runs: so many requests did not end well"
    assert next(row for row in found.rows if row.metric == "TTFT p50").verdict == "no difference"


def test_versions_are_said_and_not_refused() -> None:
    one, other = manifest("a", torch="2.13.0"), manifest("b", torch="2.14.0")
    assert versions_apart(one, other) == ["torch 2.13.0 and 2.14.0"]
    assert list(differences(one, other)) == []


def test_many_tests_are_corrected_for() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == []


# Run folders.


def example(folder: Path, slower: float = 1.0, rates: tuple[float, ...] = (3.2, 2.4)) -> Path:
    law, _ = RUNGS["smollm2-135m"]
    scaled = Law(law.base * slower, law.row * slower, law.prompt * slower)
    return write_example_run(folder, {"smollm2-135m": (scaled, rates)})


def test_a_run_says_the_same_here_and_in_its_report(tmp_path: Path) -> None:
    """Percentiles, shares and capacity: one definition, computed once for both."""
    folder = example(tmp_path / "a", rates=RUNGS["smollm2-135m"][1])
    (mine,), (theirs,) = read(folder).cells, read_run(folder).cells
    assert mine.capacity is not None
    assert theirs.capacity is not None and mine.capacity == theirs.capacity.estimate
    assert mine.capacity_words == in_short(theirs.capacity) == "holds up to 1.6 requests/s"
    for level in theirs.levels:
        if level.rate_per_second is None:
            continue
        found = mine.at(level.rate_per_second)
        assert found is not None
        times = level.summary.latencies
        for name, distribution in (("TTFT", times.ttft), ("TPOT", times.tpot), ("E2E", times.e2e)):
            for percentile in ("p50", "p95"):
                seen = found.values.get(f"{name} {percentile}")
                assert (seen.value if seen else None) == getattr(distribution, percentile)


def test_the_verb_compares_run_folders(tmp_path: Path) -> None:
    """Folders as a campaign writes them: a table, JSON, and a status for pipelines."""
    first = [str(example(tmp_path / f"a{i}", 1 + 0.01 * i)) for i in range(3)]
    second = [str(example(tmp_path / f"b{i}", 1.25 + 0.01 * i)) for i in range(3)]

    def asked(*args: str) -> Any:
        return CliRunner().invoke(app, ["compare", *args])

    done = asked(*first, "--", *second)
    assert done.exit_code == 0, done.output
    for part in (": slower (", "would have been found", "TTFT p50", "2.40/s", "3+3", "capacity"):
        assert part in done.output, part
    slower = ["--fail-on", "slower"]
    assert asked(*slower, *first, "--", *second).exit_code == 1
    assert asked(*slower, *second, "--", *first).exit_code == 0
    told = asked("--json", *first, "--", *second)
    assert msgspec.json.decode(told.output)["verdict"] == "slower"
    one = asked(first[0], second[0])
    assert one.exit_code == 0 and "not known: one run an arm" in one.output
    assert "+25" in one.output, "the difference as a number"
    refused = asked(*slower, first[0], second[0])
    assert refused.exit_code != 0 and "not known" in str(refused.exception)
    refused = asked(*first)
    assert "3 runs and no `--`" in str(refused.exception)


def test_each_runs_state_of_the_capacity_is_said(tmp_path: Path) -> None:
    """One run confirms a rate, one has no level long enough: neither is reworded."""
    whole = read(example(tmp_path / "whole", rates=(1.6, 3.2)))
    short = read(
        write_example_run(tmp_path / "short", {"smollm2-135m": RUNGS["smollm2-135m"]}, window=20.0)
    )
    found = compare([whole], [short])
    key = whole.cells[0].key
    assert found.capacities == [f"{key}: first holds up to 1.6 requests/s; second alone only"]
    out = io.StringIO()
    show_comparison(found, Console(file=out, width=200))
    assert found.capacities[0] in out.getvalue()


def test_a_folder_of_runs_is_an_arm(tmp_path: Path) -> None:
    for arm, slower in (("old", 1.0), ("new", 1.3)):
        for i in range(3):
            example(tmp_path / arm / f"{arm}{i}", slower + 0.01 * i)
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "old"), str(tmp_path / "new")])
    assert done.exit_code == 0 and ": slower (" in done.output
    with pytest.raises(BadRunFolder, match="holds no run"):
        read(tmp_path)
