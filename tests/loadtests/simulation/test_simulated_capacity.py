"""The simulated capacity against long runs, and its error against its own spread."""

import numpy as np
import pytest

from loadtests.errors import LoadError
from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.simulation import old_simulated_capacity as simulated_capacity
from loadtests.simulation.batching import Array, Policy, simulate
from loadtests.simulation.old_simulated_capacity import _Server, predict
from loadtests.simulation.step_replay import Residuals
from loadtests.workload.arrivals import Diurnal, Gamma, OnOff, Poisson, due_times
from tests.loadtests.simulation.step_laws import LAWS


def test_capacity_is_where_the_share_crosses_the_target():
    rng = np.random.default_rng(3)
    pairs = np.column_stack([rng.integers(20, 400, 3000), rng.integers(5, 100, 3000)])
    slo = Slo("x", 1.0, 0.08, target=0.95)
    found = predict(LAWS[0], Policy(), pairs, slo, seed=1)
    assert found.single_stream_share == 1.0 and found.rate > 0.3
    shares = []
    for factor in (0.9, 1.1):
        due = due_times(Poisson(), found.rate * factor, 3000 / (found.rate * factor), 77)
        count = min(len(due), 3000)
        shares.append(
            simulate(LAWS[0], Policy(), due[:count], pairs[:count]).good(slo)[300:].mean()
        )
    assert shares[0] > 0.95 > shares[1]


def test_an_slo_costs_throughput_and_burstiness_costs_more():
    rng = np.random.default_rng(3)
    pairs = np.column_stack([rng.integers(20, 400, 8000), rng.integers(5, 100, 8000)])
    rates = [
        predict(LAWS[0], Policy(), pairs, Slo("x", ttft, 0.2, target=0.9), seed=1).rate
        for ttft in (0.3, 0.6, 2.0)
    ]
    assert rates[0] < rates[1] < rates[2]
    bursty = predict(
        LAWS[0], Policy(), pairs, Slo("x", 0.6, 0.2, target=0.9), seed=1, arrivals=Gamma(3.0)
    ).rate
    assert bursty < 0.85 * rates[1]


def dispersion(due: Array, bin_seconds: float) -> float:
    """Variance over mean of the counts in bins."""
    counts, _ = np.histogram(due, np.arange(0.0, due[-1], bin_seconds))
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("rate", [0.1, 1.0, 10.0])
def test_the_arrivals_are_of_the_process_at_the_rate_that_is_asked_for(rate: float) -> None:
    """Periods of 10 s on and 30 s off stay so long at every rate: the index of dispersion of counts
    in 20 s is that of the process, not that of a process sped up.
    """
    process = OnOff(10.0, 30.0)
    count = int(1_000 * 40 * rate)
    server = _Server(LAWS[1], Policy(), np.ones((1, 2), dtype=np.int64), None, process, 1)
    played = server.play(rate, 0, count)
    asked = due_times(process, rate, count / rate, 77)
    own = dispersion(played.due, 20.0)
    assert own == pytest.approx(dispersion(asked, 20.0), rel=0.15)
    sped_up = due_times(process, 1.0, count, 77) / rate
    assert rate == 1.0 or own != pytest.approx(dispersion(sped_up, 20.0), rel=0.3)


def test_the_last_requests_do_not_end_in_an_empty_server() -> None:
    """Near saturation: the last of a run wait for nobody who comes after them, and have no say."""
    pairs = np.tile([16, 100], (600, 1))
    server = _Server(LAWS[0], Policy(slots=64), pairs, None, Poisson(), 1)
    rate, runs = 0.9 * server.saturated_rate(), range(10)
    tpot = np.concatenate([server.play(rate, run, 600).tpot_seconds[60:540] for run in runs])
    slo = Slo("x", None, float(np.median(tpot)), target=0.9)
    good = [server.play(rate, run, 600).good(slo) for run in runs]
    emptying = float(np.mean([each[60:].mean() for each in good]))
    last = float(np.mean([each[-15:].mean() for each in good]))
    share = float(server.share(rate, runs, 600, slo).mean())
    assert last > 0.7 > 0.55 > emptying > share + 0.008


def test_the_rate_moves_the_same_arrivals() -> None:
    """Common random numbers: a Poisson process at twice the rate is the same one, twice as fast."""
    pairs = np.tile([16, 8], (2_000, 1))
    server = _Server(LAWS[0], Policy(), pairs, None, Poisson(), 1)
    slow, quick = server.play(1.0, 0, 2_000), server.play(2.0, 0, 2_000)
    assert quick.due[:1000] == pytest.approx(slow.due[:1000] / 2)


def test_a_days_profile_is_not_flat() -> None:
    """A day of 200 s, all of it in its middle tenth: the capacity is that of the busy time."""
    pairs = np.tile([100, 20], (4_000, 1))
    slo = Slo("x", 1.0, 0.2, target=0.9)
    flat = predict(LAWS[0], Policy(), pairs, slo, seed=1).rate
    busy = Diurnal(200.0, (0.0,) * 5 + (1.0,) + (0.0,) * 4)
    assert predict(LAWS[0], Policy(), pairs, slo, seed=1, arrivals=busy).rate < 0.3 * flat


def test_its_error_is_that_of_other_seeds() -> None:
    rng = np.random.default_rng(3)
    found = []
    for seed in range(12):
        pairs = np.column_stack([rng.integers(20, 400, 6000), rng.integers(5, 100, 6000)])
        found.append(predict(LAWS[0], Policy(), pairs, Slo("x", 1.0, 0.2, target=0.9), seed=seed))
    spread = float(np.std(np.log([one.rate for one in found]), ddof=1))
    said = float(np.sqrt(np.mean([one.error**2 for one in found if one.error is not None])))
    assert 0.5 * said < spread < 2 * said < 0.2


def test_runs_end_once_the_error_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = np.tile([100, 20], (20_000, 1))
    slo = Slo("x", 1.0, 0.2, target=0.9)
    monkeypatch.setattr(simulated_capacity, "PRECISION", 0.2)
    rough = predict(LAWS[0], Policy(), pairs, slo, seed=1)
    assert rough.error is not None and rough.error < 0.2 and rough.requests == 8_000
    monkeypatch.setattr(simulated_capacity, "PRECISION", 1e-9)
    fine = predict(LAWS[0], Policy(), pairs, slo, seed=1)
    assert fine.requests == 20_000 and fine.rate == pytest.approx(rough.rate, rel=0.1)


def test_residuals_cost_capacity_as_a_slower_server_does() -> None:
    """Steps that all take 5 % longer are a law that is 5 % slower; the sensitivity says how much
    that costs.
    """
    rng = np.random.default_rng(3)
    pairs = np.column_stack([rng.integers(20, 400, 20_000), rng.integers(5, 100, 20_000)])
    slo = Slo("x", 1.0, 0.2, target=0.9)
    as_said = predict(LAWS[0], Policy(), pairs, slo, seed=1)
    slower = Residuals(alone=(1.05,), together=(1.05,), prompts=(1.05,))
    found = predict(LAWS[0], Policy(), pairs, slo, seed=1, residuals=slower)
    assert 1.0 < as_said.sensitivity < 3.0
    assert found.rate == pytest.approx(as_said.rate * 1.05**-as_said.sensitivity, rel=0.03)


def test_a_rate_that_no_slo_limits_is_that_of_the_saturated_server() -> None:
    pairs = np.tile([100, 20], (2_000, 1))
    found = predict(LAWS[0], Policy(slots=1), pairs, Slo("x", None, 1.0, target=0.9), seed=1)
    own = LAWS[0].seconds(0, 100, 0) + LAWS[0].stretch_seconds(1, 100, 19)
    assert found.rate == pytest.approx(1 / own, rel=0.02)


def test_an_slo_that_single_stream_requests_break_has_no_capacity():
    pairs = np.tile([400, 50], (200, 1))
    found = predict(LAWS[0], Policy(), pairs, Slo("x", 0.2, None, target=0.9))
    assert (found.rate, found.single_stream_share) == (0.0, 0.0)


def test_too_few_lengths_are_an_error() -> None:
    with pytest.raises(LoadError, match="at least 50"):
        predict(LAWS[0], Policy(), np.ones((49, 2), dtype=np.int64), SLO_PRESETS["chat"])


def test_runs_without_a_request_are_no_evidence() -> None:
    """All requests of the day come in its last hour, and a run ends before it."""
    pairs = np.tile([100, 20], (2_000, 1))
    last_hour = Diurnal(86_400.0, (0.0,) * 23 + (1.0,))
    with pytest.raises(LoadError, match="no simulated request counts"):
        predict(LAWS[0], Policy(), pairs, Slo("x", 1.0, 0.2, target=0.9), arrivals=last_hour)
    server = _Server(LAWS[0], Policy(), pairs, None, last_hour, 1)
    assert np.isnan(server.share(1.0, [0, 1], 2_000, Slo("x", 1.0, 0.2, target=0.9))).all()
