"""The search against worlds of known capacity, and at every edge."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.capacity.estimate import Evidence, estimate
from loadtests.capacity.levels import Level
from loadtests.capacity.search import Finished, Measure, next_step
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo
from loadtests.records.events import Capacity, CapacityStatus
from tests.loadtests.capacity.known_worlds import NINE, Played, World, worlds
from tests.loadtests.capacity.searched import search

WORLDS = {world.name: world for world in worlds()}
SLOTS = WORLDS["4 slots of 0.51 s"]
SINGLE_STREAM = Level(rate=None, due=27, good=27, duration_seconds=13.8, mean_e2e_seconds=0.51)


def level(rate, good, due, seconds=100.0, **changes):
    steady = {"is_steady": True} | changes
    return Level(rate=rate, good=good, due=due, duration_seconds=seconds, **steady)


def found_by(world, seeds, **config):
    return [search(world, SearchConfig(**config), seed) for seed in seeds]


def assert_sane(found: Capacity):
    assert found.reason
    known = [end for end in (found.low, found.estimate, found.high) if end is not None]
    assert known == sorted(known) and all(math.isfinite(end) and end >= 0 for end in known)
    holds = found.status in (CapacityStatus.CONFIRMED, CapacityStatus.AT_LEAST)
    assert holds == (found.held is not None and found.held > 0)


@pytest.mark.parametrize(
    ("name", "low", "high", "budget", "aim"),
    [
        ("4 slots of 0.51 s", 5.9, 6.3, 900.0, None),
        ("4 slots of 0.51 s", 5.9, 6.3, 900.0, 2.0),
        ("135M on a CPU", 2.6, 2.9, 900.0, 0.5),
        ("half speed 10 % of the time", 0.3, 0.5, 3600.0, None),
        ("TTFT limit 30 s", 1.6, 1.9, 3600.0, 0.5),
    ],
)
def test_intervals_cover_the_capacity_and_what_is_said_to_hold_does(name, low, high, budget, aim):
    """Two misses of eight would be chance one time in 20 at a coverage of 95 %."""
    world = WORLDS[name]
    truth = world.capacity()
    assert low < truth < high
    start = None if aim is None else aim * truth
    ends = [
        found.capacity
        for found, _, _ in found_by(world, range(8), budget_seconds=budget, start_rate=start)
    ]
    for found in ends:
        assert_sane(found)
    finite = [found for found in ends if found.low is not None and found.high is not None]
    missed = [found for found in finite if not found.low <= truth <= found.high]
    assert len(missed) <= 2, missed
    held = [found.held / truth for found in ends if found.held]
    assert max(held) < (1.3 if "half speed" in name else 1.05), held
    assert not any(found.status is CapacityStatus.NONE for found in ends)
    assert len(held) >= 4 and float(np.median(held)) > (0.4 if "half speed" in name else 0.5)


def test_a_share_that_breaks_the_slo_at_any_rate_is_never_a_capacity():
    """13 % of requests miss the SLO whatever the load, and 10 % may."""
    ends = found_by(WORLDS["13 % bad alone"], range(10), budget_seconds=1800.0)
    assert not [found for found, _, _ in ends if found.capacity.held]
    assert sum(found.capacity.status is CapacityStatus.NONE for found, _, _ in ends) >= 5


def test_a_longer_budget_gives_a_narrower_interval():
    widths = []
    for budget in (300.0, 2000.0):
        ends = found_by(SLOTS, range(4), budget_seconds=budget, precision=0.001)
        found = [one.capacity for one, _, _ in ends]
        widths.append(
            np.median([c.high / c.low if c.high and c.low else 100.0 for c in found]) - 1.0
        )
    assert widths[1] < 0.6 * widths[0]


@pytest.mark.parametrize("hint", [0.05, 0.5, 50.0, 900.0])
def test_a_hint_that_is_far_off_costs_a_few_levels(hint):
    config = SearchConfig(budget_seconds=1200.0, start_rate=hint)
    found, levels, elapsed = search(SLOTS, config, 1)
    assert found.capacity.low < 6.11 < found.capacity.high
    assert sum(level.rate is not None and not 3 < level.rate < 12 for level in levels) <= 8
    assert elapsed <= 1200.0 * 1.05


def test_the_end_of_the_budget_is_kept_for_a_level_that_confirms():
    found, levels, elapsed = search(SLOTS, SearchConfig(budget_seconds=600.0), 2)
    assert found.capacity.status is CapacityStatus.CONFIRMED and elapsed <= 630.0
    held = [one for one in levels if one.rate == found.capacity.confirmed_by.asked_rate]
    assert sum(one.duration_seconds for one in held) >= 59.0 and all(one.is_whole for one in held)


def test_the_last_start_first_confirms_where_no_rate_is_confirmed():
    """A rate that is likely to hold, below the interval's low end: there may be no second try."""
    config = SearchConfig(budget_seconds=300.0, starts=3)
    seen = [
        msgspec.structs.replace(SINGLE_STREAM, start=1),
        level(6.0, 100, 120, 20.0, start=1),
        level(5.0, 97, 100, 20.0, start=1),
        level(5.5, 105, 110, 20.0, start=2),
    ]
    step = next_step(seen, config, NINE, 200.0, start=3)
    assert isinstance(step, Measure) and step.purpose == "confirm"
    low = estimate(seen, config, NINE).low
    assert low is not None and step.rate is not None and step.rate <= low
    assert step.duration_seconds >= 60.0
    confirmed = [*seen, level(4.0, 300, 300, 75.0, start=2)]
    again = next_step(confirmed, config, NINE, 200.0, start=3)
    assert isinstance(again, Measure) and (again.purpose, again.rate) == ("repeat", 4.0)


def test_with_little_time_a_level_that_narrows_is_one_that_confirms():
    seen = [SINGLE_STREAM, level(6.4, 60, 100, 16.0), level(4.8, 96, 96, 20.0)]
    config = SearchConfig(budget_seconds=900.0)
    for elapsed, purpose in ((100.0, "narrow"), (700.0, "confirm")):
        step = next_step(seen, config, NINE, elapsed)
        assert isinstance(step, Measure) and step.purpose == purpose
    assert step.duration_seconds >= 60.0


def test_a_queue_that_grows_says_nothing_of_clusters_in_other_levels():
    """All requests of an overload are bad from some moment on; below the capacity few are."""
    below = level(4.0, 350, 360, 90.0, runs=(150, 3, 60, 3, 70, 4, 70))
    above = level(8.0, 60, 160, 20.0, runs=(60, 100), is_steady=False, is_whole=False)
    steady = msgspec.structs.replace(above, is_steady=True)
    alone, beside, wrong = (
        Evidence(levels, SearchConfig(), NINE).clump
        for levels in ([below], [below, above], [below, steady])
    )
    assert alone == beside < wrong


def test_what_cannot_be_confirmed_is_narrowed_to_the_end_of_the_budget():
    """Confirming would take hours at this rate; the interval is worth having all the same."""
    slow = msgspec.structs.replace(SINGLE_STREAM, mean_e2e_seconds=10.0)
    levels = [slow, level(0.02, 20, 20), level(0.04, 27, 30), level(0.08, 5, 30)]
    config = SearchConfig(budget_seconds=900.0)
    step = next_step(levels, config, NINE, 500.0)
    assert isinstance(step, Measure) and step.purpose == "narrow"
    end = next_step(levels, config, NINE, 899.0)
    assert isinstance(end, Finished) and "to confirm 0.0" in end.capacity.reason


def test_a_level_that_narrows_is_as_long_as_the_limit_asks():
    patient = Slo("patient", 10.0, None, target=0.9)
    levels = [SINGLE_STREAM, level(4.0, 400, 400), level(8.0, 100, 800)]
    config = SearchConfig(budget_seconds=4000.0)
    for slo, seconds in ((NINE, 120.0), (patient, 300.0)):
        step = next_step(levels, config, slo, 0.0)
        assert isinstance(step, Measure) and (step.purpose, step.duration_seconds) == (
            "narrow",
            seconds,
        )


def test_the_first_thing_asked_is_an_idle_server():
    assert next_step([], SearchConfig(), NINE, 0.0) == Measure(None, 120.0, "single_stream", 20)


def test_a_level_warms_up_for_two_answers_and_a_seventh_of_its_window():
    step = next_step([SINGLE_STREAM], SearchConfig(), NINE, 5.0)
    assert isinstance(step, Measure) and step.warmup_seconds == 0.15 * step.duration_seconds
    slow = msgspec.structs.replace(SINGLE_STREAM, mean_e2e_seconds=15.0)
    step = next_step([slow], SearchConfig(), NINE, 5.0)
    assert isinstance(step, Measure) and step.warmup_seconds == 30.0


def test_an_slo_that_single_stream_requests_break_holds_at_no_rate():
    broken = msgspec.structs.replace(SINGLE_STREAM, due=20, good=12)
    step = next_step([broken], SearchConfig(), NINE, 5.0)
    assert isinstance(step, Finished)
    found = step.capacity
    assert (found.status, found.held, found.high) == (CapacityStatus.NONE, 0.0, 0.0)
    assert "8 of 20 requests" in found.reason


def test_one_slow_single_stream_request_is_not_enough_to_give_up():
    """Nor are four of five at 99 %: five bad ones, or 20 requests, decide."""
    strict = Slo("strict", 1.0, None, target=0.99)
    for due, good, decided in ((1, 0, False), (5, 4, False), (5, 0, True), (20, 18, True)):
        seen = msgspec.structs.replace(SINGLE_STREAM, due=due, good=good)
        step = next_step([seen], SearchConfig(), strict, 5.0)
        assert isinstance(step, Finished) is decided, (due, good)


def test_a_server_that_is_never_full_holds_at_least_the_highest_rate():
    def play(due, rng, at):
        return Played(due, np.full(len(due), 0.1), due + 0.5, np.ones(len(due), dtype=bool))

    world = World("never full", NINE, play, 1.0, 2.0)
    found, levels, _ = search(world, SearchConfig(max_rate=40.0, budget_seconds=1200.0), 1)
    capacity = found.capacity
    assert (capacity.status, capacity.high) == (CapacityStatus.AT_LEAST, None)
    assert levels[-1].rate == capacity.confirmed_by.asked_rate == 40.0
    assert capacity.held == min(40.0, levels[-1].due / levels[-1].duration_seconds)


def test_a_budget_that_is_gone_is_said_plainly():
    found, _, elapsed = search(SLOTS, SearchConfig(budget_seconds=60.0), 1)
    assert found.capacity.held is None and "budget of 60 s" in found.capacity.reason
    assert elapsed <= 70.0
    for spent in (600.0, 1e9):
        step = next_step([SINGLE_STREAM], SearchConfig(budget_seconds=600.0), NINE, spent)
        assert isinstance(step, Finished)
        assert step.capacity.status is CapacityStatus.ALONE_ONLY


def test_no_level_costs_more_than_is_left():
    config = SearchConfig(budget_seconds=600.0, level_seconds_min=20.0, level_seconds_max=120.0)
    for spent in range(0, 600, 7):
        levels = [SINGLE_STREAM, level(4.0, 400, 400), level(8.0, 100, 800)]
        step = next_step(levels, config, NINE, float(spent))
        if isinstance(step, Measure):
            assert step.duration_seconds * 1.25 <= 600.0 - spent + 1e-9


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
        ("max_rate", 0.00001),
        ("precision", -1.0),
        ("level_seconds_max", 1.0),
        ("confidence", 0.4),
        ("start_rate", 0.0),
        ("single_stream_requests", 0),
        ("batching_gain", 0.5),
        ("overhead", -0.1),
        ("confirming_share", 1.0),
        ("budget_seconds", float("nan")),
        ("levels", 3),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_its_key(field, value):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, SearchConfig)
