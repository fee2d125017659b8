"""The capacity by step times and levels: what is confirmed, what is estimated, and what is not
said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from crossover.loadtests.capacity import capacity_estimate
from crossover.loadtests.capacity.attainment_evidence import speed_by_attainment
from crossover.loadtests.capacity.capacity_estimate import (
    confirming_seconds,
    estimate,
)
from crossover.loadtests.capacity.capacity_text import contradiction_words
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import Capacity, Disturbance
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    QUICK_REQUESTS,
    Demand,
    ServerModel,
    sd_of,
)
from crossover.serving.capacity.slo import SLO_PRESETS, Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.capacity.known_server import SETTINGS, KnownServer
from tests.loadtests.levels.made import single_streams, steady_level, taken

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")
FEW_REQUESTS = 500  # a rate: the capacities below are of so many

SLO = Slo("chat", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
STEP_TIMES = StepTimeModel(base_seconds=0.02, row_seconds=0.01, prompt_token_seconds=0.004)
POLICY = SETTINGS
SERVER = ServerModel(STEP_TIMES, POLICY)
DEMAND = Demand(Workload(prompt_tokens=40, output_tokens=10))


def by_step_times(
    levels: Sequence[Level], factor: float | Sequence[float] = LOADED, **more: Any
) -> Capacity:
    """With these factors of the levels, in their order, and without what their attainment says."""
    factors = [factor] * len(levels) if isinstance(factor, float) else factor
    factor_of = {level.name: one for level, one in zip(levels, factors, strict=True)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            capacity_estimate, "_factor", lambda step_times, level, policy: factor_of[level.name]
        )
        patched.setattr(
            capacity_estimate,
            "speed_by_attainment",
            lambda server, slo, levels, factor, sd: (factor, sd),
        )
        return estimate(levels, SLO, SERVER, DEMAND)


def rate_at(factor: float) -> float:
    """The simulated capacity if all steps take longer by this factor."""
    rates = [SERVER.slower(each).capacity(DEMAND, SLO, QUICK_REQUESTS).rate for each in (1, factor)]
    return rates[1] / rates[0] * SERVER.capacity(DEMAND, SLO).rate


# Of a calibration alone; the test of one says that they are what is simulated.
LIMIT, STEEPNESS = 2.393686527535596, 1.6028680732884473


def test_a_calibration_without_levels_gives_an_estimate_with_its_interval() -> None:
    found = by_step_times([])
    assert (found.state, found.method, found.confirmed_rate, found.factor) == (
        *("not_confirmed", "step_times", None, None),
    )
    assert found.estimated_rate == pytest.approx(LIMIT)
    assert found.steepness == pytest.approx(STEEPNESS)
    reach = math.exp(1.645 * sd_of(0))
    assert found.low == pytest.approx(rate_at(LOADED * reach), rel=0.03)
    assert found.high == pytest.approx(rate_at(LOADED / reach), rel=0.03)
    assert found.reason == "no valid level of open-loop load was measured"
    assert found.confirm_seconds == pytest.approx(confirming_seconds(SLO, 0.8 * LIMIT))


def test_a_level_that_meets_the_slo_near_the_capacity_confirms_and_narrows() -> None:
    level = steady_level(0.8 * LIMIT)
    found = by_step_times([single_streams(), level])
    assert found.state == "confirmed" and found.is_confirmed
    assert found.confirmed_rate == pytest.approx(0.8 * LIMIT, rel=0.01)
    assert (found.confirmed_seconds, found.confirmed_requests, found.confirmed_attainment) == (
        120.0,
        len(level.due),
        1,
    )
    assert found.estimated_rate == pytest.approx(LIMIT) and found.factor == pytest.approx(LOADED)
    assert found.high == pytest.approx(rate_at(LOADED / math.exp(1.645 * sd_of(1.5))), rel=0.03)
    assert found.confirm_seconds is None and found.starts == 1 and found.speed_moved is None


def test_slower_steps_lower_the_limit_by_the_factor_of_the_levels() -> None:
    (level, near), half = (steady_level(0.8 * LIMIT), steady_level(0.82 * LIMIT)), 0.5 * 0.75
    slow = by_step_times([level], LOADED * 1.2**0.5)
    assert slow.factor == pytest.approx(LOADED * 1.2 ** (0.5 / (1 + half))), (
        "less than half a level"
    )
    assert slow.estimated_rate == pytest.approx(
        LIMIT * (LOADED / slow.factor) ** STEEPNESS, rel=0.05
    )
    much = by_step_times([level], 1.3 * LOADED)
    assert much.factor == pytest.approx(1.3 * LOADED), "it was calibrated at another speed"
    two = [level, near]
    mean = by_step_times(two, (1.0 * LOADED, 1.1 * LOADED)).factor or 0.0
    assert LOADED * 1.1**0.4 < mean < LOADED * 1.1**0.5
    widths = [
        math.log((found.high or 0) / LIMIT)
        for found in (by_step_times(two[:1]), by_step_times(two))
    ]
    assert widths[1] < 0.9 * widths[0], "two levels tell more than one"


def test_a_level_far_below_the_limit_teaches_nothing_of_it() -> None:
    found = by_step_times([steady_level(0.6 * LIMIT)], 1.5)
    assert found.estimated_rate == pytest.approx(LIMIT) and found.factor is None
    assert found.state == "confirmed" and found.confirmed_rate == pytest.approx(
        0.6 * LIMIT, rel=0.02
    )
    assert found.high == pytest.approx(rate_at(LOADED / math.exp(1.645 * sd_of(0))), rel=0.03)


def test_a_level_that_misses_the_target_bounds_the_capacity_against_the_model() -> None:
    level = steady_level(0.6 * LIMIT)
    short = steady_level(0.6 * LIMIT, bad=len(level.due) // 9)
    assert short.judge(SLO).verdict == "unresolved"
    found = by_step_times([short], 1.5)
    assert found.factor == pytest.approx(1.5) and found.estimated_rate is not None
    assert found.estimated_rate < 0.9 * LIMIT


def test_a_level_above_the_estimate_confirms_what_it_proves_and_raises_the_estimate() -> None:
    """It takes as many requests as where no step-time model fits; fewer confirm the estimate."""
    above = by_step_times([steady_level(1.1 * LIMIT)])
    assert above.confirmed_rate is not None and above.confirmed_rate > LIMIT
    assert above.estimated_rate == above.confirmed_rate == above.low
    assert above.contradicted_rate == pytest.approx(LIMIT, rel=0.05)
    assert above.high is not None and above.high > above.confirmed_rate
    assert "but a level at 2.6/s met the SLO" in contradiction_words(above)
    fewer = by_step_times([steady_level(1.1 * LIMIT, bad=18)])
    assert fewer.contradicted_rate is None
    assert fewer.confirmed_rate == fewer.estimated_rate == pytest.approx(LIMIT, rel=0.05)


def test_a_level_that_met_the_target_and_confirms_nothing_has_the_reason_in_words() -> None:
    level = steady_level(0.8 * LIMIT, seconds=40)
    short = by_step_times([level])
    assert short.state == "not_confirmed" and "is too short" in short.reason
    assert f"{len(level.due)} of {len(level.due)} requests met the SLO" in short.reason


def test_a_rate_above_one_that_missed_is_not_confirmed() -> None:
    """Of several levels just above the limit one holds by chance."""
    failed, lucky = steady_level(0.8 * LIMIT, bad=60), steady_level(0.85 * LIMIT)
    assert by_step_times([failed, lucky]).state == "not_confirmed", "below it one failed"
    # By levels: 120 requests, all good, hold alone; beside tries that did not hold they do not.
    close = steady_level(1.0)
    assert estimate([close], SLO).is_confirmed
    tries = [steady_level(1.01 + 0.01 * i, bad=14) for i in range(6)]
    assert not estimate([close, *tries], SLO).is_confirmed


def test_a_level_that_clearly_failed_bounds_the_limit_from_above() -> None:
    rate = 0.9 * LIMIT
    found = by_step_times([steady_level(rate, bad=80)])
    assert found.high == rate and found.estimated_rate == rate
    assert found.low is not None and found.low < rate


@pytest.mark.parametrize(
    ("changes", "confirms"),
    [
        ({}, True),
        ({"is_valid": False}, False),
        ({"due": 1000}, False),  # requests are missing
        ({"disturbance": taken(0.02)}, True),
        ({"disturbance": taken(0.06)}, False),
        ({"disturbance": taken(0.06, counts=True)}, True),
    ],
)
def test_only_a_whole_valid_level_on_a_quiet_machine_confirms(
    changes: dict[str, Any], confirms: bool
) -> None:
    found = by_step_times([steady_level(0.8 * LIMIT, **changes)])
    assert found.is_confirmed is confirms
    if not confirms:  # nor does it tell a factor or a failure
        found = by_step_times([steady_level(0.8 * LIMIT, bad=80, **changes)], 1.5)
        assert found.estimated_rate == pytest.approx(LIMIT) and found.high and found.high > LIMIT


def test_a_level_must_be_long_and_have_requests_enough() -> None:
    assert not by_step_times([steady_level(0.8 * LIMIT, 50.0)]).is_confirmed
    wanted = confirming_seconds(SLO, 0.8 * LIMIT)
    assert by_step_times([steady_level(0.8 * LIMIT, wanted)]).is_confirmed
    strict = msgspec.structs.replace(SLO_PRESETS["chat"], target=0.99)
    assert confirming_seconds(strict, 0.1) > 0.9 * 268 * 1.3 / 0.1
    assert confirming_seconds(SLO, 10.0) == 60.0 and confirming_seconds(SLO, 2.0) == 120.0
    assert confirming_seconds(SLO, 10.0, 9.0) == 180.0, "20 answers"
    quick = Slo("quick", ttft_seconds=0.4, tpot_seconds=0.2, target=0.9)
    assert confirming_seconds(quick, 20.0, min_level_seconds=15.0) == 15.0
    assert estimate([steady_level(20.0, 15.0)], quick, min_level_seconds=15.0).is_confirmed
    assert not estimate([steady_level(20.0, 15.0)], quick).is_confirmed
    patient = Slo("patient", ttft_seconds=10.0, target=0.9)
    assert confirming_seconds(patient, 10.0) == 300.0, "an overload of 1/30 shows"


def test_both_speeds_of_a_machine_are_in_the_interval() -> None:
    levels = [steady_level(0.8 * LIMIT), steady_level(0.82 * LIMIT)]
    found, steady = by_step_times(levels, (1.0, 1.5)), by_step_times(levels, (1.2, 1.25))
    assert found.speed_moved == pytest.approx(0.5) and steady.speed_moved is None
    assert found.low is not None and found.high is not None
    assert found.low == found.confirmed_rate, "at half speed it is lower than what met the SLO"
    assert found.high > LIMIT * (LOADED / 1.0) ** STEEPNESS
    since = by_step_times(levels[:1], 1.6 * LOADED)
    assert since.speed_moved == pytest.approx(0.6), "it was calibrated at another speed"


@pytest.mark.parametrize("slowed", [pytest.param(1.0, marks=pytest.mark.slow), 1.2, 2.0])
def test_a_change_of_speed_within_a_level_is_reported_and_widens_the_interval(
    slowed: float,
) -> None:
    """Whatever the level's rate; steps of a quiet machine wander by as much as a fifth."""

    def steps(rows: int, tokens: int, context: int, passes: int) -> float:
        factor = slowed if 60 <= server.now < 120 else 1.0
        return LOADED * factor * STEP_TIMES.seconds(rows, tokens, context)

    server = KnownServer(steps)
    due = np.arange(180.0)
    level = server.level(due.tolist(), [40] * len(due), [10] * len(due))
    found = estimate([level], SLO, SERVER, DEMAND)
    assert found.estimated_rate is not None and found.low is not None and found.high is not None
    if slowed < 2.0:
        assert found.speed_moved is None
        return
    assert found.speed_moved == pytest.approx(1.0, rel=0.1)
    assert found.low == found.confirmed_rate, "at half speed the limit is lower than what held"
    assert found.high > LIMIT


@pytest.mark.parametrize(
    ("levels", "state", "starts"),
    [
        ([steady_level(0.8 * LIMIT, start=start) for start in (1, 2)], "confirmed", 2),
        ([single_streams(20, 10)], "misses_slo_unloaded", 1),
        ([single_streams(20, 10), single_streams(20, 12, start=2)], "misses_slo_unloaded", 2),
        (
            [single_streams(20, 10, start=None), single_streams(5, 5, start=None, name="b")],
            "misses_slo_unloaded",
            2,
        ),
        ([single_streams(2, 2)], "misses_slo_unloaded", 1),
        ([single_streams(20, 10), single_streams(20, 0, start=2)], "not_confirmed", 2),
        ([single_streams(20, 2)], "not_confirmed", 1),
        ([single_streams(1, 1)], "not_confirmed", 1),  # one slow one proves nothing
        (
            [single_streams(20, 10), steady_level(0.8 * LIMIT)],
            "confirmed",
            1,
        ),  # what holds holds alone
    ],
)
def test_missing_the_slo_unloaded_counts_for_every_start(
    levels: list[Level], state: str, starts: int
) -> None:
    found = by_step_times(levels)
    assert (found.state, found.starts) == (state, starts)
    if state == "misses_slo_unloaded":
        assert (
            found.estimated_rate == found.low == found.high == 0.0 and found.confirmed_rate is None
        )
        assert ("on one start" in found.reason) is (starts == 1)


def test_without_step_times_the_capacity_is_between_met_and_missed_rates() -> None:
    met, failed = steady_level(2.0, 120.0), steady_level(2.5, 120.0, bad=100)
    found = estimate([met, failed], SLO)
    assert (found.state, found.method, found.low, found.high) == ("confirmed", "levels", 2.0, 2.5)
    assert found.estimated_rate == pytest.approx(math.sqrt(5))
    open_end = estimate([met], SLO)
    assert open_end.is_confirmed and open_end.high is None and open_end.estimated_rate is None
    assert open_end.reason == "no measured rate missed the SLO"
    only_failed = estimate([failed], SLO)
    assert only_failed.state == "not_confirmed" and only_failed.high == 2.5
    assert only_failed.low is None and only_failed.estimated_rate is None
    # Good by the luck of a minute: levels alone ask for more than where a step-time model speaks
    # for a rate.
    assert not estimate([steady_level(1.0, 60.0)], SLO).is_confirmed
    bad_step_times = StepTimeModel(base_seconds=0.02, error=0.4)
    unfit = estimate([met, failed], SLO, ServerModel(bad_step_times, POLICY), DEMAND)
    assert unfit == found, "a model that does not fit is none"


def test_step_times_that_miss_the_slo_at_every_rate_give_no_capacity() -> None:
    slow = StepTimeModel(base_seconds=0.5)
    found = estimate([single_streams()], SLO, ServerModel(slow, POLICY), DEMAND)
    assert found.estimated_rate is None and "SLO attainment unloaded is only 0 %" in found.reason
    assert found.confirm_seconds is None, "no level could confirm a rate"


def level_of(server: KnownServer, rate: float, seconds: float = 240.0) -> Level:
    """A level of prompts of which every seventh is long, on a server of known step times."""
    due = np.arange(0.0, seconds, 1 / rate)
    prompts = [480 if number % 7 == 3 else 30 for number in range(len(due))]
    return server.level(due.tolist(), prompts, [40] * len(due))


def test_a_level_that_met_every_limit_speaks_against_steps_by_which_it_would_not_have() -> None:
    """A few slow steps set the factor to one at which long prompts miss the SLO unloaded."""
    level = level_of(KnownServer(STEP_TIMES.slower(0.9).seconds), rate=0.25)
    slo = Slo("chat", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
    assert level.judge(slo).good == level.judge(slo).due
    sd = sd_of(1.5)
    factor, narrowed = speed_by_attainment(SERVER, slo, [level], 1.05, sd)
    assert factor < 1.0 and narrowed < sd
    assert speed_by_attainment(SERVER, slo, [], 1.05, sd) == pytest.approx((1.05, sd), rel=0.01)


def test_a_level_that_missed_limits_speaks_against_steps_by_which_it_would_have_met_them() -> None:
    level = level_of(KnownServer(STEP_TIMES.slower(1.15).seconds), rate=0.4)
    slo = Slo("chat", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
    assert level.judge(slo).good < 0.9 * level.judge(slo).due
    factor, _ = speed_by_attainment(SERVER, slo, [level], 1.0, sd_of(1.5))
    assert factor > 1.02


def test_limits_missed_beside_a_process_in_bursts_hardly_speak_against_the_machine() -> None:
    """It takes half of the core for ten of twenty seconds: more requests miss the SLO than if it
    took a quarter all the time."""

    def steps(*counts: int) -> float:
        return STEP_TIMES.seconds(*counts) * (2 if server.now % 20 < 10 else 1)

    server = KnownServer(steps)
    level = level_of(server, rate=0.3)
    assert level.finished is not None
    disturbance = Disturbance(share=0.25, is_disturbed=True, is_corrected=True, counts=True)
    finished = msgspec.structs.replace(level.finished, disturbance=disturbance)
    level = msgspec.structs.replace(level, finished=finished)
    slo = Slo("chat", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
    factor, _ = speed_by_attainment(SERVER, slo, [level], 1.0, sd_of(0))
    assert factor == pytest.approx(1.0, abs=0.05)


def test_where_a_few_percent_of_step_time_end_the_capacity_the_interval_reaches_down() -> None:
    """Every seventh prompt is so long that it just meets the limit on an idle server."""
    demand = Demand(Workload(file=None, prompt_tokens=450, output_tokens=10))
    found = estimate([], SLO, SERVER, demand)
    assert found.estimated_rate and found.low == 0.0
    assert found.steepness is not None and found.steepness > 3
