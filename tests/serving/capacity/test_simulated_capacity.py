"""The one function for a capacity: against queueing theory, against itself, at its edges."""

import math

import msgspec
import pytest

from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    SEED,
    Demand,
    Server,
    ServerModel,
    SimulatedCapacity,
    lengths_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.arrivals import Gamma, Poisson, due_times
from crossover.serving.workload.request_lengths import Spread, Workload
from tests.loadtests.capacity.known_server import STEP_TIMES

POLICY = SchedulerSettings(slots=8, step_seconds_target=0.3, step_tokens=2048)
CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=128)
SLO = Slo("x", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
SERVER = ServerModel(STEP_TIMES, POLICY)
TALKS = Workload(
    prompt_tokens=200,
    output_tokens=30,
    turns=Spread(mean=4, sd=2, min=1, max=8),
    think_seconds=Spread(mean=5, sd=3, max=20),
    turn_tokens=Spread(mean=40),
)


def capacity(
    server: ServerModel = SERVER, workload: Workload = CHAT, slo: Slo = SLO
) -> SimulatedCapacity:
    return server.capacity(Demand(workload), slo, QUICK_REQUESTS)


def test_the_capacity_is_where_the_share_of_good_requests_is_the_target():
    found = SERVER.capacity(Demand(CHAT), SLO)
    lengths = lengths_of(CHAT, 30_000, 7)
    due = due_times(Poisson(), found.rate, 30_000 / found.rate, 9)
    n = min(len(due), 30_000)
    played = simulate(STEP_TIMES, POLICY, due[:n], lengths.prompt[:n], lengths.output[:n])
    assert SLO.met_by(played).mean() == pytest.approx(0.9, abs=0.03)
    assert found.unloaded_attainment == 1.0 and found.steepness >= 1.0


def test_the_steepness_is_that_of_a_slower_machine():
    found = capacity()
    slower = capacity(SERVER.slower(1.1))
    by_hand = math.log(found.rate / slower.rate) / math.log(1.1)
    assert found.steepness == pytest.approx(max(1.0, by_hand), abs=0.15)
    tight = capacity(slo=msgspec.structs.replace(SLO, tpot_seconds=0.06))
    assert tight.steepness > found.steepness, "the nearer the limit is, the steeper"


def test_requests_that_miss_the_slo_unloaded_have_no_capacity():
    found = capacity(SERVER.slower(20))
    assert found.rate == 0.0 and found.unloaded_attainment < 0.9


def test_the_time_to_the_answer_is_judged_while_requests_are_still_running():
    slo = Slo("answer", ttfa_seconds=1.0)
    workload = Workload(prompt_tokens=40, output_tokens=16)
    plain = ServerModel(STEP_TIMES, SchedulerSettings(slots=4))
    reasoning = msgspec.structs.replace(plain, reasoning_share=0.5)
    thinks = reasoning.capacity(Demand(workload), slo, 300)
    answers = plain.capacity(Demand(workload), slo, 300)
    assert 0 < thinks.rate < answers.rate


def test_an_slo_without_limits_is_met_until_the_server_is_saturated():
    found = capacity(slo=Slo("x", target=0.9))
    server = Server(
        STEP_TIMES, POLICY, lengths_of(CHAT, QUICK_REQUESTS, SEED), count=QUICK_REQUESTS
    )
    assert found.rate == pytest.approx(server.saturated_rate)
    assert found.rate > capacity().rate


def test_bursty_arrivals_take_capacity():
    smooth = capacity().rate
    bursty = SERVER.capacity(Demand(CHAT, Gamma(cv=3.0)), SLO, QUICK_REQUESTS)
    assert 0 < bursty.rate < 0.85 * smooth


def test_what_is_found_in_a_cache_need_not_be_computed():
    shared = Workload(prompt_tokens=1200, output_tokens=60, shared_prefix_tokens=1000)
    none, half, every = (
        capacity(ServerModel(STEP_TIMES, POLICY, prefix_share=reused), shared).rate
        for reused in (0.0, 0.5, 1.0)
    )
    assert none < half < every
    assert set(lengths_of(shared, 50, 1, 1.0).cached.tolist()) == {1000}


@pytest.mark.parametrize("workload", [CHAT, TALKS], ids=["requests", "conversations"])
def test_a_rate_is_judged_alike_whether_or_not_the_simulation_stops_early(workload: Workload):
    lengths = lengths_of(workload, 300, 1)
    saturated_rate = Server(STEP_TIMES, POLICY, lengths, count=300).saturated_rate
    verdicts = []
    for load in (0.3, 0.6, 0.8, 1.0, 1.5):
        stopping = Server(STEP_TIMES, POLICY, lengths, count=300)
        verdicts.append(stopping.meets(load * saturated_rate, SLO))
        whole = Server(STEP_TIMES, POLICY, lengths, count=300)
        assert verdicts[-1] == (whole.share(load * saturated_rate, SLO) >= SLO.target)
    assert verdicts[0] and not verdicts[-1] and not stopping.played, "overload is not played on"


@pytest.mark.parametrize("factor", [pytest.param(0.7, marks=pytest.mark.slow), 1.6])
@pytest.mark.parametrize(
    "settings",
    [SchedulerSettings(slots=8, step_seconds_target=None), POLICY],
    ids=["in slow motion", "with a step target"],
)
def test_simulations_of_one_server_serve_every_factor_of_its_step_times(
    settings: SchedulerSettings, factor: float
):
    step_times = msgspec.structs.replace(STEP_TIMES, request_seconds=0.4)
    slo = msgspec.structs.replace(SLO, ttft_seconds=1.2)
    server = ServerModel(step_times, settings).simulated(Demand(CHAT), 1_000)
    slower = ServerModel(step_times.slower(factor), settings).simulated(Demand(CHAT), 1_000)
    assert server.rate_if_slower(slo, factor) == pytest.approx(slower.crossing(slo), rel=1e-6)


def test_a_server_that_is_too_slow_for_single_requests_has_no_rate():
    server = SERVER.simulated(Demand(CHAT), 300)
    assert server.rate_if_slower(SLO, 20.0) == 0.0
