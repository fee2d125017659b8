"""The one function for a capacity: against queueing theory, against itself, at its edges."""

import functools
import math

import msgspec
import pytest

from crossover.serving.capacity import simulated_capacity
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Server,
    lengths_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.arrivals import Gamma, Poisson, due_times
from crossover.serving.workload.request_lengths import Spread, Workload
from tests.loadtests.capacity.known_server import STEP_TIMES

capacity = functools.partial(simulated_capacity.capacity, requests=QUICK_REQUESTS)

POLICY = SchedulerSettings(slots=8, step_seconds_target=0.3, step_tokens=2048)
CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=128)
SLO = Slo("x", 2.0, 0.2, target=0.9)
TALKS = Workload(
    prompt_tokens=200,
    output_tokens=30,
    turns=Spread(mean=4, sd=2, min=1, max=8),
    think_seconds=Spread(mean=5, sd=3, max=20),
    turn_tokens=Spread(mean=40),
)


def test_the_capacity_is_where_the_share_of_good_requests_is_the_target():
    found = capacity(STEP_TIMES, POLICY, CHAT, SLO, requests=8000)
    lengths = lengths_of(CHAT, 30_000, 7)
    due = due_times(Poisson(), found.rate, 30_000 / found.rate, 9)
    n = min(len(due), 30_000)
    played = simulate(STEP_TIMES, POLICY, due[:n], lengths.prompt[:n], lengths.output[:n])
    assert played.good(2.0, 0.2).mean() == pytest.approx(0.9, abs=0.03)
    assert found.unloaded_attainment == 1.0 and found.steepness >= 1.0


def test_the_steepness_is_that_of_a_slower_machine():
    found = capacity(STEP_TIMES, POLICY, CHAT, SLO)
    slower = capacity(STEP_TIMES.slower(1.1), msgspec.structs.replace(POLICY), CHAT, SLO)
    by_hand = math.log(found.rate / slower.rate) / math.log(1.1)
    assert found.steepness == pytest.approx(max(1.0, by_hand), abs=0.15)
    tight = capacity(STEP_TIMES, POLICY, CHAT, msgspec.structs.replace(SLO, tpot_seconds=0.06))
    assert tight.steepness > found.steepness, "the nearer the limit is, the steeper"


def test_requests_that_fail_alone_have_no_capacity():
    found = capacity(STEP_TIMES.slower(20), POLICY, CHAT, SLO)
    assert found.rate == 0.0 and found.unloaded_attainment < 0.9


def test_the_time_to_the_answer_is_judged_while_requests_are_still_running():
    slo = Slo("answer", ttft_seconds=None, tpot_seconds=None, ttfa_seconds=1.0)
    workload = Workload(prompt_tokens=40, output_tokens=16)
    settings = SchedulerSettings(slots=4)
    thinks = capacity(STEP_TIMES, settings, workload, slo, reasoning_share=0.5, requests=300)
    answers = capacity(STEP_TIMES, settings, workload, slo, requests=300)
    assert 0 < thinks.rate < answers.rate


def test_an_slo_without_limits_is_held_until_the_server_is_saturated():
    found = capacity(STEP_TIMES, POLICY, CHAT, Slo("x", None, None, target=0.9))
    server = Server(STEP_TIMES, POLICY, CHAT, count=QUICK_REQUESTS)
    assert found.rate == pytest.approx(server.saturated_rate())
    assert found.rate > capacity(STEP_TIMES, POLICY, CHAT, SLO).rate


def test_bursty_arrivals_take_capacity():
    smooth = capacity(STEP_TIMES, POLICY, CHAT, SLO).rate
    assert 0 < capacity(STEP_TIMES, POLICY, CHAT, SLO, arrivals=Gamma(cv=3.0)).rate < 0.85 * smooth


def test_what_is_found_in_a_cache_need_not_be_computed():
    shared = Workload(prompt_tokens=1200, output_tokens=60, shared_prefix_tokens=1000)
    none, half, every = (
        capacity(STEP_TIMES, POLICY, shared, SLO, reused_share=reused).rate
        for reused in (0.0, 0.5, 1.0)
    )
    assert none < half < every
    assert set(lengths_of(shared, 50, 1, 1.0).cached.tolist()) == {1000}


@pytest.mark.parametrize("workload", [CHAT, TALKS], ids=["requests", "conversations"])
def test_a_rate_is_judged_alike_whether_or_not_the_simulation_stops_early(workload: Workload):
    lengths = lengths_of(workload, 300, 1)
    saturated_rate = Server(STEP_TIMES, POLICY, lengths, count=300).saturated_rate()
    verdicts = []
    for load in (0.3, 0.6, 0.8, 1.0, 1.5):
        stopping = Server(STEP_TIMES, POLICY, lengths, count=300)
        verdicts.append(stopping.meets(load * saturated_rate, SLO))
        whole = Server(STEP_TIMES, POLICY, lengths, count=300)
        assert verdicts[-1] == (whole.share(load * saturated_rate, SLO) >= SLO.target)
    assert verdicts[0] and not verdicts[-1] and not stopping.played, "overload is not played on"
