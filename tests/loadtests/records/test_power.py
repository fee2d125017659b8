"""Power during a level: from watts that are known."""

from __future__ import annotations

import pytest

from crossover.loadtests.records.resource_sample import Power, power_of
from tests.loadtests.levels.made import sample


def test_the_power_of_a_part_of_the_samples_is_their_watts_by_their_time_on_each_device() -> None:
    samples = [sample(float(at), cpu_watts=10.0 + at, gpu_watts=100.0) for at in range(11)]
    # 0.5 s of the sample at 3, then those at 4, 5 and 6
    joules = 0.5 * 13 + 14 + 15 + 16
    found = power_of(samples, 2.5, 6.0)
    assert found.cpu_watts == pytest.approx(joules / 3.5)
    assert found.gpu_watts == pytest.approx(100.0)
    assert found.together == pytest.approx(joules / 3.5 + 100.0)


def test_nothing_is_measured_where_nobody_looked() -> None:
    nothing = Power()
    assert nothing.together is None
    assert power_of([sample(0.0), sample(1.0), sample(2.0)], 0.0, 2.0) == nothing
    assert power_of([sample(0.0, cpu_watts=5.0)], 0.0, 1.0) == nothing
    few = [sample(float(at), cpu_watts=5.0) for at in range(4)]
    assert power_of(few, 0.0, 10.0) == nothing, "a third of the time is no measurement"
    gap = [sample(at, cpu_watts=20.0, gpu_watts=50.0) for at in (0.0, 1.0, 2.0, 12.0)]
    assert power_of(gap, 0.0, 12.0) == nothing


def test_a_gpus_own_counter_goes_before_its_readings_until_it_begins_anew() -> None:
    counted = [
        sample(float(at), gpu_watts=50.0, gpu_energy_joules=7e6 + 300.0 * at) for at in range(12)
    ]
    assert power_of(counted, 2.5, 9.5) == Power(gpu_watts=pytest.approx(300.0))
    again = [*counted[:6], sample(6.0, gpu_watts=50.0, gpu_energy_joules=5.0)]
    assert power_of(again, 0.0, 6.0) == Power(), "a sixth of the time is not known"
