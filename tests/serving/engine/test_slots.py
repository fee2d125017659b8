"""Who gets a slot, and the KV that is found in it."""

import random

import pytest

from serving.engine.slot_allocator import common_prefix
from tests.fake_backend import continuation
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
