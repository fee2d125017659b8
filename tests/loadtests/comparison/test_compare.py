"""Two runs side by side: how often equal ones are called different, which differences are found,
and what is refused.
"""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtests.comparison.compare import CellSeries, LevelSeries, Run, Verdict, compare
from loadtests.comparison.quantile_test import (
    Difference,
    Unknown,
    block_length,
    difference,
    holm,
    of_intervals,
)
from loadtests.errors import NotComparable
from loadtests.records.comparability import FACTS, differences, versions_apart
from loadtests.records.events import Capacity
from loadtests.records.schema import FORMAT_VERSION, RunManifest
from loadtests.simulation.batching import Policy, simulate
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Poisson, due_times

LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-7
)
MACHINE = {
    "cpu_model": "EPYC",
    "architecture": "x86_64",
    "logical_cores": 2,
    "allowed_cores": [0, 1],
    "memory_total_bytes": 24 << 30,
}
CAMPAIGN = {
    "slo": {"name": "chat", "ttft_seconds": 2.0, "tpot_seconds": 0.1, "target": 0.9},
    "workload": {"preset": "chat"},
    "arrivals": {"kind": "poisson"},
    "server": {"slots": 8, "context_tokens": 256},
}
CELL = {
    "model": "smollm2-135m",
    "format": "Q4_0",
    "backend": "llama_cpp",
    "hardware": "",
    "url": "",
    "workload": "",
}


def manifest(name: str, machine=MACHINE, campaign=CAMPAIGN, **versions: str) -> RunManifest:
    return RunManifest(
        format_version=FORMAT_VERSION,
        run_id=name,
        created="",
        crossover_version="0.1.0",
        git_commit=None,
        command=[],
        campaign=campaign,
        campaign_text="",
        cells=[{"key": "c", **CELL, "url": None}],
        server_facts=machine,
        client_facts=machine,
        versions=versions,
        seed=1,
    )


def level(rate: float | None, seed: int, slower: float = 1.0, count: int = 300) -> LevelSeries:
    """A level of continuous batching as a simulated server of known speed would give it: latencies
    that remember each other.
    """
    rng = np.random.default_rng(seed)
    pairs = np.column_stack([rng.integers(20, 300, count), rng.integers(8, 40, count)])
    if rate is None:
        due = np.arange(count) * 20.0
    else:
        due = due_times(Poisson(), rate, 2 * count / rate, seed)[:count]
    scaled = msgspec.structs.replace(
        LAW,
        base_seconds=LAW.base_seconds * slower,
        row_seconds=LAW.row_seconds * slower,
        prompt_token_seconds=LAW.prompt_token_seconds * slower,
    )
    played = simulate(scaled, Policy(slots=8), due, pairs)
    noise = np.exp(0.03 * rng.normal(size=count))
    times = {
        "TTFT": played.ttft_seconds * noise,
        "TPOT": played.tpot_seconds * noise,
        "E2E": (played.last_token - played.due) * noise,
    }
    return LevelSeries(rate, times)


def run(
    name: str, levels: list[LevelSeries], capacity: Capacity | None = None, facts=CELL, **changes
) -> Run:
    return Run(manifest(name, **changes), [CellSeries("c", facts, levels, capacity, 0.95)])


def measured(name: str, seed: int, slower: float = 1.0) -> Run:
    return run(name, [level(None, seed, slower, 60), level(2.2, seed + 2, slower, 250)])


def test_equal_runs_are_seldom_called_different() -> None:
    """100 pairs of the same thing, twelve tests each, near capacity too, without a noise floor."""
    wrong = sum(
        compare(measured("a", 10 * i), measured("b", 10 * i + 5000), floor=0.0).verdict
        != "no difference"
        for i in range(100)
    )
    assert wrong <= 8


def test_a_tenth_is_found() -> None:
    found = [
        compare(measured("a", 10 * i), measured("b", 10 * i + 5000, slower=1.10)) for i in range(10)
    ]
    assert [one.verdict for one in found] == ["slower"] * 10
    tpot = next(row for row in found[0].rows if row.load is None and row.metric == "TPOT p50")
    assert (
        tpot.difference is not None
        and tpot.difference.low < 1.10 < tpot.difference.high
        and tpot.verdict == "slower"
    )
    assert compare(measured("a", 7, slower=1.10), measured("b", 5007)).verdict == "faster"


def test_the_interval_covers_the_true_ratio() -> None:
    """A quantile of strongly correlated series (an AR(1) with a memory of ten) whose true ratio is
    known.
    """
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)

        def walk(rng: np.random.Generator = rng) -> np.ndarray:
            x = np.zeros(600)
            for i in range(1, 600):
                x[i] = 0.82 * x[i - 1] + rng.normal()
            return np.exp(0.2 * x)

        found = difference([walk()], [1.2 * walk()], 0.5, resamples=200)
        covered += isinstance(found, Difference) and found.low <= 1.2 <= found.high
    assert covered >= 90


def test_independent_values_would_be_taken_for_too_much() -> None:
    x = np.repeat(np.random.default_rng(1).random(30), 20)  # 600 values that are 30
    assert block_length(x) > 20 and block_length(np.random.default_rng(2).random(600)) < 15
    found = difference([np.linspace(1.0, 2.0, 200)], [np.ones(200)], 0.5)
    assert isinstance(found, Unknown) and "share their fate" in found.reason


def test_what_never_came_and_what_is_too_little_is_said() -> None:
    late = np.array([0.1 + i % 7 for i in range(80)] + [math.inf] * 20)
    assert isinstance(difference([late], [late], 0.5), Difference)
    assert isinstance(difference([late], [late], 0.95), Unknown)
    few = difference([np.ones(8)], [np.ones(100)], 0.5)
    assert isinstance(few, Unknown) and few.reason == "8 requests are too few"
    assert isinstance(difference([np.ones(40)], [np.ones(40)], 0.95), Unknown)


def test_noise_hides_what_is_smaller_than_it() -> None:
    a, b, repeat = (
        run(name, [level(None, seed, slower, 60)])
        for name, seed, slower in (("a", 3, 1.0), ("b", 5, 1.1), ("again", 7, 1.15))
    )
    assert compare(a, b).verdict == "slower"
    # The machine itself is off by 15 % from run to run.
    found = compare(a, b, noise=[repeat])
    assert found.verdict == "no difference"
    row = next(row for row in found.rows if row.metric == "TPOT p50" and row.load is None)
    assert (
        row.noise_pairs == 1
        and row.noise == pytest.approx(0.15, abs=0.03)
        and row.reason == "within the noise"
    )
    twice = run("a", [level(None, 3, count=60), level(None, 4, 1.2, 60)])
    found = compare(twice, run("b", [level(None, 5, 1.1, 60)]))
    assert next(row for row in found.rows if row.metric == "TPOT p50").noise == pytest.approx(
        0.2, abs=0.04
    ), "levels measured twice count"


def test_capacities_are_compared_by_their_intervals() -> None:
    def has(low: float, middle: float, high: float) -> Capacity:
        return Capacity(
            low=low,
            high=high,
            estimate=middle,
            status="resolved",
            holds_at_any_rate=True,
            reason="",
        )

    def verdict(a: Capacity, b: Capacity) -> Verdict:
        (row,) = [
            row
            for row in compare(run("a", [level(1.0, 1)], a), run("b", [level(1.0, 2)], b)).rows
            if row.metric == "capacity"
        ]
        return row.verdict

    assert verdict(has(0.9, 1.0, 1.1), has(1.3, 1.4, 1.5)) == "faster"
    assert verdict(has(0.9, 1.0, 1.1), has(0.6, 0.7, 0.8)) == "slower"
    assert verdict(has(0.7, 1.0, 1.4), has(0.9, 1.2, 1.6)) == "no difference"
    none = Capacity(
        low=0.0,
        high=0.0,
        estimate=0.0,
        status="none",
        holds_at_any_rate=False,
        reason="single-stream requests broke it",
    )
    assert verdict(none, has(0.9, 1.0, 1.1)) == "too few"
    found = of_intervals((0.9, 1.0, 1.1), (0.9, 1.0, 1.1), 0.95)
    assert found.p == pytest.approx(1.0) and found.low < 1 < found.high


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    a, b = run("a", [level(1.0, 1)]), run("b", [level(1.0, 2)], **changes)
    with pytest.raises(NotComparable, match=message):
        compare(a, b)
    (apart,) = differences(a.manifest, b.manifest)
    found = compare(a, b, allow=[apart.fact])
    assert any(apart.name in note for note in found.notes)
    with pytest.raises(NotComparable, match="differ in"):
        compare(a, a, noise=[b])


def test_cells_are_matched_by_what_they_are() -> None:
    a, b = run("a", [level(1.0, 1)]), run("b", [level(1.0, 2)], facts=CELL | {"format": "Q8_0"})
    with pytest.raises(NotComparable, match="differ in format, 'Q4_0' and 'Q8_0'"):
        compare(a, b)
    assert compare(a, b, allow=["format"]).verdict == "no difference"
    with pytest.raises(NotComparable, match="--allow 'colour' is no fact; there are cpu_model"):
        compare(a, b, allow=["colour"])
    assert {"format", "slots", "cpu_model", "workload"} <= set(FACTS)


def test_rates_that_only_one_run_measured_are_left_out_and_said() -> None:
    found = compare(
        run("a", [level(None, 1, count=60), level(1.0, 1)]),
        run("b", [level(None, 2, count=60), level(1.3, 2)]),
    )
    assert {row.load for row in found.rows} == {None}
    assert any(
        "no rate was measured in both (1; 1.3)" in note and "campaign repeat" in note
        for note in found.notes
    )
    near = compare(run("a", [level(1.0, 1)]), run("b", [level(1.01, 2)]))
    assert {row.load for row in near.rows if row.metric != "capacity"} == {1.0}


def test_versions_are_said_and_not_refused() -> None:
    one, other = manifest("a", torch="2.13.0"), manifest("b", torch="2.14.0")
    assert (
        versions_apart(one, other) == ["torch 2.13.0 and 2.14.0"]
        and list(differences(one, other)) == []
    )


def test_many_tests_are_corrected_for() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == []


def test_the_verb_compares_run_folders(tmp_path: Path) -> None:
    """Folders as a campaign writes them: a table, JSON, and a status for pipelines."""
    import typer
    from typer.testing import CliRunner

    from loadtests.cli import compare as verb
    from tests.reports.example_run import RUNGS, Law, write_example_run

    law, rates = RUNGS["smollm2-135m"]
    worse = Law(law.base * 1.2, law.row * 1.2, law.prompt * 1.2)
    first = write_example_run(tmp_path / "a", {"smollm2-135m": (law, rates)})
    second = write_example_run(tmp_path / "b", {"smollm2-135m": (worse, rates)})
    runner, app = CliRunner(), typer.Typer()
    app.command()(verb)
    done = runner.invoke(app, [str(first), str(second)])
    assert done.exit_code == 0, done.output
    assert ": slower" in done.output and "TTFT p50" in done.output and "2.40/s" in done.output
    assert runner.invoke(app, [str(first), str(second), "--fail-on", "slower"]).exit_code == 1
    assert runner.invoke(app, [str(second), str(first), "--fail-on", "slower"]).exit_code == 0
    told = runner.invoke(app, [str(first), str(first), "--json", "--fail-on", "different"])
    assert told.exit_code == 0 and msgspec.json.decode(told.output)["verdict"] == "no difference"
