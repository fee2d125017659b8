"""The scheduler on the fake backend, whose tokens are a hash of all that a slot's KV holds: a wrong
schedule gives wrong tokens.
"""

import random
from typing import Any

import pytest

from serving.backends.base import EngineConfig
from serving.backends.fake import FakeBackend, continuation
from serving.engine import scheduler as module
from serving.engine.messages import Delta, GenerationRequest, Origin, Submit
from serving.engine.scheduler import Scheduler
from serving.engine.slot_pool import common_prefix
from serving.errors import EngineFailed, ServingError, Unsupported
from serving.sampling.types import Row, Sampled, Sampling
from serving.supervisor.stream import merged

VOCABULARY = 500
TABLE = [f" t{i}".encode() for i in range(VOCABULARY)]


def no_progress(what: str, fraction: float | None) -> None:
    pass


class Recorder(FakeBackend):
    """The fake backend, and what it was asked to do."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, no_progress)
        self.steps: list[list[tuple[int, int, int]]] = []  # (slot, start, count)
        self.copies: list[tuple[int, int, int]] = []

    def step(self, rows: list[Row]) -> list[Sampled]:
        out = super().step(rows)
        self.steps.append([(row.slot, row.start, len(row.tokens)) for row in rows])
        return out

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.copies.append((source, target, tokens))
        super().copy(source, target, tokens)


def make(**changes: Any) -> tuple[Scheduler, Recorder]:
    options = {"vocabulary": VOCABULARY, **changes.pop("options", {})}
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="fake",
        options=options,
        **{"slots": 4, "context_tokens": 256, **changes},
    )
    backend = Recorder(config)
    return Scheduler(backend, TABLE, frozenset({0}), config), backend


def request(number: int, prompt: list[int], count: int, **more: Any) -> Submit:
    return Submit(
        number, GenerationRequest(prompt, count, more.pop("sampling", Sampling()), **more)
    )


def run(scheduler: Scheduler, limit: int = 10_000) -> dict[int, list[Delta]]:
    out: dict[int, list[Delta]] = {}
    for _ in range(limit):
        if not scheduler.busy:
            return out
        for delta in scheduler.step():
            out.setdefault(delta.id, []).append(delta)
    raise AssertionError(f"still busy after {limit} steps")


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def expected_text(prompt: list[int], count: int) -> str:
    return b"".join(TABLE[token] for token in continuation(prompt, count, VOCABULARY)).decode()


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_tokens": 300}, {"prefill_tokens": 7}, {"prefix_reuse": False}, {"slots": 1}],
)
def test_tokens_are_right_under_churn(changes: dict[str, Any]) -> None:
    """32 sequences with shared prefixes joining while others leave: each gets what it would have
    got alone.
    """
    rng = random.Random(3)
    scheduler, backend = make(**changes)
    shared = prompt_of(rng, 60)
    asked = {}
    out: dict[int, list[Delta]] = {}
    for number in range(32):
        prompt = shared[: rng.choice([0, 30, 60])] + prompt_of(rng, rng.randint(1, 90))
        asked[number] = (prompt, rng.randint(1, 50))
        assert scheduler.add(request(number, prompt, asked[number][1])) is None
        for _ in range(rng.randint(0, 6)):
            for delta in scheduler.step():
                out.setdefault(delta.id, []).append(delta)
    for number, deltas in run(scheduler).items():
        out.setdefault(number, []).extend(deltas)
    for number, (prompt, count) in asked.items():
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


def test_decoders_run_in_every_step_while_a_long_prompt_is_filled_in_pieces() -> None:
    scheduler, backend = make(prefill_tokens=32)
    scheduler.add(request(1, [5] * 10, 40))
    scheduler.step()
    scheduler.add(request(2, [7] * 200, 4))
    backend.steps.clear()
    for _ in range(7):
        scheduler.step()
    assert all(any(slot == 0 and count == 1 for slot, _, count in step) for step in backend.steps)
    pieces = [count for step in backend.steps for slot, _, count in step if slot == 1 and count > 1]
    assert sum(pieces) == 200
    assert max(pieces) <= 32


@pytest.mark.parametrize("prefill_tokens", [19, 40, 63])
def test_prompts_are_cut_at_whole_blocks_and_no_crumbs_of_a_second_one_are_taken(
    prefill_tokens: int,
) -> None:
    """Matrix kernels take 16 tokens at a time: what is left of a budget of 19 is not worth a pass
    for another prompt.
    """
    scheduler, backend = make(prefill_tokens=prefill_tokens)
    scheduler.add(request(1, [5] * 10, 60))
    scheduler.step()
    prompts = {1: 150, 2: 131, 3: 9}  # by slot
    for slot, length in prompts.items():
        scheduler.add(request(slot + 1, [slot + 6] * length, 4))
    run(scheduler)
    for slot, length in prompts.items():
        pieces = [
            (start, count)
            for step in backend.steps
            for s, start, count in step
            if s == slot and start < length
        ]
        assert sum(count for _, count in pieces) == length
        assert all(count % 16 == 0 for start, count in pieces if start + count < length), pieces


def test_prefill_tokens_is_the_bound_however_little_it_is() -> None:
    scheduler, backend = make(prefill_tokens=5)
    scheduler.add(request(1, [5] * 40, 60))
    scheduler.step()
    scheduler.add(request(2, [7] * 100, 4))
    run(scheduler)
    pieces = [count for step in backend.steps for slot, _, count in step if slot == 1 and count > 1]
    assert set(pieces) == {5}, pieces


@pytest.mark.clock
def test_the_budget_shrinks_until_a_mixed_step_fits_its_target() -> None:
    scheduler, backend = make(
        step_seconds_target=0.02, options={"prompt_token_seconds": 0.0005, "step_seconds": 0.001}
    )
    scheduler.add(request(1, [5] * 40, 100))
    scheduler.step()
    scheduler.add(request(2, [7] * 200, 4))
    for _ in range(7):
        scheduler.step()
    pieces = [
        count for step in backend.steps[1:] for slot, _, count in step if slot == 1 and count > 1
    ]
    assert sum(pieces) == 200
    assert all(16 <= piece <= 48 for piece in pieces[:-1]), pieces


class Timed(Recorder):
    """A backend whose rows get cheaper in company, by a clock of its own; `says`: whether it tells
    what the decoding rows took.
    """

    PROMPT_TOKEN = 0.003

    def __init__(self, config: EngineConfig, says: bool) -> None:
        super().__init__(config)
        self.now, self.says = 0.0, says
        self.last_decode_seconds: float | None = None

    @staticmethod
    def decode_seconds(rows: int) -> float:
        blocks, ones = divmod(rows, 4)
        return 0.026 * blocks + 0.011 * ones

    def step(self, rows: list[Row]) -> list[Sampled]:
        decode = self.decode_seconds(sum(len(row.tokens) == 1 for row in rows))
        self.now += decode + self.PROMPT_TOKEN * sum(
            len(row.tokens) for row in rows if len(row.tokens) > 1
        )
        self.last_decode_seconds = decode if self.says else None
        return super().step(rows)


@pytest.mark.parametrize(("says", "over"), [(True, 1.1), (False, 1.6)])
def test_while_prompts_keep_coming_a_step_takes_what_the_rule_gives_it(
    says: bool, over: float
) -> None:
    """From the first sequence to the sixteenth, with no step of decoding alone in between to learn
    from.
    """
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="fake",
        options={"vocabulary": VOCABULARY},
        slots=16,
        context_tokens=512,
    )
    backend = Timed(config, says)
    scheduler = Scheduler(backend, TABLE, frozenset({0}), config, clock=lambda: backend.now)
    for number in range(16):
        scheduler.add(request(number, list(range(number, number + 260)), 200, ignore_eos=True))
    mixed = 0
    while scheduler.busy and len(scheduler.running) + len(scheduler.waiting) == 16:
        before = backend.now
        scheduler.step()
        decoding = sum(count == 1 for _, _, count in backend.steps[-1])
        filled = sum(count for _, _, count in backend.steps[-1] if count > 1)
        if not decoding or not filled:
            continue
        mixed += 1
        decode = backend.decode_seconds(decoding)
        cheapest = backend.decode_seconds(4) / 4
        allowed = max(0.3, decode * 4.75, decode + 120 * (decode / decoding - cheapest))
        assert backend.now - before <= allowed * over + 0.03, (decoding, filled)
    assert mixed > 30


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


def test_reasoning_is_counted_up_to_the_first_token_that_ends_it() -> None:
    prompt = [5, 6, 7]
    drawn = continuation(prompt, 6, VOCABULARY)
    scheduler, _ = make()
    scheduler.add(request(1, prompt, 6, thought_end=drawn[3]))
    counts = [delta.reasoning_tokens for delta in run(scheduler)[1]]
    assert counts == [None, None, None, 4, None, None]


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
        slots=1,
        context_tokens=64,
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


def test_what_the_backend_cannot_do_is_refused_and_harms_nobody() -> None:
    scheduler, _ = make()
    refused = scheduler.add(request(1, [3, 4], 5, sampling=Sampling(grammar="root ::= x")))
    assert refused is not None and refused.finish == "refused" and "grammar" in str(refused.error)
    assert scheduler.add(request(2, [3, 4], 5)) is None
    assert len(run(scheduler)[2]) == 5


class Grammar:
    """A state that is given up after a few tokens, as serving.sampling.grammar does with a grammar
    that hangs.
    """

    def __init__(self) -> None:
        self.error: ServingError | None = None


class GivesUp(Recorder):
    problem: ServingError

    def step(self, rows: list[Row]) -> list[Sampled]:
        for row in rows:
            if isinstance(row.state, Grammar) and row.start >= 5:
                row.state.error = self.problem
        for row in rows:
            row.sampling = Sampling()
        return super().step(rows)


@pytest.mark.parametrize(
    ("problem", "finish", "parameter"),
    [
        (Unsupported("the grammar needs too much", "grammar"), "refused", "grammar"),
        (ServingError("the draw was wrong"), "error", None),
    ],
)
def test_the_end_of_a_grammar_ends_its_own_sequence_and_no_other(
    problem: ServingError, finish: str, parameter: str | None
) -> None:
    config = EngineConfig(
        "fake", "", "fake", slots=4, context_tokens=256, options={"vocabulary": VOCABULARY}
    )
    backend = GivesUp(config)
    backend.problem = problem
    scheduler = Scheduler(backend, TABLE, frozenset({0}), config)
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
    with pytest.raises(EngineFailed, match="whatever it is asked"):
        for number in range(10, 20):
            scheduler.add(request(number, [9], 5))
            run(scheduler)


def test_the_scores_of_a_long_prompt_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 4)
    scheduler, _ = make()
    prompt = list(range(10, 21))
    scheduler.add(request(1, prompt, 2, sampling=Sampling(logprobs=0, prompt_logprobs=0)))
    deltas = run(scheduler)[1]
    pieces = [[one.token for one in delta.prompt_details or []] for delta in deltas]
    assert pieces == [prompt[1:5], prompt[5:9], prompt[9:], []]
    assert [delta.tokens for delta in deltas] == [0, 0, 1, 1]
    whole = merged(deltas)
    assert [one.token for one in whole.prompt_details or []] == prompt[1:]


def begun(scheduler: Scheduler) -> list[int]:
    """The sequences in the order in which they begin."""
    order: list[int] = []
    while scheduler.busy:
        for sequence in sorted(scheduler.running.values(), key=lambda s: s.serial):
            if sequence.id not in order:
                order.append(sequence.id)
        scheduler.step()
    return order


def test_slots_go_round_by_owner_share_and_request() -> None:
    scheduler, _ = make(slots=4)
    flood, small = Origin("a", 0.75, 1), Origin("a", 0.75, 2)
    for number in range(10):
        scheduler.add(request(number, [3, 4], 4 + number, origin=flood))
    scheduler.step()
    assert [s.id for s in scheduler.running.values()] == [0, 1, 2, 3]
    for number in range(20, 23):
        scheduler.add(request(number, [3, 4], 4, origin=small))
    for number in range(30, 33):
        scheduler.add(request(number, [3, 4], 40, origin=Origin("b", 0.25, number)))
    # As the first four end: b gets its quarter, one slot; within a, the smaller request catches up.
    assert begun(scheduler)[4:] == [30, 20, 4, 5, 21, 22, 6, 7, 8, 9, 31, 32]


def test_one_request_of_many_answers_shares_with_single_ones() -> None:
    scheduler, _ = make(slots=2)
    for number in range(6):
        scheduler.add(request(number, [3, 4], 4, origin=Origin(request=7)))
    scheduler.step()
    for number in range(10, 13):
        scheduler.add(request(number, [3, 4], 4))
    assert begun(scheduler)[2:] == [2, 10, 3, 11, 4, 12, 5]


def test_prefixes_are_reused_by_their_own_cache_only() -> None:
    scheduler, _ = make()
    prompt = list(range(10, 60))
    cached = []
    for number, cache in enumerate(["x", "y", "x", ""]):
        scheduler.add(request(number, prompt, 1, origin=Origin(cache=cache)))
        (delta,) = run(scheduler)[number]
        cached.append(delta.cached_tokens)
    assert cached == [0, 0, 49, 0]


def test_a_pool_too_small_for_all_prompts_is_not_promised_twice() -> None:
    scheduler, _ = make(kv_tokens=300, prefill_tokens=16)
    for number in range(4):
        scheduler.add(request(number, [number + 3] * 140, 5))
    run(scheduler)
    assert scheduler.preemptions == 0


def test_a_pool_smaller_than_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context_tokens = 256"):
        make(kv_tokens=100)


def test_common_prefix() -> None:
    import numpy as np

    a = np.array([1, 2, 3, 4], np.int32)
    assert common_prefix(a, a[:2]) == 2
    assert common_prefix(a, np.array([1, 2, 9], np.int32)) == 2
    assert common_prefix(a, np.array([9], np.int32)) == 0
    assert common_prefix(a, a[:0]) == 0
