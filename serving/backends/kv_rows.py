"""Which KV row holds which slot: the bookkeeping that lets a decode step be one call over neighbouring rows.

A decode step of the onnx and torch backends runs over rows `lo..hi` of the KV buffers, all of them neighbours. The scheduler's slots come
and go in any order, so slots are mapped to rows by a permutation which changes when that pays:

  - a row inside the range that takes no part (it is being prefilled, or it is an idle prefix) can run along with a dummy token. Its KV
    entry lands just behind the row's valid tokens, where the next real token overwrites it. This costs one row of compute a step;
  - or rows swap places, which costs one copy of what they hold.

Holes that close again within a step or two are the rule (a slot is refilled as soon as it is free), long ones happen when load falls. So
the classical answer to rent-or-buy is used: run along until the rent paid equals the price of swapping, then swap. Never worse than twice
the best.

Lengths and costs are in tokens of KV. Pure bookkeeping: nothing here touches a buffer, so all of it is tested without a model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Rows lo..hi-1 of one decode call. `swaps` are done first, in order; `riders` run along with a dummy token."""

    lo: int
    hi: int
    swaps: tuple[tuple[int, int], ...] = ()
    riders: tuple[int, ...] = ()


# What a CPU thread multiplies and adds in a second, and what it copies: round figures of a server core, to weigh one against the other.
FLOPS_PER_THREAD, COPY_BYTES_PER_SECOND = 40e9, 4e9


def rider_tokens(flops_per_token: float, threads: int, kv_bytes_per_token: float) -> float:
    """What one row of dummy compute costs on a CPU, as the number of KV tokens that could be copied in that time."""
    return flops_per_token / (FLOPS_PER_THREAD * threads) * COPY_BYTES_PER_SECOND / kv_bytes_per_token


class RowMap:
    """A permutation of slots over rows, with the number of valid tokens in each row.

    `rider_tokens`: what one row of dummy compute costs, expressed as the number of KV tokens that could be copied in the same time.
    """

    def __init__(self, slots: int, context_tokens: int, rider_tokens: float) -> None:
        self.context_tokens = context_tokens
        self.rider_tokens = rider_tokens
        self.row_of = list(range(slots))
        self.slot_of = list(range(slots))
        self.length = [0] * slots  # by row
        self._rent = 0.0

    def swap(self, a: int, b: int) -> None:
        """Exchange the slots of rows a and b; the caller has exchanged what the buffers hold."""
        self.slot_of[a], self.slot_of[b] = self.slot_of[b], self.slot_of[a]
        self.length[a], self.length[b] = self.length[b], self.length[a]
        self.row_of[self.slot_of[a]], self.row_of[self.slot_of[b]] = a, b

    def window(self, slots: Collection[int]) -> Window:
        """The rows of this step's decode call for these slots (at least one). Applies no swap: see `swap`."""
        members = {self.row_of[slot] for slot in slots}
        lo, hi = min(members), max(members) + 1
        riders = tuple(row for row in range(lo, hi) if row not in members)
        if not riders:
            self._rent = 0.0
            return Window(lo, hi)
        full = any(self.length[row] >= self.context_tokens for row in riders)  # no room for a dummy token
        self._rent += len(riders) * self.rider_tokens
        start, cost = self._cheapest(members)
        if not full and self._rent < cost:
            return Window(lo, hi, riders=riders)
        self._rent = 0.0
        inside = range(start, start + len(members))
        incoming = sorted(members.difference(inside))
        outgoing = [row for row in inside if row not in members]
        return Window(start, start + len(members), swaps=tuple(zip(incoming, outgoing, strict=True)))

    def _cheapest(self, members: Collection[int]) -> tuple[int, int]:
        """The start of the gapless range that costs least to fill with exactly these rows, and that cost in tokens."""
        size, best_start, best_cost = len(members), 0, -1
        total = sum(self.length[row] for row in members)
        for start in range(len(self.length) - size + 1):
            inside = range(start, start + size)
            kept = sum(self.length[row] for row in inside if row in members)
            evicted = sum(self.length[row] for row in inside if row not in members)
            cost = total - kept + evicted
            if best_cost < 0 or cost < best_cost:
                best_start, best_cost = start, cost
        return best_start, best_cost
