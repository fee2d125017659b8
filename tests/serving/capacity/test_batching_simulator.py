"""The simulation against queueing theory and the scheduler."""

import math
import time

import msgspec
import numpy as np
import pytest

from crossover.models.shape.model_spec import Routing
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Lengths, Server
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.engine.ipc_messages import GenerationRequest, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.workload.arrivals import Poisson, due_times
from tests.fake_backend import FakeBackend
from tests.loadtests.capacity.known_server import (
    EXPERTS_STEP_TIMES,
    SERVER_STEPS,
    SETTINGS,
    STEP_TIMES,
    KnownServer,
)

SLOW_TEST = pytest.mark.slow
STEP = 0.0051  # short beside the service, so that starting on a step's edge hardly matters


def erlang_c(servers: int, load: float) -> float:
    """Probability of waiting in M/M/c at `load` erlangs."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


def waits_of(servers, rate, outputs, seed=1):
    """Waiting times of a queue made of an engine whose steps always take the same time: one prompt
    token, then one token a step.
    """
    count = len(outputs)
    due = due_times(Poisson(), rate, 1.3 * count / rate, seed)[:count]
    assert len(due) == count
    pairs = np.column_stack([np.ones(count, dtype=np.int64), outputs])
    played = simulate(
        StepTimeModel(base_seconds=STEP),
        SchedulerSettings(
            slots=servers, prefill_tokens=servers, step_tokens=2048, step_seconds_target=None
        ),
        due,
        *pairs.T,
    )
    # A request that finds a free slot has its first token after the step under way (half of one, on
    # average) and one of its own.
    return played, (played.ttft - 1.5 * STEP)[count // 20 :]


class Clocked(FakeBackend):
    """A backend that obeys a step-time model, on a clock of its own.

    `told`: it says apart what its decoding rows took.
    """

    def __init__(self, config, step_times, reports_decode):
        super().__init__(config, lambda *_: None)
        self.step_times, self.reports_decode, self.now, self.last_decode_seconds = (
            step_times,
            reports_decode,
            0.0,
            None,
        )

    def step(self, rows):
        decoding = [row for row in rows if len(row.tokens) == 1]
        context = sum(row.start for row in decoding)
        self.now += self.step_times.seconds(
            len(decoding),
            sum(len(row.tokens) for row in rows) - len(decoding),
            context,
            len(rows) - len(decoding) + bool(decoding),
        )
        self.last_decode_seconds = (
            self.step_times.seconds(len(decoding), 0, context) if self.reports_decode else None
        )
        return super().step(rows)


def scheduled(step_times, policy, due, pairs, reports_decode):
    """TTFT and TPOT, float64 [n], of the same requests under the server's own scheduler, which has
    to learn the step-time model; and how often it preempted one.
    """
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="fake",
        settings=msgspec.structs.replace(policy, context_tokens=512),
        prefix_reuse=False,
    )
    backend = Clocked(config, step_times, reports_decode)
    engine = Scheduler(backend, [b"x"] * 8192, frozenset(), config, clock=lambda: backend.now)
    first, last, arrived = {}, {}, 0
    while arrived < len(due) or engine.busy:
        if not engine.busy:
            backend.now = max(backend.now, due[arrived])
        while arrived < len(due) and due[arrived] <= backend.now:
            prompt = np.random.default_rng(arrived).integers(3, 8192, pairs[arrived][0]).tolist()
            assert (
                engine.add(
                    Submit(
                        arrived, GenerationRequest(prompt, int(pairs[arrived][1]), ignore_eos=True)
                    )
                )
                is None
            )
            arrived += 1
        for delta in engine.step():
            first.setdefault(delta.id, backend.now)
            last[delta.id] = backend.now
    first, last = (np.array([times[i] for i in range(len(due))]) for times in (first, last))
    return first - due, (last - first) / (pairs[:, 1] - 1), engine.preemptions


# Small machines, where prompts are what a step mostly is, so that every bound on them matters;
# requests/s near what they can do.
SMALL = StepTimeModel(
    base_seconds=0.02, row_seconds=0.006, prompt_token_seconds=0.0025, context_token_seconds=2e-6
)
CALLS = msgspec.structs.replace(SMALL, pass_seconds=0.05)
MIXTURE = msgspec.structs.replace(SMALL, expert_seconds=0.05, experts=Routing(32, 4))
SLOW = StepTimeModel(
    base_seconds=0.06, row_seconds=0.045, prompt_token_seconds=0.012, context_token_seconds=5e-6
)


@pytest.mark.parametrize(
    ("servers", "load"), [(1, 0.6), pytest.param(4, 3.0, marks=SLOW_TEST), (8, 6.0)]
)
def test_geometric_service_is_m_m_c(servers, load):
    outputs = np.random.default_rng(11).geometric(1 / 100, 60_000)
    service = 100 * STEP
    _, waits = waits_of(servers, load / service, outputs)
    waiting = erlang_c(servers, load)
    assert np.mean(waits > STEP) == pytest.approx(waiting, abs=0.03)
    assert waits.mean() == pytest.approx(waiting * service / (servers - load), rel=0.08)
    assert np.mean(waits > service) == pytest.approx(
        waiting * math.exp(-(servers - load)), abs=0.03
    )


@pytest.mark.parametrize(
    ("step_times", "rate", "kv_tokens", "within", "reports_decode"),
    [
        pytest.param(SMALL, 1.0, None, 0.03, False, id="small, learnt"),
        pytest.param(CALLS, 0.7, None, 0.06, False, id="calls, learnt"),
        pytest.param(MIXTURE, 0.7, None, 0.1, True, id="experts, told"),
        pytest.param(SMALL, 0.7, 700, 0.06, True, id="tight pool, told"),
        pytest.param(SMALL, 1.0, None, 0.03, True, id="small, told", marks=SLOW_TEST),
        pytest.param(SLOW, 0.2, None, 0.03, True, id="slow, told", marks=SLOW_TEST),
        pytest.param(SLOW, 0.2, None, 0.03, False, id="slow, learnt", marks=SLOW_TEST),
        pytest.param(CALLS, 0.7, None, 0.06, True, id="calls, told", marks=SLOW_TEST),
        pytest.param(MIXTURE, 0.7, None, 0.1, False, id="experts, learnt", marks=SLOW_TEST),
        pytest.param(SMALL, 0.7, 700, 0.06, False, id="tight pool, learnt", marks=SLOW_TEST),
    ],
)
def test_the_simulation_is_of_the_schedulers_own_policy(
    step_times, rate, kv_tokens, within, reports_decode
):
    policy = SchedulerSettings(
        slots=8,
        prefill_tokens=256,
        step_tokens=512,
        kv_tokens=kv_tokens,
        step_seconds_target=0.2,
    )
    rng = np.random.default_rng(5)
    pairs = np.column_stack([rng.integers(20, 300, 400), rng.integers(10, 60, 400)])
    due = np.cumsum(rng.exponential(1 / rate, 400))
    played = simulate(step_times, policy, due, *pairs.T)
    *times, preemptions = scheduled(step_times, policy, due, pairs, reports_decode)
    assert (preemptions > 10) is (kv_tokens is not None)
    for simulated, true in zip((played.ttft, played.tpot), times, strict=True):
        for share in (0.5, 0.9, 0.99):
            rel = within * (2 if kv_tokens and share == 0.99 else 1)  # four that were preempted
            assert np.quantile(simulated, share) == pytest.approx(
                np.quantile(true, share), rel=rel
            ), share


def test_one_single_stream_request_takes_the_time_of_the_model():
    played = simulate(STEP_TIMES, SchedulerSettings(), [5.0], [100], [11])
    assert played.ttft[0] == pytest.approx(STEP_TIMES.seconds(0, 100, 0))
    assert played.tpot[0] == pytest.approx(STEP_TIMES.seconds(1, 0, 104.5))
    single_stream = simulate(STEP_TIMES, SchedulerSettings(), [5.0], [100], [1])
    assert (
        np.isnan(single_stream.tpot[0])
        and Slo("x", ttft_seconds=2.0, tpot_seconds=0.1).met_by(single_stream)[0]
    )
    assert not Slo("x", ttft_seconds=0.01).met_by(single_stream)[0]


def test_cached_prompt_tokens_are_context_and_are_not_computed():
    played = simulate(STEP_TIMES, SchedulerSettings(), [0.0], [100], [11], [80])
    assert played.ttft[0] == pytest.approx(STEP_TIMES.seconds(0, 20, 0))
    assert played.tpot[0] == pytest.approx(STEP_TIMES.seconds(1, 0, 104.5))
    whole = simulate(
        STEP_TIMES,
        SchedulerSettings(),
        [0.0],
        [100],
        [11],
        [100],
    )
    assert whole.ttft[0] == pytest.approx(STEP_TIMES.seconds(0, 1, 0)), (
        "one token is always computed"
    )


def test_steps_that_only_decode_are_not_played_one_by_one():
    """8,000 answers of 110 tokens in well under a second, as bisections need it."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 300, 8000), rng.integers(2, 220, 8000)
    due = np.cumsum(rng.exponential(1.0, 8000))
    began = time.process_time()
    simulate(STEP_TIMES, SchedulerSettings(slots=8), due, *lengths)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "step_times",
    [STEP_TIMES, EXPERTS_STEP_TIMES, SERVER_STEPS],
    ids=["dense", "experts", "GPU server"],
)
def test_a_level_is_played_as_a_server_plays_it_step_by_step(step_times):
    rng = np.random.default_rng(4)
    due = np.cumsum(rng.exponential(0.8, 300))
    prompts, outputs = rng.integers(20, 300, 300), rng.integers(2, 80, 300)
    settings = msgspec.structs.replace(SETTINGS, prefill_tokens=2048)  # prompts are not cut
    server = KnownServer(step_times.seconds, prefill_tokens=2048)
    level = server.level(due.tolist(), prompts.tolist(), outputs.tolist())
    played = simulate(step_times, settings, due, prompts, outputs)
    for share in (0.1, 0.5, 0.9, 0.99):
        for simulated, true in ((played.ttft, level.ttft), (played.tpot, level.tpot)):
            assert np.quantile(simulated, share) == pytest.approx(
                np.quantile(true, share), rel=0.02
            )


GPU_MIXTURE = msgspec.structs.replace(
    SERVER_STEPS, expert_seconds=0.03, experts=Routing(128, 8), shares_pass=True
)


def test_a_step_with_a_prompt_multiplies_all_its_tokens_together():
    settings = SchedulerSettings(
        slots=8, prefill_tokens=2048, step_tokens=2048, step_seconds_target=None
    )
    due, lengths = [0.0, 0.1], ([50, 300], [9, 1])
    steps = msgspec.structs.replace(GPU_MIXTURE, base_seconds=1.0)  # the second comes in step 1
    played = simulate(steps, settings, due, *lengths)
    first = steps.seconds(0, 50, 0)
    second = steps.seconds(1, 300, 50)
    assert played.ttft[0] == pytest.approx(first)
    assert played.ttft[1] == pytest.approx(first + second - 0.1)


def test_pieces_of_a_prompt_attend_to_the_pieces_before_them():
    settings = SchedulerSettings(slots=1, step_tokens=512)
    played = simulate(SERVER_STEPS, settings, [0.0], [1200], [1])
    expected = sum(
        SERVER_STEPS.seconds(0, tokens, 0, token_pairs=tokens * (before + tokens / 2))
        for tokens, before in ((512, 0), (512, 512), (176, 1024))
    )
    assert played.ttft[0] == pytest.approx(expected)


def test_on_a_gpu_decode_rows_and_prompts_read_the_experts_together():
    step_times = msgspec.structs.replace(EXPERTS_STEP_TIMES, shares_pass=True)
    settings = SchedulerSettings(slots=8, step_tokens=2048, step_seconds_target=None)
    due, lengths = [0.0, 0.0, 0.0], ([50, 300, 200], [1, 1, 1])
    played = simulate(step_times, settings, due, *lengths)
    assert played.ttft[0] == pytest.approx(step_times.seconds(0, 550, 0, passes=3))
    apart = simulate(EXPERTS_STEP_TIMES, settings, due, *lengths)
    assert apart.ttft[0] - played.ttft[0] == pytest.approx(2 * step_times.expert_seconds, rel=0.05)


@pytest.mark.parametrize(
    "step_times",
    [EXPERTS_STEP_TIMES, SERVER_STEPS, GPU_MIXTURE],
    ids=["experts", "GPU server", "experts on a GPU server"],
)
def test_single_streams_are_the_same_in_closed_form(step_times):
    lengths = Lengths(np.array([30, 700]), np.array([5, 20]), np.array([0, 0]))
    settings = SchedulerSettings(step_tokens=512)
    single_stream = Server(step_times, settings, lengths).unloaded()
    for number in range(2):
        own = [lengths.prompt[number]], [lengths.output[number]]
        played = simulate(step_times, settings, [0.0], *own)
        assert single_stream.ttft[number] == pytest.approx(played.ttft[0], rel=0.01)
        assert single_stream.tpot[number] == pytest.approx(played.tpot[0])
