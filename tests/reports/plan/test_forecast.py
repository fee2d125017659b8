"""The forecast: hours of a month, peaks, growth, traces, and arrivals at any rate."""

from pathlib import Path

import numpy as np
import pytest

from loadtests.workload.arrivals import OnOff, Poisson
from reports.errors import ReportError
from reports.plan.forecast import (
    DAYS,
    HOURS_A_MONTH,
    Forecast,
    RecordedShape,
    Shape,
    day_loads,
    sized_rate,
    trace_loads,
)


@pytest.mark.parametrize("day", DAYS)
@pytest.mark.parametrize("weekend", [1.0, 0.2])
def test_a_curve_has_the_rate_that_is_asked_for(day: str, weekend: float) -> None:
    by_peak = day_loads(DAYS[day], weekend, peak_rate=3.0)
    assert by_peak[0].rate == pytest.approx(3.0)
    assert sum(load.hours for load in by_peak) == pytest.approx(HOURS_A_MONTH)
    by_mean = day_loads(DAYS[day], weekend, mean_rate=3.0)
    mean = sum(load.rate * load.hours for load in by_mean) / HOURS_A_MONTH
    assert mean == pytest.approx(3.0)
    assert [load.rate for load in by_mean] == sorted((x.rate for x in by_mean), reverse=True)


def test_the_violation_budget_excuses_the_busiest_hours() -> None:
    loads = day_loads(tuple(float(hour) for hour in range(1, 25)), peak_rate=24.0)
    assert sized_rate(loads, 0.0) == pytest.approx(24.0)
    assert sized_rate(loads, 0.04) == pytest.approx(24.0)
    assert sized_rate(loads, 1 / 24) == pytest.approx(23.0)
    assert sized_rate(loads, 0.5) == pytest.approx(12.0)


def test_growth_moves_every_hour() -> None:
    forecast = Forecast(loads=day_loads((1.0, 2.0), peak_rate=2.0), growth_per_month=0.5, months=3)
    assert forecast.at(2)[0].rate == pytest.approx(4.5)
    first = 3600 * HOURS_A_MONTH * 1.5
    assert forecast.requests == pytest.approx(first * (1 + 1.5 + 2.25))
    assert forecast.scaled(2.0).at(0)[0].rate == pytest.approx(4.0)


def write_trace(path: Path, seconds: np.ndarray) -> str:
    rows = [f'{{"prompt_tokens": 50, "output_tokens": 10, "seconds": {t}}}' for t in seconds]
    path.write_text("\n".join(rows))
    return str(path)


def test_a_trace_is_its_windows_and_its_busiest_window_the_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    quiet, busy = rng.uniform(0, 600, 60), rng.uniform(600, 1200, 300)
    quiet[0] = 0.0
    path = write_trace(tmp_path / "t.jsonl", np.concatenate([quiet, busy, [1800.0]]))
    loads, shape = trace_loads(path, 600.0, times=2.0)
    assert [load.rate for load in loads] == pytest.approx([1.0, 0.2, 0.0])
    assert sum(load.hours for load in loads) == pytest.approx(HOURS_A_MONTH)
    for rate in (0.1, 0.5, 2.0):
        times = shape.times(rate, 1000, seed=1)
        assert len(times) / times[-1] == pytest.approx(rate, rel=0.15)
        assert np.all(np.diff(times) >= 0)
    with pytest.raises(ReportError, match="60 requests|too few"):
        trace_loads(write_trace(tmp_path / "few.jsonl", quiet[:20]), 600.0)


def test_a_thinned_window_keeps_its_bursts() -> None:
    stamps = np.repeat(np.arange(0.0, 600.0, 60.0), 30) + np.tile(np.arange(30) / 30, 10)
    times = RecordedShape(stamps, 600.0).times(0.25, 500, seed=3)
    assert np.all(times % 60.0 < 1.0)


def test_bursts_come_at_the_rate_that_is_asked_for() -> None:
    process = OnOff(on_seconds=10.0, off_seconds=30.0)
    slow = Shape(process).times(0.5, 2000, seed=2)
    assert len(slow) / slow[-1] == pytest.approx(0.5, rel=0.25)
    # Too quick to hold some cycles: the rate of the on phase throughout.
    quick = Shape(process).times(1000.0, 2000, seed=2)
    assert len(quick) / quick[-1] == pytest.approx(4000.0, rel=0.1)
    assert Shape(Poisson()).is_scale_free and not Shape(process).is_scale_free
