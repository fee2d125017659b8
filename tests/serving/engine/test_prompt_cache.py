"""The prompt cache on the fake backend, whose tokens are a hash of all that a slot's KV holds: KV
that was stored or restored wrongly gives wrong tokens.
"""

import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from crossover.serving.capacity.choose_slot import PROMPT_TAIL
from crossover.serving.capacity.stored_sequences import StoredSequences
from crossover.serving.engine.ipc_messages import Delta, PromptCacheStats
from crossover.serving.engine.prompt_cache import BLOCK_BYTES
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.errors import EngineFailed
from crossover.serving.hardware.machine_facts import resident_bytes
from tests.fake_backend import continuation
from tests.serving.engine.schedules import (
    VOCABULARY,
    Recorder,
    expected_text,
    make,
    prompt_of,
    request,
    run,
    text_of,
)

ANSWER_TOKENS = 12
RECURRENT = {"rewinds": False}  # as with a recurrent state


def make_cached(stored_tokens: int, **changes: Any) -> tuple[Scheduler, Recorder]:
    """A scheduler whose prompt cache has a block for each of so many tokens."""
    options = {"token_bytes": BLOCK_BYTES, **changes.pop("options", {})}
    context_tokens = changes.pop("context_tokens", 512)
    size = (stored_tokens + context_tokens) * BLOCK_BYTES
    changes |= {"context_tokens": context_tokens, "prompt_cache_bytes": size}
    return make(options=options, **changes)


def stats_of(scheduler: Scheduler) -> PromptCacheStats:
    stats = scheduler.stats().prompt_cache
    assert stats is not None
    return stats


class Chats:
    """Users who take turns on a scheduler, each with a history of its own after one beginning that
    all share."""

    def __init__(self, scheduler: Scheduler, users: int, shared_tokens: int = 30) -> None:
        self.rng = random.Random(11)
        self.scheduler = scheduler
        shared = prompt_of(self.rng, shared_tokens)
        self.histories = [shared + prompt_of(self.rng, 90) for _ in range(users)]
        self.turns = 0

    def ask(self, user: int) -> int:
        """Queue the next turn of a user and return its number."""
        self.turns += 1
        assert self.scheduler.add(request(self.turns, self.histories[user], ANSWER_TOKENS)) is None
        return self.turns

    def read(self, user: int, deltas: list[Delta], sent_back: int = ANSWER_TOKENS) -> int:
        """Check an answer, add its first `sent_back` tokens and the next question to the history,
        and return how many tokens of the prompt were computed."""
        history = self.histories[user]
        assert text_of(deltas) == expected_text(history, ANSWER_TOKENS)
        cached = next(each.cached_tokens for each in deltas if each.cached_tokens is not None)
        answer = continuation(history, ANSWER_TOKENS, VOCABULARY)
        self.histories[user] = history + answer[:sent_back] + prompt_of(self.rng, 9)
        return len(history) - cached

    def turn(self, user: int, sent_back: int = ANSWER_TOKENS) -> int:
        """Play the next turn of a user; return how many tokens of its prompt were computed."""
        number = self.ask(user)
        return self.read(user, run(self.scheduler)[number], sent_back)


@pytest.mark.parametrize("options", [{}, RECURRENT], ids=["truncated", "checkpoints"])
def test_histories_beyond_the_slots_are_restored(options: dict[str, Any]) -> None:
    scheduler, _ = make_cached(2000, slots=2, options=options)
    chats = Chats(scheduler, users=6)
    for user in range(6):
        chats.turn(user)
    for _ in range(3):
        # the new question, and the last token of the answer, whose KV was never computed
        assert [chats.turn(user) for user in range(6)] == [10] * 6
    stats = stats_of(scheduler)
    assert stats.restored_tokens > 0 and stats.copy_seconds > 0
    assert stats.sequences == 4, "those of the other two users are in their slots"
    assert stats.used_bytes <= stats.max_bytes


def test_a_history_that_is_not_continued_whole_is_restored_from_its_checkpoint() -> None:
    """As where a chat template leaves thoughts out of the next prompt."""
    scheduler, _ = make_cached(2000, slots=2, options=RECURRENT)
    chats = Chats(scheduler, users=6)
    for user in range(6):
        chats.turn(user, sent_back=0)
    for _ in range(3):
        # what follows the checkpoint, and the new question
        assert [chats.turn(user, sent_back=0) for user in range(6)] == [PROMPT_TAIL + 9] * 6


def test_a_checkpoint_of_a_shared_beginning_serves_with_the_kv_of_a_stored_history() -> None:
    rng = random.Random(8)
    scheduler, _ = make_cached(2000, slots=2, options=RECURRENT)
    shared = prompt_of(rng, 100)
    prompts = [[*shared, *prompt_of(rng, 30)] for _ in range(3)]
    others = [prompt_of(rng, 20) for _ in range(2)]  # they take both slots
    found = []
    for number, prompt in enumerate([*prompts[:2], *others, prompts[2]]):
        scheduler.add(request(number, prompt, ANSWER_TOKENS))
        deltas = run(scheduler)[number]
        assert text_of(deltas) == expected_text(prompt, ANSWER_TOKENS)
        found += [each.cached_tokens for each in deltas if each.cached_tokens is not None]
    assert found == [0, 0, 0, 0, 100]


def test_states_and_checkpoints_count_as_memory_of_stored_sequences() -> None:
    options = {**RECURRENT, "saved_bytes": 40 * BLOCK_BYTES}
    scheduler, _ = make_cached(1080, slots=1, options=options)
    assert scheduler.settings.stored_tokens == 1000, "the other 80 are for copies of a context"
    assert scheduler.settings.stored_sequence_tokens == 80
    chats = Chats(scheduler, users=8)
    for user in range(8):
        chats.turn(user)
    stats = stats_of(scheduler)
    assert stats.sequences == 1000 // (131 + 80)
    assert stats.used_bytes == stats.sequences * (131 + 80) * BLOCK_BYTES
    assert stats.dropped_tokens == 131 * (7 - stats.sequences)


def test_without_a_prompt_cache_more_users_than_slots_compute_their_histories() -> None:
    scheduler, _ = make(slots=2)
    chats = Chats(scheduler, users=6)
    for user in range(6):
        chats.turn(user)
    computed = [chats.turn(user) for user in range(6)]
    assert computed[0] == 10, "no other conversation took its slot"
    assert min(computed[1:]) > 100
    assert scheduler.stats().prompt_cache is None


def test_the_sequences_used_least_recently_are_dropped() -> None:
    scheduler, _ = make_cached(450, slots=1)  # three histories of 131 tokens
    chats = Chats(scheduler, users=5)
    for user in range(5):
        chats.turn(user)
    assert stats_of(scheduler).dropped_tokens == 131, "the first of four"
    assert [chats.turn(user) for user in (3, 2, 4)] == [10, 10, 10]
    assert chats.turn(0) > 100
    assert stats_of(scheduler).used_bytes <= 450 * BLOCK_BYTES


def test_a_prefix_that_conversations_share_stays_stored() -> None:
    scheduler, _ = make_cached(2000, slots=1)
    chats = Chats(scheduler, users=3, shared_tokens=100)
    chats.turn(0)
    chats.turn(1)
    # The only slot is another one's, so the shared tokens come from the store or the slot.
    assert chats.turn(2) <= 90
    assert [chats.turn(user) for user in range(3)] == [10, 10, 10]


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 4},
        {"slots": 4, "kv_tokens": 512},
        {"slots": 1},
        {"slots": 3, "stored_tokens": 400},
        {"slots": 3, "prefill_tokens": 7},
        {"slots": 4, "options": RECURRENT},
        {"slots": 4, "kv_tokens": 512, "options": RECURRENT},
        {"slots": 1, "options": RECURRENT},
        {"slots": 3, "stored_tokens": 400, "options": RECURRENT},
        {"slots": 3, "stored_tokens": 900, "options": {**RECURRENT, "saved_bytes": 1 << 21}},
    ],
)
def test_tokens_are_right_under_churn_of_conversations(changes: dict[str, Any]) -> None:
    """Turns of 9 users that overlap, of which some are cancelled: each answer is what it would be
    without any other."""
    scheduler, _ = make_cached(**{"stored_tokens": 700, **changes})
    chats = Chats(scheduler, users=9)
    rng = random.Random(2)
    user_of: dict[int, int] = {}
    out: dict[int, list[Delta]] = {}
    for _ in range(120):
        idle = sorted(set(range(9)) - set(user_of.values()))
        if idle and rng.random() < 0.7:
            user = rng.choice(idle)
            if len(chats.histories[user]) < 350:
                user_of[chats.ask(user)] = user
        if user_of and rng.random() < 0.1:
            scheduler.cancel(rng.choice(sorted(user_of)))
        for _ in range(rng.randint(1, 12)):
            for delta in scheduler.step() if scheduler.busy else ():
                out.setdefault(delta.id, []).append(delta)
                if delta.finish == "length":
                    chats.read(user_of.pop(delta.id), out[delta.id])
                elif delta.finish is not None:
                    assert delta.finish == "cancelled"
                    del user_of[delta.id]
    stats = stats_of(scheduler)
    assert stats.restored_tokens > 0 and stats.stored_tokens > 0
    assert stats.dropped_tokens > 0 or "stored_tokens" not in changes


def bytes_after_much_churn() -> int:
    """Return by how much a new process grows."""
    before = resident_bytes()
    scheduler, _ = make_cached(3500, slots=2)
    chats = Chats(scheduler, users=30)
    for _ in range(16):
        for user in range(30):
            chats.turn(user)
    assert stats_of(scheduler).dropped_tokens > 20 * 3500, "all of it was overwritten many times"
    after = resident_bytes()
    assert before is not None and after is not None
    return after - before


def test_memory_after_much_churn_is_what_was_requested() -> None:
    # In a process of its own, since this one may have memory that earlier tests no longer use.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        grown_bytes = process.submit(bytes_after_much_churn).result()
    assert grown_bytes == pytest.approx((3500 + 512) * BLOCK_BYTES, rel=0.05)


def test_a_preempted_sequence_goes_on_from_what_it_computed() -> None:
    scheduler, backend = make_cached(1000, slots=2, kv_tokens=256, context_tokens=256)
    rng = random.Random(4)
    prompts = [prompt_of(rng, 110), prompt_of(rng, 110)]
    for number, prompt in enumerate(prompts):
        scheduler.add(request(number, prompt, 60))
    out = run(scheduler)
    for number, prompt in enumerate(prompts):
        assert text_of(out[number]) == expected_text(prompt, 60)
    assert scheduler.preemptions == 1
    computed = sum(count for step in backend.steps for _, _, count in step)
    # Both prompts and answers once, and at most a few tokens of the preempted one again.
    assert computed <= 2 * (110 + 59) + 3


@pytest.mark.parametrize("method", ["export", "load"])
def test_a_copy_that_fails_fails_no_request(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineFailed("the copy fails")

    scheduler, _ = make_cached(2000, slots=2)
    monkeypatch.setattr(Recorder, method, fail)
    chats = Chats(scheduler, users=5)
    for _ in range(3):
        for user in range(5):
            assert chats.turn(user) >= 10  # `turn` checks the answer
    assert stats_of(scheduler).restored_tokens == 0


def test_a_sequence_with_broken_logits_is_not_stored() -> None:
    scheduler, _ = make_cached(2000, slots=1, options={"fail_cause": "nan", "fail_token": 9})
    broken = [*range(10, 110), 9]
    scheduler.add(request(1, broken, 5))
    assert run(scheduler)[1][-1].finish == "error"
    scheduler.add(request(2, [3] * 80, 5))
    run(scheduler)
    assert stats_of(scheduler).stored_tokens == 0


def test_a_cache_without_room_for_a_context_is_off() -> None:
    scheduler, _ = make_cached(0, slots=2)
    assert scheduler.stats().prompt_cache is None
    assert scheduler.settings.stored_tokens == 0
    scheduler, _ = make_cached(300, slots=2)
    assert scheduler.settings.stored_tokens == 300


def test_memory_is_made_ready_in_idle_time_or_when_it_is_needed() -> None:
    scheduler, _ = make_cached(2000, slots=1)
    assert scheduler.settings.stored_tokens == 2000, "all of it counts from the start"
    index = scheduler._slots.prompt_cache._index  # type: ignore[union-attr]
    start_tokens = index.capacity
    assert start_tokens < 2000
    assert scheduler.prepare_memory() and start_tokens < index.capacity < 2000
    chats = Chats(scheduler, users=6)
    for user in [*range(6)] * 2:
        chats.turn(user)
    assert stats_of(scheduler).dropped_tokens == 0, "more was made ready instead"
    while scheduler.prepare_memory():
        pass
    assert index.capacity == 2000
    assert [chats.turn(user) for user in range(6)] == [10] * 6


def test_an_engine_without_memory_for_its_prompt_cache_serves_without_one() -> None:
    scheduler, _ = make(slots=1, prompt_cache_bytes=1 << 60)
    chats = Chats(scheduler, users=2)
    for user in (0, 1):
        chats.turn(user)
    assert min(chats.turn(user) for user in (0, 1)) > 90, "both compute their histories again"
    assert scheduler.stats().prompt_cache is None
    assert scheduler.settings.stored_tokens == 0
    assert not scheduler.prepare_memory()


def test_an_index_drops_what_was_used_least_recently_and_never_the_pinned_one() -> None:
    index = StoredSequences[str](10)
    assert index.add("a", 4) == [] and index.add("b", 4) == []
    index.use("a")
    assert index.add("c", 4) == ["b"]
    assert index.add("d", 4, pinned="a") == ["c"]
    assert index.add("e", 7, pinned="a") is None, "it does not fit beside the pinned one"
    assert sorted(index) == ["a", "d"] and index.used == 8
    assert index.add("f", 10) == ["a", "d"]
    assert index.add("g", 11) is None and list(index) == ["f"]
