"""Who gets a slot, and the KV that is found in it."""

import random

import pytest

from serving.backends.fake import continuation
from serving.engine.messages import Origin
from serving.engine.scheduler import Scheduler
from serving.engine.slot_pool import common_prefix
from tests.serving.engine.schedules import (
    VOCABULARY,
    expected_text,
    make,
    prompt_of,
    request,
    run,
    text_of,
)


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
