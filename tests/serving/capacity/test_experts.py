"""Mixtures of experts by measured step times: the step-time model with its sixth number tells their
capacity.

The tables are of llama.cpp on two cores: milliseconds of a step of 1, 2, 4, 8 and 16 rows, and
tokens/s of prompts of 16, 64 and 512 tokens. Weights in float32 stand for machines whose memory is
the limit: two cores read them more slowly than they multiply. The smallest prompt of 4 of 32 was
not measured; it lies on the line through the other two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from crossover.loadtests.capacity.calibration_bursts import calibrate
from crossover.models.shape.model_spec import Routing
from crossover.serving.capacity.batching_simulator import Array, SimulatedLoad
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import SEED, Server, lengths_of
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepObservation, StepTimeModel
from crossover.serving.workload.arrivals import due_times
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.capacity.known_server import KnownServer

ROWS, PROMPTS = (0, 1, 2, 4, 8, 16), (0, 16, 64, 512)
FLOAT32_128 = (Routing(128, 8), (4.2, 6.8, 10.9, 19.6, 30.5), (972, 1651, 2445))
FLOAT32_32 = (Routing(32, 4), (9.7, 14.3, 25.7, 37.9, 61.6), (447, 895, 1264))
Q8_0_128 = (Routing(128, 8), (5.3, 9.3, 15.8, 29.6, 53.6), (553, 681, 699))
Q4_0_128 = (Routing(128, 8), (5.5, 10.4, 18.3, 35.6, 63.5), (365, 374, 373))

Measured = tuple[Routing, tuple[float, ...], tuple[float, ...]]
Steps = Callable[[int, int, int, int], float]

REQUESTS = 600
SLOTS = SchedulerSettings(slots=16, step_tokens=2048, step_seconds_target=None)
CHAT = Workload(preset="chat", max_prompt_tokens=128, max_output_tokens=256)


def steps_of(measured: Measured) -> Steps:
    """Seconds of a step, straight between what was measured."""
    _, decode, prompts = measured
    prompt_seconds = [tokens / rate for tokens, rate in zip(PROMPTS[1:], prompts, strict=True)]
    token = (prompt_seconds[1] - prompt_seconds[0]) / (PROMPTS[2] - PROMPTS[1])
    empty = max(0.0, prompt_seconds[0] - PROMPTS[1] * token)

    @cache
    def decode_seconds(rows: int) -> float:
        return float(np.interp(rows, ROWS, (0.0, *decode))) / 1e3

    @cache
    def pass_seconds(tokens: float) -> float:
        return float(np.interp(tokens, PROMPTS, (empty, *prompt_seconds)))

    def seconds(rows: int, tokens: int, context: int, passes: int) -> float:
        if not tokens:
            return decode_seconds(rows)
        count = max(1, passes - (rows > 0))
        return decode_seconds(rows) + count * pass_seconds(tokens / count)

    return seconds


class KnownCapacity(Server):
    """The capacity of a server with these step times, played step by step with the same draws."""

    def __init__(self, steps: Steps) -> None:
        lengths = lengths_of(CHAT, REQUESTS, SEED)
        super().__init__(StepTimeModel(base_seconds=1.0), SLOTS, lengths, count=REQUESTS)
        self.steps = steps

    def play(self, rate: float) -> SimulatedLoad:
        if rate not in self.played:
            due = due_times(self.arrivals, rate, REQUESTS / rate, SEED)
            simulated = self.simulate_due(due)
            self.played[rate] = simulated.of(self._is_counted(due, rate))
        return self.played[rate]

    def meets(self, rate: float, slo: Slo) -> bool:
        return self.share(rate, slo) >= slo.target

    def simulate_due(self, due: Array) -> SimulatedLoad:
        at = np.arange(len(due)) % len(self.lengths.prompt)
        prompts, outputs = self.lengths.prompt[at].tolist(), self.lengths.output[at].tolist()
        server = KnownServer(self.steps, slots=SLOTS.slots)
        level = server.level(due.tolist(), prompts, outputs)
        nobody = np.zeros(len(due), dtype=bool)
        return SimulatedLoad(
            due,
            level.ttft,
            level.tpot,
            level.e2e,
            np.zeros(len(due)),
            waited_for_slot=nobody,
            waited_for_kv=nobody,
            work=StepObservation(seconds=0.0, rows=0.0, prompt_tokens=0.0, context_tokens=0.0),
        )


def step_times_of(measured: Measured, experts: Routing | None) -> StepTimeModel:
    """As a calibration makes it."""
    server = KnownServer(steps_of(measured), slots=SLOTS.slots)
    due = [100.0 * number for number in range(6)]
    single_streams = server.level(due, (20, 100, 64, 50, 128, 90), [40] * 6)
    step_times = calibrate(server, CHAT, SLOTS.slots, 20.0, [single_streams], experts).step_times
    assert step_times is not None
    return step_times


def capacity_errors(
    measured: Measured, multiple: int, *models_of_steps: StepTimeModel
) -> list[float]:
    """Errors of the capacity by each model, with a TPOT limit of so many steps of one row."""
    slo = Slo("x", ttft_seconds=2.0, tpot_seconds=multiple * measured[1][0] / 1e3, target=0.95)
    truth = KnownCapacity(steps_of(measured)).crossing(slo)
    lengths = lengths_of(CHAT, REQUESTS, SEED)
    return [
        Server(step_times, SLOTS, lengths, count=REQUESTS).crossing(slo) / truth - 1
        for step_times in models_of_steps
    ]


@pytest.mark.parametrize(
    ("measured", "multiple"),
    [
        pytest.param(FLOAT32_128, 3, id="float32, 3 x"),
        pytest.param(Q4_0_128, 4, id="Q4_0", marks=pytest.mark.slow),
        pytest.param(FLOAT32_128, 6, id="float32, 6 x", marks=pytest.mark.slow),
        pytest.param(FLOAT32_32, 6, id="float32, 4 of 32", marks=pytest.mark.slow),
        pytest.param(Q8_0_128, 3, id="Q8_0", marks=pytest.mark.slow),
    ],
)
def test_step_times_with_experts_predict_the_capacity(measured: Measured, multiple: int) -> None:
    (error,) = capacity_errors(measured, multiple, step_times_of(measured, measured[0]))
    assert error == pytest.approx(0.0, abs=0.08)


def test_without_experts_it_is_wrong_where_memory_is_the_limit_and_the_slo_tight() -> None:
    """Which is what the sixth number is for, at twice the step of one row."""
    models_of_steps = step_times_of(FLOAT32_32, None), step_times_of(FLOAT32_32, FLOAT32_32[0])
    five, six = capacity_errors(FLOAT32_32, 2, *models_of_steps)
    assert abs(five) > 0.2
    assert six == pytest.approx(0.0, abs=0.08)
