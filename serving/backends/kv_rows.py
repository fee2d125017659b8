"""Which KV row holds which slot, so that a decode step is one call over neighbouring rows.

A decode step of onnx runs over rows lo..hi of the KV buffers. Slots come and go in any
order, so they are mapped to rows by a permutation. Where a row in the range takes no part,
  - it rides along with a dummy token, written behind its valid tokens: one row of compute a step,
  - or rows swap places: one copy of what they hold.
Gaps are padded with riders until their total cost equals a copy, then rows swap (ski rental: at
most 2x the optimum). Lengths and costs are in tokens of KV; nothing here touches a buffer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from serving.errors import EngineFailed
from serving.sampling.step_rows import Row

# Round figures of a server core, to weigh compute against copying.
FLOPS_PER_THREAD = 40e9
COPY_BYTES_PER_SECOND = 4e9


@dataclass(frozen=True, slots=True)
class Window:
    """Rows lo..hi-1 of a decode call. `swaps` come first, in order; who takes no part rides."""

    lo: int
    hi: int
    swaps: tuple[tuple[int, int], ...] = ()


def rider_tokens(flops_per_token: float, threads: int, kv_bytes_per_token: float) -> float:
    """KV tokens that can be copied in the time of one row of dummy compute on a CPU."""
    seconds = flops_per_token / (FLOPS_PER_THREAD * threads)
    return seconds * COPY_BYTES_PER_SECOND / kv_bytes_per_token


class RowMap:
    """A permutation of slots over rows, with the number of valid tokens in each row."""

    def __init__(self, slots: int, context_tokens: int, rider_tokens: float) -> None:
        self.context_tokens = context_tokens
        self.rider_tokens = rider_tokens  # price of a rider
        self.row_of = list(range(slots))
        self.slot_of = list(range(slots))
        self.length = [0] * slots  # by row
        self._rent = 0.0

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

    def window(self, slots: Collection[int]) -> Window:
        """The rows of this step's decode call for these slots (at least one)."""
        members = {self.row_of[slot] for slot in slots}
        lo, hi = min(members), max(members) + 1
        riders = [row for row in range(lo, hi) if row not in members]
        if not riders:
            self._rent = 0.0
            return Window(lo, hi)
        # A full row has no room for a dummy token.
        full = any(self.length[row] >= self.context_tokens for row in riders)
        inside = range(lo, lo + len(members))
        incoming = sorted(members.difference(inside))
        outgoing = [row for row in inside if row not in members]
        self._rent += len(riders) * self.rider_tokens
        if not full and self._rent < sum(self.length[row] for row in (*incoming, *outgoing)):
            return Window(lo, hi)
        self._rent = 0.0
        return Window(lo, inside.stop, tuple(zip(incoming, outgoing, strict=True)))
