"""The arithmetic of the side-by-side benchmarks: ratios of pairs, figures from token times, what a
static batch must wait for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.bench.paired import Figures, Line, Series, ratios, table, take_turns
from tests.bench.peers.jobs import Child, figures, make_job, static_batches

JOB = {"arrivals": [0.0, 1.0], "prompts": [[1], [2]], "outputs": [3, 2], "batch": 2}


def test_contestants_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def player(name: str) -> dict[str, float | None]:
        order.append(name)
        return {"rate": float(len(order))}

    runs = take_turns({"a": lambda _: player("a"), "b": lambda _: player("b")}, 2)
    assert order == ["a", "b", "b", "a"]
    assert runs == {"a": [{"rate": 1.0}, {"rate": 4.0}], "b": [{"rate": 2.0}, {"rate": 3.0}]}


def test_a_ratio_is_of_pairs_and_leaves_out_rounds_that_did_not_measure() -> None:
    ours: list[Figures] = [{"x": 10.0}, {"x": 30.0}, {"x": None}]
    theirs: list[Figures] = [{"x": 5.0}, {"x": 10.0}, {"x": 1.0}]
    assert ratios(ours, theirs, "x") == [2.0, 3.0]
    text = table({"we": ours, "they": theirs}, "we", (Line("x", "ms"), Line("never", "ms")))
    assert "ratio 2.50 (2.00-3.00, 2 pairs)" in text and "never" not in text


def test_figures_count_from_arrivals_and_decode_only_while_all_decode() -> None:
    steps = [[0.5 + 0.1 * step for step in range(20)], [1.5 + 0.1 * step for step in range(20)]]
    found = figures({**JOB, "outputs": [20, 20]}, steps)
    assert found["output_tokens_per_second"] == pytest.approx(40 / 3.4)
    assert found["ttft_p50_seconds"] == pytest.approx(0.5) and found[
        "ttft_max_seconds"
    ] == pytest.approx(0.5)
    assert found["decode_tokens_per_second"] == pytest.approx(
        20, rel=0.15
    )  # two rows, a step each 0.1 s
    with pytest.raises(RuntimeError, match=r"\[20, 19\] tokens came back"):
        figures({**JOB, "outputs": [20, 20]}, [steps[0], steps[1][:-1]])


def test_a_static_batch_takes_who_is_there_and_ends_with_its_longest() -> None:
    batches: list[tuple[int, int]] = []

    def run_batch(prompts: list[list[int]], output_tokens: int, clock: object) -> list[float]:
        batches.append((len(prompts), output_tokens))
        return [float(step) for step in range(output_tokens)]

    job = {
        "arrivals": [0.0, 0.0, 0.0, 0.02],
        "prompts": [[1], [2], [3], [4]],
        "outputs": [1, 5, 2, 4],
        "batch": 2,
    }
    assert [len(each) for each in static_batches(job, run_batch)] == [1, 5, 2, 4]
    assert batches == [(2, 5), (1, 2), (1, 4)]  # the third comes alone: the fourth has not arrived


def test_uneven_answers_have_the_asked_mean() -> None:
    job = make_job(16, 8, 64, 8, 0.25, 1000, seed=1, spread=0.75)
    assert (
        sum(job["outputs"]) == 16 * 64 and min(job["outputs"]) == 19 and max(job["outputs"]) == 109
    )
    assert job["arrivals"][:3] == [0.0, 0.25, 0.5] and len(job["prompts"][5]) == 8


def test_a_series_goes_on_only_with_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    for sitting in range(2):
        series = Series.opened(file, {"model": "m", "cores": (0,)}, {"sitting": sitting})
        series.add("8 once", {"a": [{"x": float(sitting)}]})
        series.save(file)
    found = Series.opened(file, {"model": "m", "cores": [0]}, {})
    assert found.runs == {"8 once": {"a": [{"x": 0.0}, {"x": 1.0}]}} and len(found.machines) == 3
    with pytest.raises(ValueError, match="other settings \\(model\\)"):
        Series.opened(file, {"model": "n", "cores": [0]}, {})


def test_a_child_answers_and_says_why_it_died() -> None:
    code = (
        "from tests.bench.peers.jobs import answer_jobs\n"
        "def load(settings):\n    print('chatter')\n    return {'loaded': settings['x']}, lambda "
        "job: 1 / job['by']\n"
        "answer_jobs(load)"
    )
    with Child([sys.executable, "-c", code], {"x": 7}, [min(os.sched_getaffinity(0))]) as child:
        assert child.facts == {"loaded": 7}
        assert child.ask({"by": 4}) == 0.25
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            child.ask({"by": 0})
