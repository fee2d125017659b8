"""What a report says of a prediction: beside what was measured, tagged, never inside it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from loadtests.records.events import PredictedRate
from loadtests.simulation.calibration import prediction_ratio
from models import formatting
from reports.charts.crossover_map import HEIGHT, map_rows
from reports.findings import crossover
from reports.numbers import CellNumbers, RunNumbers
from reports.render.page import cards
from reports.render.tables import cell_records, predicted_cell, state_words
from reports.run import read_run
from reports.sentences import headline, sentences
from tests.reports.example_run import PREDICTED, RUNGS, write_example_run

MODEL = "smollm2-135m"


def with_prediction(folder: Path, low: float, middle: float, high: float) -> CellNumbers:
    rungs = {MODEL: RUNGS[MODEL]}
    write_example_run(folder, rungs, predicted={MODEL: (low, middle, high)})
    (cell,) = read_run(folder).cells
    return cell


def test_it_is_in_no_measured_figure(tmp_path: Path) -> None:
    """A prediction ten times too high, one ten times too low: the same capacity, to the digit."""
    high = with_prediction(tmp_path / "high", 15, 20, 25)
    low = with_prediction(tmp_path / "low", 0.1, 0.2, 0.3)
    assert high.capacity == low.capacity and high.capacity is not None
    assert state_words(high) == state_words(low)


def test_it_is_shown_with_its_interval_and_its_ratio_to_what_was_measured(run: RunNumbers) -> None:
    cell = next(cell for cell in run.cells if cell.model == "llama-3.2-1b")
    low, middle, high = PREDICTED["llama-3.2-1b"]
    assert cell.predicted == PredictedRate(rate=middle, low=low, high=high)
    assert cell.capacity is not None
    ratio = prediction_ratio(cell.predicted.rate, cell.capacity)
    assert ratio is not None and cell.prediction_ratio == ratio
    beside = (
        f"0.50 requests/s (0.30–0.80), {formatting.significant(ratio[1])} x what was measured "
        f"({formatting.interval(ratio[0], ratio[2])})"
    )
    assert predicted_cell(cell) == beside.replace("), ", "); ", 1)
    found = crossover(run)
    said = next(text for text in sentences(run, found) if text.startswith("Predicted"))
    assert f"Llama-3.2-1B Q4_0 {beside}" in said
    assert "predicted" not in headline(run, found)
    card = next(one for one in cards(run, found) if one.source == "predicted")
    assert card.value == "0.50 requests/s" and "interval 0.30–0.80/s" in card.note
    columns = {row["key"]: row for row in map_rows(run.cells).columns}
    column = columns[cell.key]
    shown = (column["predicted_low"], column["predicted"], column["predicted_high"])
    assert shown == (low, middle, high)
    assert column["floor"] == cell.held and column["label"] == "0.13/s"


def test_steps_that_were_slower_under_load_are_said_beside_the_ratio(run: RunNumbers) -> None:
    cell = next(cell for cell in run.cells if cell.model == "llama-3.2-1b")
    slow = predicted_cell(msgspec.structs.replace(cell, speed=0.8))
    assert slow.endswith("; steps under load took 1.2 x what its calibration saw")
    for speed in (0.97, None):
        assert "under load" not in predicted_cell(msgspec.structs.replace(cell, speed=speed))


def test_a_word_in_a_column_stands_beside_the_marks_of_its_levels(run: RunNumbers) -> None:
    rows = map_rows(run.cells)

    def pixels(rate: float) -> float:
        return HEIGHT * math.log(rate / rows.bottom) / math.log(rows.top / rows.bottom)

    for cell, column in zip(run.cells, rows.columns, strict=True):
        place = pixels(column["beside_levels"])
        assert 10 < place < HEIGHT - 10
        assert all(abs(place - pixels(level.rate_per_second or 0)) > 20 for level in cell.loaded)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_the_ratio_has_the_side_of_the_error(tmp_path: Path, factor: float) -> None:
    cell = with_prediction(tmp_path / "plain", 1, 1, 1)
    assert cell.capacity is not None and cell.capacity.estimate is not None
    middle = factor * cell.capacity.estimate
    cell = with_prediction(tmp_path / "run", middle, middle, middle)
    (record,) = cell_records(read_run(tmp_path / "run"))
    low, high = (record[f"predicted_over_measured_{name}"] for name in ("low", "high"))
    assert record["predicted_over_measured"] == pytest.approx(factor)
    assert low < factor < high


def test_it_counts_for_the_slo_that_it_was_made_for(tmp_path: Path) -> None:
    own = read_run(write_example_run(tmp_path / "run", {MODEL: RUNGS[MODEL]}))
    assert own.cells[0].predicted is not None
    looser = msgspec.structs.replace(own.slo, ttft_seconds=5.0)
    other = read_run(tmp_path / "run", looser).cells[0]
    assert other.predicted is None and other.prediction_ratio is None
    folder = write_example_run(tmp_path / "plain", {MODEL: RUNGS[MODEL]}, predicted={})
    assert read_run(folder).cells[0].predicted is None


def test_a_prediction_of_no_rate_is_said(tmp_path: Path) -> None:
    cell = with_prediction(tmp_path / "run", 0, 0, 0)
    assert predicted_cell(cell) == "at no rate"
    assert map_rows([cell]).columns[0]["predicted"] is None
