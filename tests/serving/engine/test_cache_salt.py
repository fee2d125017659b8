"""Prefixes are reused only among requests with the same cache salt: in idle and running slots, from
checkpoints, and in the prompt cache. The tokens of the fake backend show what a slot's KV holds.
"""

import random
from typing import Any

import pytest

from crossover.serving.engine.prompt_cache import BLOCK_BYTES
from crossover.serving.engine.scheduler import Scheduler
from tests.serving.engine.schedules import expected_text, make, prompt_of, request, run, text_of

ANSWER_TOKENS = 5
PROMPT = prompt_of(random.Random(3), 120)
OTHER_PROMPTS = [prompt_of(random.Random(seed), 120) for seed in range(10, 14)]


class Tenants:
    """Tenants who ask one after the other."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler: Scheduler = make(**changes)[0]
        self.requests = 0

    def cached_tokens(self, salt: str, prompt: list[int] = PROMPT) -> int:
        """Ask a prompt, check the answer, and return how many of its tokens were reused."""
        self.requests += 1
        submit = request(self.requests, prompt, ANSWER_TOKENS, cache_salt=salt)
        assert self.scheduler.add(submit) is None
        deltas = run(self.scheduler)[self.requests]
        assert text_of(deltas) == expected_text(prompt, ANSWER_TOKENS)
        return next(each.cached_tokens for each in deltas if each.cached_tokens is not None)


@pytest.mark.parametrize("options", [{}, {"rewinds": False}], ids=["truncated", "checkpoints"])
def test_a_prompt_of_another_salt_is_computed_anew(options: dict[str, Any]) -> None:
    tenants = Tenants(options=options)
    assert tenants.cached_tokens("a") == 0
    reused = tenants.cached_tokens("a")
    assert reused > 100
    for salt in ("b", "", "aa"):
        assert tenants.cached_tokens(salt) == 0
    assert tenants.cached_tokens("a") == reused, "the first tenant's prefix is still there"
    assert tenants.cached_tokens("b") == reused


@pytest.mark.parametrize("salt", ["a", "b"])
def test_the_prefix_of_a_running_sequence_is_copied_only_within_its_salt(salt: str) -> None:
    scheduler, backend = make()
    scheduler.add(request(1, PROMPT, 60, cache_salt="a"))
    for _ in range(10):
        scheduler.step()
    scheduler.add(request(2, [*PROMPT, 7, 8, 9], ANSWER_TOKENS, cache_salt=salt))
    deltas = run(scheduler)
    assert text_of(deltas[2]) == expected_text([*PROMPT, 7, 8, 9], ANSWER_TOKENS)
    assert bool(backend.copies) == (salt == "a")


def test_the_prompt_cache_restores_only_within_a_salt() -> None:
    tenants = Tenants(
        slots=1,
        options={"token_bytes": BLOCK_BYTES},
        prompt_cache_bytes=2000 * BLOCK_BYTES,
    )
    tenants.cached_tokens("a")
    for prompt in OTHER_PROMPTS:  # they take the only slot
        tenants.cached_tokens("a", prompt)
    stats = tenants.scheduler.stats().prompt_cache
    assert stats is not None and stats.sequences == len(OTHER_PROMPTS)
    assert tenants.cached_tokens("b") == 0
    assert stats.restored_tokens == 0
    assert tenants.cached_tokens("a") > 100, "it was neither dropped nor taken by the other tenant"
    # The other tenant's sequence was stored beside it, though it has the same tokens.
    assert tenants.cached_tokens("b") > 100
