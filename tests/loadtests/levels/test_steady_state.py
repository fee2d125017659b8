"""A queue that grows is not steady, however good its requests still are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from crossover.loadtests.levels.slo_attainment import grows, is_steady
from tests.loadtests.levels.made import waits_md_c

Queue = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float, float]


def queue(rate: float, seconds: float, seed: int) -> Queue:
    """Due times and waits of M/D/4 in a window of so many seconds after a warm-up of 20 s."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, int(rate * (seconds + 20) * 1.5)))
    waits = waits_md_c(due, 4, 0.51)
    inside = (due >= 20.0) & (due < 20.0 + seconds)
    return due[inside], waits[inside], 20.0, 20.0 + seconds


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9])
def test_a_queue_below_saturation_is_steady(load: float) -> None:
    rate = load * 4 / 0.51
    unsteady = sum(is_steady(*queue(rate, 60.0, seed), 5.0) is False for seed in range(100))
    assert unsteady <= 5


def test_a_queue_above_saturation_is_not_steady_while_its_requests_are_still_good() -> None:
    """Half of the levels of 60 s look good at 5 % above saturation with a TTFT limit of 5 s; hardly
    one of 150 s, which is as long as such a limit asks for, looks good and steady.
    """
    rate = 1.05 * 4 / 0.51
    seen = {}
    for seconds in (60.0, 150.0):
        levels = [queue(rate, seconds, seed) for seed in range(100)]
        looks_good = [one for one in levels if (one[1] <= 5.0).mean() >= 0.9]
        steady = [one for one in looks_good if is_steady(*one, 5.0) is not False]
        seen[seconds] = (len(looks_good), len(steady))
    assert seen[60.0][0] >= 40 and seen[60.0][1] <= 0.6 * seen[60.0][0]
    assert seen[150.0][1] <= 5, seen


def test_without_a_limit_a_queue_that_doubles_its_wait_is_not_steady() -> None:
    due = np.linspace(0, 60, 200, endpoint=False)
    assert is_steady(due, 0.1 + 0.1 * due, 0.0, 60.0, None) is False
    assert is_steady(due, 1.0 + 0.001 * due, 0.0, 60.0, None) is True


def test_too_few_requests_show_no_trend() -> None:
    few, none, never = np.ones(19), np.empty(0), np.full(30, np.inf)
    assert is_steady(few, few, 0.0, 10.0, 1.0) is None
    assert is_steady(none, none, 0.0, 10.0, 1.0) is None
    assert is_steady(np.ones(30), never, 0.0, 10.0, 1.0) is None
    assert is_steady(np.ones(30), np.ones(30), 0.0, 10.0, 1.0) is None, "all in one part"


def test_failures_count_as_the_slowest_answer() -> None:
    due = np.linspace(0, 60, 200, endpoint=False)
    ttft = np.where(due > 40, np.inf, 1.0)
    ttft[-1] = 9.0
    assert is_steady(due, ttft, 0.0, 60.0, 5.0) is False


def test_a_queue_grows_beyond_the_wandering_of_a_stable_one() -> None:
    """Allowed: 2 + 3 sqrt(first + 1) more in the last third than in the first."""
    assert not grows(0.0, 5.0) and grows(0.0, 5.1)
    assert not grows(3.0, 11.0) and grows(3.0, 11.1)
