"""Conversations in the simulation, held to the scheduler and its slot allocator, step by step."""

from __future__ import annotations

import heapq

import msgspec
import numpy as np
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity import simulated_capacity
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    NO_REUSE,
    Demand,
    Lengths,
    PrefixReuse,
    Server,
    ServerModel,
    lengths_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.engine.ipc_messages import GenerationRequest, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.workload.arrivals import Constant, Poisson, due_times
from crossover.serving.workload.request_lengths import Spread, Workload
from tests.fake_backend import FakeBackend

STEPS = StepTimeModel(
    base_seconds=0.02, row_seconds=0.006, prompt_token_seconds=0.0025, context_token_seconds=2e-6
)
CHATS = Workload(
    prompt_tokens=220,
    output_tokens=24,
    shared_prefix_tokens=60,
    turns=Spread(mean=4, sd=2, min=1, max=8),
    think_seconds=Spread(mean=8, sd=5, min=0.5, max=30),
    turn_tokens=Spread(mean=40, sd=20, min=20, max=120),
)


class Clocked(FakeBackend):
    """A backend whose steps take what the step-time model says, on a clock of its own."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, lambda *_: None)
        self.now = 0.0
        self.last_decode_seconds = 0.0

    def step(self, rows):  # type: ignore[no-untyped-def]
        decoding = [row for row in rows if len(row.tokens) == 1]
        context = sum(row.start for row in decoding)
        prompt_tokens = sum(len(row.tokens) for row in rows) - len(decoding)
        passes = len(rows) - len(decoding) + bool(decoding)
        self.now += STEPS.seconds(len(decoding), prompt_tokens, context, passes)
        self.last_decode_seconds = STEPS.seconds(len(decoding), 0, context)
        return super().step(rows)


def converse(
    lengths: Lengths,
    due: np.ndarray,
    settings: SchedulerSettings,
    options: dict[str, str],
    prompt_cache_bytes: int = 0,
    has_salts: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """TTFT and reused tokens of each turn, by the server's own scheduler: users send the answers
    back that it gave them. `has_salts`: each conversation is a tenant's of its own."""
    turns = lengths.turns
    assert turns is not None
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="fake",
        settings=msgspec.structs.replace(settings, context_tokens=2048),
        prefix_reuse=True,
        prompt_cache_bytes=prompt_cache_bytes,
        options=options,
    )
    backend = Clocked(config)
    engine = Scheduler(backend, [b"x"] * 8192, frozenset(), config, clock=lambda: backend.now)
    count = len(lengths.prompt)
    shared = np.random.default_rng(9).integers(3, 8192, turns.shared_tokens).tolist()
    begins = turns.number == 0
    coming = [(float(at), one) for one, at in enumerate(due) if begins[one]]
    heapq.heapify(coming)
    times = {one: at for at, one in coming}
    prompts: dict[int, list[int]] = {}
    answers: dict[int, list[int]] = {}
    submitted: list[int] = []  # the request of each sequence, by its id
    ttft, cached = np.full(count, np.nan), np.full(count, np.nan)
    while coming or engine.busy:
        if not engine.busy:
            backend.now = max(backend.now, coming[0][0])
        while coming and coming[0][0] <= backend.now:
            _, one = heapq.heappop(coming)
            before = prompts[one - 1] + answers[one - 1] if turns.number[one] else shared
            new = int(lengths.prompt[one]) - len(before)
            rng = np.random.default_rng([one, 3])
            prompts[one] = before + rng.integers(3, 8192, new).tolist()
            answers[one] = []
            request = GenerationRequest(
                prompts[one],
                int(lengths.output[one]),
                ignore_eos=True,
                cache_salt=str(turns.session[one]) if has_salts else "",
            )
            assert engine.add(Submit(len(submitted), request)) is None
            submitted.append(one)
        sequences = {sequence.id: sequence for sequence in engine.waiting}
        sequences |= {sequence.id: sequence for sequence in engine.running.values()}
        for delta in engine.step():
            one, sequence = submitted[delta.id], sequences[delta.id]
            if np.isnan(ttft[one]):
                ttft[one] = backend.now - times[one]
                cached[one] = sequence.cached
            if delta.finish is not None:
                answers[one] = sequence.tokens[len(prompts[one]) : sequence.length].tolist()
                after = one + 1
                if after < count and turns.number[after]:
                    at = backend.now + float(turns.think_seconds[after])
                    times[after] = at
                    heapq.heappush(coming, (at, after))
    return ttft, cached


SLO = Slo("chats", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)


@pytest.mark.parametrize(
    ("options", "kind", "slots", "kv_tokens", "gap_seconds"),
    [
        ({}, "any prefix", 8, None, 8.0),
        ({}, "any prefix", 3, None, 8.0),
        ({}, "any prefix", 8, 1800, 8.0),
        ({"rewinds": "false"}, "checkpoints", 4, None, 16.0),
    ],
    ids=["slots enough", "too few slots", "a tight pool", "checkpoints"],
)
def test_reuse_is_the_slot_allocators_own(options, kind, slots, kv_tokens, gap_seconds):
    settings = SchedulerSettings(
        slots=slots,
        prefill_tokens=256,
        step_tokens=512,
        kv_tokens=kv_tokens,
        step_seconds_target=0.2,
    )
    lengths = lengths_of(CHATS, 240, 3, reuse=PrefixReuse(kind=kind))
    turns = lengths.turns
    assert turns is not None
    due = np.cumsum(np.random.default_rng(5).exponential(gap_seconds, turns.session[-1] + 1))
    played = simulate(
        STEPS, settings, due[turns.session], lengths.prompt, lengths.output, turns=turns
    )
    ttft, cached = converse(lengths, due[turns.session], settings, options)
    assert cached.sum() > 0.2 * lengths.prompt.sum(), "much is reused"
    assert played.cached.sum() == pytest.approx(cached.sum(), rel=0.03)
    assert (played.cached == cached).mean() > 0.9
    assert played.ttft.mean() == pytest.approx(ttft.mean(), rel=0.05)


@pytest.mark.parametrize(
    ("kind", "stored_tokens", "gap_seconds", "found_share"),
    [
        ("any prefix", 1000, 12.0, 0.6),
        pytest.param("any prefix", 5000, 8.0, 0.7, marks=pytest.mark.slow),
        ("checkpoints", 1500, 16.0, 0.5),
        pytest.param("checkpoints", 8000, 16.0, 0.6, marks=pytest.mark.slow),
    ],
)
def test_the_prompt_cache_is_the_engines_own(kind, stored_tokens, gap_seconds, found_share):
    """The simulation stores, restores and drops the same histories as the scheduler. With
    checkpoints, each takes as much as 100 tokens for two states beside its own."""
    token_bytes, context_tokens = 1 << 14, 2048
    sequence_tokens = 100 if kind == "checkpoints" else 0
    lengths = lengths_of(CHATS, 240, 3, reuse=PrefixReuse(kind=kind))
    turns = lengths.turns
    assert turns is not None
    due = np.cumsum(np.random.default_rng(5).exponential(gap_seconds, turns.session[-1] + 1))
    settings = SchedulerSettings(slots=3, step_seconds_target=0.2)
    size = (stored_tokens + context_tokens + sequence_tokens) * token_bytes
    options = {"token_bytes": str(token_bytes)}
    if kind == "checkpoints":
        options |= {"rewinds": "false", "saved_bytes": str(sequence_tokens * token_bytes // 2)}
    ttft, cached = converse(lengths, due[turns.session], settings, options, size)
    settings = msgspec.structs.replace(
        settings, stored_tokens=stored_tokens, stored_sequence_tokens=sequence_tokens
    )
    played = simulate(
        STEPS, settings, due[turns.session], lengths.prompt, lengths.output, turns=turns
    )
    assert cached.sum() > found_share * lengths.prompt.sum()
    assert played.cached.sum() == pytest.approx(cached.sum(), rel=0.03)
    assert (played.cached == cached).mean() > 0.9
    assert played.ttft.mean() == pytest.approx(ttft.mean(), rel=0.05)


def test_conversations_of_tenants_with_salts_are_simulated_without_a_shared_prefix():
    """A campaign measures how many tokens the first turns of conversations find in the cache. If
    each conversation has a salt of its own, that is 0, and the simulation plays it so."""
    token_bytes, context_tokens = 1 << 14, 2048
    sent = lengths_of(CHATS, 240, 3, reuse=PrefixReuse(kind="any prefix"))
    simulated = lengths_of(CHATS, 240, 3, reuse=PrefixReuse(kind="any prefix", shared_tokens=0))
    turns = sent.turns
    assert turns is not None and turns.shared_tokens == 60
    due = np.cumsum(np.random.default_rng(5).exponential(8.0, turns.session[-1] + 1))
    settings = SchedulerSettings(slots=3, step_seconds_target=0.2)
    size = (5000 + context_tokens) * token_bytes
    options = {"token_bytes": str(token_bytes)}
    ttft, cached = converse(sent, due[turns.session], settings, options, size, has_salts=True)
    assert cached[turns.number == 0].max() == 0
    played = simulate(
        STEPS,
        msgspec.structs.replace(settings, stored_tokens=5000),
        due[turns.session],
        simulated.prompt,
        simulated.output,
        turns=simulated.turns,
    )
    assert played.cached.sum() == pytest.approx(cached.sum(), rel=0.03)
    assert (played.cached == cached).mean() > 0.9
    assert played.ttft.mean() == pytest.approx(ttft.mean(), rel=0.05)


def test_a_prompt_cache_raises_the_capacity_of_few_slots_and_slow_copies_take_it_back() -> None:
    def users(**settings: float) -> float:
        server = msgspec.structs.replace(SchedulerSettings(slots=3), **settings)
        return Server(STEPS, server, lengths, count=400).crossing(SLO)

    lengths = lengths_of(CHATS, 240, 3, reuse=PrefixReuse(kind="any prefix"))
    without, cached = users(), users(stored_tokens=20_000)
    assert cached > 1.3 * without
    assert users(stored_tokens=20_000, copy_token_seconds=0.01) < without


def test_capacity_with_reuse_is_higher_and_is_given_in_users() -> None:
    """Little's law is held to what the simulation itself has under way."""
    settings = SchedulerSettings(slots=16, step_tokens=512)
    found = ServerModel(STEPS, settings).capacity(Demand(CHATS), SLO, 2_000)
    without = ServerModel(STEPS, settings, reuse=NO_REUSE).capacity(Demand(CHATS), SLO, 2_000)
    assert found.rate > 1.3 * without.rate
    assert found.users is not None and without.users is not None
    lengths = lengths_of(CHATS, 2_000, 0)
    assert lengths.turns is not None
    sessions = int((lengths.turns.number == 0).sum())
    begins = due_times(Poisson(), found.rate / lengths.mean_turns, 1e6, 0)[:sessions]
    played = Server(STEPS, settings, lengths).simulate_due(begins)
    first = np.flatnonzero(lengths.turns.number == 0)
    until = (played.due + played.e2e)[[*first[1:] - 1, -1]]
    start, end = 0.2 * begins[-1], 0.8 * begins[-1]
    overlap = np.minimum(until, end) - np.maximum(played.due[first], start)
    assert found.users == pytest.approx(np.maximum(overlap, 0).sum() / (end - start), rel=0.1)


def test_few_slots_evict_histories_and_lower_the_capacity() -> None:
    many, few = (
        ServerModel(STEPS, SchedulerSettings(slots=slots, step_tokens=512))
        .capacity(Demand(CHATS), SLO, 2_000)
        .rate
        for slots in (16, 2)
    )
    assert few < 0.8 * many


def test_an_unloaded_conversation_computes_only_new_tokens() -> None:
    """One after the other, each turn goes on where the slot stands: in closed form as played."""
    settings = SchedulerSettings(slots=1, step_tokens=4096)
    talk = msgspec.structs.replace(CHATS, turns=3, shared_prefix_tokens=0)
    lengths = lengths_of(talk, 3, 1)
    assert lengths.prompt.tolist()[0] == 220 and len(lengths.prompt) == 3
    server = Server(STEPS, settings, lengths, Constant())
    played = server.simulate_due(np.zeros(1))
    single_stream = server.unloaded()
    for one in ("ttft", "tpot", "e2e", "cached"):
        assert getattr(single_stream, one) == pytest.approx(getattr(played, one), rel=0.01), one
    assert single_stream.cached.tolist() == [0, *(lengths.prompt[:-1] + lengths.output[:-1] - 1)]
    nothing = Server(STEPS, settings, lengths.without_reuse(), Constant())
    assert nothing.unloaded().cached.tolist() == [0, 0, 0]


def test_limits_of_the_whole_answer_and_of_the_answer_itself_are_simulated() -> None:
    settings = SchedulerSettings(slots=8, step_tokens=512)
    fixed = Workload(prompt_tokens=100, output_tokens=50)
    plain = Server(STEPS, settings, lengths_of(fixed, 50, 1)).unloaded()
    thinking = Server(STEPS, settings, lengths_of(fixed, 50, 1, reasoning_share=0.5)).unloaded()
    assert plain.ttfa[0] == plain.ttft[0]
    assert thinking.ttfa[0] == pytest.approx((thinking.ttft[0] + thinking.e2e[0]) / 2)
    e2e = float(plain.e2e[0])
    for limit, is_met in ((e2e * 1.01, True), (e2e * 0.99, False)):
        slo = Slo("e2e", e2e_seconds=limit)
        assert bool(slo.met_by(plain).all()) is is_met
    slo = Slo(
        "ttfa", ttft_seconds=9.0, tpot_seconds=9.0, ttfa_seconds=float(thinking.ttfa[0]) * 0.99
    )
    assert not slo.met_by(thinking).any() and slo.met_by(plain).all()


# A queue of one server in which every turn takes 1 s: 10 steps of 0.1 s, and no batching.
ONE_BY_ONE = StepTimeModel(
    base_seconds=0.1, row_seconds=0.0, prompt_token_seconds=0.0, context_token_seconds=0.0
)


def one_by_one(count: int, think_seconds: float = 60.0) -> Server:
    settings = SchedulerSettings(slots=1, context_tokens=4096)
    think = Spread(mean=think_seconds, min=1, max=10 * think_seconds, kind="exponential")
    workload = Workload(
        prompt_tokens=20,
        output_tokens=10,
        turns=Spread(mean=4, sd=2, min=1, max=8),
        think_seconds=think,
        turn_tokens=20,
    )
    lengths = lengths_of(workload, 2_000, 1, reuse=NO_REUSE)
    return Server(ONE_BY_ONE, settings, lengths, count=count)


@pytest.mark.parametrize("seed", range(2))
def test_the_capacity_for_conversations_is_that_of_the_queue(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of many users who think for long come like a Poisson process, so this is an M/D/1
    queue. At a load of 0.80, 10 % of its requests wait for longer than 5 s."""
    monkeypatch.setattr(simulated_capacity, "SEED", seed)
    slo = Slo("patient", ttft_seconds=5.1, tpot_seconds=1.0, target=0.9)
    assert one_by_one(10_000, think_seconds=600.0).crossing(slo) == pytest.approx(0.80, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_turns_come_at_the_rate_that_is_simulated(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of conversations that are drawn at random, a thousand turns are up to 10 % more or fewer."""
    monkeypatch.setattr(simulated_capacity, "SEED", seed)
    counted_share = 1 - simulated_capacity.CONVERSATION_WARM_UP - simulated_capacity.COOL_DOWN
    turns = len(one_by_one(1_000).play(0.2).due)
    assert turns == pytest.approx(counted_share * 1_000, rel=0.03)


def test_more_turns_are_simulated_of_more_users() -> None:
    """From turn to turn it takes 45.3 s: 1 s to answer and 44.3 s to think, on average."""
    server = one_by_one(1_000)
    turns = [server._seconds(rate) * rate for rate in (0.2, 4.0, 40.0)]
    assert turns == pytest.approx([1_000, 10 * 45.3 * 4.0, 3_000], rel=0.01)
