"""The shipped constants are those of the fit, and their errors have not grown."""

import csv
import gzip

import msgspec
import numpy as np
import pytest

from crossover.reports.devices.device_step_times import DeviceConstants
from tests.bench.device_fit import fit
from tests.bench.device_fit.facts import DATA
from tests.bench.device_fit.published import published_rows, published_table

# MAPE in percent with each device left out, rates for decode and prompts: at most these.
MOST = {
    "decode|gddr|llama": 7.7,
    "decode|apple|llama": 10.0,
    "decode|hbm|llama": 14.9,
    "decode|uma|llama": 17.8,
    "decode|gddr|other": 33.0,
    "decode|hbm|other": 43.0,
    "prefill|apple|llama": 8.3,
    "prefill|gddr|llama": 22.1,
    "prefill|hbm|llama": 25.0,
    "prefill|uma|llama": 43.5,
    "tpot|hbm|serve": 14.7,
    "ttft|hbm|serve": 68.0,
}


@pytest.fixture(scope="module")
def left_out_errors() -> dict[tuple[str, str], float]:
    text = gzip.decompress(DATA.joinpath("errors.csv.gz").read_bytes()).decode()
    rows = csv.DictReader(text.splitlines())
    return {(row["id"], row["metric"]): float(row["ln_error"]) for row in rows}


def test_errors_by_class_are_those_of_the_rows_and_have_not_grown(
    left_out_errors: dict[tuple[str, str], float],
) -> None:
    rows, left_out = published_rows()
    left_out.pop("a CPU: one calibrates it")
    assert len(rows) == len(left_out_errors) == 3_000 > 20 * sum(left_out.values())
    errors = fit.class_errors(rows, np.array([left_out_errors[r.id, r.metric] for r in rows]))
    assert errors == fit.fitted().errors
    assert {name: one.mape for name, one in errors.items() if one.mape > MOST.get(name, 99)} == {}
    inside = sum(one.covered * one.rows for one in errors.values()) / len(rows)
    assert 90 <= inside <= 97  # of what the 90 % intervals say


def test_shipped_constants_are_those_of_the_fit_s_classes() -> None:
    shipped = msgspec.json.decode(fit.SHIPPED_FILE.read_bytes(), type=dict[str, DeviceConstants])
    assert shipped == fit.shipped(fit.fitted())


def test_fitted_constants_are_where_the_fit_ends() -> None:
    """One step of Gauss-Newton from them moves none by more than their last digit."""
    rows, _ = published_rows()
    logs = fit.fitted().logs
    problem = fit.Problem(rows, frozenset(logs))
    shipped = np.array([logs[node] for node in problem.nodes])
    curve, slope = problem.curve_and_slope(shipped)
    assert np.abs(np.linalg.solve(curve, -slope)).max() < 2 * 10**-fit.DIGITS


def test_a_device_left_out_of_the_fit_is_predicted_within_the_stated_errors(
    left_out_errors: dict[tuple[str, str], float],
) -> None:
    logs = fit.fitted().logs
    problem = fit.Problem(published_rows()[0], frozenset(logs))
    names = np.array([row.case.chip.name for row in problem.rows])
    start = np.array([logs[node] for node in problem.nodes])
    own = np.flatnonzero(names == "RTX 4080")
    rest = problem.part(np.flatnonzero(names != "RTX 4080")).solve(start)
    part = problem.part(own)
    for row, error in zip(part.rows, part.predicted(rest) - part.seen, strict=True):
        assert error == pytest.approx(left_out_errors[row.id, row.metric], abs=0.005)


def test_every_published_row_has_its_source() -> None:
    assert all(line["source"] for line in published_table())
