"""Calibration on servers whose step law is known: the law is found again, the capacity predicted,
the time-box kept.
"""

import numpy as np
import pytest

from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.records.schema import RequestRecord
from loadtests.simulation.batching import Policy, predict, simulate
from loadtests.simulation.calibration import (
    LEAST_SECONDS,
    SHARE,
    Burst,
    Prediction,
    calibrate,
    error_in_words,
    error_of,
    prediction,
    time_box,
)
from loadtests.simulation.step_observations import (
    most_at_once,
    observations_of,
    observations_of_burst,
)
from loadtests.simulation.step_time import StepLaw, fit
from loadtests.workload.arrivals import Poisson
from loadtests.workload.requests import Workload, draw
from tests.tools.records import request

LAW = StepLaw(
    base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-6
)
WORKLOAD = Workload(preset="chat", max_prompt_tokens=256, max_output_tokens=48)
CHAT = Slo("chat", 2.0, 0.1, target=0.9)


class Engine:
    """Serves bursts as simulated, and stamps tokens evenly: what a client would see of it."""

    def __init__(self, law: StepLaw, slots: int, chunk: int = 1) -> None:
        self.law, self.policy, self.chunk = law, Policy(slots=slots), chunk
        self.bursts: list[Burst] = []

    def __call__(self, burst: Burst) -> list[RequestRecord]:
        self.bursts.append(burst)
        pairs = np.tile([burst.prompt_tokens, burst.output_tokens], (burst.streams, 1))
        played = simulate(self.law, self.policy, np.zeros(burst.streams), pairs)
        records = []
        for i, (first, last) in enumerate(zip(played.first_token, played.last_token, strict=True)):
            stamps = np.linspace(first, last, burst.output_tokens)[:: self.chunk].tolist()
            records.append(
                request(
                    i,
                    tokens=burst.output_tokens,
                    prompt_tokens=burst.prompt_tokens,
                    first_chunk_tokens=self.chunk,
                    content_seconds=stamps,
                    first_content_seconds=stamps[0],
                    last_content_seconds=stamps[-1],
                    ended_seconds=float(last),
                )
            )
        return records


def single_stream(engine: Engine, workload: Workload, count: int = 4) -> list[RequestRecord]:
    return [
        engine(Burst(1, ask.prompt_tokens, ask.output_tokens))[0]
        for ask in draw(workload, count, 1)
    ]


@pytest.mark.parametrize("slots", [4, 16, None], ids=["4", "16", "unknown"])
def test_the_capacity_is_predicted_from_a_few_bursts(slots: int | None) -> None:
    engine = Engine(LAW, slots or 8)
    alone = single_stream(engine, WORKLOAD)
    seen, served = calibrate(engine, alone, WORKLOAD, slots, 1e9)
    assert served == (slots or 8)
    policy = Policy(slots=served or 0)
    made = prediction([*observations_of(alone, 1), *seen], policy, WORKLOAD, Poisson(), [CHAT], 1)
    pairs = np.array([(a.prompt_tokens, a.output_tokens) for a in draw(WORKLOAD, 3000, 5)])
    truth = predict(LAW, policy, pairs, CHAT, seed=9).rate
    assert (
        made.law is not None
        and made.reason == ""
        and made.rates["chat"].rate == pytest.approx(truth, rel=0.15)
    )


def test_equal_lengths_get_a_sweep_of_prompts() -> None:
    engine = Engine(LAW, 8)
    fixed = Workload(prompt_tokens=128, output_tokens=16)
    alone = single_stream(engine, fixed)
    engine.bursts.clear()
    seen, _ = calibrate(engine, alone, fixed, 8, 1e9)
    assert Burst(1, 16, 2) in engine.bursts, (
        "a second length, or the cost of a prompt token could not be told from the base"
    )
    law = fit([*observations_of(alone, 1), *seen])
    assert law.unseen == () and law.prompt_token_seconds == pytest.approx(
        LAW.prompt_token_seconds, rel=0.2
    )
    assert max(burst.streams for burst in engine.bursts) == 8


def test_only_steps_in_which_all_decode_are_counted() -> None:
    engine = Engine(LAW, 4)
    (seen,) = observations_of_burst(engine(Burst(4, 32, 20)))
    assert seen.decode_rows == 4 and seen.prefill_tokens == 0
    assert seen.seconds == pytest.approx(LAW.seconds(4, 0, seen.kv_tokens), rel=0.01)
    chunked = observations_of_burst(Engine(LAW, 4, chunk=4)(Burst(4, 32, 20)))
    assert chunked[0].seconds == pytest.approx(seen.seconds, rel=0.3)
    assert observations_of_burst(engine(Burst(8, 32, 20))) == [], (
        "more streams than slots never decode together"
    )
    assert (
        observations_of_burst([]) == []
        and observations_of_burst([request(error="refused", status=429)]) == []
    )
    assert (
        most_at_once(engine(Burst(8, 32, 20))) == 4
        and most_at_once(engine(Burst(2, 32, 20))) == 2
        and most_at_once([]) == 0
    )
    one_token = Engine(StepLaw(base_seconds=0.5), 4)(Burst(8, 1, 1))
    assert most_at_once(one_token) == 4, "answers of one chunk: by how many came together"


def test_the_time_box_is_kept() -> None:
    assert time_box(100.0, 60.0) == pytest.approx(100 * SHARE) and time_box(10_000.0, 60.0) == 60.0
    assert time_box(LEAST_SECONDS / SHARE * 0.9, 60.0) == 0.0 and time_box(1e6, 0.0) == 0.0
    slow = Engine(StepLaw(base_seconds=2.0, prompt_token_seconds=0.05), 16)
    alone = single_stream(slow, WORKLOAD)
    slow.bursts.clear()
    calibrate(slow, alone, WORKLOAD, 16, 5.0)
    assert slow.bursts == [], "nothing is begun that would not be over in time"


def test_bursts_end_within_the_time_on_the_clock() -> None:
    engine = Engine(LAW, 16)
    alone = single_stream(engine, WORKLOAD)
    now, begun = 0.0, []

    def ask(burst: Burst) -> list[RequestRecord]:
        nonlocal now
        begun.append(now)
        records = engine(burst)
        now += max(r.ended_seconds or 0.0 for r in records)
        return records

    calibrate(ask, alone, WORKLOAD, 16, 3.0, clock=lambda: now)
    assert len(begun) >= 3 and now < 3.0, (begun, now)


def test_no_prediction_has_its_reason() -> None:
    made = prediction([], Policy(), WORKLOAD, Poisson(), [CHAT], 1)
    assert isinstance(made, Prediction) and made.law is None and "too few to fit" in made.reason
    engine = Engine(LAW, 4)
    seen = observations_of(single_stream(engine, WORKLOAD), 1)
    assert prediction(seen, Policy(), WORKLOAD, Poisson(), [SLO_PRESETS["batch"]], 1).rates == {}


def test_errors_have_a_sign() -> None:
    assert (
        error_of(1.1, 1.0) == pytest.approx(0.1)
        and error_of(None, 1.0) is None
        and error_of(1.0, 0.0) is None
    )
    assert (
        error_in_words(0.1) == "10 % too high"
        and error_in_words(-0.25) == "25 % too low"
        and error_in_words(0.001) == "right to the percent"
    )
