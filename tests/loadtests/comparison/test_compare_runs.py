"""Two arms of runs: how often equal ones are called different, which differences are found, and
what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from crossover import app
from loadtests.comparison.compare_runs import (
    CONFOUNDED,
    compare,
    confounded,
    difference,
    holm,
    in_time,
    is_interleaved,
)
from loadtests.comparison.run_environment import FACTS, differences, versions_apart
from loadtests.comparison.run_metrics import (
    CellValues,
    RunValues,
    Value,
    read,
)
from loadtests.errors import BadRunFolder, NotComparable
from loadtests.records.run_folder import RunFolder
from loadtests.records.run_journal import (
    Capacity,
    CellFinished,
    LevelFinished,
    LevelPurpose,
    LevelStarted,
)
from tests.loadtests.analysis.made import request
from tests.loadtests.comparison.servers_of_known_speed import (
    CAMPAIGN,
    CELL,
    MACHINE,
    Servers,
    manifest,
)

TRIALS = 60


@pytest.mark.parametrize("runs", [3, 5])
@pytest.mark.parametrize("sd", [0.02, 0.07])
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
    limit = next(row for row in back.rows if row.metric == "limit")
    assert limit.difference is not None and limit.difference.ratio > 1.1


def values(numbers: Any) -> list[Value]:
    return [Value(float(one)) for one in numbers]


def test_what_is_called_detectable_is_detected() -> None:
    """In 80 % of comparisons, as it says, where the true difference is as large."""
    rng = np.random.default_rng(1)
    draws = np.exp(0.03 * rng.normal(size=(300, 2, 4)))
    said = np.mean([difference(values(a), values(b), 5).detectable for a, b in draws])
    found = 0
    for a, b in np.exp(0.03 * rng.normal(size=(300, 2, 4))):
        p = difference(values(a), values(b * (1 + said)), 5).p
        found += p is not None and 5 * p < 0.05
    assert 0.70 <= found / 300 <= 0.95


def test_the_interval_covers_the_true_ratio_and_p_is_welchs() -> None:
    from scipy import stats

    rng = np.random.default_rng(2)
    covered = 0
    for a, b in np.exp(0.05 * rng.normal(size=(300, 2, 3))):
        found = difference(values(a), values(1.2 * b), 1)
        assert found.low is not None and found.high is not None
        covered += found.low <= 1.2 <= found.high
        theirs = stats.ttest_ind(np.log(a), np.log(1.2 * b), equal_var=False)
        assert found.p == pytest.approx(float(theirs.pvalue))
    assert 0.91 <= covered / 300 <= 0.995


def test_equal_values_are_no_nearer_than_chance_leaves_them() -> None:
    """Three runs of 100 % against three of 99 %, of a hundred requests each, differ by nothing."""
    same = difference([Value(1.0, 0.01)] * 3, [Value(0.99, 0.01)] * 3, 1)
    assert same.p is not None and same.p > 0.2 and same.ratio == pytest.approx(0.99)


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
    values: Any = {rate: {"TTFT p50": Value(1.0)}}
    cell = CellValues("c", facts, values, {rate: frozenset({1})})
    return RunValues(manifest(name, **changes), [cell])


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
    changes: dict[str, Any], message: str
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
    assert {row.metric for row in found.rows} == {"limit"}
    assert any("no rate was measured in both arms (1; 1.01)" in note for note in found.notes)


def test_what_never_came_is_said() -> None:
    def late(name: str) -> RunValues:
        seen = run(name)
        cell = msgspec.structs.replace(seen.cells[0], never={1.0: frozenset({"TTFT p95"})})
        return RunValues(seen.manifest, [cell])

    def whole(name: str) -> RunValues:
        seen = run(name)
        seen.cells[0].values[1.0]["TTFT p95"] = Value(2.0)
        return seen

    found = compare([whole("a"), whole("b"), whole("c")], [late("d"), late("e"), whole("f")])
    row = next(row for row in found.rows if row.metric == "TTFT p95")
    assert (row.verdict, row.runs) == ("not known", (3, 1))
    assert row.reason == "infinite in 0 and 2 runs: too many requests failed"
    assert next(row for row in found.rows if row.metric == "TTFT p50").verdict == "no difference"


def test_versions_are_said_and_not_refused() -> None:
    one, other = manifest("a", torch="2.13.0"), manifest("b", torch="2.14.0")
    assert versions_apart(one, other) == ["torch 2.13.0 and 2.14.0"]
    assert list(differences(one, other)) == []


def test_many_tests_are_corrected_for() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == []


# Run folders.


def written(
    folder: Path, slower: float = 1.0, rates: tuple[float, ...] = (3.0,), held: float = 1.6
) -> Path:
    """A run of one cell whose answers take `slower` times as long."""
    rng = np.random.default_rng(abs(hash(folder.name)) % 1000)
    at = int(folder.name[-1]) * 2 + (folder.name[0] > "a")
    with RunFolder.create(folder, manifest(folder.name, at=at)) as run:
        for number, rate in enumerate(rates):
            name = f"c#{number}"
            run.event(
                LevelStarted(
                    cell="c",
                    level=name,
                    purpose=LevelPurpose.SEARCH,
                    rate_per_second=rate,
                    window_seconds=60.0,
                    seed=at + 1,
                )
            )
            dues = np.arange(0.0, 60.0, 1 / rate)
            for i, due in enumerate(dues.tolist()):
                ttft, gap = (slower * one * rng.uniform(0.9, 1.1) for one in (0.3, 0.05))
                made = request(i, due, ttft=ttft, gap=gap, tokens=12)
                run.request(msgspec.structs.replace(made, level=name))
            run.finish(LevelFinished(cell="c", level=name, due=len(dues), window_seconds=60.0))
        limit = 3.5 / slower * float(rng.uniform(0.99, 1.01))
        capacity = Capacity(state="holds", held=held, limit=limit, low=3.0, high=4.0, method="law")
        run.event(CellFinished(cell="c", capacities={"chat": capacity}))
    return folder


def test_a_run_is_one_number_a_metric(tmp_path: Path) -> None:
    (cell,) = read(written(tmp_path / "a1", rates=(3.0, 2.0, 2.0000001))).cells
    assert list(cell.values) == [2.0, 3.0] and cell.left_out == 0
    assert cell.values[3.0]["TTFT p50"].value == pytest.approx(0.3, rel=0.05)
    assert {"TPOT p50", "E2E p95", "good", "output tokens/s"} <= set(cell.values[3.0])
    assert cell.limit == pytest.approx(3.5, rel=0.02)


def test_the_verb_compares_run_folders(tmp_path: Path) -> None:
    """Folders as a campaign writes them: a table, JSON, and a status for pipelines."""
    first = [str(written(tmp_path / f"a{i}", 1 + 0.01 * i)) for i in range(3)]
    second = [str(written(tmp_path / f"b{i}", 1.25 + 0.01 * i)) for i in range(3)]

    def asked(*args: str) -> Any:
        return CliRunner().invoke(app, ["compare", *args])

    done = asked(*first, "--", *second)
    assert done.exit_code == 0, done.output
    for part in (": slower (", "would have been found", "TTFT p50", "3.00/s", "3+3", "limit"):
        assert part in done.output, part
    slower = ["--fail-on", "slower"]
    assert asked(*slower, *first, "--", *second).exit_code == 1
    assert asked(*slower, *second, "--", *first).exit_code == 0
    told = asked("--json", *first, "--", *second)
    assert msgspec.json.decode(told.output)["verdict"] == "slower"
    one = asked(first[0], second[0])
    assert one.exit_code == 0 and "not known: one run an arm" in one.output
    assert "+2" in one.output, "the difference as a number"
    refused = asked(*slower, first[0], second[0])
    assert refused.exit_code != 0 and "not known" in str(refused.exception)
    refused = asked(*first)
    assert "3 runs and no `--`" in str(refused.exception)


def test_a_folder_of_runs_is_an_arm(tmp_path: Path) -> None:
    for arm, slower in (("a", 1.0), ("b", 1.3)):
        for i in range(3):
            written(tmp_path / arm / f"{arm}{i}", slower + 0.01 * i)
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 0 and ": slower (" in done.output
    with pytest.raises(BadRunFolder, match="holds no run"):
        read(tmp_path)
