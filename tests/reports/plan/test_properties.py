"""What must hold of every plan, whatever chance does in the simulation.

More rate never costs less, a tighter SLO never costs less, a cheaper price never loses rank.
"""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.metrics.slo import Slo
from loadtests.workload.arrivals import Gamma, OnOff
from reports.plan.candidates import Candidate, Cost
from reports.plan.forecast import DAYS, Forecast, day_loads
from reports.plan.options import Maker, Option
from reports.plan.ranking import ranked, tier
from reports.plan.sizing import Errors, Pool
from tests.reports.plan.worlds import CHAT, CPU, GPU, gpu, laptop, server, terms

CHEAP = gpu("cheap", 0.5, server=server(GPU, 16, Gamma(cv=2.0)), errors=Errors(step=0.1))
CANDIDATES = (
    laptop(dollars=Cost.of(900.0)),
    gpu("rented CPU", 0.2, is_cpu=True, server=server(CPU, 4), kind="calibrated"),
    CHEAP,
    gpu("big", 4.0, errors=Errors(step=0.2, rate=0.1)),
)
QUICK = settings(max_examples=25, deadline=None, derandomize=True)
rates = st.floats(0.05, 2000.0)
days = st.sampled_from(list(DAYS))
limits = st.tuples(st.floats(0.1, 8.0), st.floats(0.02, 0.4), st.floats(0.5, 0.98))
less = st.one_of(st.floats(0.2, 1.0), st.floats(0.97, 1.0))  # slight changes are told by luck
tightenings = st.tuples(less, less, st.one_of(st.floats(0.0, 0.9), st.floats(0.0, 0.03)))


def slo_of(limit: tuple[float, float, float]) -> Slo:
    return Slo("any", *limit)


def cost(candidates: tuple[Candidate, ...], forecast: Forecast, slo: Slo, spares: int) -> float:
    """Of the answer; infinite where nothing suffices."""
    asked = terms(slo, spares=spares, violations=0.02)
    first = ranked(Maker(candidates, forecast, asked, ("certain",)).options())[0]
    return (first.dollars_per_month.certain or 0.0) if tier(first) == 0 else math.inf


def forecast_of(day: str, rate: float, months: int = 1) -> Forecast:
    loads = day_loads(DAYS[day], 0.3, peak_rate=rate)
    return Forecast(loads=loads, months=months, growth_per_month=0.1)


@QUICK
@given(
    rates,
    st.one_of(st.floats(1.0, 20.0), st.floats(1.0, 1.1)),
    days,
    limits,
    st.integers(0, 1),
    st.integers(1, 3),
)
def test_more_rate_never_costs_less(
    rate: float, times: float, day: str, limit: tuple[float, float, float], spares: int, months: int
) -> None:
    slo = slo_of(limit)
    before = cost(CANDIDATES, forecast_of(day, rate, months), slo, spares)
    after = cost(CANDIDATES, forecast_of(day, rate * times, months), slo, spares)
    assert after >= before * (1 - 1e-9)


@QUICK
@given(rates, days, limits, tightenings, st.integers(0, 1))
def test_a_tighter_slo_never_costs_less(
    rate: float,
    day: str,
    limit: tuple[float, float, float],
    by: tuple[float, float, float],
    spares: int,
) -> None:
    tight = tightened(limit, by)
    forecast = forecast_of(day, rate)
    loose_cost = cost(CANDIDATES, forecast, slo_of(limit), spares)
    assert cost(CANDIDATES, forecast, tight, spares) >= loose_cost * (1 - 1e-9)


def tightened(limit: tuple[float, float, float], by: tuple[float, float, float]) -> Slo:
    ttft, tpot, target = limit
    return slo_of((ttft * by[0], tpot * by[1], target + (0.999 - target) * by[2]))


@QUICK
@given(limits, tightenings, st.sampled_from([1, 4]), st.floats(0.7, 1.5))
def test_a_tighter_slo_and_slower_steps_never_give_a_replica_more(
    limit: tuple[float, float, float],
    by: tuple[float, float, float],
    replicas: int,
    slower: float,
) -> None:
    for one in (server(), server(GPU, 64)):
        loose = one.capacity(slo_of(limit), replicas, slower)
        assert one.capacity(tightened(limit, by), replicas, slower) <= loose
        assert one.capacity(slo_of(limit), replicas, slower * 1.01) <= loose


def place(options: list[Option], name: str) -> int:
    """Rank of the best option that a machine is in."""
    return next(at for at, one in enumerate(options) if one.machine == name)


@QUICK
@given(rates, days, st.floats(0.05, 1.0), st.sampled_from(["cheap", "big", "rented CPU"]))
def test_a_cheaper_price_never_loses_rank(rate: float, day: str, factor: float, name: str) -> None:
    forecast = forecast_of(day, rate)
    ranks = []
    for times in (1.0, factor):
        machines = tuple(
            msgspec.structs.replace(one, dollars_per_hour=Cost.of(times * price.estimate))
            if one.name == name and (price := one.dollars_per_hour)
            else one
            for one in CANDIDATES
        )
        ranks.append(place(ranked(Maker(machines, forecast, terms()).options()), name))
    assert ranks[1] <= ranks[0]


@pytest.mark.parametrize("arrivals", [Gamma(cv=3.0), OnOff(on_seconds=5.0, off_seconds=20.0)])
def test_slower_steps_and_tighter_limits_never_hold_more(arrivals: Gamma | OnOff) -> None:
    one = server(CPU, 8, arrivals)
    slos = [Slo("any", 4.0 * by, 0.2 * by, target=0.9) for by in (1.0, 0.7, 0.5, 0.35, 0.25)]
    for replicas in (1, 2, 4):
        by_slo = [one.capacity(slo, replicas) for slo in slos]
        assert by_slo == sorted(by_slo, reverse=True)
        by_speed = [one.capacity(slos[0], replicas, slower) for slower in (0.8, 1.0, 1.3)]
        assert by_speed == sorted(by_speed, reverse=True)
        assert by_slo[0] > 0


@QUICK
@given(limits, st.floats(0.0, 0.6), st.floats(0.0, 0.4), st.floats(0.1, 300.0))
def test_ends_of_the_band_are_in_order(
    limit: tuple[float, float, float], step: float, rate_error: float, rate: float
) -> None:
    errors = Errors(step=step, rate=rate_error)
    found = []
    for sigmas in (1.0, 0.78, 0.0, -1.0):
        pool = Pool(server(), slo_of(limit), errors, sigmas=sigmas)
        found.append(pool.least(rate) or math.inf)
        if found[-1] < math.inf:
            assert pool.most(int(found[-1])) >= rate * (1 - 1e-9)
            assert pool.most(int(found[-1]) - 1) < rate
    assert found == sorted(found, reverse=True)


def test_replicas_in_turn_hold_more_each_than_one_alone() -> None:
    pool = Pool(server(), CHAT, Errors())
    assert pool.most(4) > 4.2 * pool.most(1) > 0
