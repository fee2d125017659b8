"""Who gets a slot, and the KV that is found in it."""

import random

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
