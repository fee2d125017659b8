"""Which KV row holds which slot, so that a decode step is one call over neighbouring rows.

A decode step of onnx runs over rows lo..hi of the KV buffers. Slots come and go in any order, so
they are mapped to rows by a permutation: where a row in between takes no part, rows swap places,
one copy of what they hold. Lengths are in tokens of KV; nothing here touches a buffer.
"""

from __future__ import annotations

from collections.abc import Collection

from serving.errors import EngineFailed
from serving.sampling.step_rows import Row


class RowMap:
    """A permutation of slots over rows, with the number of valid tokens in each row."""

    def __init__(self, slots: int, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.row_of = list(range(slots))
        self.slot_of = list(range(slots))
        self.length = [0] * slots  # by row

    def swap(self, a: int, b: int) -> None:
        """Exchange the slots of rows a and b; the caller has exchanged the buffers."""
        self.slot_of[a], self.slot_of[b] = self.slot_of[b], self.slot_of[a]
        self.length[a], self.length[b] = self.length[b], self.length[a]
        self.row_of[self.slot_of[a]], self.row_of[self.slot_of[b]] = a, b

    def place_of(self, row: Row) -> int:
        """The KV row of a step's row. Raises EngineFailed where it does not hold `row.start`."""
        place, count = self.row_of[row.slot], len(row.tokens)
        held = self.length[place]
        if row.start > held or row.start + count > self.context_tokens:
            raise EngineFailed(
                f"slot {row.slot} holds {held} of {self.context_tokens} tokens; "
                f"a row of {count} tokens cannot start at {row.start}"
            )
        return place

    def copied(self, source: int, target: int, tokens: int) -> tuple[int, int]:
        """The rows of slots `source` and `target`, whose first `tokens` the caller copies."""
        a, b = self.row_of[source], self.row_of[target]
        if tokens > self.length[a]:
            raise EngineFailed(
                f"slot {source} holds {self.length[a]} tokens, {tokens} were to be copied"
            )
        self.length[b] = tokens
        return a, b

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` entries of a slot."""
        row = self.row_of[slot]
        self.length[row] = min(tokens, self.length[row])

    def window(self, slots: Collection[int]) -> tuple[int, list[tuple[int, int]]]:
        """Where this step's decode call for these slots begins; it has their rows alone, after
        these swaps, in order."""
        members = {self.row_of[slot] for slot in slots}
        inside = range(min(members), min(members) + len(members))
        incoming = sorted(members.difference(inside))
        outgoing = [row for row in inside if row not in members]
        return inside.start, list(zip(incoming, outgoing, strict=True))
