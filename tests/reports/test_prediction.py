"""What a report says of a prediction: its value, its error."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.records.events import Calibrated, CellReady, Event, PredictedRate
from loadtests.records.run_folder import EVENTS, Appender, read_events, read_manifest
from reports.render.tables import cell_records
from reports.run import read_run
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
    assert cell.capacity.estimate == measured, "a prediction is no evidence"
    (record,) = cell_records(run)
    assert record["prediction_error"] == pytest.approx(factor - 1)


def test_it_counts_for_the_slo_that_it_was_made_for(tmp_path: Path) -> None:
    folder, _ = with_prediction(tmp_path / "run", 1.2)
    own = read_run(folder).slo
    other = read_run(folder, msgspec.structs.replace(own, ttft_seconds=5.0)).cells[0]
    assert other.predicted_rate is None and other.prediction_error is None
    without = read_run(write_example_run(tmp_path / "plain", {MODEL: RUNGS[MODEL]})).cells[0]
    assert without.predicted_rate is None
