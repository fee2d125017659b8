"""The search against servers of known capacity, and at every edge."""

import math
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.capacity.estimate import Level, estimate
from loadtests.capacity.search import Finished, Measure, next_step
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo
from loadtests.records.events import Capacity
from loadtests.simulation.batching import Policy
from loadtests.simulation.simulated_capacity import predict
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.requests import Workload, draw
from tests.loadtests.capacity.known_worlds import batching, capacity, md4, search

NINE = Slo("nine", 0.5, None, target=0.9)


SINGLE_STREAM = Level(rate=None, due=5, good=5, duration_seconds=2.55, mean_e2e_seconds=0.51)


def level(rate, good, due, seconds=100.0, **changes):
    return Level(rate=rate, good=good, due=due, duration_seconds=seconds, **changes)


RUNS = 60


def coverage(run, truth):
    """(of 60 runs those whose interval covers the truth, median estimate / truth)."""
    covered, estimates, widths = 0, [], []
    for seed in range(RUNS):
        found = run(seed)
        covered += found.low <= truth and (found.high is None or truth <= found.high)
        assert found.high is not None and found.estimate is not None  # an interval, not a shrug
        widths.append((found.high - found.low) / found.estimate)
        estimates.append(found.estimate / truth)
    assert np.median(widths) < 0.35 and max(widths) < 1.0
    return covered, float(np.median(estimates))


def found_of_four_slots(seed):
    return search(md4(0.5), SearchConfig(budget_seconds=900.0), NINE, seed, 0.51)[0].capacity


LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-7
)


PAIRS = np.array(
    [
        (a.prompt_tokens, a.output_tokens)
        for a in draw(Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=64), 3000, 1)
    ]
)


BOTH = Slo("both", 2.0, 0.1, target=0.9)


def found_of_batching(seed, start_rate):
    config = SearchConfig(budget_seconds=1200.0, start_rate=start_rate)
    return search(batching(LAW, Policy(slots=16), PAIRS, BOTH), config, BOTH, seed, 2.5)[0].capacity


def assert_sane(found: Capacity):
    assert found.reason and math.isfinite(found.low) and found.low >= 0
    if found.high is not None:
        assert found.low <= found.high
    if found.estimate is not None and found.high is not None:
        assert found.low <= found.estimate <= found.high
    if found.status == "resolved":
        assert found.high is not None and found.low > 0


def test_interval_covers_the_capacity_of_four_slots_in_nine_of_ten_runs():
    truth = capacity(md4(0.5), 0.9, 5.0, 7.5)
    assert truth == pytest.approx(6.08, abs=0.05)  # of 7.84 that the slots could serve
    covered, middle = coverage(found_of_four_slots, truth)
    assert covered >= 0.9 * RUNS
    assert middle == pytest.approx(1.0, abs=0.04)


def test_interval_covers_the_capacity_of_continuous_batching_in_nine_of_ten_runs():
    world = batching(LAW, Policy(slots=16), PAIRS, BOTH)
    predicted = predict(LAW, Policy(slots=16), PAIRS, BOTH, seed=5).rate
    truth = capacity(world, 0.9, 0.7 * predicted, 1.3 * predicted, n=40_000, halvings=7)
    assert predicted == pytest.approx(truth, rel=0.1)
    covered, middle = coverage(partial(found_of_batching, start_rate=predicted * 0.8), truth)
    assert covered >= 0.9 * RUNS
    assert middle == pytest.approx(1.0, abs=0.06)


def test_a_longer_budget_gives_a_narrower_interval():
    world = md4(0.5)
    widths = []
    for budget in (200.0, 2000.0):
        config = SearchConfig(budget_seconds=budget, precision=0.001)
        found = [search(world, config, NINE, seed, 0.51)[0].capacity for seed in range(6)]
        widths.append(
            np.median(
                [(c.high - c.low) / c.estimate if c.high and c.estimate else 10.0 for c in found]
            )
        )
    assert widths[1] < 0.6 * widths[0]


@pytest.mark.parametrize("hint", [0.05, 0.5, 50.0, 900.0])
def test_a_hint_that_is_far_off_costs_a_few_levels(hint):
    found, levels, elapsed = search(
        md4(0.5), SearchConfig(budget_seconds=900.0, start_rate=hint), NINE, 1, 0.51
    )
    assert found.capacity.low < 6.08 < found.capacity.high
    assert sum(level.rate is not None and not 3 < level.rate < 12 for level in levels) <= 8
    assert elapsed <= 900.0 * 1.001


def test_the_first_thing_asked_is_an_idle_server():
    assert next_step([], SearchConfig(), NINE, 0.0) == Measure(None, 60.0, "single_stream", 5)


def test_an_slo_that_single_stream_requests_break_holds_at_no_rate():
    step = next_step([msgspec.structs.replace(SINGLE_STREAM, good=1)], SearchConfig(), NINE, 5.0)
    assert isinstance(step, Finished)
    found = step.capacity
    assert (found.status, found.low, found.high, found.holds_at_any_rate) == (
        "none",
        0.0,
        0.0,
        False,
    )
    assert "4 of 5 requests" in found.reason


def test_one_slow_single_stream_request_is_not_enough_to_give_up():
    step = next_step(
        [msgspec.structs.replace(SINGLE_STREAM, due=1, good=0)],
        SearchConfig(),
        Slo("half", 1.0, None, target=0.5),
        5.0,
    )
    assert isinstance(step, Measure)


def test_a_share_that_breaks_the_slo_at_any_rate_ends_in_asking_the_idle_server_again():
    """A fifth of prompts is too long for the TTFT whatever the load: five single-stream requests
    may not show it.
    """

    def world(rate, n, rng):
        return np.cumsum(rng.exponential(1 / rate, n)), rng.random(n), rng.random(n) > 0.2

    ends = [
        search(world, SearchConfig(budget_seconds=2400.0), NINE, seed, 2.0) for seed in range(10)
    ]
    assert sum(found.capacity.status == "none" for found, _, _ in ends) >= 8
    assert not any(found.capacity.status == "resolved" for found, _, _ in ends)
    assert any(levels[-1].rate is None and levels[-1].due > 5 for _, levels, _ in ends)


def test_a_server_that_is_never_full_holds_at_least_the_highest_rate():
    def world(rate, n, rng):
        return np.cumsum(rng.exponential(1 / rate, n)), rng.random(n), np.ones(n, dtype=bool)

    found, levels, _ = search(
        world, SearchConfig(max_rate=40.0, budget_seconds=3600.0), NINE, 1, 0.5
    )
    assert (found.capacity.status, found.capacity.low, found.capacity.high) == (
        "at_least",
        40.0,
        None,
    )
    assert levels[-1].rate == 40.0


def test_a_budget_that_is_gone_is_said_plainly():
    found, levels, elapsed = search(md4(0.5), SearchConfig(budget_seconds=60.0), NINE, 1, 0.51)
    assert found.capacity.status == "unresolved" and "budget of 60 s" in found.capacity.reason
    assert elapsed <= 60.0
    for spent in (600.0, 1e9):
        step = next_step([SINGLE_STREAM], SearchConfig(budget_seconds=600.0), NINE, spent)
        assert isinstance(step, Finished) and step.capacity.status == "unresolved"


def test_no_level_costs_more_than_is_left():
    config = SearchConfig(budget_seconds=600.0, level_seconds_min=20.0, level_seconds_max=120.0)
    for spent in range(0, 600, 7):
        step = next_step(
            [SINGLE_STREAM, level(4.0, 400, 400), level(8.0, 100, 800)], config, NINE, float(spent)
        )
        if isinstance(step, Measure):
            assert step.duration_seconds * 1.25 <= 600.0 - spent + 1e-9
            assert 20.0 <= step.duration_seconds <= 120.0


def test_invalid_levels_do_not_count():
    good = [SINGLE_STREAM, level(4.0, 400, 400), level(8.0, 300, 800)]
    bad = level(5.0, 0, 500, is_valid=False)
    assert estimate([*good, bad], SearchConfig(), NINE) == estimate(good, SearchConfig(), NINE)
    step = next_step([*good, bad, bad, bad], SearchConfig(), NINE, 0.0)
    assert isinstance(step, Finished) and "last three levels were not valid" in step.capacity.reason
    single_stream = msgspec.structs.replace(SINGLE_STREAM, is_valid=False)
    assert isinstance(next_step([single_stream, single_stream], SearchConfig(), NINE, 0.0), Measure)
    step = next_step([single_stream, single_stream, single_stream], SearchConfig(), NINE, 0.0)
    assert (
        isinstance(step, Finished)
        and "3 single-stream levels were not valid" in step.capacity.reason
    )


@given(
    st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]), st.integers(1, 300), st.floats(0, 1)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0.5, 0.9, 0.99]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_was_measured_there_is_a_next_step_that_makes_sense(shape, target):
    slo = Slo("x", 1.0, None, target=target)
    config = SearchConfig(min_rate=0.1, max_rate=100.0)
    levels = [SINGLE_STREAM] + [level(rate, int(share * due), due) for rate, due, share in shape]
    step = next_step(levels, config, slo, 0.0)
    if isinstance(step, Measure):
        assert step.rate is None or (0.1 <= step.rate <= 100.0 and math.isfinite(step.rate))
        assert step.duration_seconds > 0
    else:
        assert_sane(step.capacity)
    assert_sane(estimate(levels, config, slo))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_rate", 0.0),
        ("max_rate", 0.001),
        ("precision", -1.0),
        ("level_seconds_max", 1.0),
        ("confidence", 0.4),
        ("start_rate", 0.0),
        ("single_stream_requests", 0),
        ("batching_gain", 0.5),
        ("overhead", -0.1),
        ("budget_seconds", float("nan")),
        ("levels", 3),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_its_key(field, value):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, SearchConfig)
