"""Which rates are confirmed."""

import numpy as np
import pytest

from loadtests.capacity.confirmation import (
    candidates,
    chance_to_confirm,
    confirmed_rate,
    confirming_seconds,
    seconds_to_confirm,
    verdicts,
)
from loadtests.capacity.levels import Level
from loadtests.capacity.posterior import SLOPES, Observation, posterior, share_good
from loadtests.metrics.clustering import dispersion
from loadtests.metrics.slo import Slo, verdict

NINE = Slo("nine", 0.5, None, target=0.9)
CLUMP = 10.0


def level(rate, good, due, seconds=60.0, **changes):
    steady = {"is_steady": True} | changes
    return Level(rate=rate, good=good, due=due, duration_seconds=seconds, **steady)


def test_a_confirming_level_is_long_for_its_limits_and_its_answers():
    assert confirming_seconds(NINE, None) == confirming_seconds(NINE, 1.0) == 60.0
    assert confirming_seconds(NINE, 6.0) == 120.0
    assert confirming_seconds(Slo("x", 5.0, None), 1.0) == 150.0
    assert confirming_seconds(Slo("x", None, None), 0.5) == 60.0


@pytest.mark.parametrize(
    "changes",
    [
        {"is_valid": False},
        {"is_whole": False},
        {"is_steady": False},
        {"is_steady": None},
        {"grows_soon": True},
        {"seconds": 50.0},
    ],
)
def test_what_is_short_cut_unsteady_or_disturbed_confirms_nothing(changes):
    assert confirmed_rate([level(2.0, 120, 120)], NINE, CLUMP) == 2.0
    assert confirmed_rate([level(2.0, 120, 120, **changes)], NINE, CLUMP) is None


def test_levels_at_one_rate_count_together():
    one = level(2.0, 22, 22)
    assert confirmed_rate([one], NINE, CLUMP) is None
    assert confirmed_rate([one, one, one], NINE, CLUMP) == 2.0
    assert candidates([one, one]) == {2.0: (44, 44)}


def test_a_rate_above_the_interval_is_confirmed_only_where_no_lower_one_is():
    seen = [level(rate, 400, 400) for rate in (1.0, 2.0, 3.0)]
    found = [confirmed_rate(seen, NINE, CLUMP, low) for low in (0.5, 1.0, 2.5, 9.0)]
    assert found == [1.0, 1.0, 2.0, 3.0]


def test_a_rate_above_one_that_failed_is_not_confirmed():
    seen = [level(1.0, 100, 100), level(2.0, 60, 100), level(3.0, 100, 100)]
    assert confirmed_rate(seen, NINE, CLUMP) == 1.0


def test_a_level_too_short_for_the_ttft_limit_is_judged_by_the_limit_it_is_long_for():
    patient = Slo("patient", 5.0, None, target=0.9)
    short = patient.shown_in(60.0).ttft_seconds
    assert short == pytest.approx(60 / 30 / 0.98)
    assert patient.shown_in(150.0) is patient and NINE.shown_in(60.0) is NINE
    assert confirmed_rate([level(2.0, 120, 120, good_soon=119)], patient, CLUMP) == 2.0
    assert confirmed_rate([level(2.0, 120, 120, good_soon=100)], patient, CLUMP) is None
    assert confirmed_rate([level(2.0, 400, 400, seconds=150.0)], patient, CLUMP) == 2.0


def test_a_shorter_limit_than_the_slos_confirms_and_fails_nothing():
    """A short level that misses the limit it is long for says nothing against a higher rate."""
    patient = Slo("patient", 5.0, None, target=0.9)
    higher = level(3.0, 600, 600, seconds=200.0)
    late = level(2.0, 120, 120, good_soon=60)
    assert verdicts([late, higher], patient, CLUMP) == {2.0: "unresolved", 3.0: "holds"}
    assert confirmed_rate([late, higher], patient, CLUMP) == 3.0
    bad = level(2.0, 60, 120, good_soon=50)
    assert verdicts([bad, higher], patient, CLUMP) == {2.0: "fails", 3.0: "holds"}
    assert confirmed_rate([bad, higher], patient, CLUMP) is None


def test_slow_answers_make_a_level_longer():
    slow = Level(rate=None, due=5, good=5, duration_seconds=50.0, mean_e2e_seconds=10.0)
    assert confirmed_rate([slow, level(2.0, 120, 120)], NINE, CLUMP) is None
    assert confirmed_rate([slow, level(2.0, 400, 400, seconds=200.0)], NINE, CLUMP) == 2.0


def test_the_time_to_confirm_grows_towards_the_capacity_and_ends_there():
    seen = [Observation(4.0, 780, 800), Observation(6.0, 860, 1000), Observation(8.0, 100, 800)]
    belief = posterior(seen, 0.01, 100.0, 0.9)
    times = [seconds_to_confirm(rate, belief, NINE) for rate in (2.0, 3.0, 4.0)]
    assert all(seconds is not None for seconds in times)
    counts = [rate * seconds for rate, seconds in zip((2.0, 3.0, 4.0), times, strict=True)]
    assert counts == sorted(counts) and counts[0] >= 25
    assert seconds_to_confirm(8.0, belief, NINE) is None
    half = seconds_to_confirm(4.0, belief, NINE, (98, 100))
    assert half is not None and half < times[2]


def test_the_chance_to_confirm_is_how_often_such_a_level_holds():
    """Against levels drawn from the same belief: capacities of the next start, slopes, requests."""
    seen = [
        Observation(rate, good, 100, (good, 100 - good), start)
        for start in (1, 2, 3)
        for rate, good in ((4.0, 98), (6.0, 85))
    ]
    belief = posterior(seen, 0.01, 100.0, NINE.target)
    rng = np.random.default_rng(1)
    capacities = np.exp(
        np.interp(
            rng.random(4000),
            np.linspace(0, 1, 200),
            np.log([belief.quantile(q) for q in np.linspace(0.0005, 0.9995, 200)]),
        )
    )
    slopes = rng.choice(SLOPES, 4000, p=belief.weights.sum(axis=0))
    for rate, seconds in ((2.0, 900.0), (3.5, 900.0), (4.2, 900.0), (5.5, 900.0)):
        share = share_good(rate, capacities, slopes, NINE.target)
        together = dispersion((1 - NINE.target) / 2, belief.clump)
        due = round(rate * seconds / together)
        good = rng.binomial(due, share)
        held = np.mean([verdict(int(g), due, NINE) == "holds" for g in good])
        assert chance_to_confirm(rate, seconds, belief, NINE) == pytest.approx(held, abs=0.08)


def test_a_level_too_short_to_hold_has_no_chance():
    belief = posterior([Observation(4.0, 100, 100)], 0.01, 100.0, NINE.target)
    assert chance_to_confirm(0.1, 60.0, belief, NINE) == 0.0
    assert chance_to_confirm(0.1, 60.0, belief, NINE, (400, 400)) > 0.5
