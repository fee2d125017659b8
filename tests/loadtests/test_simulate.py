"""The simulation against exact queueing results and against a step-by-step play; the step-time law against known laws."""

import math

import numpy as np
import pytest

import loadtests.simulate as simulation
from loadtests.arrivals import Gamma, Poisson, due_times
from loadtests.errors import LoadError
from loadtests.simulate import MIN_PREFILL_TOKENS, Policy, predict, simulate
from loadtests.slo import PROMISES, Promise
from loadtests.steptime import StepLaw, StepObservation, fit, observations_of
from serving import scheduler
from serving.backends.base import EngineConfig, Sampling
from serving.backends.fake import FakeBackend
from serving.messages import Submit
from tests.loadtests.test_summary import request

STEP = 0.0051  # short beside the service, so that starting on a step's edge hardly matters


def erlang_c(servers: int, load: float) -> float:
    """Probability of waiting in M/M/c at `load` erlangs."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


def waits_longer_md_c(servers: int, load: float, terms: int = 400) -> float:
    """P(wait > 0) in M/D/c: the number in system, seen one service apart, is a chain with Poisson steps (Crommelin 1932)."""
    step = np.exp(-load + np.arange(terms) * math.log(load) - np.array([math.lgamma(k + 1) for k in range(terms)]))
    chain = np.zeros((terms, terms))
    for i in range(terms):
        stay = max(i - servers, 0)
        chain[i, stay:] = step[: terms - stay]
    chain[:, -1] += 1 - chain.sum(axis=1)
    system = np.vstack([chain.T - np.eye(terms), np.ones(terms)])
    p = np.linalg.lstsq(system, np.append(np.zeros(terms), 1.0), rcond=None)[0]
    return float(1 - p[:servers].sum())


def waits_of(servers, rate, outputs, seed=1):
    """Waiting times of a queue made of an engine whose steps always take the same time: one prompt token, then one token a step."""
    count = len(outputs)
    due = due_times(Poisson(), rate, 1.3 * count / rate, seed)[:count]
    assert len(due) == count
    pairs = np.column_stack([np.ones(count, dtype=np.int64), outputs])
    played = simulate(StepLaw(base_seconds=STEP), Policy(slots=servers, prefill_tokens=servers), due, pairs)
    # A request that finds a free slot has its first token after the step under way (half of one, on average) and one of its own.
    return played, (played.ttft_seconds - 1.5 * STEP)[count // 20 :]


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 3.2)])
def test_constant_service_is_m_d_c(servers, load):
    outputs = np.full(60_000, 100)
    service = 100 * STEP
    _, waits = waits_of(servers, load / service, outputs)
    if servers == 1:
        assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)  # Pollaczek-Khinchine
    assert np.mean(waits > STEP) == pytest.approx(waits_longer_md_c(servers, load), abs=0.03)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.6), (4, 3.0), (8, 6.0)])
def test_geometric_service_is_m_m_c(servers, load):
    outputs = np.random.default_rng(11).geometric(1 / 100, 150_000)
    service = 100 * STEP
    _, waits = waits_of(servers, load / service, outputs)
    waiting = erlang_c(servers, load)
    assert np.mean(waits > STEP) == pytest.approx(waiting, abs=0.03)
    assert waits.mean() == pytest.approx(waiting * service / (servers - load), rel=0.08)
    assert np.mean(waits > service) == pytest.approx(waiting * math.exp(-(servers - load)), abs=0.03)


LAWS = [
    StepLaw(base_seconds=0.02, row_seconds=0.003, prompt_token_seconds=0.0005, kv_token_seconds=2e-6),
    StepLaw(base_seconds=0.01),
    StepLaw(form="max", base_seconds=0.001, row_seconds=0.004, prompt_token_seconds=0.0002, kv_token_seconds=5e-6, weights_seconds=0.015),
]
POLICIES = [
    Policy(slots=4, prefill_tokens=32, step_tokens=128),
    Policy(slots=16, prefill_tokens=256, step_seconds_target=0.08),
    Policy(slots=8, kv_tokens=2000),
]


def played_step_by_step(law, policy, due, pairs):
    """The policy written as plainly as can be: one loop turn is one step."""
    waiting, running, first, last = list(range(len(due))), [], {}, {}
    left = {i: int(p) for i, (p, _) in enumerate(pairs)}
    made = dict.fromkeys(left, 0)
    now = 0.0
    while waiting or running:
        if not running and due[waiting[0]] > now:
            now = due[waiting[0]]
        while waiting and due[waiting[0]] <= now and len(running) < policy.slots:
            i = waiting[0]
            held = sum(pairs[j][0] - left[j] + max(made[j] - 1, 0) for j in running)
            if running and policy.kv_tokens is not None and held + pairs[i][0] + len(running) > policy.kv_tokens:
                break
            running.append(waiting.pop(0))
        decoding = [i for i in running if left[i] == 0]
        context = sum(pairs[i][0] + made[i] - 1 for i in decoding)
        room = policy.step_tokens - len(decoding)
        filling = [i for i in running if left[i] > 0]
        if decoding and filling:
            room = min(room, policy.prefill_tokens)
            if policy.step_seconds_target is not None and law.prompt_token_seconds:
                decode = law.seconds(len(decoding), 0, context)
                lost = decode / len(decoding) - law.seconds(policy.slots, 0, context) / policy.slots
                spare = max(policy.step_seconds_target - decode, 3.75 * decode, 120 * lost)
                room = max(MIN_PREFILL_TOKENS, min(room, max(0, int(spare / law.prompt_token_seconds))))
        taken = 0
        done = []
        for i in filling:
            piece = min(left[i], room - taken)
            if taken and piece < min(left[i], 16):
                break
            if 16 < piece < left[i]:
                piece = piece // 16 * 16
            left[i] -= piece
            taken += piece
            if left[i] == 0:
                done.append(i)
        now += law.seconds(len(decoding), taken, context)
        for i in decoding + done:
            made[i] += 1
            first.setdefault(i, now)
            last[i] = now
            if made[i] == pairs[i][1]:
                running.remove(i)
    return np.array([first[i] for i in range(len(due))]), np.array([last[i] for i in range(len(due))])


@pytest.mark.parametrize("policy", POLICIES, ids=["small", "target", "pool"])
@pytest.mark.parametrize("law", LAWS, ids=["sum", "constant", "max"])
def test_jumping_over_decode_steps_changes_nothing(law, policy):
    rng = np.random.default_rng(7)
    pairs = np.column_stack([rng.integers(1, 400, 120), rng.integers(1, 60, 120)])
    due = np.cumsum(rng.exponential(0.4, 120))
    played = simulate(law, policy, due, pairs)
    first, last = played_step_by_step(law, policy, due, pairs)
    assert played.first_token == pytest.approx(first, rel=1e-9)
    assert played.last_token == pytest.approx(last, rel=1e-9)


class Clocked(FakeBackend):
    """A backend that obeys a law, on a clock of its own. `told`: it says apart what its decoding rows took."""

    def __init__(self, config, law, told):
        super().__init__(config, lambda *_: None)
        self.law, self.told, self.now, self.last_decode_seconds = law, told, 0.0, None

    def step(self, rows):
        decoding = [row for row in rows if len(row.tokens) == 1]
        context = sum(row.start for row in decoding)
        self.now += self.law.seconds(len(decoding), sum(len(row.tokens) for row in rows) - len(decoding), context)
        self.last_decode_seconds = self.law.seconds(len(decoding), 0, context) if self.told else None
        return super().step(rows)


def scheduled(law, policy, due, pairs, told):
    """TTFT and TPOT, float64 [n], of the same requests under the server's own scheduler, which has to learn the law."""
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="fake",
        slots=policy.slots,
        kv_tokens=policy.kv_tokens,
        prefill_tokens=policy.prefill_tokens,
        step_seconds_target=policy.step_seconds_target,
        prefix_reuse=False,
    )
    backend = Clocked(config, law, told)
    engine = scheduler.Scheduler(backend, [b"x"] * 8192, frozenset(), config, clock=lambda: backend.now)
    first, last, arrived = {}, {}, 0
    while arrived < len(due) or engine.busy:
        if not engine.busy:
            backend.now = max(backend.now, due[arrived])
        while arrived < len(due) and due[arrived] <= backend.now:
            prompt = np.random.default_rng(arrived).integers(3, 8192, pairs[arrived][0]).tolist()
            assert engine.add(Submit(arrived, prompt, int(pairs[arrived][1]), Sampling(), ignore_eos=True)) is None
            arrived += 1
        for delta in engine.step():
            first.setdefault(delta.id, backend.now)
            last[delta.id] = backend.now
    first, last = (np.array([times[i] for i in range(len(due))]) for times in (first, last))
    return first - due, (last - first) / (pairs[:, 1] - 1)


# Small machines, where prompts are what a step mostly is, so that every bound on them matters; requests/s near what they can do.
SMALL = StepLaw(base_seconds=0.02, row_seconds=0.006, prompt_token_seconds=0.0025, kv_token_seconds=2e-6)
SLOW = StepLaw(base_seconds=0.06, row_seconds=0.045, prompt_token_seconds=0.012, kv_token_seconds=5e-6)


@pytest.mark.parametrize("told", [True, False], ids=["told", "learnt"])
@pytest.mark.parametrize(("law", "rate"), [(SMALL, 1.0), (SLOW, 0.2)], ids=["small", "slow"])
def test_the_simulation_is_of_the_schedulers_own_policy(law, rate, told):
    policy = Policy(slots=8, prefill_tokens=256, step_tokens=512, step_seconds_target=0.2)
    rng = np.random.default_rng(5)
    pairs = np.column_stack([rng.integers(20, 300, 400), rng.integers(10, 60, 400)])
    due = np.cumsum(rng.exponential(1 / rate, 400))
    played = simulate(law, policy, due, pairs)
    for simulated, true in zip((played.ttft_seconds, played.tpot_seconds), scheduled(law, policy, due, pairs, told), strict=True):
        for share in (0.5, 0.9, 0.99):
            assert np.quantile(simulated, share) == pytest.approx(np.quantile(true, share), rel=0.03), share


@pytest.mark.parametrize("name", ["PREFILL_MULTIPLE", "MIN_PREFILL_TOKENS", "PREFILL_SHARE", "PREFILL_WORTH"])
def test_the_schedulers_bounds_are_the_simulations(name):
    assert getattr(simulation, name) == getattr(scheduler, name)


def test_one_lone_request_takes_what_the_law_says():
    law = LAWS[0]
    played = simulate(law, Policy(), [5.0], np.array([[100, 11]]))
    assert played.ttft_seconds[0] == pytest.approx(law.seconds(0, 100, 0))
    assert played.tpot_seconds[0] == pytest.approx(law.seconds(1, 0, 104.5))
    alone = simulate(law, Policy(), [5.0], np.array([[100, 1]]))
    assert np.isnan(alone.tpot_seconds[0]) and alone.good(PROMISES["chat"])[0]


def test_ten_thousand_requests_take_seconds():
    rng = np.random.default_rng(0)
    pairs = np.column_stack([rng.integers(20, 600, 10_000), rng.integers(5, 300, 10_000)])
    import time

    started = time.perf_counter()
    simulate(LAWS[0], Policy(), due_times(Poisson(), 1.0, 12_000.0, 1)[:10_000], pairs)
    assert time.perf_counter() - started < 5.0


def test_capacity_is_where_the_share_crosses_the_target():
    rng = np.random.default_rng(3)
    pairs = np.column_stack([rng.integers(20, 400, 3000), rng.integers(5, 100, 3000)])
    promise = Promise("x", 1.0, 0.08, target=0.95)
    found = predict(LAWS[0], Policy(), pairs, promise, seed=1)
    assert found.lone_share == 1.0 and found.rate > 0.3
    shares = []
    for factor in (0.9, 1.1):
        due = due_times(Poisson(), found.rate * factor, 3000 / (found.rate * factor), 77)
        count = min(len(due), 3000)
        shares.append(simulate(LAWS[0], Policy(), due[:count], pairs[:count]).good(promise)[300:].mean())
    assert shares[0] > 0.95 > shares[1]


def test_a_promise_costs_throughput_and_burstiness_costs_more():
    rng = np.random.default_rng(3)
    pairs = np.column_stack([rng.integers(20, 400, 2000), rng.integers(5, 100, 2000)])
    rates = [predict(LAWS[0], Policy(), pairs, Promise("x", ttft, 0.2, target=0.9), seed=1).rate for ttft in (0.6, 2.0, 20.0)]
    assert rates[0] < rates[1] < rates[2]
    bursty = predict(LAWS[0], Policy(), pairs, Promise("x", 2.0, 0.2, target=0.9), seed=1, arrivals=Gamma(3.0)).rate
    assert bursty < 0.85 * rates[1]


def test_a_promise_that_lone_requests_break_has_no_capacity():
    pairs = np.tile([400, 50], (200, 1))
    found = predict(LAWS[0], Policy(), pairs, Promise("x", 0.2, None, target=0.9))
    assert (found.rate, found.lone_share) == (0.0, 0.0)


def test_inputs_that_cannot_be_are_errors():
    with pytest.raises(LoadError, match="3 pairs of lengths for 2"):
        simulate(LAWS[0], Policy(), [0.0, 1.0], np.ones((3, 2), dtype=np.int64))
    with pytest.raises(LoadError, match="at least 50"):
        predict(LAWS[0], Policy(), np.ones((49, 2), dtype=np.int64), PROMISES["chat"])
    with pytest.raises(ValueError, match="slots"):
        Policy(slots=0)


def calibration(law, rng, noise=0.02):
    seen = [(rows, 0, rows * kv) for rows in (1, 2, 4, 8, 16, 32) for kv in (50, 500, 2000)]
    seen += [(rows, tokens, rows * 300) for rows in (0, 4, 12) for tokens in (16, 64, 256, 1024)]
    return [StepObservation(r, p, k, law.seconds(r, p, k) * float(np.exp(noise * rng.normal()))) for r, p, k in seen * 2]


@pytest.mark.parametrize("law", LAWS, ids=["sum", "constant", "max"])
def test_a_law_is_found_again_from_noisy_steps(law):
    found = fit(calibration(law, np.random.default_rng(1)))
    for rows, prefill, kv in ((3, 0, 900), (24, 0, 20_000), (6, 128, 2000), (0, 512, 0)):
        assert found.seconds(rows, prefill, kv) == pytest.approx(law.seconds(rows, prefill, kv), rel=0.06)
    assert found.unseen == () and found.error == pytest.approx(0.0135, abs=0.01)


def test_the_form_is_chosen_by_the_data():
    rng = np.random.default_rng(4)
    assert fit(calibration(LAWS[0], rng)).form == "sum"
    assert fit(calibration(LAWS[2], rng)).form == "max"


def test_a_few_hiccups_do_not_move_the_law():
    rng = np.random.default_rng(2)
    seen = calibration(LAWS[0], rng)
    for i in (3, 20, 41):
        seen[i] = StepObservation(seen[i].decode_rows, seen[i].prefill_tokens, seen[i].kv_tokens, seen[i].seconds * 6)
    found = fit(seen)
    assert found.seconds(8, 0, 2400) == pytest.approx(LAWS[0].seconds(8, 0, 2400), rel=0.06)


def test_what_was_never_varied_is_said_to_be_unknown():
    alone = [StepObservation(1, 0, kv, LAWS[0].seconds(1, 0, kv)) for kv in (100, 1000, 5000, 20_000)]
    found = fit(alone)
    assert found.unseen == ("decode_rows", "prefill_tokens")
    assert found.row_seconds == 0.0 and found.seconds(1, 0, 3000) == pytest.approx(LAWS[0].seconds(1, 0, 3000), rel=0.01)


@pytest.mark.parametrize("steps", [0, 1, 7, 500])
@pytest.mark.parametrize("law", LAWS, ids=["sum", "constant", "max"])
def test_a_stretch_is_the_sum_of_its_steps(law, steps):
    for rows, kv in ((1, 10), (5, 2000), (3, 3500)):
        one_by_one = sum(law.seconds(rows, 0, kv + rows * j) for j in range(steps))
        assert law.stretch_seconds(rows, kv, steps) == pytest.approx(one_by_one, rel=1e-9, abs=1e-12)


def test_calibration_can_be_seen_from_the_client():
    law = LAWS[0]
    records = []
    for i, prompt in enumerate((50, 200, 800)):
        ttft, gap = law.seconds(0, prompt, 0), law.seconds(1, 0, prompt + 16)
        records.append(request(i, 10.0 * i, ttft=ttft, gap=gap, tokens=32, prompt_tokens=prompt))
    seen = observations_of(records, 1)
    seen += observations_of([request(9, 0.0, ttft=1.0, gap=law.seconds(8, 0, 8 * 116), tokens=32, prompt_tokens=100)], 8)
    found = fit(seen)
    assert found.seconds(8, 0, 8 * 116) == pytest.approx(law.seconds(8, 0, 8 * 116), rel=0.05)
    assert found.seconds(0, 400, 0) == pytest.approx(law.seconds(0, 400, 0), rel=0.05)
    assert observations_of([request(output_tokens=None)], 1) == []


def test_observations_that_cannot_be_are_errors():
    with pytest.raises(LoadError, match="at least 3"):
        fit([StepObservation(1, 0, 0, 0.1)] * 2)
    with pytest.raises(LoadError, match="above 0"):
        fit([StepObservation(1, 0, 0, 0.0)] * 3)
