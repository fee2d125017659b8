"""Energy of a level: from watts whose sum is known."""

from __future__ import annotations

import pytest

from loadtests.analysis.energy import energy_of
from tests.loadtests.analysis.made import sample


def test_the_energy_of_a_part_of_the_samples_is_their_watts_by_their_time() -> None:
    samples = [sample(float(at), cpu_watts=10.0 + at, gpu_watts=100.0) for at in range(11)]
    found = energy_of(samples, 2.5, 6.0)
    assert found is not None and found.seconds == 3.5
    # 0.5 s of the sample at 3, then those at 4, 5 and 6
    assert found.cpu_joules == pytest.approx(0.5 * 13 + 14 + 15 + 16)
    assert found.gpu_joules == pytest.approx(350.0)
    assert found.watts == pytest.approx((0.5 * 13 + 14 + 15 + 16 + 350.0) / 3.5)


def test_counters_bridge_a_gap_and_readings_of_the_moment_do_not() -> None:
    """RAPL's mean is of the whole gap; what a GPU drew in it nobody saw."""
    moments = [0.0, 1.0, 2.0, 3.0, 9.0, 10.0, 11.0, 12.0]
    samples = [sample(at, cpu_watts=20.0, gpu_watts=50.0) for at in moments]
    found = energy_of(samples, 0.0, 12.0)
    assert found is not None and found.cpu_joules == pytest.approx(240.0)
    assert found.gpu_joules is None


def test_nothing_is_measured_where_nobody_looked() -> None:
    assert energy_of([sample(0.0), sample(1.0), sample(2.0)], 0.0, 2.0) is None
    assert energy_of([sample(0.0, cpu_watts=5.0)], 0.0, 1.0) is None
    few = [sample(float(at), cpu_watts=5.0) for at in range(4)]
    assert energy_of(few, 0.0, 10.0) is None, "a third of the time is no measurement"


def test_a_gpus_own_counter_bridges_a_gap_until_it_begins_anew() -> None:
    moments = [0.0, 1.0, 2.0, 3.0, 9.0, 10.0, 11.0, 12.0]
    counted = [sample(at, gpu_watts=50.0, gpu_energy_joules=7e6 + 300.0 * at) for at in moments]
    found = energy_of(counted, 0.0, 12.0)
    assert found is not None and found.gpu_joules == pytest.approx(3600.0), "not 50 W"
    assert energy_of(counted, 2.5, 9.5).gpu_joules == pytest.approx(2100.0)  # type: ignore[union-attr]
    again = [
        sample(float(at), gpu_watts=50.0, gpu_energy_joules=1e3 if at < 6 else 5.0)
        for at in range(12)
    ]
    reset = energy_of([*again[:3], *again[9:]], 0.0, 11.0)
    assert reset is None, "neither the counter nor the readings tell of the gap"
