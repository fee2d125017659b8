"""Steps of an engine, timed in the child that loads it, for measurements of engines.

found, waited_share = in_child(config, lambda backend: TimedSteps(backend).prompt(0, 64))
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from serving.backends.backend_interface import Backend, EngineConfig
from serving.backends.backend_table import backend_class
from serving.sampling.step_rows import Row

FIRST_TOKEN = 3  # ids below it are special
MOST_STEPS = 64  # of one kind

T = TypeVar("T")
Clock = Callable[[], float]


class TimedSteps:
    """Gives a loaded backend steps of random tokens; knows what each slot holds."""

    def __init__(self, backend: Backend, clock: Clock = time.perf_counter) -> None:
        self.info = backend.info
        self.held = [0] * backend.info.slots
        self._backend = backend
        self._clock = clock
        self._random = np.random.default_rng(1)

    def prompt(self, slot: int, count: int, start: int = 0) -> float:
        """Seconds of `count` prompt tokens behind the first `start` tokens of a slot."""
        self.held[slot] = start + count
        return self._took([Row(slot, self._tokens(count), start, True)])

    def decode(self, rows: int, wants_token: bool = True) -> float:
        """Seconds of a step with one token for each of the first `rows` slots.

        `wants_token` False: without logits, and nothing is drawn.
        """
        step = [Row(slot, self._tokens(1), self.held[slot], wants_token) for slot in range(rows)]
        for slot in range(rows):
            self.held[slot] += 1
        return self._took(step)

    def mixed(self, rows: int, prompts: int, tokens: int) -> float:
        """Seconds of a step that decodes the first `rows` slots and computes prompts in the last.

        Each prompt has `tokens` tokens and takes the place of all that its slot holds.
        """
        step = [Row(slot, self._tokens(1), self.held[slot], True) for slot in range(rows)]
        for slot in range(rows):
            self.held[slot] += 1
        for slot in range(len(self.held) - prompts, len(self.held)):
            step.append(Row(slot, self._tokens(tokens), 0, True))
            self.held[slot] = tokens
        return self._took(step)

    def share(self, tokens: int) -> None:
        """All slots with the first `tokens` tokens of slot 0."""
        for slot in range(len(self.held)):
            if slot:
                self._backend.copy(0, slot, tokens)
            self.held[slot] = tokens

    def quick(
        self, measure: Callable[[], float], seconds: float, least: int, most: int = MOST_STEPS
    ) -> float:
        """The lower quartile of as many measurements as `seconds` hold.

        Whatever else the machine does only makes a step longer.
        """
        until = self._clock() + seconds
        found: list[float] = []
        while len(found) < least or (self._clock() < until and len(found) < most):
            found.append(measure())
        return sorted(found)[len(found) // 4]

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(FIRST_TOKEN, self.info.vocabulary, count, np.int32)

    def _took(self, rows: list[Row]) -> float:
        began = self._clock()
        self._backend.step(rows)
        return max(self._clock() - began, 1e-9)


def in_child(config: EngineConfig, measure: Callable[[Backend], T]) -> tuple[T, float]:
    """What is measured on the loaded backend, and the share of the time that its threads waited.

    Of the thread that waited most for a core. Moves this process to the engine's cores.
    """
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    backend: Backend = backend_class(config.backend)(config, lambda what, fraction: None)
    began, waited = time.perf_counter(), _waited_seconds()
    try:
        found = measure(backend)
        more = max(seconds - waited.get(name, 0.0) for name, seconds in _waited_seconds().items())
        return found, round(more / (time.perf_counter() - began), 4)
    finally:
        backend.close()


def _waited_seconds() -> dict[str, float]:
    """Of each thread, how long it was runnable and had no core (man 5 proc, schedstat)."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found or {"": 0.0}
