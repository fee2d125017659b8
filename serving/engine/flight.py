"""A step on its way: the rows that the backend was given, whose they are, and what they draw."""

from __future__ import annotations

from dataclasses import dataclass

from serving.backends.base import Launched
from serving.engine.sequence import Sequence
from serving.sampling.types import Row, Sampled


@dataclass(slots=True)
class Flight:
    """`launched`: the step may still be under way, else `sampled` is what it drew."""

    rows: list[Row]
    sequences: list[Sequence]  # of the rows
    prompt_tokens: int
    began: float  # by the scheduler's clock
    seconds: float  # so far, in the backend
    launched: Launched | None
    sampled: list[Sampled]

    @property
    def decoding(self) -> int:
        """Tokens that are no piece of a prompt."""
        return sum(len(row.tokens) for row in self.rows) - self.prompt_tokens
