"""The band of a server whose step times are known up to a factor."""

import math

import msgspec
import numpy as np
import pytest

from loadtests.errors import LoadError
from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.simulation.batching import Pairs, Policy, simulate
from loadtests.simulation.capacity_band import capacity_band
from loadtests.simulation.simulated_capacity import predict
from loadtests.simulation.step_time import StepLaw
from loadtests.workload.arrivals import Arrivals, OnOff, Piecewise
from loadtests.workload.requests import Workload, draw

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


def slower(by: float) -> StepLaw:
    names = ("base_seconds", "row_seconds", "prompt_token_seconds", "kv_token_seconds")
    return msgspec.structs.replace(LAW, **{name: getattr(LAW, name) * by for name in names})


@pytest.mark.parametrize("slo", [CHAT, TIGHT], ids=["by-ttft", "by-tpot"])
def test_the_band_is_what_slower_and_faster_servers_hold(slo: Slo, pairs: Pairs) -> None:
    band = capacity_band(LAW, POLICY, pairs, slo, spread=1.25)
    for rate, by in ((band.low, 1.25), (band.estimate, 1.0), (band.high, 0.8)):
        assert rate == pytest.approx(predict(slower(by), POLICY, pairs, slo, seed=1).rate, rel=0.15)
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


@pytest.mark.parametrize(
    ("arrivals", "kind"),
    [(OnOff(), "on_off"), (Piecewise(((30.0, 1.0), (30.0, 0.0))), "piecewise")],
)
def test_arrivals_in_cycles_are_refused(arrivals: Arrivals, kind: str, pairs: Pairs) -> None:
    with pytest.raises(LoadError, match=f"not simulated for {kind} arrivals"):
        capacity_band(LAW, POLICY, pairs, CHAT, spread=1.5, arrivals=arrivals)


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(LoadError, match="at least 50"):
        capacity_band(LAW, POLICY, np.ones((3, 2), dtype=np.int64), CHAT, spread=1.5)
