"""Engines of others beside ours in a report: the ratio, its interval, and what is shown of them."""

from __future__ import annotations

import msgspec
import pytest

from loadtests.records.events import Capacity
from reports.engines import side_by_side
from reports.findings import crossover, standing
from reports.numbers import CellNumbers, RunNumbers
from reports.render.engines import side_table
from reports.render.markdown import markdown
from reports.sentences import sentences


def other(cell: CellNumbers, factor: float | None, name: str = "vllm") -> CellNumbers:
    """The same model on an engine of others with `factor` times the capacity; None: skipped."""
    found: Capacity | None = None
    if factor is not None:
        assert cell.capacity is not None
        ends = {
            key: value * factor
            for key in ("held", "low", "estimate", "high")
            if (value := getattr(cell.capacity, key)) is not None
        }
        found = msgspec.structs.replace(cell.capacity, **ends)
    changes = {"capacity": found, "levels": cell.levels if found else ()}
    if found is None:
        changes |= {"state": "skipped", "reason": "vllm did not start", "skip_cause": "server"}
    return msgspec.structs.replace(
        cell,
        key=f"{cell.key}-{name}",
        backend=name,
        command="" if found is None else f"{name} serve <b>x</b> --port 1",
        engine_version=None if found is None else "0.9",
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def beside(run: RunNumbers) -> RunNumbers:
    first = run.cells[0]
    cells = (first, other(first, 2.0), other(first, None, "sglang"), *run.cells[1:])
    return msgspec.structs.replace(run, cells=cells)


def test_the_ratio_is_of_confirmed_rates_and_its_ends_of_both_intervals(beside: RunNumbers) -> None:
    (group,) = side_by_side(beside)
    ours, theirs, skipped = (group.rows[0], group.rows[2], group.rows[1])
    assert group.ours is ours.cell and ours.ratio is None and skipped.ratio is None
    assert theirs.cell.backend == "vllm" and theirs.ratio is not None
    found = ours.cell.capacity
    assert found is not None and found.low and found.high
    low, middle, high = theirs.ratio
    assert middle == pytest.approx(2.0)
    assert low == pytest.approx(2 * found.low / found.high)
    assert high == pytest.approx(2 * found.high / found.low)


def test_no_engine_of_others_is_no_table(run: RunNumbers) -> None:
    assert side_by_side(run) == [] and not side_table(run).rows


def test_the_report_says_who_holds_more_and_by_which_command(beside: RunNumbers) -> None:
    found = crossover(beside)
    said = [line for line in sentences(beside, found) if "vllm holds 2.0 x what llama_cpp" in line]
    assert len(said) == 1
    text = markdown(beside, found)
    assert "### Engines side by side" in text and "vllm serve <b>x</b> --port 1" in text
    rows = side_table(beside).rows
    assert [row[1].split()[0] for row in rows] == ["llama_cpp", "sglang", "vllm"]
    assert "skipped: vllm did not start" in rows[1] and "0.9" in rows[2]


def test_of_one_model_the_best_engine_is_what_this_machine_holds(run: RunNumbers) -> None:
    largest = standing(run.cells).largest
    assert largest is not None
    better = other(largest, 1.5)
    found = standing((*run.cells, better))
    assert found.largest is better
    whole = crossover(msgspec.structs.replace(run, cells=(*run.cells, better)))
    assert whole.largest is better and whole.first_not is not None
