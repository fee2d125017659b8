"""What answers say about steps."""

import pytest

from loadtests.simulation.step_observations import observations_of
from loadtests.simulation.step_time import StepObservation, fit
from tests.loadtests.simulation.step_laws import LAWS
from tests.tools.records import request


def test_calibration_can_be_seen_from_the_client():
    law = LAWS[0]
    records = []
    for i, prompt in enumerate((50, 200, 800)):
        ttft, gap = law.seconds(0, prompt, 0), law.seconds(1, 0, prompt + 16)
        records.append(request(i, 10.0 * i, ttft=ttft, gap=gap, tokens=32, prompt_tokens=prompt))
    seen = observations_of(records)
    seen.append(StepObservation(8, 0, 8 * 116, law.seconds(8, 0, 8 * 116)))
    found = fit(seen)
    assert found.seconds(8, 0, 8 * 116) == pytest.approx(law.seconds(8, 0, 8 * 116), rel=0.05)
    assert found.seconds(0, 400, 0) == pytest.approx(law.seconds(0, 400, 0), rel=0.05)
    assert observations_of([request(output_tokens=None)]) == []
