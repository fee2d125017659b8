"""Whose prompt is computed next: the prompt tokens of a step go round by owner and share.

    turns = PromptTurns()
    turns.begin(filling)                    # each step
    sequence = turns.next(left)             # of those that have no row in this step yet
    turns.planned(sequence, 512)
    turns.gave(sequence, 512)               # once the backend has the step

Weighted fair queueing: each owner has a clock of the tokens that it was given, over its share; who
is furthest behind goes next, on a tie who was given nothing yet, there the oldest sequence. Who
comes begins at the common clock, which runs at the mean of all: nobody catches up on a time without
prompts, and no number of newcomers holds up an older one for ever.
"""

from __future__ import annotations

from collections.abc import Collection

from serving.engine.sequence import Sequence


class PromptTurns:
    """See the module's docstring. Only owners with a prompt under way are remembered."""

    def __init__(self) -> None:
        self._now = 0.0  # the common clock: tokens over the sum of the shares
        self._shares = 1.0  # the sum
        self._clocks: dict[str, tuple[float, bool]] = {}  # by owner; True: was given some
        self._planned = self._clocks.copy()  # as they will be after this step

    def begin(self, filling: Collection[Sequence]) -> None:
        """A step begins, with these prompts under way."""
        shares = {s.origin.owner: s.origin.share for s in filling}
        newcomer = (self._now, False)
        self._clocks = {owner: self._clocks.get(owner, newcomer) for owner in shares}
        self._shares = sum(shares.values())
        self._planned = self._clocks.copy()

    def next(self, left: Collection[Sequence]) -> Sequence:
        """Who is next of these (at least one), all of them known to `begin`."""
        return min(left, key=lambda s: (*self._planned[s.origin.owner], s.serial))

    def planned(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens of the step are to be this prompt's; it may come to nothing."""
        _charge(self._planned, sequence, tokens)

    def gave(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens of the step went to this prompt."""
        _charge(self._clocks, sequence, tokens)
        self._now += tokens / self._shares


def _charge(clocks: dict[str, tuple[float, bool]], sequence: Sequence, tokens: int) -> None:
    origin = sequence.origin
    clock, _ = clocks[origin.owner]
    clocks[origin.owner] = clock + tokens / origin.share, True
