"""The band of a server whose step times are known up to a factor."""

import math

import msgspec
import numpy as np
import pytest

from loadtests.errors import LoadError
from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.simulation.batching import Pairs, Policy, simulate
from loadtests.simulation.capacity_band import capacity_band
from loadtests.simulation.old_simulated_capacity import predict
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Arrivals, Diurnal, Gamma, OnOff, Piecewise, due_times
from loadtests.workload.request_lengths import Workload, draw

CHAT = SLO_PRESETS["chat"]
LAW = StepLaw(
    base_seconds=0.01,
    row_seconds=4e-4,
    prompt_token_seconds=2e-5,
    kv_token_seconds=2e-8,
)
POLICY = Policy(slots=64, prefill_tokens=2048)
TIGHT = msgspec.structs.replace(CHAT, tpot_seconds=0.025)


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    asks = draw(Workload(preset="chat", scale=0.5), 1000, 1)
    return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)


@pytest.mark.parametrize("slo", [CHAT, TIGHT], ids=["by-ttft", "by-tpot"])
def test_the_band_is_what_slower_and_faster_servers_hold(slo: Slo, pairs: Pairs) -> None:
    band = capacity_band(LAW, POLICY, pairs, slo, spread=1.25)
    for rate, by in ((band.low, 1.25), (band.estimate, 1.0), (band.high, 0.8)):
        assert rate == pytest.approx(
            predict(LAW.slower(by), POLICY, pairs, slo, seed=1).rate, rel=0.15
        )
    assert band.played is not None
    assert float(band.played.good(slo).mean()) > 0.95


def test_an_end_of_the_band_may_hold_no_rate(pairs: Pairs) -> None:
    slo = msgspec.structs.replace(CHAT, tpot_seconds=0.0125)
    band = capacity_band(LAW, POLICY, pairs, slo, spread=2.0)
    assert band.low == 0.0 < band.estimate < band.high


def test_without_limits_it_is_the_speed_of_the_server(pairs: Pairs) -> None:
    band = capacity_band(LAW, POLICY, pairs, SLO_PRESETS["batch"], spread=2.0)
    assert band.high / band.low == pytest.approx(4.0)
    most = 64 / (pairs[:, 1].mean() * LAW.seconds(64, 0, 0))
    assert 0.5 * most < band.estimate < 1.2 * most
    assert math.isfinite(band.estimate)


@pytest.mark.parametrize("tpot_seconds", [None, 1.0])
def test_no_rate_is_above_what_the_server_answers(tpot_seconds: float | None, pairs: Pairs) -> None:
    slots = Policy(slots=16, prefill_tokens=2048)
    loose = msgspec.structs.replace(CHAT, ttft_seconds=None, tpot_seconds=tpot_seconds)
    band = capacity_band(LAW, slots, pairs, loose, spread=2.0)
    saturated = simulate(LAW, slots, np.zeros(len(pairs)), pairs)
    rate = len(pairs) / saturated.last_token.max()  # with its beginning and end: a little lower
    assert 0.95 * rate < band.estimate < 1.06 * rate
    assert band.low == pytest.approx(band.estimate / 2)
    assert band.high == pytest.approx(band.estimate * 2)


def test_bursts_are_played_as_the_load_generator_sends_them(pairs: Pairs) -> None:
    process = OnOff(on_seconds=5.0, off_seconds=15.0)
    band = capacity_band(LAW, POLICY, pairs, TIGHT, spread=1.25, arrivals=process)
    assert 0 < band.low < band.estimate < band.high
    shares = []
    for factor in (0.7, 1.3):
        rate = factor * band.estimate
        due = due_times(process, rate, 3_000.0, 77)
        lengths = pairs[np.arange(len(due)) % len(pairs)]
        shares.append(simulate(LAW, POLICY, due, lengths).good(TIGHT).mean())
    assert shares[0] > TIGHT.target > shares[1]


@pytest.mark.parametrize(
    ("arrivals", "share"),
    [
        (Diurnal(86_400.0, (1.0, 3.0)), 1 / 1.5),
        (Piecewise(((40_000.0, 1.0), (40_000.0, 3.0))), 1 / 1.5),
        (OnOff(on_seconds=7_200.0, off_seconds=21_600.0), 1 / 4),
        (Diurnal(2.0, (1.0, 3.0)), 1.0),
    ],
    ids=["day", "steps", "hours on", "quick"],
)
def test_a_cycle_is_held_at_its_busiest_or_where_it_is_short_on_average(
    arrivals: Arrivals, share: float, pairs: Pairs
) -> None:
    even = capacity_band(LAW, POLICY, pairs, TIGHT, spread=1.25)
    band = capacity_band(LAW, POLICY, pairs, TIGHT, spread=1.25, arrivals=arrivals)
    assert band.estimate == pytest.approx(even.estimate * share, rel=0.1)
    assert band.low == pytest.approx(even.low * share, rel=0.1)
    assert band.high == pytest.approx(even.high * share, rel=0.1)
    assert band.played is not None and len(band.played.due)


def test_clusters_cost_capacity_and_those_longer_than_a_run_are_refused(pairs: Pairs) -> None:
    even = capacity_band(LAW, POLICY, pairs, CHAT, spread=1.25)
    bursty = capacity_band(LAW, POLICY, pairs, CHAT, spread=1.25, arrivals=Gamma(cv=4.0))
    assert 0 < bursty.estimate < 0.9 * even.estimate
    with pytest.raises(LoadError, match=r"gamma arrivals of cv 10: .* clusters of some 100"):
        capacity_band(LAW, POLICY, pairs, CHAT, spread=1.25, arrivals=Gamma(cv=10.0))


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(LoadError, match="at least 50"):
        capacity_band(LAW, POLICY, np.ones((3, 2), dtype=np.int64), CHAT, spread=1.5)
