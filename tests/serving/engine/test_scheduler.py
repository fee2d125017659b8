"""The scheduler on the fake backend, whose tokens are a hash of all that a slot's KV holds: a wrong
schedule gives wrong tokens.
"""

import random
from typing import Any

import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.choose_slot import PROMPT_TAIL, max_checkpoints
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.engine.ipc_messages import Delta
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.errors import EngineFailed, ServingError, Unsupported
from crossover.serving.sampling.step_inputs import Row, Sampled, Sampling
from tests.fake_backend import FakeBackend, continuation
from tests.serving.engine.schedules import (
    TABLE,
    VOCABULARY,
    Recorder,
    expected_text,
    make,
    prompt_of,
    request,
    run,
    text_of,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_tokens": 300},
        {"prefill_tokens": 7},
        {"prefix_reuse": False},
        {"slots": 1},
        {"options": {"rewinds": False}},
        {"options": {"rewinds": False}, "kv_tokens": 300},
        {"options": {"rewinds": False}, "slots": 1},
        {"options": {"rewinds": False}, "prefix_reuse": False},
    ],
)
def test_tokens_are_right_under_churn(changes: dict[str, Any]) -> None:
    """32 sequences with shared prefixes joining while others leave: each gets what it would have
    got alone.
    """
    rng = random.Random(3)
    scheduler, backend = make(**changes)
    shared = prompt_of(rng, 60)
    requests = {}
    out: dict[int, list[Delta]] = {}
    for number in range(32):
        prompt = shared[: rng.choice([0, 30, 60])] + prompt_of(rng, rng.randint(1, 90))
        requests[number] = (prompt, rng.randint(1, 50))
        assert scheduler.add(request(number, prompt, requests[number][1])) is None
        for _ in range(rng.randint(0, 6)):
            for delta in scheduler.step():
                out.setdefault(delta.id, []).append(delta)
    for number, deltas in run(scheduler).items():
        out.setdefault(number, []).extend(deltas)
    for number, (prompt, count) in requests.items():
        assert text_of(out[number]) == expected_text(prompt, count), number
        assert sum(delta.tokens for delta in out[number]) == count
        assert [delta.finish for delta in out[number]] == [None] * (count - 1) + ["length"]
    if "kv_tokens" in changes:
        assert scheduler.preemptions > 0
    if not changes:
        assert backend.copies, "no prefix was copied though many were shared"
    rows = [row for step in backend.steps for row in step]
    assert all(step == sorted(step) for step in backend.steps)
    assert len(rows) > 32


def test_without_rewinding_a_turn_and_a_shared_beginning_go_on_from_checkpoints() -> None:
    rng = random.Random(5)
    scheduler, backend = make(options={"rewinds": False})

    def cached(number: int, prompt: list[int]) -> int:
        assert scheduler.add(request(number, prompt, 5)) is None
        deltas = run(scheduler)[number]
        assert text_of(deltas) == expected_text(prompt, 5)
        return next(one.cached_tokens for one in deltas if one.cached_tokens is not None)

    first = prompt_of(rng, 60)
    assert cached(1, first) == 0
    assert cached(2, first) == 60 - PROMPT_TAIL, "the same prompt again"
    # A turn that keeps the whole answer goes on where the slot stands; one that drops what the
    # template put at the end of the prompt, as thoughts are dropped, from before that.
    answered = [*first, *continuation(first, 4, VOCABULARY)]
    assert cached(3, [*answered, *prompt_of(rng, 30)]) == len(answered)
    assert cached(4, [*first[:-3], *prompt_of(rng, 30)]) == 60 - PROMPT_TAIL
    # Where two prompts part is known by the second; the third goes on from there.
    shared = prompt_of(rng, 70)
    seen = [cached(number, [*shared, *prompt_of(rng, 30)]) for number in (5, 6, 7, 8)]
    assert seen == [0, 0, 70, 70]
    assert not backend.copies


def test_checkpoints_are_bounded_and_those_in_use_stay() -> None:
    rng = random.Random(6)
    scheduler, _ = make(options={"rewinds": False}, slots=2)
    shared = prompt_of(rng, 40)
    for number in range(2):
        scheduler.add(request(number, [*shared, *prompt_of(rng, 60)], 2))
        run(scheduler)
    for number in range(2, 12):
        scheduler.add(request(number, [*shared, *prompt_of(rng, 60)], 2))
        (delta, *_) = run(scheduler)[number]
        assert delta.cached_tokens == 40
    assert len(scheduler._slots._checkpoints) == max_checkpoints(2)


def test_stop_token_eos_and_min_tokens() -> None:
    prompt = [3, 4, 5]
    truth = continuation(prompt, 20, VOCABULARY)
    scheduler, _ = make()
    scheduler.add(request(1, prompt, 20, stop_token_ids=[truth[4]]))
    deltas = run(scheduler)[1]
    assert [delta.finish for delta in deltas] == [None] * 4 + ["stop"]
    assert text_of(deltas) == expected_text(prompt, 4)
    scheduler, _ = make(options={"eos_token": 0, "eos_every": 5})
    scheduler.add(request(1, prompt, 200))
    scheduler.add(request(2, prompt, 200, ignore_eos=True))
    out = run(scheduler)
    assert out[1][-1].finish == "stop" and len(out[1]) < 200
    assert out[2][-1].finish == "length" and len(out[2]) == 200


def test_a_stop_string_ends_the_sequence_and_frees_its_slot() -> None:
    prompt = [3, 4, 5]
    truth = continuation(prompt, 20, VOCABULARY)
    scheduler, _ = make()
    scheduler.add(request(1, prompt, 20, stop=[f"t{truth[6]}"]))
    deltas = run(scheduler)[1]
    assert text_of(deltas) == expected_text(prompt, 6) + " "
    assert deltas[-1].finish == "stop"
    assert not scheduler.running


def test_cancel_frees_the_slot_before_the_next_step_and_a_waiting_one_too() -> None:
    scheduler, _ = make(slots=1)
    scheduler.add(request(1, [3] * 50, 100))
    scheduler.add(request(2, [4] * 50, 3))
    scheduler.add(request(3, [5] * 50, 3))
    scheduler.step()
    scheduler.cancel(1)
    scheduler.cancel(3)
    scheduler.cancel(99)
    ended = {delta.id: delta.finish for delta in scheduler.step() if delta.finish}
    assert ended == {1: "cancelled", 3: "cancelled"}
    assert [s.id for s in scheduler.running.values()] == [2]
    assert set(run(scheduler)) == {2}


def test_a_deadline_ends_a_sequence_that_waits_and_one_that_runs() -> None:
    now = [0.0]
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="f",
        settings=SchedulerSettings(slots=1, context_tokens=64),
        options={"vocabulary": VOCABULARY},
    )
    scheduler = Scheduler(Recorder(config), TABLE, frozenset(), config, clock=lambda: now[0])
    scheduler.add(request(1, [3, 4], 50, deadline_seconds=5.0))
    scheduler.add(request(2, [3, 4], 50, deadline_seconds=3.0))
    scheduler.step()
    now[0] = 4.0
    assert [(d.id, d.finish) for d in scheduler.step() if d.finish] == [(2, "deadline")]
    now[0] = 6.0
    assert [(d.id, d.finish) for d in scheduler.step() if d.finish] == [(1, "deadline")]
    assert not scheduler.busy


def test_the_context_is_the_limit_and_an_impossible_prompt_is_refused() -> None:
    scheduler, _ = make(context_tokens=64)
    scheduler.add(request(1, [3] * 60, 100))
    assert len(run(scheduler)[1]) == 4
    refused = scheduler.add(request(2, [3] * 64, 1))
    assert refused is not None and refused.finish == "refused" and "64 tokens" in str(refused.error)
    assert not scheduler.busy


class Grammar:
    """A state that is given up after a few tokens, as one of a grammar that hangs."""

    error: ServingError | None = None


@pytest.mark.parametrize(
    ("problem", "finish", "parameter"),
    [
        (Unsupported("the grammar needs too much", "grammar"), "refused", "grammar"),
        (ServingError("the draw was wrong"), "error", None),
    ],
)
def test_the_end_of_a_grammar_ends_its_own_sequence_and_no_other(
    problem: ServingError, finish: str, parameter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(backend: Recorder, rows: list[Row]) -> list[Sampled]:
        for row in rows:
            if isinstance(row.state, Grammar) and row.start >= 5:
                row.state.error = problem
            row.sampling = Sampling()
        return FakeBackend.step(backend, rows)

    monkeypatch.setattr(Recorder, "step", step)
    scheduler, _ = make()
    scheduler.add(request(1, [3, 4, 5], 20, sampling=Sampling(grammar="root ::= x")), Grammar())
    scheduler.add(request(2, [6, 7, 8], 20))
    out = run(scheduler)
    last = out[1][-1]
    assert (last.finish, last.error, last.parameter) == (finish, str(problem), parameter)
    assert len(out[1]) == 4
    assert text_of(out[2]) == expected_text([6, 7, 8], 20)


def test_logits_that_are_no_numbers_end_their_own_sequence_and_leave_no_kv() -> None:
    scheduler, backend = make(options={"fail_cause": "nan", "fail_token": 9})
    scheduler.add(request(1, list(range(10, 50)), 5))
    scheduler.add(request(2, [*range(10, 50), 9], 5))
    out = run(scheduler)
    assert text_of(out[1]) == expected_text(list(range(10, 50)), 5)
    assert out[2][-1].finish == "error" and "NaN" in str(out[2][-1].error)
    assert scheduler.stats().kv_used_tokens == 0
    scheduler.add(request(3, list(range(10, 50)), 1))
    run(scheduler)
    assert scheduler.busy is False
    with pytest.raises(EngineFailed, match="for any request"):
        for number in range(10, 20):
            scheduler.add(request(number, [9], 5))
            run(scheduler)


def test_a_conversation_does_not_fill_its_history_again() -> None:
    scheduler, backend = make()
    first = prompt_of(random.Random(1), 80)
    scheduler.add(request(1, first, 10))
    run(scheduler)
    second = first + continuation(first, 10, VOCABULARY) + [9, 8, 7]
    backend.steps.clear()
    scheduler.add(request(2, second, 5))
    deltas = run(scheduler)[2]
    assert (
        deltas[0].cached_tokens == 89
    )  # all but the last generated token, which was never written to the KV
    assert backend.steps[0] == [(0, 89, 4)]
    assert text_of(deltas) == expected_text(second, 5)


def computed_tokens_by_turn(
    users: int, slots: int, turns: int, retokenized: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Prompt tokens that each user's turns computed, of users who take turns after one system
    prompt of 120 tokens. What the model answered to `retokenized` users comes back changed."""
    rng = random.Random(7)
    system = prompt_of(rng, 120)
    histories = [system + prompt_of(rng, 20) for _ in range(users)]
    scheduler, _ = make(slots=slots, context_tokens=1024)
    computed = []
    for turn in range(turns):
        computed.append([])
        for user, history in enumerate(histories):
            number = turn * users + user
            scheduler.add(request(number, history, 16))
            deltas = run(scheduler)[number]
            cached = next(each.cached_tokens for each in deltas if each.cached_tokens is not None)
            computed[-1].append(len(history) - cached)
            answer = continuation(history, 16, VOCABULARY)
            if user in retokenized:
                answer = [token - 1 if token > 3 else token + 1 for token in answer]
            histories[user] = history + answer + prompt_of(rng, 10)
    return computed


def test_users_of_one_long_system_prompt_keep_their_histories_beside_empty_slots() -> None:
    computed = computed_tokens_by_turn(users=3, slots=16, turns=4)
    assert computed[0][1:] == [20, 20], "the system prompt is computed once"
    for turn in computed[1:]:
        # the new question, and the last token of the answer, whose KV was never computed
        assert turn == [11, 11, 11]


def test_a_history_that_never_comes_back_as_generated_pushes_no_other_out() -> None:
    computed = computed_tokens_by_turn(users=6, slots=8, turns=8, retokenized=frozenset({0}))
    for turn in computed[1:]:
        assert turn == [26, 11, 11, 11, 11, 11]


def test_a_pool_too_small_for_all_prompts_is_not_promised_twice() -> None:
    scheduler, _ = make(kv_tokens=300, prefill_tokens=16)
    for number in range(4):
        scheduler.add(request(number, [number + 3] * 140, 5))
    run(scheduler)
    assert scheduler.preemptions == 0
