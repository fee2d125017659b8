"""What a report says of a prediction: its value, its error, where an interval leans on it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.records.events import Calibrated, CellReady, Event, PredictedRate
from loadtests.records.run_folder import EVENTS, Appender, read_events, read_manifest
from models import formatting
from reports.numbers import CapacityNumbers
from reports.render.tables import cell_records
from reports.run import read_run
from reports.warnings import leans
from tests.reports.example_run import RUNGS, cell_key, write_example_run

MODEL = "smollm2-135m"


def with_prediction(folder: Path, factor: float, **changes: Any) -> tuple[Path, float]:
    """One rung, with a calibration that predicted `factor` times what its levels say."""
    write_example_run(folder, {MODEL: RUNGS[MODEL]}, **changes)
    measured = read_run(folder).cells[0].capacity.estimate
    assert measured is not None
    name = read_manifest(folder).campaign["slo"]["name"]
    events = read_events(folder).records
    (folder / EVENTS).unlink()
    out: Appender[Event] = Appender(folder / EVENTS)
    for event in events:
        out.append(event)
        if isinstance(event, CellReady):
            out.append(
                Calibrated(
                    unix_seconds=event.unix_seconds,
                    cell=cell_key(MODEL),
                    spent_seconds=9.0,
                    rates={name: PredictedRate(rate=factor * measured)},
                )
            )
    out.close()
    return folder, measured


@pytest.mark.parametrize("factor", [1.2, 0.7])
def test_a_prediction_is_shown_with_its_error_and_sign(tmp_path: Path, factor: float) -> None:
    folder, measured = with_prediction(tmp_path / "run", factor)
    run = read_run(folder)
    (cell,) = run.cells
    assert cell.predicted_rate == pytest.approx(
        factor * measured
    ) and cell.prediction_error == pytest.approx(factor - 1)
    assert cell.measured_only is not None and cell.measured_only.estimate == pytest.approx(measured)
    assert cell.capacity.estimate == pytest.approx(measured, rel=0.1), "many levels outweigh it"
    (record,) = cell_records(run)
    assert record["prediction_error"] == pytest.approx(factor - 1) and record[
        "measured_only_per_second"
    ] == pytest.approx(measured)


def test_it_counts_for_the_slo_that_it_was_made_for(tmp_path: Path) -> None:
    folder, _ = with_prediction(tmp_path / "run", 1.2)
    own = read_run(folder).slo
    other = read_run(folder, msgspec.structs.replace(own, ttft_seconds=5.0)).cells[0]
    assert (
        other.predicted_rate is None
        and other.measured_only is None
        and other.prediction_error is None
    )
    without = read_run(write_example_run(tmp_path / "plain", {MODEL: RUNGS[MODEL]})).cells[0]
    assert without.predicted_rate is None


def test_an_interval_that_leans_on_it_is_a_warning(tmp_path: Path) -> None:
    """Few requests a level: the prediction makes the interval; many: it hardly matters."""
    few, _ = with_prediction(tmp_path / "few", 1.0, window=20.0)
    many, _ = with_prediction(tmp_path / "many", 1.0)
    warnings = {warning.code: warning for warning in read_run(few).warnings}
    alone = read_run(few).cells[0].measured_only
    assert alone is not None
    words = formatting.interval(alone.low, alone.high)
    assert f"by the levels alone, in requests/s: SmolLM2-135M {words}" in (
        warnings["LeansOnPrediction"].text
    )
    assert "LeansOnPrediction" not in {warning.code for warning in read_run(many).warnings}


def test_it_leans_where_the_levels_alone_give_no_interval(tmp_path: Path) -> None:
    folder, _ = with_prediction(tmp_path / "run", 1.0)
    (cell,) = read_run(folder).cells
    unknown = CapacityNumbers("unresolved")
    assert not leans(cell) and leans(msgspec.structs.replace(cell, measured_only=unknown))
