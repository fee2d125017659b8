"""Which SLO would be sharper, where the SLO itself makes an interval wide."""

import math
import re
from functools import cache

import msgspec
import numpy as np
import pytest

from crossover.loadtests.capacity.sharper_slo import MAX_WIDTH, advice
from crossover.loadtests.records.journal_events import Capacity
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Z_90,
    Demand,
    Server,
    ServerModel,
    SimulatedCapacity,
    sd_of,
)
from crossover.serving.capacity.slo import SLO_PRESETS, Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")
FEW_REQUESTS = 500  # a rate: fewer vary too much where few meet the SLO

# As SmolLM2-135M on two cores: its longest prompts take 1.6 s of the 2 s alone.
STEP_TIMES = StepTimeModel(
    base_seconds=0.0075,
    row_seconds=0.0012,
    prompt_token_seconds=0.0015,
    context_token_seconds=3e-6,
    pass_seconds=0.001,
)
SETTINGS = SchedulerSettings(slots=16)
SERVER = ServerModel(STEP_TIMES, SETTINGS)
LONG = Demand(Workload(preset="chat", max_prompt_tokens=1024, max_output_tokens=256))
STRICT = msgspec.structs.replace(SLO_PRESETS["chat"], target=0.99)


@cache
def simulated(slo: Slo) -> SimulatedCapacity:
    return SERVER.capacity(LONG, slo, QUICK_REQUESTS)


def found_of(slo: Slo, **changes: object) -> Capacity:
    """What a calibration and one level say of the capacity."""
    expected = simulated(slo)
    reach = math.exp(Z_90 * sd_of(1) * expected.steepness)
    found = Capacity(
        state="not_confirmed",
        method="step_times",
        estimated_rate=expected.rate,
        low=expected.rate / reach,
        high=expected.rate * reach,
        steepness=expected.steepness,
        factor=1.0,
    )
    return msgspec.structs.replace(found, **changes)


def test_a_wide_interval_is_explained_and_the_slo_that_is_named_is_sharp() -> None:
    found = found_of(STRICT)
    assert found.high is not None and found.low is not None and found.high > MAX_WIDTH * found.low
    text = advice(found, SERVER, LONG, STRICT)
    assert "near the edge" in text and "single requests meet it" in text
    named = re.findall(r"slo\.(\w+) = ([\d.]+)", text)
    assert named
    for key, value in named:
        other = msgspec.structs.replace(STRICT, **{key: float(value)})
        again = found_of(other)
        assert again.high is not None and again.low is not None
        assert again.high <= 1.02 * MAX_WIDTH * again.low, (key, value)


@pytest.mark.parametrize(
    "changes",
    [
        {"low": 1.0, "high": 1.5, "estimated_rate": 1.2},  # sharp already
        {"method": "levels"},
        {"speed_moved": 0.5},  # the machine made it wide
        {"low": None},
    ],
)
def test_no_other_slo_is_named_where_it_would_not_help(changes: dict[str, object]) -> None:
    assert advice(found_of(STRICT, **changes), SERVER, LONG, STRICT) == ""


@pytest.mark.parametrize("rate", [None, pytest.param(0.0, marks=pytest.mark.slow)])
def test_where_no_rate_meets_the_slo_one_is_named_under_which_some_do(rate: float | None) -> None:
    slow = SERVER.slower(3.0)
    assert slow.capacity(LONG, STRICT, 500).rate == 0.0
    text = advice(found_of(STRICT, estimated_rate=rate, low=rate, high=rate), slow, LONG, STRICT)
    assert "There would be a capacity with slo." in text
    named = re.findall(r"slo\.(\w+) = ([\d.]+)", text)
    assert named
    for key, value in named:
        easier = msgspec.structs.replace(STRICT, **{key: float(value)})
        assert slow.capacity(LONG, easier, 500).rate > 0
    assert len(set(re.findall(r"requests (?:a minute|an hour|a second)|requests/s", text))) == 1
    (words,) = re.findall(r"prompts (half|a quarter|an eighth) as long", text)
    factor = {"half": 1 / 2, "a quarter": 1 / 4, "an eighth": 1 / 8}[words]
    lengths = slow.simulated(LONG).lengths
    prompt = np.maximum(np.ceil(factor * lengths.prompt), 1).astype(np.int64)
    shorter = Server(
        slow.step_times, SETTINGS, msgspec.structs.replace(lengths, prompt=prompt), count=500
    )
    assert shorter.capacity(STRICT).rate > 0


def test_an_slo_that_single_requests_miss_is_not_at_its_edge() -> None:
    slow = SERVER.slower(1.6)
    found = found_of(STRICT)
    assert "single requests meet it" not in advice(found, slow, LONG, STRICT)
