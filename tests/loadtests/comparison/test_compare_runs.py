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

from crossover.cli import app
from crossover.loadtests.comparison.compare_runs import (
    CellFacts,
    RunValues,
    compare,
    read,
)
from crossover.loadtests.comparison.run_environment import differences
from crossover.loadtests.errors import BadRunFolder, NotComparable
from crossover.loadtests.records.journal_events import (
    Capacity,
    CellFinished,
    LevelFinished,
    LevelStarted,
)
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.run_folder import RunFolder
from tests.loadtests.comparison.servers_of_known_speed import (
    CAMPAIGN,
    CELL,
    MACHINE,
    Servers,
    manifest,
)
from tests.loadtests.levels.made import request

TRIALS = 60


@pytest.mark.parametrize(("sd", "runs"), [(0.02, 5), (0.07, 3)])
def test_equal_servers_are_seldom_called_different(sd: float, runs: int) -> None:
    """Some fifteen metrics a comparison: at most 5 % and what chance adds."""
    wrong = 0
    for trial in range(TRIALS):
        servers = Servers(sd, seed=trial)
        found = compare(servers.arm("a", runs), servers.arm("b", runs))
        assert len(found.rows) > 14
        wrong += found.verdict != "no difference shown"
    assert wrong <= 0.07 * TRIALS


def test_a_fifth_is_found() -> None:
    verdicts = []
    for trial in range(TRIALS):
        servers = Servers(0.02, seed=trial)
        found = compare(servers.arm("a", 3), servers.arm("b", 3, slower=1.2))
        verdicts.append(found.verdict)
    assert verdicts.count("slower") >= 0.8 * TRIALS
    assert sum(verdict in ("faster", "different") for verdict in verdicts) <= 0.05 * TRIALS
    servers = Servers(0.02, seed=1)
    back = compare(servers.arm("a", 5, slower=1.2), servers.arm("b", 5))
    limit = next(row for row in back.rows if row.metric == "estimated capacity")
    assert back.verdict == "faster" and limit.ratio is not None and limit.ratio > 1.1


def test_without_repeats_nothing_is_known() -> None:
    servers = Servers(0.02, seed=3)
    found = compare(servers.arm("a", 1), servers.arm("b", 1, slower=2.0))
    assert found.verdict == "not known"
    assert found.reason == "1 and 1 runs; each side needs 3 with the same metric"
    assert {row.verdict for row in found.rows} == {"not known"}
    row = next(row for row in found.rows if row.metric == "TPOT mean")
    assert row.ratio == pytest.approx(2.0, rel=0.1) and (row.p, row.low) == (None, None)


def run(name: str, cell: CellFacts = CELL, load: str = "1/s", **changes: Any) -> RunValues:
    return RunValues(manifest(name, **changes), {cell: {(load, "TTFT p50"): 1.0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"machine": MACHINE | {"isa": ["avx2"]}},
            "differ in instruction sets: not known and avx2. .* --allow isa",
        ),
        ({"machine": MACHINE | {"cpu_model": "Xeon"}}, "CPU: EPYC and Xeon. .* --allow cpu_model"),
        ({"machine": MACHINE | {"memory_total_bytes": 8 << 30}}, "differ in memory: 24.* and 8"),
        (
            {"campaign": CAMPAIGN | {"workload": {"preset": "code"}}},
            "differ in workload: preset 'chat' and preset 'code'",
        ),
        (
            {"campaign": CAMPAIGN | {"server": {"slots": 4, "context_tokens": 256}}},
            "differ in server: slots 8 and slots 4. .* --allow server",
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
    assert any(apart.name in note for note in compare([a], [b], allow=[apart.fact]).notes)
    with pytest.raises(NotComparable, match="differ in .*of one side must have the same"):
        compare([a, b], [run("c")], allow=[apart.fact])


def test_what_cannot_be_compared_is_refused() -> None:
    a, b = run("a"), run("b", cell=(CELL[0], "Q8_0", *CELL[2:]))
    for arms, allow, message in (
        (([a, b], [a]), (), "Run a is given 2 times"),
        (([a], [b]), (), "differ in format, 'Q4_0' and 'Q8_0'"),
        (([a], [b]), ("colour",), "--allow 'colour' is not a fact. Facts are cpu_model"),
    ):
        with pytest.raises(NotComparable, match=message):
            compare(*arms, allow=allow)
    assert compare([a], [b], allow=["format"]).verdict == "not known"


def test_what_is_left_out_is_reported() -> None:
    found = compare([run("a")], [run("b", load="1.01/s")])
    assert not found.rows and any(
        "no rate was measured on both sides" in one for one in found.notes
    )
    one, other = manifest("a", torch="2.13.0"), manifest("b", torch="2.14.0")
    assert differences(one, other) == [], "versions are what one compares"


# Run folders.


def written(folder: Path, slower: float = 1.0, rates: tuple[float, ...] = (3.0,)) -> Path:
    """A run of one cell whose answers take `slower` times as long."""
    rng = np.random.default_rng(abs(hash(folder.name)) % 1000)
    at = int(folder.name[-1]) * 2 + (folder.name[0] > "a")
    with RunFolder.create(folder, manifest(folder.name, at=at)) as run:
        for number, rate in enumerate(rates):
            name = f"c#{number}"
            run.append_event(
                LevelStarted(
                    cell="c",
                    level=name,
                    plan=LevelPlan(rate=rate, window_seconds=60.0, seed=at + 1),
                )
            )
            dues = np.arange(0.0, 60.0, 1 / rate)
            for i, due in enumerate(dues.tolist()):
                ttft, gap = (slower * one * rng.uniform(0.9, 1.1) for one in (0.3, 0.05))
                made = request(i, due, ttft=ttft, gap=gap, tokens=12)
                run.append_request(msgspec.structs.replace(made, level=name))
            run.finish_level(
                LevelFinished(cell="c", level=name, due=len(dues), window_seconds=60.0)
            )
        limit = 3.5 / slower * float(rng.uniform(0.99, 1.01))
        capacity = Capacity(
            state="confirmed",
            confirmed_rate=1.6,
            estimated_rate=limit,
            low=3.0,
            high=4.0,
            method="step_times",
        )
        run.append_event(CellFinished(cell="c", capacity=capacity))
    return folder


def test_a_run_is_one_number_a_metric(tmp_path: Path) -> None:
    (values,) = read(written(tmp_path / "a1", rates=(3.0, 2.0, 2.0000001))).values.values()
    assert list(dict.fromkeys(load for load, _ in values)) == ["3.000/s", "2.000/s", ""]
    assert values["3.000/s", "TTFT p50"] == pytest.approx(0.3, rel=0.05)
    assert {("2.000/s", one) for one in ("TPOT p50", "E2E p95", "output tokens/s")} <= set(values)
    assert values["", "estimated capacity"] == pytest.approx(3.5, rel=0.02)


def test_the_verb_compares_run_folders_and_folders_of_runs(tmp_path: Path) -> None:
    """Folders as a campaign writes them: a table, JSON, and a status for pipelines."""
    for i in range(3):
        written(tmp_path / "a" / f"a{i}", 1 + 0.01 * i)
        written(tmp_path / "b" / f"b{i}", 1.25 + 0.01 * i)
    a, b = (str(tmp_path / arm) for arm in "ab")

    def run_compare(*args: str) -> Any:
        return CliRunner().invoke(app, ["compare", *args])

    done = run_compare(a, b)
    assert done.exit_code == 0, done.output
    for part in (": slower", "TTFT p50", "3.000/s", "3+3", "estimated capacity"):
        assert part in done.output, part
    slower = ["--fail-on", "slower"]
    assert run_compare(*slower, a, b).exit_code == 1 and run_compare(*slower, b, a).exit_code == 0
    one = run_compare(f"{a}/a0", f"{b}/b0")
    assert one.exit_code == 0 and "not known: 1 and 1 runs" in one.output
    assert "+2" in one.output, "the difference as a number"
    refused = run_compare(*slower, f"{a}/a0", f"{b}/b0")
    assert refused.exit_code != 0 and "not known" in str(refused.exception)
    with pytest.raises(BadRunFolder, match="is not a run folder"):
        read(tmp_path)
