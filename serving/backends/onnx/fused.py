"""Serving a GroupQueryAttention graph over fixed KV rows, with no copying between steps.

Each layer's keys and values are one numpy buffer [rows, kv_heads, context, head_dim]. The graph's
past_* and present_* are bound to the same view of rows lo..hi, so the operator appends in place;
how long each row is enters by the sums of `attention_mask`. A ragged decode step is one call with
no padding, and a prompt is prefilled straight into its row, chunk by chunk. Short prompts of
neighbouring rows share a call, padded right: all weights are read once for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.backends.onnx.graph import GraphFacts, Logits, Part
from serving.errors import EngineFailed
from serving.sampling.step_rows import Row

_KEPT_BINDINGS = 256  # a binding holds two references a layer and no memory of its own
# A call of prompts saves time where it is short: 1.5 x at 4 of 16 tokens, 1.2 x at 4 of 64, nothing
# at 4 of 128 (1B, int8, two threads).
_SHARED_TOKENS = 256
_SHARED_PADDING = 1.25  # tokens with padding / tokens, at most
_MASK_GRAIN = 64  # mask widths are multiples of this, so that onnxruntime sees few different shapes


class RowMap:
    """Which KV row holds which slot, and how many valid tokens each row has.

    A decode call runs over neighbouring rows. Slots come and go in any order: where a row in
    between takes no part, rows swap places, one copy of what they hold.
    """

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


class SlotGraph:
    """A session, its KV rows and its bindings."""

    def __init__(self, session: Any, facts: GraphFacts, slots: int, context_tokens: int) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._session = session
        self._names = facts.kv_names
        self.rows = RowMap(slots, context_tokens)
        shape = (slots, facts.kv_heads, context_tokens, facts.head_dim)
        # Zeroed pages cost nothing until they are written: idle slots take address space only.
        self._kv = [np.zeros(shape, np.float32) for _ in self._names]
        self._ids = np.zeros((slots, 1), np.int64)
        self._out = np.zeros((slots, 1, facts.vocabulary), np.float32)
        self._columns = np.arange(context_tokens, dtype=np.int64)
        self._binding = lru_cache(_KEPT_BINDINGS)(self._bound)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of slot `source` into slot `target`."""
        a, b = self.rows.copied(source, target, tokens)
        if a != b:
            for buffer in self._kv:
                buffer[b, :, :tokens] = buffer[a, :, :tokens]

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` entries of a slot."""
        self.rows.truncate(slot, tokens)

    def decode(self, rows: list[Row]) -> Part:
        """Rows of one token each, in one call."""
        for row in rows:
            self.rows.place_of(row)
        lo, swaps = self.rows.window([row.slot for row in rows])
        for a, b in swaps:
            self._swap(a, b)
        rows = sorted(rows, key=lambda row: self.rows.row_of[row.slot])
        ids = self._ids[: len(rows)]
        ids[:, 0] = [row.tokens[0] for row in rows]
        ends = [row.start + 1 for row in rows]
        self.rows.length[lo : lo + len(rows)] = ends
        out = self._call(lo, np.array(ends, np.int64), ids)
        asked = [at for at, row in enumerate(rows) if row.wants_token]
        return out if len(asked) == len(out) else out[asked], [rows[at] for at in asked]

    def prefill(self, rows: list[Row], chunk: int) -> Iterator[Part]:
        """Longer rows, in calls of at most `chunk` tokens; short prompts side by side share one."""
        for group in self._sharing(rows, chunk):
            places = [self.rows.place_of(row) for row in group]
            longest = max(len(row.tokens) for row in group)
            piece = chunk if len(group) == 1 else longest
            ids = np.zeros((len(group), longest), np.int64)
            for at, row in enumerate(group):
                ids[at, : len(row.tokens)] = row.tokens
            for first in range(0, longest, piece):
                ends = [row.start + min(len(row.tokens), first + piece) for row in group]
                self.rows.length[places[0] : places[0] + len(group)] = ends
                part = np.ascontiguousarray(ids[:, first : first + piece])
                out = self._call(places[0], np.array(ends, np.int64), part)
            asked = [at for at, row in enumerate(group) if row.wants_token]
            if asked:  # copied: the output buffer is used again by the next call
                yield out[asked], [group[at] for at in asked]

    def _sharing(self, prompts: list[Row], chunk: int) -> list[list[Row]]:
        """The prompts in groups that share a call: short ones from their first token, of about the
        same length, in rows side by side.
        """
        groups: list[list[Row]] = []
        for row in sorted(prompts, key=lambda row: self.rows.row_of[row.slot]):
            joined = [*groups[-1], row] if groups else [row]
            lengths = [len(one.tokens) for one in joined]
            most = min(_SHARED_TOKENS, chunk * len(joined), _SHARED_PADDING * sum(lengths))
            places = [self.rows.row_of[one.slot] for one in joined]
            is_short = max(lengths) * len(joined) <= most and not any(one.start for one in joined)
            if groups and is_short and places[-1] - places[0] == len(places) - 1:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _call(self, lo: int, ends: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> Logits:
        """Logits [rows, vocabulary] of each row's last token, a view. `ids`: [rows, tokens], for
        the KV rows from `lo` on; `ends`: tokens that each row then holds."""
        hi = lo + len(ends)
        binding = self._binding(lo, hi)
        width = int(ends.max())
        if 1 in ids.shape:  # wider, GroupQueryAttention takes a call of several prompts for a past
            width = min(self.rows.context_tokens, -(-width // _MASK_GRAIN) * _MASK_GRAIN)
        mask = (self._columns[:width] < ends[:, None]).astype(np.int64)
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("input_ids", ids)
        out = self._out[lo:hi]
        binding.bind_ortvalue_output("logits", self._ort.OrtValue.ortvalue_from_numpy(out))
        self._session.run_with_iobinding(binding)
        return out[:, 0]

    def _bound(self, lo: int, hi: int) -> Any:
        binding = self._session.io_binding()
        for name, buffer in zip(self._names, self._kv, strict=True):
            view = self._ort.OrtValue.ortvalue_from_numpy(buffer[lo:hi])
            if view.data_ptr() != buffer[lo:hi].ctypes.data:
                raise EngineFailed(
                    "onnxruntime copied a KV buffer instead of using it in place; "
                    "this version cannot be used"
                )
            binding.bind_ortvalue_input(f"past_key_values.{name}", view)
            binding.bind_ortvalue_output(f"present.{name}", view)
        return binding

    def _swap(self, a: int, b: int) -> None:
        held_a, held_b = self.rows.length[a], self.rows.length[b]
        for buffer in self._kv:
            kept = buffer[a, :, :held_a].copy() if held_b else buffer[a, :, :held_a]
            buffer[a, :, :held_b] = buffer[b, :, :held_b]
            buffer[b, :, :held_a] = kept
        self.rows.swap(a, b)
