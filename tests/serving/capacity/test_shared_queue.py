"""Several engines with one queue: the simulation beside engines that are played step by step."""

import heapq
import math

import numpy as np
import pytest

from crossover.serving.capacity.batching_simulator import Simulated, Turns, simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Demand, Lengths, ServerModel, lengths_of
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.arrivals import Poisson, due_times
from crossover.serving.workload.request_lengths import Workload

STEP_TIMES = StepTimeModel(
    base_seconds=0.03,
    row_seconds=0.004,
    prompt_token_seconds=0.001,
    context_token_seconds=2e-6,
    pass_seconds=0.005,
)
CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=64)
SLO = Slo("x", ttft_seconds=2.0, tpot_seconds=0.1, target=0.9)


def settings(engines: int, slots: int) -> SchedulerSettings:
    """Each step takes the whole prompts of all requests that get a slot."""
    return SchedulerSettings(
        slots=slots,
        engines=engines,
        context_tokens=4096,
        prefill_tokens=100_000,
        step_tokens=100_000,
        step_seconds_target=None,
    )


class SteppedEngines:
    """Engines that take their steps one by one, and a queue that gives a request to the engine with
    the most free slots, or that had its conversation, at the moment when one has a free slot."""

    def __init__(self, engines: int, slots: int, lengths: Lengths, turns: Turns | None) -> None:
        self.slots = slots
        self.prompt, self.output = lengths.prompt.tolist(), lengths.output.tolist()
        self.turns = turns
        self.ends: list[float | None] = [None] * engines  # of the step in progress; None: idle
        self.rows: list[dict[int, int]] = [{} for _ in range(engines)]  # request -> tokens to come
        self.given: list[list[int]] = [[] for _ in range(engines)]  # they begin with a next step
        self.prompts: list[list[int]] = [[] for _ in range(engines)]  # in the step in progress
        self.last_engine: dict[int, int] = {}  # by session

    def play(self, due: np.ndarray) -> Simulated:
        self.due = due.copy()
        first, last = np.zeros(len(due)), np.zeros(len(due))
        number = np.zeros(len(due)) if self.turns is None else self.turns.number
        self.queue = [(at, request) for request, at in enumerate(due) if number[request] == 0]
        heapq.heapify(self.queue)
        now = 0.0
        while self.queue or any(end is not None for end in self.ends):
            ends = [end for end in self.ends if end is not None]
            arrivals = [at for at, _ in self.queue if at > now]
            now = min([*ends, min(arrivals, default=math.inf)])
            for engine, end in enumerate(self.ends):
                if end == now:
                    self.end_step(engine, now, first, last)
            self.hand_out(now)
            for engine, end in enumerate(self.ends):
                if end is None:
                    self.begin_step(engine, now)
        later_tokens = np.array(self.output, dtype=float)[: len(due)] - 1
        tpot = np.where(later_tokens > 0, (last - first) / np.maximum(later_tokens, 1), np.nan)
        nothing = np.zeros(len(due))
        return Simulated(self.due, first - self.due, tpot, last - self.due, nothing)

    def hand_out(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            free = [
                self.slots - len(rows) - len(given) - len(prompts)
                for rows, given, prompts in zip(self.rows, self.given, self.prompts, strict=True)
            ]
            if max(free) == 0:
                return
            _, request = heapq.heappop(self.queue)
            engine = free.index(max(free))
            if self.turns is not None:
                session = int(self.turns.session[request])
                last = self.last_engine.get(session)
                engine = last if last is not None and free[last] else engine
                self.last_engine[session] = engine
            self.given[engine].append(request)

    def begin_step(self, engine: int, now: float) -> None:
        rows = self.rows[engine]
        self.prompts[engine], self.given[engine] = self.given[engine], []
        if not rows and not self.prompts[engine]:
            return
        context = sum(
            self.prompt[request] + self.output[request] - 1 - left for request, left in rows.items()
        )
        prompt_tokens = sum(self.prompt[request] for request in self.prompts[engine])
        passes = len(self.prompts[engine]) + (len(rows) > 0)
        self.ends[engine] = now + STEP_TIMES.seconds(len(rows), prompt_tokens, context, passes)

    def end_step(self, engine: int, now: float, first: np.ndarray, last: np.ndarray) -> None:
        rows = self.rows[engine]
        ended = []
        for request in list(rows):
            rows[request] -= 1
            if not rows[request]:
                del rows[request]
                ended.append(request)
        for request in self.prompts[engine]:
            first[request] = now
            if self.output[request] > 1:
                rows[request] = self.output[request] - 1
            else:
                ended.append(request)
        self.prompts[engine], self.ends[engine] = [], None
        for request in ended:
            last[request] = now
            if self.turns is not None and request + 1 < len(last):
                if self.turns.number[request + 1] > 0:
                    self.due[request + 1] = now + self.turns.think_seconds[request + 1]
                    heapq.heappush(self.queue, (self.due[request + 1], request + 1))


@pytest.mark.parametrize("rate", [0.5, 4.0, 9.0], ids=["idle", "busy", "overloaded"])
@pytest.mark.parametrize(("engines", "slots"), [(2, 4), (3, 2)])
def test_requests_take_as_long_as_on_engines_played_step_by_step(
    rate: float, engines: int, slots: int
) -> None:
    lengths = lengths_of(CHAT, 400, 1)
    due = due_times(Poisson(), rate, 400 / rate, 1)[:400]
    truth = SteppedEngines(engines, slots, lengths, None).play(due)
    count = len(due)
    simulated = simulate(
        STEP_TIMES, settings(engines, slots), due, lengths.prompt[:count], lengths.output[:count]
    )
    assert simulated.ttft == pytest.approx(truth.ttft, abs=1e-6)
    assert simulated.e2e == pytest.approx(truth.e2e, abs=1e-6)


@pytest.mark.parametrize("think_seconds", [0.05, 2.0])
def test_conversations_stay_on_the_engine_that_has_them(think_seconds: float) -> None:
    talk = Workload(
        preset="sharegpt",
        max_prompt_tokens=128,
        max_output_tokens=32,
        turns=4,
        think_seconds=think_seconds,
    )
    lengths = lengths_of(talk, 300, 1)
    assert lengths.turns is not None
    lengths = lengths.without_reuse()
    turns = lengths.turns
    assert turns is not None
    due = np.zeros(len(lengths.prompt))
    firsts = np.flatnonzero(turns.number == 0)
    due[firsts] = due_times(Poisson(), 1.0, 1000.0, 1)[: len(firsts)]
    truth = SteppedEngines(2, 3, lengths, turns).play(due)
    simulated = simulate(
        STEP_TIMES, settings(2, 3), due, lengths.prompt, lengths.output, turns=turns
    )
    assert simulated.ttft == pytest.approx(truth.ttft, abs=1e-6)
    assert simulated.e2e == pytest.approx(truth.e2e, abs=1e-6)


def test_a_history_is_reused_on_the_engine_that_has_it() -> None:
    talk = Workload(prompt_tokens=200, output_tokens=20, turns=6, think_seconds=5.0)
    lengths = lengths_of(talk, 600, 1)
    server = ServerModel(STEP_TIMES, settings(2, 16)).simulated(Demand(talk), 600)
    simulated = server.play(0.3)
    later_turns = simulated.cached[simulated.cached > 0]
    assert len(later_turns) / len(simulated.cached) > 0.75  # 5 of 6 turns continue one
    assert lengths.turns is not None


def test_two_engines_carry_twice_as_much_as_one_and_a_little_more() -> None:
    """With one queue, requests wait less for a slot of either than they would for that of one."""
    demand = Demand(CHAT)
    one, two = (
        ServerModel(STEP_TIMES, settings(engines, 8)).capacity(demand, SLO, 2000)
        for engines in (1, 2)
    )
    assert 2.0 * one.rate < two.rate < 2.5 * one.rate
    assert two.unloaded_attainment == one.unloaded_attainment


def test_an_engine_is_busy_half_the_time_of_which_another_takes_half_of_the_requests() -> None:
    one_step = Workload(prompt_tokens=100, output_tokens=1)
    server = ServerModel(StepTimeModel(base_seconds=0.1), settings(2, 1)).simulated(
        Demand(one_step)
    )
    assert server.busy_share(10.0) == pytest.approx(0.5, abs=0.02)
