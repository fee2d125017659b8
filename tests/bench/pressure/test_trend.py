"""Does the verdict on a slope mean what it says?"""

import numpy as np
import pytest

from tests.bench.pressure.trend import trend

EVERY = 5.0  # seconds


def wandering(seed: int, samples: int, memory: float) -> np.ndarray:
    """Noise of size 1 that forgets a share 1 - memory of itself from one sample to the next."""
    rng = np.random.default_rng(seed)
    values = [0.0]
    for step in rng.normal(0, np.sqrt(1 - memory**2), samples - 1):
        values.append(memory * values[-1] + step)
    return np.array(values)


@pytest.mark.parametrize("memory", [0.0, 0.6, 0.9])
def test_what_does_not_grow_is_seldom_said_to(memory: float) -> None:
    times = np.arange(300) * EVERY
    wrong = sum(
        trend(times.tolist(), wandering(seed, 300, memory).tolist()).verdict != "flat"
        for seed in range(60)
    )
    assert wrong <= 10  # 5 % of 60, and room for chance and for the autocorrelation's own error


def test_a_stair_now_and_then_is_chance_and_one_every_two_minutes_a_leak() -> None:
    times = (np.arange(288) * EVERY).tolist()
    for seed in range(20):
        places = np.random.default_rng(seed).choice(288, 12, replace=False)
        few, many = (
            np.array([np.sum(places[:count] <= number) for number in range(288)]) * 32768.0
            for count in (2, 12)
        )
        assert (
            trend(times, few.tolist()).verdict == "flat"
            and trend(times, many.tolist()).verdict == "grows"
        )


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_what_grows_is_found(memory: float) -> None:
    times = np.arange(300) * EVERY
    for seed in range(20):
        found = trend(
            times.tolist(), (wandering(seed, 300, memory) + 12 * times / times[-1]).tolist()
        )
        assert found.verdict == "grows" and found.low > 6 * 3600 / times[-1]


def test_what_never_moves_is_flat_and_a_line_is_not() -> None:
    times = [EVERY * number for number in range(20)]
    assert trend(times, [7.0] * 20).verdict == "flat"
    assert (
        trend(times, times).verdict == "grows"
        and trend(times, [-time for time in times]).verdict == "shrinks"
    )
    with pytest.raises(ValueError, match="4 samples"):
        trend(times[:4], times[:4])
