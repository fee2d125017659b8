"""The check accepts a process's own times and finds out others."""

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from loadtests.workload.arrivals import (
    Constant,
    OnOff,
    Poisson,
    Ramp,
    deal,
    due_times,
)
from loadtests.workload.goodness_of_fit import check, ks_probability
from tests.tools.arrivals import KINDS, LONG, RATE, kind


def test_poisson_is_poisson():
    times = due_times(Poisson(), RATE, LONG, 1)
    found = check(Poisson(), times, RATE, LONG)
    assert found.cv == pytest.approx(1.0, abs=0.02)
    assert found.lag1 == pytest.approx(0.0, abs=0.02)
    by_window = {d.window_seconds: d.index for d in found.dispersion}
    assert {1.0, 10.0, 60.0, 300.0} <= set(by_window)
    for window, index in by_window.items():
        assert index == pytest.approx(1.0, abs=4 * np.sqrt(2 / (LONG / window)))
    assert found.as_asked and found.against == "exponential"


def test_the_check_is_right_as_often_as_it_says():
    p_values = [
        check(Poisson(), due_times(Poisson(), 5.0, 200.0, seed), 5.0, 200.0).ks_p
        for seed in range(200)
    ]
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.10  # uniform p-values, known rate


def test_workers_with_a_seed_in_common_are_found_out():
    """What another tool does: every worker draws the same Poisson process at its share of the rate,
    a moment apart.
    """
    one = due_times(Poisson(), RATE / 4, LONG, 1)
    together = np.sort(np.concatenate([one + 0.002 * worker for worker in range(4)]))
    found = check(Poisson(), together, RATE, LONG)
    assert found.as_asked is False
    assert max(d.index for d in found.dispersion) > 3


def test_constant_is_found_out_when_called_poisson_and_the_other_way_round():
    constant, poisson = due_times(Constant(), RATE, 600.0, 1), due_times(Poisson(), RATE, 600.0, 1)
    assert check(Constant(), constant, RATE, 600.0).as_asked
    assert check(Poisson(), constant, RATE, 600.0).as_asked is False
    assert check(Constant(), poisson, RATE, 600.0).as_asked is False
    assert check(Poisson(), poisson * 0.9, RATE, 540.0).as_asked is False  # the wrong rate


def test_too_few_arrivals_say_nothing():
    found = check(Poisson(), np.array([1.0, 2.0]), 1.0, 10.0)
    assert found.as_asked is None and found.cv is None and found.ks_p is None
    assert check(Poisson(), np.empty(0), 1.0, 10.0).count == 0


@pytest.mark.parametrize("process", KINDS, ids=kind)
@pytest.mark.parametrize("workers", [1, 4])
def test_every_process_is_itself_when_dealt_out(process, workers):
    """The check that is kept with every level, on what several load generators sent, each a little
    late: it accepts the process asked.
    """
    times = due_times(process, RATE, 300.0, 11)
    rng = np.random.default_rng(5)
    sent = np.concatenate([deal(times, worker, workers)[1] for worker in range(workers)])
    found = check(
        process, sent + rng.exponential(0.0002, len(sent)), RATE, 300.0, late_seconds=0.002
    )
    assert found.count == len(times) and found.dispersion
    assert found.as_asked is (None if isinstance(process, OnOff) else True)


def test_arrivals_that_are_not_as_asked_are_a_warning():
    from loadtests.metrics.level import summarise
    from loadtests.metrics.level_summary import Window
    from loadtests.metrics.slo import SLO_PRESETS
    from tests.tools.records import request

    def level(times, process):
        records = [request(i, at) for i, at in enumerate(times)]
        return summarise(
            records, [], Window(0.0, 60.0), SLO_PRESETS["chat"], rate=RATE, arrivals=process
        )

    good = level(due_times(Poisson(), RATE, 60.0, 1), Poisson())
    assert good.arrivals.as_asked and "ArrivalsOff" not in {
        warning.code for warning in good.warnings
    }
    off = level(due_times(Constant(), RATE, 60.0, 1), Poisson())
    (warning,) = [warning for warning in off.warnings if warning.code == "ArrivalsOff"]
    assert (
        "dispersion 0.00 at 1 s" in warning.text
        and "exponential" in warning.text
        and not warning.is_serious
    )
    assert level(due_times(Ramp(), RATE, 60.0, 1), Ramp()).arrivals is None
    assert level(due_times(Constant(), RATE, 60.0, 1), None).arrivals is None


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_the_probability_is_that_of_the_exact_test(count: int) -> None:
    random = np.random.default_rng(count)
    small = 0
    for number in range(200):
        unit = random.random(count) ** (1.0 + 0.7 * number / 200)  # from uniform to far from it
        exact = stats.kstest(unit, stats.uniform.cdf).pvalue
        found = ks_probability(unit)
        assert found == pytest.approx(exact, abs=0.03)
        if 5e-4 < exact < 5e-3:
            small += 1
            assert found == pytest.approx(exact, rel=0.1)
    assert small >= 5
    assert ks_probability((np.arange(count) + 0.5) / count) == 1.0


def test_a_level_of_poisson_arrivals_is_checked_without_scipy() -> None:
    code = (
        "import sys, numpy as np\n"
        "from loadtests.workload.arrivals import Poisson, due_times\n"
        "from loadtests.workload.goodness_of_fit import check\n"
        "found = check(Poisson(), due_times(Poisson(), 10.0, 20.0, 1), 10.0, 20.0)\n"
        "print(found.as_asked, 'scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
