"""A scheduler on the fake backend, whose tokens are a hash of all that a slot's KV holds: a wrong
schedule gives wrong tokens.
"""

import random
from typing import Any

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import Delta, GenerationRequest, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.sampling.step_inputs import Row, Sampled, Sampling
from tests.fake_backend import FakeBackend, continuation
from tests.tools.with_settings import engine_config

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
    config = engine_config(
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
