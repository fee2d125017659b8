"""The law: five numbers found again, and what a fit may not do."""

import numpy as np
import pytest

from loadtests.errors import LoadError
from loadtests.simulation.step_law_fit import NUMBERS, StepObservation, fit_law
from tests.loadtests.simulation.known_server import LAW


def seen(law, count=60, noise=0.0, seed=1):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        steps = int(rng.integers(1, 4))
        rows, passes = int(rng.integers(0, 9)) * steps, steps + int(rng.integers(0, 3))
        counts = (rows, int(rng.integers(0, 300)), rows * int(rng.integers(50, 600)), passes, steps)
        seconds = law.seconds(*counts) * float(np.exp(noise * rng.normal()))
        names = ("rows", "prompt_tokens", "context_tokens", "passes", "steps")
        found.append(StepObservation(seconds=seconds, **dict(zip(names, counts, strict=True))))
    return found


def test_five_numbers_are_found_again():
    found = fit_law(seen(LAW))
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(getattr(LAW, name), rel=1e-6), name
    assert found.error < 1e-6 and found.observations == 60 and found.fits


def test_the_error_is_that_of_what_was_left_out():
    found = fit_law(seen(LAW, 400, noise=0.1))
    assert found.error == pytest.approx(0.1, rel=0.15)
    assert not fit_law(seen(LAW, 400, noise=0.4)).fits


def test_a_slower_machine_takes_longer_for_every_step():
    one = seen(LAW, 5)[3]
    assert LAW.slower(1.3).of(one) == pytest.approx(1.3 * LAW.of(one))
    assert LAW.slower(1.3).error == LAW.error


def test_too_few_observations_are_an_error():
    with pytest.raises(LoadError, match="4 observations are too few"):
        fit_law(seen(LAW, 4))
