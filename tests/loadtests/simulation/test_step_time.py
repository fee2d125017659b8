"""The step-time law against known laws."""

import numpy as np
import pytest

from loadtests.errors import LoadError
from loadtests.simulation.step_time import StepObservation, fit
from tests.loadtests.simulation.step_laws import LAWS


def calibration(law, rng, noise=0.02):
    seen = [(rows, 0, rows * kv) for rows in (1, 2, 4, 8, 16, 32) for kv in (50, 500, 2000)]
    seen += [(rows, tokens, rows * 300) for rows in (0, 4, 12) for tokens in (16, 64, 256, 1024)]
    return [
        StepObservation(r, p, k, law.seconds(r, p, k) * float(np.exp(noise * rng.normal())))
        for r, p, k in seen * 2
    ]


@pytest.mark.parametrize("law", LAWS, ids=["sum", "constant", "max"])
def test_a_law_is_found_again_from_noisy_steps(law):
    found = fit(calibration(law, np.random.default_rng(1)))
    for rows, prefill, kv in ((3, 0, 900), (24, 0, 20_000), (6, 128, 2000), (0, 512, 0)):
        assert found.seconds(rows, prefill, kv) == pytest.approx(
            law.seconds(rows, prefill, kv), rel=0.06
        )
    assert found.unseen == () and found.error == pytest.approx(0.0135, abs=0.01)


def test_the_form_is_chosen_by_the_data():
    rng = np.random.default_rng(4)
    assert fit(calibration(LAWS[0], rng)).form == "sum"
    assert fit(calibration(LAWS[2], rng)).form == "max"


def test_a_few_hiccups_do_not_move_the_law():
    rng = np.random.default_rng(2)
    seen = calibration(LAWS[0], rng)
    for i in (3, 20, 41):
        seen[i] = StepObservation(
            seen[i].decode_rows, seen[i].prefill_tokens, seen[i].kv_tokens, seen[i].seconds * 6
        )
    found = fit(seen)
    assert found.seconds(8, 0, 2400) == pytest.approx(LAWS[0].seconds(8, 0, 2400), rel=0.06)


def test_what_was_never_varied_is_said_to_be_unknown():
    alone = [
        StepObservation(1, 0, kv, LAWS[0].seconds(1, 0, kv)) for kv in (100, 1000, 5000, 20_000)
    ]
    found = fit(alone)
    assert found.unseen == ("decode_rows", "prefill_tokens")
    assert found.row_seconds == 0.0 and found.seconds(1, 0, 3000) == pytest.approx(
        LAWS[0].seconds(1, 0, 3000), rel=0.01
    )


@pytest.mark.parametrize("steps", [0, 1, 7, 500])
@pytest.mark.parametrize("law", LAWS, ids=["sum", "constant", "max"])
def test_a_stretch_is_the_sum_of_its_steps(law, steps):
    for rows, kv in ((1, 10), (5, 2000), (3, 3500)):
        one_by_one = sum(law.seconds(rows, 0, kv + rows * j) for j in range(steps))
        assert law.stretch_seconds(rows, kv, steps) == pytest.approx(
            one_by_one, rel=1e-9, abs=1e-12
        )


def stairs(rng, noise, bursts):
    """Three rows cost what four do; each burst shows each number of rows once."""
    cost = {1: 1, 2: 2, 3: 4, 4: 4, 5: 5, 8: 8}
    seen = [StepObservation(0, p, 0, 0.0035 + 0.0033 * p) for p in (16, 40, 200)]
    seen += [StepObservation(1, 0, 30, 0.0098) for _ in range(8)]
    for burst in range(1, bursts + 1):
        seen += [
            StepObservation(
                rows,
                0,
                30 * rows,
                (0.0035 + 0.0063 * cost[rows]) * float(np.exp(noise * rng.normal())),
                burst=burst,
            )
            for rows in (8, 5, 4, 3, 2)
        ]
    return seen


def test_the_cost_of_rows_is_a_table_that_never_falls():
    found = fit(stairs(np.random.default_rng(1), 0.1, 2))
    costs = [found.rows_seconds(rows) for rows in np.linspace(0, 30, 121)]
    assert np.all(np.diff(costs) >= 0) and costs[0] == 0.0
    exact = fit(stairs(np.random.default_rng(1), 0.0, 1))
    assert exact.seconds(3, 0, 0) == pytest.approx(exact.seconds(4, 0, 0), rel=1e-3)
    assert exact.seconds(6, 0, 0) == pytest.approx(0.0035 + 0.0063 * 6, rel=1e-3), "in between"
    assert exact.seconds(16, 0, 0) == pytest.approx(0.0035 + 0.0063 * 16, rel=0.02), "beyond"


def test_the_error_is_of_what_was_left_out():
    """In the sample the table meets every single observation; left out, a step of the staircase is
    told from its neighbours. With two bursts each row is there when the other's is left out.
    """
    once = fit(stairs(np.random.default_rng(2), 0.03, 1))
    assert once.error is not None and once.error > 0.02
    twice = [fit(stairs(np.random.default_rng(seed), 0.03, 2)).error for seed in range(20)]
    assert np.median(twice) == pytest.approx(0.03, abs=0.015)


def test_observations_that_cannot_be_are_errors():
    with pytest.raises(LoadError, match="at least 3"):
        fit([StepObservation(1, 0, 0, 0.1)] * 2)
    with pytest.raises(LoadError, match="above 0"):
        fit([StepObservation(1, 0, 0, 0.0)] * 3)
