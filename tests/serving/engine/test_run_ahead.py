"""The scheduler on a backend that launches steps: the tokens of a step are read after the next one
was launched. The backend is the fake one, whose tokens are a hash of all that a slot's KV holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import Delta, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.errors import EngineFailed
from crossover.serving.sampling.step_inputs import NO_TOKEN, PLACEHOLDER, Row, Sampled, Sampling
from tests.serving.engine.schedules import (
    TABLE,
    VOCABULARY,
    Recorder,
    expected_text,
    prompt_of,
    request,
    run,
    text_of,
)
from tests.tools.with_settings import engine_config


class Step:
    """A launched step. It computes in its turn, as a device does, and its tokens are known to the
    next one at once, to the host when it asks."""

    def __init__(self, backend: Launching, drawn: list[Sampled], slots: list[int]) -> None:
        self._backend = backend
        self._drawn = drawn
        self.by_slot = {slot: one.token for slot, one in zip(slots, drawn, strict=True)}

    def tokens(self) -> list[Sampled | None]:
        self._backend.unread.remove(self)
        return [None if self._backend.is_no_good(one) else one for one in self._drawn]


class Launching(Recorder):
    """Launches steps of greedy and seeded rows. `no_good`: one in so many draws has to be made
    again by a step that is waited for."""

    def __init__(self, config: EngineConfig, no_good: int = 0) -> None:
        super().__init__(config)
        self.unread: WeakSet[Step] = WeakSet()  # and not forgotten
        self.most_unread = 0
        self.launched = 0
        self.again = 0
        self._no_good = no_good
        self._random = random.Random(5)

    def is_no_good(self, drawn: Sampled) -> bool:
        found = drawn.token == NO_TOKEN or (
            self._no_good > 0 and self._random.randrange(self._no_good) == 0
        )
        self.again += found
        return found

    def launch(self, rows: list[Row], after: Step | None) -> Step | None:
        wanting = [row for row in rows if row.wants_token]
        if any(
            row.banned or row.sampling.logprobs is not None or row.sampling.needs_logits_work
            for row in wanting
        ):
            return None
        assert list(self.unread) == ([] if after is None else [after])
        known = []
        for row in rows:
            if row.tokens[0] == PLACEHOLDER:
                assert after is not None and len(row.tokens) == 1
                row = replace(row, tokens=np.array([after.by_slot[row.slot]], np.int32))
            known.append(row)
        step = Step(self, super().step(known), [row.slot for row in wanting])
        self.unread.add(step)
        self.launched += 1
        self.most_unread = max(self.most_unread, len(self.unread))
        return step

    def step(self, rows: list[Row]) -> list[Sampled]:
        assert not self.unread, "a step that is waited for while another is under way"
        assert all(PLACEHOLDER not in row.tokens for row in rows)
        return super().step(rows)


def launching(
    no_good: int = 0, clock: Callable[[], float] | None = None, **changes: Any
) -> tuple[Scheduler, Launching]:
    options = {"vocabulary": VOCABULARY, **changes.pop("options", {})}
    settings: dict[str, Any] = {"slots": 4, "context_tokens": 256, **changes}
    config = engine_config("fake", "", "fake", options=options, **settings)
    backend = Launching(config, no_good)
    more = {} if clock is None else {"clock": clock}
    return Scheduler(backend, TABLE, frozenset({0}), config, **more), backend


def waiting(**changes: Any) -> Scheduler:
    """The same world without launched steps."""
    scheduler, backend = launching(**changes)
    backend.launch = lambda rows, after: None  # type: ignore[method-assign]
    return scheduler


def some_load(rng: random.Random) -> list[tuple[int, Submit]]:
    """Requests of many kinds, and how many steps after the one before each comes."""
    shared = prompt_of(rng, 60)
    found = []
    for number in range(30):
        prompt = shared[: rng.choice([0, 30, 60])] + prompt_of(rng, rng.randint(1, 90))
        sampling = rng.choice(
            [
                *[Sampling()] * 4,
                *[Sampling(temperature=1.0, seed=number)] * 4,
                Sampling(logprobs=2),
                Sampling(presence_penalty=0.5),
            ]
        )
        more: dict[str, Any] = {"sampling": sampling}
        if rng.random() < 0.2:
            more["min_tokens"] = rng.randint(1, 9)
        if rng.random() < 0.3:
            more["stop"] = [f"t{rng.randrange(VOCABULARY)}"]
        if rng.random() < 0.2:
            more["ignore_eos"] = True
        gap = rng.choice([0, 0, 1, 3, 9])
        found.append((gap, request(number, prompt, rng.randint(1, 60), **more)))
    return found


def served(scheduler: Scheduler, load: list[tuple[int, Submit]]) -> dict[int, list[Delta]]:
    out: dict[int, list[Delta]] = {}
    for gap, submit in load:
        for delta in [delta for _ in range(gap) for delta in scheduler.step()]:
            out.setdefault(delta.id, []).append(delta)
        assert scheduler.add(submit) is None
    for number, deltas in run(scheduler).items():
        out.setdefault(number, []).extend(deltas)
    return out


def answer(deltas: list[Delta]) -> tuple[Any, ...]:
    details = [(one.token, one.logprob) for delta in deltas for one in delta.details]
    return (
        *(text_of(deltas), deltas[-1].finish, sum(delta.tokens for delta in deltas)),
        *(deltas[-1].error, details),
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"no_good": 7}, {"kv_tokens": 300, "no_good": 9}, {"prefill_tokens": 7}, {"slots": 1}],
    ids=["plain", "no good", "small pool", "small pieces", "one slot"],
)
def test_answers_are_those_of_steps_that_are_waited_for(changes: dict[str, Any], seed: int) -> None:
    """Greedy and seeded requests, log-probabilities, penalties, stop strings and end tokens,
    joining and leaving.
    """
    changes = {"options": {"eos_every": 40}} | changes
    load = some_load(random.Random(seed))
    scheduler, backend = launching(**changes)
    out = served(scheduler, load)
    expected = served(waiting(**changes), load)
    assert {number: answer(deltas) for number, deltas in out.items()} == {
        number: answer(deltas) for number, deltas in expected.items()
    }
    assert backend.launched > 10 and backend.most_unread == 2
    assert not backend.unread and not scheduler.running
    if "no_good" in changes:
        assert backend.again > 0
    if "kv_tokens" in changes:
        assert scheduler.preemptions > 0


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    scheduler, backend = launching()
    prompt = [3, 4, 5]
    scheduler.add(request(1, prompt, 6))
    found = []
    for _ in range(6):
        found += scheduler.step()
        assert len(backend.unread) == (len(found) < 6)
    assert text_of(found) == expected_text(prompt, 6) and found[-1].finish == "length"
    assert backend.launched == 6, "the limit is known beforehand: nothing is computed for nobody"
    assert not scheduler.busy


@pytest.mark.parametrize("by", ["cancel", "deadline"])
def test_a_sequence_that_is_ended_leaves_its_step_unread(by: str) -> None:
    now = [0.0]
    scheduler, _ = launching(slots=1, clock=lambda: now[0])
    scheduler.add(request(1, [3] * 20, 100, deadline_seconds=5.0))
    scheduler.add(request(2, [4] * 20, 3))
    for _ in range(4):
        scheduler.step()
    if by == "cancel":
        scheduler.cancel(1)
    now[0] = 6.0 if by == "deadline" else 1.0
    deltas = scheduler.step()
    assert [(delta.id, delta.tokens, delta.finish) for delta in deltas] == [
        (1, 0, {"cancel": "cancelled", "deadline": "deadline"}[by])
    ]
    assert text_of(run(scheduler)[2]) == expected_text([4] * 20, 3)


def test_tokens_that_are_never_any_good_are_waited_for() -> None:
    """Each would take three steps: of top-p over a flat distribution, say."""
    scheduler, backend = launching(no_good=1)
    scheduler.add(request(1, [3, 4, 5], 60))
    assert text_of(run(scheduler)[1]) == expected_text([3, 4, 5], 60)
    assert len(backend.steps) < 80


def test_a_failure_of_a_launched_step_ends_the_engine() -> None:
    scheduler, _ = launching(options={"fail_cause": "engine_died", "fail_after_steps": 5})
    scheduler.add(request(1, [3, 4, 5], 20))
    with pytest.raises(EngineFailed):
        run(scheduler)
