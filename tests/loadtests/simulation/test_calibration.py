"""Calibration on servers whose step law is known: the law is found again, the capacity predicted,
the time-box kept.
"""

import msgspec
import numpy as np
import pytest

from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.records.events import Capacity, CapacityStatus
from loadtests.records.schema import RequestRecord
from loadtests.simulation.batching import Policy
from loadtests.simulation.calibration import (
    LEAST_SECONDS,
    SHARE,
    Burst,
    Prediction,
    calibrate,
    prediction,
    prediction_ratio,
    time_box,
)
from loadtests.simulation.old_simulated_capacity import predict
from loadtests.simulation.step_observations import (
    most_at_once,
    observations_of,
    observations_of_burst,
)
from loadtests.simulation.step_replay import Residuals
from loadtests.simulation.step_time import StepLaw, StepObservation, fit
from loadtests.workload.arrivals import Poisson
from loadtests.workload.request_lengths import Workload, draw
from tests.loadtests.simulation.simulated_server import Server, Skewed, staircase
from tests.tools.records import request

LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-6
)
STAIRS = StepLaw(
    base_seconds=0.0035,
    rows=tuple((rows, 0.0063 * staircase(rows)) for rows in range(1, 9)),
    prompt_token_seconds=0.0033,
)
CALLS = msgspec.structs.replace(STAIRS, base_seconds=0.012, pass_seconds=0.012)
WORKLOAD = Workload(preset="chat", max_prompt_tokens=256, max_output_tokens=48)
CHAT = Slo("chat", 2.0, 0.1, target=0.9)


class Engine(Server):
    """A server that obeys a law."""

    def __init__(self, law: StepLaw, slots: int, chunk: int = 1) -> None:
        super().__init__(law.seconds, slots, chunk)

    def __call__(self, burst: Burst) -> list[RequestRecord]:
        return self.answer(burst.prompt_tokens, burst.output_tokens)


def single_stream(engine: Engine, workload: Workload, count: int = 4) -> list[RequestRecord]:
    return [
        engine(Burst(ask.prompt_tokens, (ask.output_tokens,)))[0]
        for ask in draw(workload, count, 1)
    ]


@pytest.mark.parametrize("slots", [4, 16, None], ids=["4", "16", "unknown"])
def test_the_capacity_is_predicted_from_a_few_bursts(slots: int | None) -> None:
    engine = Engine(LAW, slots or 8)
    alone = single_stream(engine, WORKLOAD)
    seen, served = calibrate(engine, alone, WORKLOAD, slots, 1e9, lambda: engine.now)
    assert served == (slots or 8)
    policy = Policy(slots=served or 0)
    made = prediction([*observations_of(alone), *seen], policy, WORKLOAD, Poisson(), [CHAT], 1)
    pairs = np.array([(a.prompt_tokens, a.output_tokens) for a in draw(WORKLOAD, 40_000, 5)])
    truth = predict(LAW, policy, pairs, CHAT, seed=9).rate
    assert made.law is not None and made.reason == ""
    predicted = made.rates["chat"]
    assert predicted.rate == pytest.approx(truth, rel=0.08)
    assert predicted.low is not None and predicted.high is not None
    assert 0.5 * truth < predicted.low < predicted.rate < predicted.high < 2 * truth


def test_a_staircase_of_row_costs_is_found_step_by_step() -> None:
    """3 rows cost what 4 do, 7 what 8 do; a line through 2, 4 and 8 rows is a fifth too quick."""
    engine = Engine(STAIRS, 8)
    workload = Workload(preset="chat", max_prompt_tokens=40, max_output_tokens=16)
    alone = single_stream(engine, workload, 8)
    seen, _ = calibrate(engine, alone, workload, 8, 10.0, lambda: engine.now)
    law = fit([*observations_of(alone), *seen])
    for rows in (1, 2, 3, 4, 5, 6, 8):
        assert law.seconds(rows, 0, 0) == pytest.approx(STAIRS.seconds(rows, 0, 0), rel=0.02), rows
    costs = [law.rows_seconds(rows) for rows in np.linspace(0, 20, 81)]
    assert np.all(np.diff(costs) >= 0), "more rows never cost less"
    friendly = fit([*observations_of(alone), *(o for o in seen if o.decode_rows in (2, 4, 8))])
    assert friendly.seconds(3, 0, 0) < 0.85 * STAIRS.seconds(3, 0, 0)


@pytest.mark.parametrize(
    ("base", "row", "prompt", "ttft", "tpot"),
    [(3.5, 6.3, 3.3, 2.0, 0.1), (30, 32, 24, 2.0, 0.1), (300, 310, 240, 30.0, 1.0)],
    ids=["135M", "1B", "slower"],
)
def test_a_prediction_is_right_where_rows_are_a_staircase_and_steps_stall(
    base: float, row: float, prompt: float, ttft: float, tpot: float
) -> None:
    """One step in a hundred takes four times as long: typical steps alone would predict more."""
    law = StepLaw(
        base_seconds=base / 1e3,
        rows=tuple((rows, row / 1e3 * staircase(rows)) for rows in range(1, 9)),
        prompt_token_seconds=prompt / 1e3,
    )
    slo = Slo("x", ttft, tpot, target=0.9)
    skewed = Skewed(3)
    engine = Engine(law, 8)
    engine.steps = lambda *counts: law.seconds(*counts) * skewed()
    workload = Workload(preset="chat", max_prompt_tokens=40, max_output_tokens=16)
    alone = single_stream(engine, workload, 20)
    seen, _ = calibrate(engine, alone, workload, 8, 30.0, lambda: engine.now)
    made = prediction(
        [*observations_of(alone), *seen], Policy(slots=8), workload, Poisson(), [slo], 1
    )
    pairs = np.array([(a.prompt_tokens, a.output_tokens) for a in draw(workload, 20_000, 1)])
    assert made.law is not None
    typical = predict(made.law, Policy(slots=8), pairs, slo, seed=1).rate
    ratios = tuple(skewed() for _ in range(20_000))
    true_steps = Residuals(ratios, ratios, ratios)
    truth = predict(law, Policy(slots=8), pairs, slo, seed=1, residuals=true_steps).rate
    predicted = made.rates["x"]
    assert predicted.rate == pytest.approx(truth, rel=0.15) and predicted.rate < typical
    assert predicted.low is not None and predicted.high is not None
    assert predicted.low < truth < predicted.high


def test_equal_lengths_get_a_sweep_of_prompts() -> None:
    engine = Engine(LAW, 8)
    fixed = Workload(prompt_tokens=128, output_tokens=16)
    alone = single_stream(engine, fixed)
    engine.asked.clear()
    seen, _ = calibrate(engine, alone, fixed, 8, 1e9)
    assert (16, (2,)) in engine.asked, (
        "a second length, or the cost of a prompt token could not be told from the base"
    )
    law = fit([*observations_of(alone), *seen])
    assert law.unseen == () and law.prompt_token_seconds == pytest.approx(
        LAW.prompt_token_seconds, rel=0.2
    )
    assert max(len(outputs) for _, outputs in engine.asked) == 8


def test_only_steps_in_which_the_same_streams_decode_are_counted() -> None:
    engine = Engine(LAW, 4)
    first, seen = observations_of_burst(engine(Burst(32, (20,) * 4)))
    assert (first.passes, first.prefill_tokens, first.decode_rows) == (4, 128, 0)
    assert first.seconds == pytest.approx(LAW.seconds(0, 128, 0, 4), rel=0.01)
    assert seen.decode_rows == 4 and seen.prefill_tokens == 0
    assert seen.seconds == pytest.approx(LAW.seconds(4, 0, seen.kv_tokens), rel=0.01)
    assert len(seen.steps) == pytest.approx(18, abs=1)
    fewer = observations_of_burst(engine(Burst(32, (30, 30, 20, 12))), 7)
    assert [(one.decode_rows, one.burst) for one in fewer] == [(0, 7), (4, 7), (3, 7), (2, 7)]
    for one in fewer[1:]:
        assert one.seconds == pytest.approx(
            LAW.seconds(one.decode_rows, 0, one.kv_tokens), rel=0.01
        )
    chunked = observations_of_burst(Engine(LAW, 4, chunk=4)(Burst(32, (20,) * 4)))
    assert chunked[0].seconds == pytest.approx(seen.seconds, rel=0.3)
    assert observations_of_burst(engine(Burst(32, (20,) * 8))) == [], (
        "more streams than slots never decode together"
    )
    assert (
        observations_of_burst([]) == []
        and observations_of_burst([request(error="refused", status=429)]) == []
    )
    assert (
        most_at_once(engine(Burst(32, (20,) * 8))) == 4
        and most_at_once(engine(Burst(32, (20,) * 2))) == 2
        and most_at_once([]) == 0
    )
    one_token = Engine(StepLaw(base_seconds=0.5), 4)(Burst(1, (1,) * 8))
    assert most_at_once(one_token) == 4, "answers of one chunk: by how many came together"


def test_the_time_box_is_kept() -> None:
    assert time_box(100.0, 60.0) == pytest.approx(100 * SHARE) and time_box(10_000.0, 60.0) == 60.0
    assert time_box(LEAST_SECONDS / SHARE * 0.9, 60.0) == 0.0 and time_box(1e6, 0.0) == 0.0
    slow = Engine(StepLaw(base_seconds=2.0, prompt_token_seconds=0.05), 16)
    alone = single_stream(slow, WORKLOAD)
    slow.asked.clear()
    calibrate(slow, alone, WORKLOAD, 16, 5.0)
    assert slow.asked == [], "nothing is begun that would not be over in time"


@pytest.mark.parametrize(("seconds", "rows"), [(1.0, {2}), (3.0, {2, 3, 5}), (8.0, {2, 3, 5, 16})])
def test_bursts_end_within_the_time_on_the_clock(seconds: float, rows: set[int]) -> None:
    """Few rows first, where time is short: a slow model serves few at once."""
    engine = Engine(LAW, 16)
    alone = single_stream(engine, WORKLOAD)
    began = engine.now
    engine.asked.clear()
    seen, _ = calibrate(engine, alone, WORKLOAD, 16, seconds, lambda: engine.now)
    assert len(engine.asked) >= 2 and engine.now - began < seconds
    assert rows <= {one.decode_rows for one in seen}


def test_no_prediction_has_its_reason() -> None:
    at_once = [StepObservation(rows, 0, 8, 0.0) for rows in (1, 2, 4, 8)]
    made = prediction(at_once, Policy(), WORKLOAD, Poisson(), [CHAT], 1)
    assert made.law is None and made.rates == {} and made.observations == at_once
    assert made.reason == "the engine's steps take no time that the client can see"
    made = prediction([], Policy(), WORKLOAD, Poisson(), [CHAT], 1)
    assert isinstance(made, Prediction) and made.law is None and "too few to fit" in made.reason
    engine = Engine(LAW, 4)
    seen = observations_of(single_stream(engine, WORKLOAD))
    assert prediction(seen, Policy(), WORKLOAD, Poisson(), [SLO_PRESETS["batch"]], 1).rates == {}


def test_a_prediction_is_held_against_the_interval_that_was_measured() -> None:
    found = Capacity(
        status=CapacityStatus.CONFIRMED, held=0.9, low=0.8, estimate=1.0, high=1.25, reason="x"
    )
    assert prediction_ratio(1.1, found) == pytest.approx((0.88, 1.1, 1.375))
    assert prediction_ratio(None, found) is None
    unknown = Capacity(status=CapacityStatus.ALONE_ONLY, high=2.0, reason="x")
    assert prediction_ratio(1.0, unknown) is None


def test_what_a_pass_for_each_prompt_costs_is_told_by_the_beginning_of_a_burst() -> None:
    """Eight prompts in a step of an engine that computes each in a call of its own."""
    engine = Engine(CALLS, 8)
    alone = single_stream(engine, WORKLOAD)
    seen, _ = calibrate(engine, alone, WORKLOAD, 8, 1e9, lambda: engine.now)
    first = next(one for one in seen if one.passes > 1)
    assert (first.passes, first.prefill_tokens, first.decode_rows) == (8, 128, 0)
    law = fit([*observations_of(alone), *seen])
    assert law.pass_seconds == pytest.approx(CALLS.pass_seconds, rel=0.05)
    for counts in ((0, 288, 0, 8), (6, 36, 300, 2), (8, 0, 400, 1)):
        assert law.seconds(*counts) == pytest.approx(CALLS.seconds(*counts), rel=0.03), counts
    blind = fit([one for one in [*observations_of(alone), *seen] if one.passes == 1])
    assert blind.seconds(0, 288, 0, 8) < 0.95 * CALLS.seconds(0, 288, 0, 8)


def test_one_call_for_all_prompts_costs_no_pass() -> None:
    engine = Engine(LAW, 8)
    alone = single_stream(engine, WORKLOAD)
    seen, _ = calibrate(engine, alone, WORKLOAD, 8, 1e9, lambda: engine.now)
    law = fit([*observations_of(alone), *seen])
    assert law.pass_seconds < 0.02 * law.base_seconds
