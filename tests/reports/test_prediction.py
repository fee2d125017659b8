"""What a report says of a prediction: its value, its error and sign, and where an interval leans on it."""

from pathlib import Path

import msgspec
import pytest

from loadtests.calibrate import Prediction
from loadtests.records import Event
from loadtests.store import EVENTS, Appender, read_events, read_manifest
from reports.capacity import read_run
from reports.tables import cell_records
from tests.reports.example_run import RUNGS, cell_key, write_example_run

MODEL = "smollm2-135m"


def with_prediction(folder: Path, factor: float) -> tuple[Path, float]:
    """The example run of one rung with a calibration on record that predicted `factor` times what its levels say."""
    write_example_run(folder, {MODEL: RUNGS[MODEL]})
    measured = read_run(folder).cells[0].capacity.estimate
    assert measured is not None
    name = read_manifest(folder).campaign["promise"]["name"]
    made = Prediction(spent_seconds=9.0, rates={name: factor * measured})
    events = read_events(folder).records
    (folder / EVENTS).unlink()
    out: Appender[Event] = Appender(folder / EVENTS)
    for event in events:
        out.append(event)
        if event.kind == "cell_ready":
            out.append(Event(kind="calibrated", unix_seconds=event.unix_seconds, cell=cell_key(MODEL), detail=msgspec.to_builtins(made)))
    out.close()
    return folder, measured


@pytest.mark.parametrize("factor", [1.2, 0.7])
def test_a_prediction_is_shown_with_its_error_and_sign(tmp_path: Path, factor: float) -> None:
    folder, measured = with_prediction(tmp_path / "run", factor)
    run = read_run(folder)
    (cell,) = run.cells
    assert cell.predicted_rate == pytest.approx(factor * measured) and cell.prediction_error == pytest.approx(factor - 1)
    assert cell.measured_only is not None and cell.measured_only.estimate == pytest.approx(measured)
    assert cell.capacity.estimate == pytest.approx(measured, rel=0.1), "many levels outweigh it"
    (record,) = cell_records(run)
    assert record["prediction_error"] == pytest.approx(factor - 1) and record["measured_only_per_second"] == pytest.approx(measured)


def test_it_counts_for_the_promise_that_it_was_made_for(tmp_path: Path) -> None:
    folder, _ = with_prediction(tmp_path / "run", 1.2)
    own = read_run(folder).promise
    other = read_run(folder, msgspec.structs.replace(own, ttft_seconds=5.0)).cells[0]
    assert other.predicted_rate is None and other.measured_only is None and other.prediction_error is None
    without = read_run(write_example_run(tmp_path / "plain", {MODEL: RUNGS[MODEL]})).cells[0]
    assert without.predicted_rate is None


def test_an_interval_that_leans_on_it_is_a_doubt(tmp_path: Path) -> None:
    folder, _ = with_prediction(tmp_path / "run", 1.0)
    assert "LeansOnPrediction" not in {doubt.name for doubt in read_run(folder).doubts}
    from reports.doubts import _leans
    from reports.numbers import CapacityNumbers

    cell = read_run(folder).cells[0]
    wide = msgspec.structs.replace(
        cell, measured_only=CapacityNumbers("interval", 0.5, 1.0, 4.0), capacity=CapacityNumbers("interval", 0.9, 1.0, 1.2)
    )
    none = msgspec.structs.replace(wide, measured_only=CapacityNumbers("unresolved"))
    assert _leans(wide) and _leans(none) and not _leans(msgspec.structs.replace(wide, measured_only=wide.capacity))
