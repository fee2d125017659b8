"""Step times in a simulation: the law's own, or the law's times residuals that were measured.

    ReplayedSteps(law, residuals_of(observations, law), seed)

A residual is measured / law of one step. Step times are skewed, and a law of typical steps leaves
the stalls out; the replay puts them back as often as they were seen. Residuals are drawn in runs of
consecutive steps (moving-block bootstrap, Kuensch 1989), as slow steps come together. Steps of one
decode row and of several are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.simulation.step_time import StepLaw, StepObservation

DRAWN = 4096  # residuals of a kind, then from the start again
BLOCK = 4  # consecutive steps drawn together


class Residuals(msgspec.Struct, frozen=True):
    """Measured over law, by kind of step, in the order they were measured."""

    alone: tuple[float, ...] = ()  # one decode row
    together: tuple[float, ...] = ()  # several
    prompts: tuple[float, ...] = ()  # a step with prompt tokens

    @property
    def kinds(self) -> tuple[tuple[float, ...], ...]:
        """With prompts, alone, together; what was never measured is as its like, or as the law.

        Steps with prompts are few, too few to tell how often one stalls: they have the residuals of
        all steps. One stalled prompt among ten would be a stall in every tenth request.
        """
        every = self.prompts + self.alone + self.together
        return every or (1.0,), self.alone or every or (1.0,), self.together or every or (1.0,)


def residuals_of(observations: Iterable[StepObservation], law: StepLaw) -> Residuals:
    """Every step that was observed, over what the law says of it."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for one in observations:
        said = law.seconds(one.decode_rows, one.prefill_tokens, one.kv_tokens, one.passes)
        if said > 0:
            kind = kind_of(one.decode_rows, one.prefill_tokens)
            found[kind].extend(seconds / said for seconds in one.steps or (one.seconds,))
    prompts, alone, together = found
    return Residuals(tuple(alone), tuple(together), tuple(prompts))


def kind_of(decode_rows: float, prefill_tokens: float) -> int:
    """Index into Residuals.kinds."""
    if prefill_tokens > 0:
        return 0
    return 1 if decode_rows <= 1 else 2


class LawSteps:
    """Each step takes what the law says, seconds."""

    def __init__(self, law: StepLaw) -> None:
        self.law = law

    def step(self, rows: int, prompt_tokens: int, context: float, passes: int = 1) -> float:
        """Seconds of the next step."""
        return self.law.seconds(rows, prompt_tokens, context, passes)

    def stretch(self, rows: int, context: float, steps: int) -> float:
        """Seconds of the next `steps` steps that only decode."""
        return self.law.stretch_seconds(rows, context, steps)

    def most(self, rows: int, steps: int) -> int:
        """How many of `steps` can be asked for at once."""
        return steps

    def pass_by(self, rows: int, steps: int) -> None:
        """The stretch that was asked for has happened."""


class ReplayedSteps(LawSteps):
    """Each step takes what the law says, times a residual."""

    def __init__(self, law: StepLaw, residuals: Residuals, seed: int) -> None:
        super().__init__(law)
        rng = np.random.default_rng([seed, 0x5E])
        drawn = [_blocks(rng, kind) for kind in residuals.kinds]
        self._ratios: list[list[float]] = [each.tolist() for each in drawn]
        # Sums before each place, plain and weighted by the place: a stretch is two differences.
        self._sums: list[list[float]] = [_before(each) for each in drawn]
        self._moments: list[list[float]] = [_before(each * np.arange(DRAWN)) for each in drawn]
        self._at = [0] * len(drawn)

    def step(self, rows: int, prompt_tokens: int, context: float, passes: int = 1) -> float:
        kind = kind_of(rows, prompt_tokens)
        at = self._at[kind]
        self._at[kind] = (at + 1) % DRAWN
        return self.law.seconds(rows, prompt_tokens, context, passes) * self._ratios[kind][at]

    def stretch(self, rows: int, context: float, steps: int) -> float:
        kind = kind_of(rows, 0)
        sums, moments, at = self._sums[kind], self._moments[kind], self._at[kind]
        seconds = 0.0
        for count, first, growth in self.law.pieces(rows, context, steps):
            ratios = sums[at + count] - sums[at]
            seconds += first * ratios
            if growth:
                seconds += growth * (moments[at + count] - moments[at] - at * ratios)
            at += count
        return seconds

    def most(self, rows: int, steps: int) -> int:
        return min(steps, DRAWN - self._at[kind_of(rows, 0)])

    def pass_by(self, rows: int, steps: int) -> None:
        kind = kind_of(rows, 0)
        self._at[kind] = (self._at[kind] + steps) % DRAWN


def _blocks(rng: np.random.Generator, values: Sequence[float]) -> npt.NDArray[np.float64]:
    """DRAWN of the values, in runs of BLOCK consecutive ones."""
    starts = rng.integers(len(values), size=DRAWN // BLOCK)
    places = (starts[:, None] + np.arange(BLOCK)) % len(values)
    drawn: npt.NDArray[np.float64] = np.asarray(values, dtype=np.float64)[places.ravel()]
    return drawn


def _before(values: npt.NDArray[np.float64]) -> list[float]:
    sums: list[float] = np.concatenate([[0.0], np.cumsum(values)]).tolist()
    return sums
