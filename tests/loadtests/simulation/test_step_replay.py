"""Replayed residuals: as often as they were seen, in one stretch as step by step."""

import numpy as np
import pytest

from loadtests.simulation.step_replay import DRAWN, LawSteps, ReplayedSteps, Residuals, residuals_of
from loadtests.simulation.step_time import StepLaw, StepObservation
from tests.loadtests.simulation.step_laws import LAWS

RESIDUALS = Residuals(alone=(1.0, 1.1, 0.9), together=(1.0,) * 9 + (5.0,), prompts=(1.2, 0.8))


def test_what_was_measured_over_what_the_law_says() -> None:
    law = StepLaw(base_seconds=0.01, row_seconds=0.01, prompt_token_seconds=0.001)
    seen = [
        StepObservation(1, 0, 5, 0.02, (0.02, 0.03)),
        StepObservation(4, 0, 5, 0.05, (0.05, 0.2)),
        StepObservation(0, 90, 0, 0.05),
    ]
    found = residuals_of(seen, law)
    assert found.alone == pytest.approx((1.0, 1.5)) and found.together == pytest.approx((1.0, 4.0))
    assert found.prompts == pytest.approx((0.5,))
    assert Residuals().kinds == ((1.0,),) * 3
    assert Residuals(alone=(2.0,)).kinds == ((2.0,),) * 3
    assert RESIDUALS.kinds[0] == (*RESIDUALS.prompts, *RESIDUALS.alone, *RESIDUALS.together)


@pytest.mark.parametrize("law", LAWS, ids=["sum", "constant", "max"])
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (1, 40), (5, 300)])
def test_a_stretch_is_the_sum_of_its_steps(law: StepLaw, rows: int, steps: int) -> None:
    one, other = (ReplayedSteps(law, RESIDUALS, 3) for _ in range(2))
    for context in (10, 2000):
        single = sum(one.step(rows, 0, context + rows * step) for step in range(steps))
        assert other.stretch(rows, context, steps) == pytest.approx(single, rel=1e-9)
        other.pass_by(rows, steps)


def test_stalls_come_as_often_as_they_were_seen() -> None:
    law = LAWS[1]
    replay = ReplayedSteps(law, RESIDUALS, 7)
    ratios = [replay.step(4, 0, 0) / law.base_seconds for _ in range(DRAWN)]
    assert np.mean(np.array(ratios) > 4) == pytest.approx(0.1, abs=0.02)
    assert replay.most(4, 10**6) == DRAWN, "from the start again"
    replay.pass_by(4, 10)
    assert replay.most(4, 10**6) == DRAWN - 10 and replay.most(1, 10**6) == DRAWN
    prompts = [replay.step(4, 16, 0) / law.base_seconds for _ in range(DRAWN)]
    assert np.mean(np.array(prompts) > 4) == pytest.approx(1 / 15, abs=0.02)
    assert LawSteps(law).most(4, 10**6) == 10**6
