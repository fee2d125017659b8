"""Calibration on servers whose step law is known: the law is found again, the capacity predicted, the time-box kept."""

import numpy as np
import pytest

from loadtests.arrivals import Poisson
from loadtests.calibrate import LEAST_SECONDS, SHARE, Prediction, Wave, calibrate, error_in_words, error_of, prediction, time_box
from loadtests.records import RequestRecord
from loadtests.simulate import Policy, predict
from loadtests.slo import PROMISES, Promise
from loadtests.steptime import StepLaw, fit, most_at_once, observations_of, observations_of_wave
from loadtests.workload import Workload, draw
from tests.loadtests.test_summary import request

LAW = StepLaw(base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-6)
WORKLOAD = Workload(preset="chat", max_prompt_tokens=256, max_output_tokens=48)
CHAT = Promise("chat", 2.0, 0.1, target=0.9)


class Engine:
    """Serves a wave as the simulator's policy would, step by step, and stamps every token: what a client would see of it."""

    def __init__(self, law: StepLaw, slots: int, chunk: int = 1) -> None:
        self.law, self.slots, self.chunk = law, slots, chunk
        self.waves: list[Wave] = []

    def __call__(self, wave: Wave) -> list[RequestRecord]:
        self.waves.append(wave)
        waiting, running = list(range(wave.streams)), []
        stamps: dict[int, list[float]] = {i: [] for i in waiting}
        now = 0.0
        while waiting or running:
            new = []
            while waiting and len(running) + len(new) < self.slots:
                new.append(waiting.pop(0))
            context = sum(wave.prompt_tokens + len(stamps[i]) for i in running)
            now += self.law.seconds(len(running), len(new) * wave.prompt_tokens, context)
            for i in running + new:
                stamps[i].append(now)
            running = [i for i in running + new if len(stamps[i]) < wave.output_tokens]
        return [
            request(
                i, 0.0, tokens=wave.output_tokens, prompt_tokens=wave.prompt_tokens, first_chunk_tokens=self.chunk,
                content_seconds=s[:: self.chunk], first_content_seconds=s[0], last_content_seconds=s[:: self.chunk][-1],
                ended_seconds=s[-1],
            )
            for i, s in stamps.items()
        ]  # fmt: skip


def lone(engine: Engine, workload: Workload, count: int = 4) -> list[RequestRecord]:
    return [engine(Wave(1, ask.prompt_tokens, ask.output_tokens))[0] for ask in draw(workload, count, 1)]


@pytest.mark.parametrize("slots", [4, 16, None], ids=["4", "16", "unknown"])
def test_the_capacity_is_predicted_from_a_few_waves(slots: int | None) -> None:
    engine = Engine(LAW, slots or 8)
    alone = lone(engine, WORKLOAD)
    seen, served = calibrate(engine, alone, WORKLOAD, slots, 1e9)
    assert served == (slots or 8)
    policy = Policy(slots=served or 0)
    made = prediction([*observations_of(alone, 1), *seen], policy, WORKLOAD, Poisson(), [CHAT], 1, slots=served, spent_seconds=1.0)
    pairs = np.array([(a.prompt_tokens, a.output_tokens) for a in draw(WORKLOAD, 3000, 5)])
    truth = predict(LAW, policy, pairs, CHAT, seed=9).rate
    assert made.law is not None and made.reason == "" and made.rates["chat"] == pytest.approx(truth, rel=0.15)


def test_equal_lengths_get_a_sweep_of_prompts() -> None:
    engine = Engine(LAW, 8)
    fixed = Workload(prompt_tokens=128, output_tokens=16)
    alone = lone(engine, fixed)
    engine.waves.clear()
    seen, _ = calibrate(engine, alone, fixed, 8, 1e9)
    assert Wave(1, 16, 2) in engine.waves, "a second length, or the cost of a prompt token could not be told from the base"
    law = fit([*observations_of(alone, 1), *seen])
    assert law.unseen == () and law.prompt_token_seconds == pytest.approx(LAW.prompt_token_seconds, rel=0.2)
    assert max(wave.streams for wave in engine.waves) == 8


def test_only_steps_in_which_all_decode_are_counted() -> None:
    engine = Engine(LAW, 4)
    (seen,) = observations_of_wave(engine(Wave(4, 32, 20)))
    assert seen.decode_rows == 4 and seen.prefill_tokens == 0
    assert seen.seconds == pytest.approx(LAW.seconds(4, 0, seen.kv_tokens), rel=0.01)
    chunked = observations_of_wave(Engine(LAW, 4, chunk=4)(Wave(4, 32, 20)))
    assert chunked[0].seconds == pytest.approx(seen.seconds, rel=0.3)
    assert observations_of_wave(engine(Wave(8, 32, 20))) == [], "more streams than slots never decode together"
    assert observations_of_wave([]) == [] and observations_of_wave([request(error="refused", status=429)]) == []
    assert most_at_once(engine(Wave(8, 32, 20))) == 4 and most_at_once(engine(Wave(2, 32, 20))) == 2 and most_at_once([]) == 0
    one_token = Engine(StepLaw(base_seconds=0.5), 4)(Wave(8, 1, 1))
    assert most_at_once(one_token) == 4, "answers of one chunk: by how many came together"


def test_the_time_box_is_kept() -> None:
    assert time_box(100.0, 60.0) == pytest.approx(100 * SHARE) and time_box(10_000.0, 60.0) == 60.0
    assert time_box(LEAST_SECONDS / SHARE * 0.9, 60.0) == 0.0 and time_box(1e6, 0.0) == 0.0
    slow = Engine(StepLaw(base_seconds=2.0, prompt_token_seconds=0.05), 16)
    alone = lone(slow, WORKLOAD)
    slow.waves.clear()
    calibrate(slow, alone, WORKLOAD, 16, 5.0)
    assert slow.waves == [], "nothing is begun that would not be over in time"


def test_no_prediction_has_its_reason() -> None:
    made = prediction([], Policy(), WORKLOAD, Poisson(), [CHAT], 1, slots=4, spent_seconds=0.1)
    assert isinstance(made, Prediction) and made.law is None and "too few to fit" in made.reason
    engine = Engine(LAW, 4)
    seen = observations_of(lone(engine, WORKLOAD), 1)
    assert prediction(seen, Policy(), WORKLOAD, Poisson(), [PROMISES["batch"]], 1, slots=4, spent_seconds=0.1).rates == {}


def test_errors_have_a_sign() -> None:
    assert error_of(1.1, 1.0) == pytest.approx(0.1) and error_of(None, 1.0) is None and error_of(1.0, 0.0) is None
    assert (
        error_in_words(0.1) == "10 % too high"
        and error_in_words(-0.25) == "25 % too low"
        and error_in_words(0.001) == "right to the percent"
    )
