"""The arithmetic of the side-by-side benchmarks, a series that goes on, a child that dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.bench.paired import Figures, Line, Series, ratios, table, take_turns
from tests.bench.peers.jobs import Child


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
