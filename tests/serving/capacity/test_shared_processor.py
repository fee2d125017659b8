"""Several engines on one processor: the rule beside engines that are simulated step by step, and
what no mix can do."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from crossover.serving.capacity.batching_simulator import Simulated
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.shared_processor import (
    SharedProcessor,
    SharingEngine,
    mean_slowdown,
)
from crossover.serving.capacity.simulated_capacity import (
    Demand,
    Lengths,
    Server,
    ServerModel,
    lengths_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.arrivals import Poisson, due_times
from crossover.serving.workload.request_lengths import Workload

# Each step takes the whole prompts of all requests that get a slot.
SETTINGS = SchedulerSettings(
    slots=8,
    context_tokens=4096,
    prefill_tokens=100_000,
    step_tokens=100_000,
    step_seconds_target=None,
)
SMALL = StepTimeModel(
    base_seconds=0.006,
    row_seconds=0.004,
    prompt_token_seconds=0.0006,
    context_token_seconds=2e-6,
    pass_seconds=0.005,
)
LARGE = SMALL.slower(3.0)
CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=64)
SLO = Slo("x", ttft_seconds=3.0, tpot_seconds=0.2, target=0.9)


def server(step_times: StepTimeModel) -> Server:
    return ServerModel(step_times, SETTINGS).simulated(Demand(CHAT))


def engines(*parts: tuple[StepTimeModel, float], use: float = 1.0) -> list[SharingEngine]:
    return [
        SharingEngine(
            server=(own := server(step_times)),
            slo=SLO,
            share=share,
            unshared_rate=own.crossing(SLO),
            use=use,
        )
        for step_times, share in parts
    ]


class SteppedEngine:
    """An engine whose steps are played one by one, for any speed of the processor."""

    def __init__(self, step_times: StepTimeModel, due: Sequence[float], lengths: Lengths) -> None:
        self.step_times = step_times
        self.due = list(due)
        self.prompt = lengths.prompt.tolist()
        self.output = lengths.output.tolist()
        self.first = np.zeros(len(self.due))
        self.last = np.zeros(len(self.due))
        self.arrived = 0  # requests that have got a slot
        self.tokens_to_come: dict[int, int] = {}  # by request that decodes
        self.prompts: list[int] = []  # requests whose prompts this step computes
        self.context_tokens = 0
        self.seconds_left: float | None = None  # of this step on a whole processor; None: idle

    @property
    def next_arrival(self) -> float:
        return self.due[self.arrived] if self.arrived < len(self.due) else math.inf

    def begin_step(self, now: float) -> None:
        rows = len(self.tokens_to_come)
        self.prompts = []
        while self.next_arrival <= now and rows + len(self.prompts) < SETTINGS.slots:
            self.prompts.append(self.arrived)
            self.arrived += 1
        if not rows and not self.prompts:
            self.seconds_left = None
            return
        prompt_tokens = sum(self.prompt[request] for request in self.prompts)
        passes = len(self.prompts) + (rows > 0)
        self.seconds_left = self.step_times.seconds(
            rows, prompt_tokens, self.context_tokens, passes
        )
        self.context_tokens += rows

    def end_step(self, now: float) -> None:
        for request in list(self.tokens_to_come):
            self.tokens_to_come[request] -= 1
            if not self.tokens_to_come[request]:
                del self.tokens_to_come[request]
                self.last[request] = now
                self.context_tokens -= self.prompt[request] + self.output[request] - 1
        for request in self.prompts:
            self.first[request] = self.last[request] = now
            if self.output[request] > 1:
                self.tokens_to_come[request] = self.output[request] - 1
                self.context_tokens += self.prompt[request]

    def attainment(self, slo: Slo) -> float:
        due, output = np.array(self.due), np.array(self.output[: len(self.due)])
        later_tokens = np.where(output > 1, output - 1, np.nan)
        simulated = Simulated(
            due=due,
            ttft=self.first - due,
            tpot=(self.last - self.first) / later_tokens,
            e2e=self.last - due,
            cached=np.zeros(len(due)),
        )
        return float(slo.met_by(simulated).mean())


def play(stepped: Sequence[SteppedEngine], use: float = 1.0) -> None:
    """Let the engines share the processor: of n that are in a step, each gets 1/n of it, or the
    part `use` of it, which is all that it needs."""
    now = 0.0
    while True:
        at_work = [engine for engine in stepped if engine.seconds_left is not None]
        slowdown = max(1.0, use * len(at_work))
        ends = [now + (engine.seconds_left or 0.0) * slowdown for engine in at_work]
        arrivals = [engine.next_arrival for engine in stepped if engine.seconds_left is None]
        if (then := min([*ends, *arrivals])) == math.inf:
            return
        for engine, end in zip(at_work, ends, strict=True):
            assert engine.seconds_left is not None
            engine.seconds_left -= (then - now) / slowdown
            if end == then:
                engine.end_step(then)
                engine.begin_step(then)
        now = then
        for engine in stepped:
            if engine.seconds_left is None:
                engine.begin_step(now)


def attainments(
    total_rate: float, *parts: tuple[StepTimeModel, float], use: float, count: int
) -> list[float]:
    stepped = []
    for seed, (step_times, share) in enumerate(parts):
        due = due_times(Poisson(), total_rate * share, count / total_rate, seed)
        lengths = lengths_of(CHAT, 2 * count, seed)
        stepped.append(SteppedEngine(step_times, due.tolist(), lengths))
    play(stepped, use)
    return [engine.attainment(SLO) for engine in stepped]


def test_the_engine_that_is_played_step_by_step_is_that_of_the_simulation() -> None:
    lengths = lengths_of(CHAT, 500, 1)
    due = due_times(Poisson(), 1.0, 400.0, 1)
    stepped = SteppedEngine(LARGE, due.tolist(), lengths)
    play([stepped])
    simulated = Server(LARGE, SETTINGS, lengths).simulate_due(due)
    assert stepped.first - due == pytest.approx(simulated.ttft, abs=1e-6)
    assert stepped.last - due == pytest.approx(simulated.e2e, abs=1e-6)


@pytest.mark.parametrize(
    ("parts", "use"),
    [
        pytest.param(((SMALL, 0.7), (LARGE, 0.3)), 0.8, id="a router, 0.8"),
        pytest.param(((SMALL, 0.5), (SMALL, 0.5)), 1.0, id="equal models, 1.0"),
        pytest.param(((SMALL, 0.7), (LARGE, 0.3)), 1.0, id="a router", marks=pytest.mark.slow),
        pytest.param(((SMALL, 0.5), (SMALL, 0.5)), 0.8, id="equal models", marks=pytest.mark.slow),
    ],
)
def test_the_capacity_of_a_mix_is_that_of_engines_that_share_the_processor(
    parts: tuple[tuple[StepTimeModel, float], ...], use: float
) -> None:
    capacity = SharedProcessor(engines(*parts, use=use)).capacity()
    assert min(attainments(0.9 * capacity, *parts, use=use, count=1500)) >= SLO.target
    assert min(attainments(1.1 * capacity, *parts, use=use, count=1500)) < SLO.target


@pytest.mark.parametrize(
    ("use", "by_hand"),
    [
        (1.0, (1.3 / 0.94, 1.2 / 0.94)),  # f = 1 + 0.3 g and g = 1 + 0.2 f
        (0.8, (1.18 / 0.9784, 1.12 / 0.9784)),  # f = 1 + 0.6 * 0.3 g and g = 1 + 0.6 * 0.2 f
        (0.5, (1.0, 1.0)),  # both fit the processor
    ],
)
def test_slowdowns_are_those_computed_by_hand(use: float, by_hand: tuple[float, float]) -> None:
    """Of requests with one step of 0.1 s at 2/s beside others of 0.2 s at 1.5/s: the steps of both
    take 2 * use times as long while both are in one."""
    one_step = Workload(prompt_tokens=100, output_tokens=1)
    one_by_one = SchedulerSettings(slots=1, step_seconds_target=None)
    parts = [
        SharingEngine(
            server=ServerModel(StepTimeModel(base_seconds=seconds), one_by_one).simulated(
                Demand(one_step)
            ),
            slo=SLO,
            share=share,
            unshared_rate=1 / seconds,
            use=use,
        )
        for seconds, share in ((0.1, 2 / 3.5), (0.2, 1.5 / 3.5))
    ]
    factors = SharedProcessor(parts).slowdowns(3.5)
    assert factors == pytest.approx(by_hand, abs=0.02)


@pytest.mark.parametrize("share", [0.05, 0.95, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_mix_never_carries_more_than_its_parts(share: float) -> None:
    parts = engines((SMALL, share), (LARGE, 1 - share))
    capacity = SharedProcessor(parts).capacity()
    assert capacity > 0
    for part in parts:
        assert capacity * part.share <= part.unshared_rate
    # Together they do not carry more than the processor: with the rest of the requests, each of
    # them needs the time that it would need by itself.
    assert sum(capacity * part.share / part.unshared_rate for part in parts) < 1.05


def test_of_three_engines_each_pair_and_all_three_together_slow_a_step() -> None:
    """Each needs 0.6 of the processor and is in a step for half of the time: beside none of the
    two others a step takes as long as by itself, beside one 1.2 and beside both 1.8 times."""
    by_hand = 0.25 * 1.0 + 0.5 * 1.2 + 0.25 * 1.8
    assert mean_slowdown(0.6, [(0.6, 0.5), (0.6, 0.5)]) == pytest.approx(by_hand)


def test_one_engine_has_the_processor_to_itself() -> None:
    (part,) = engines((LARGE, 1.0))
    assert SharedProcessor([part]).capacity() == part.unshared_rate
    assert SharedProcessor([part]).slowdowns(0.5) == [1.0]


def test_an_engine_that_misses_its_slo_unloaded_leaves_no_capacity_for_the_mix() -> None:
    small, large = engines((SMALL, 0.5), (LARGE, 0.5))
    strict = SharingEngine(
        server=large.server,
        slo=Slo("strict", tpot_seconds=0.001, target=0.9),
        share=0.5,
        unshared_rate=0.0,
    )
    assert SharedProcessor([small, strict]).capacity() == 0.0
