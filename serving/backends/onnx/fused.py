"""Serving a GroupQueryAttention graph over fixed KV rows, with no copying between steps.

Each layer's keys and values are one numpy buffer [rows, kv_heads, context, head_dim]. The graph's
past_* and present_* are bound to the same view of rows lo..hi, so the operator appends in place;
how long each row is enters by the sums of `attention_mask`. A ragged decode step is one call with
no padding, and a prompt is prefilled straight into its row, chunk by chunk. Short prompts of
neighbouring rows share a call, padded right: all weights are read once for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.backends.kv_rows import RowMap
from serving.backends.onnx.graph import GraphFacts, Logits, Part
from serving.errors import EngineFailed
from serving.sampling.step_rows import Row

_KEPT_BINDINGS = 256  # a binding holds two references a layer and no memory of its own
# A call of prompts saves time where it is short: 1.5 x at 4 of 16 tokens, 1.2 x at 4 of 64, nothing
# at 4 of 128 (1B, int8, two threads).
_SHARED_TOKENS = 256
_SHARED_PADDING = 1.25  # tokens with padding / tokens, at most
_MASK_GRAIN = 64  # mask widths are multiples of this, so that onnxruntime sees few different shapes


class SlotGraph:
    """A session, its KV rows and its bindings. `rider_tokens`: see kv_rows."""

    def __init__(
        self, session: Any, facts: GraphFacts, slots: int, context_tokens: int, rider_tokens: float
    ) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._session = session
        self._names = facts.kv_names
        self.rows = RowMap(slots, context_tokens, rider_tokens)
        shape = (slots, facts.kv_heads, context_tokens, facts.head_dim)
        # Zeroed pages cost nothing until they are written: idle slots take address space only.
        self._kv = [np.zeros(shape, np.float32) for _ in self._names]
        self._ids = np.zeros((slots, 1), np.int64)
        self._out = np.zeros((slots, 1, facts.vocabulary), np.float32)
        self._columns = np.arange(context_tokens, dtype=np.int64)
        self._bindings: OrderedDict[tuple[int, int], Any] = OrderedDict()

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
            self.rows.length[self.rows.place_of(row)] = row.start
        window = self.rows.window([row.slot for row in rows])
        for a, b in window.swaps:
            self._swap(a, b)
        totals = np.array(self.rows.length[window.lo : window.hi], np.int64) + 1
        ids = self._ids[window.lo : window.hi]
        ids[:] = 0
        wanted: dict[int, Row] = {}  # by place in the call
        for row in rows:
            place = self.rows.row_of[row.slot]
            self.rows.length[place] += 1
            ids[place - window.lo, 0] = row.tokens[0]
            if row.wants_token:
                wanted[place - window.lo] = row
        out = self._call(window.lo, window.hi, totals, ids)
        asked = sorted(wanted)
        return out if len(asked) == len(out) else out[asked], [wanted[at] for at in asked]

    def prefill(self, rows: list[Row], chunk: int) -> Iterator[Part]:
        """Longer rows, in calls of at most `chunk` tokens; short ones share a call."""
        for group in self._neighbours(rows, chunk):
            logits = self._fill(group, chunk)
            asked = [at for at, row in enumerate(group) if row.wants_token]
            if asked:
                yield logits[asked], [group[at] for at in asked]

    def _fill(self, group: list[Row], chunk: int) -> Logits:
        """Logits [rows, vocabulary] of prompts side by side: one in chunks, several in one call."""
        places = [self.rows.place_of(row) for row in group]
        longest = max(len(row.tokens) for row in group)
        ids = np.zeros((len(group), longest), np.int64)
        for at, row in enumerate(group):
            ids[at, : len(row.tokens)] = row.tokens
        out, step = self._out[:0, 0], chunk if len(group) == 1 else longest
        for first in range(0, longest, step):
            piece = np.ascontiguousarray(ids[:, first : first + step])
            ends = [row.start + min(len(row.tokens), first + piece.shape[1]) for row in group]
            out = self._call(places[0], places[-1] + 1, np.array(ends, np.int64), piece)
            for place, end in zip(places, ends, strict=True):
                self.rows.length[place] = end
        # The output buffer is used again by the next call of this step.
        return out.copy()

    def _neighbours(self, prompts: list[Row], chunk: int) -> list[list[Row]]:
        """The prompts in groups that share a call: short ones from their first token, of about the
        same length, in rows side by side."""
        groups: list[list[Row]] = []
        for row in sorted(prompts, key=lambda row: self.rows.row_of[row.slot]):
            group = groups[-1] if groups else []
            joined = [*group, row]
            lengths = [len(one.tokens) for one in joined]
            most = min(_SHARED_TOKENS, chunk * len(joined), _SHARED_PADDING * sum(lengths))
            places = [self.rows.row_of[one.slot] for one in joined]
            if (
                group
                and not any(one.start for one in joined)
                and places[-1] == places[0] + len(places) - 1
                and max(lengths) * len(joined) <= most
            ):
                group.append(row)
            else:
                groups.append([row])
        return groups

    def _call(
        self, lo: int, hi: int, totals: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
    ) -> Logits:
        """Logits [hi - lo, vocabulary] of each row's last token, a view. `ids`: [rows, tokens]."""
        binding, longest = self._binding(lo, hi), int(totals.max())
        width = min(self.rows.context_tokens, -(-longest // _MASK_GRAIN) * _MASK_GRAIN)
        if ids.shape[1] > 1 and len(ids) > 1:
            width = longest  # wider, GroupQueryAttention would take it for a past
        mask = (self._columns[:width] < totals[:, None]).astype(np.int64)
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("input_ids", ids)
        out = self._out[lo:hi]
        binding.bind_ortvalue_output("logits", self._ort.OrtValue.ortvalue_from_numpy(out))
        self._session.run_with_iobinding(binding)
        return out[:, 0]

    def _binding(self, lo: int, hi: int) -> Any:
        binding = self._bindings.get((lo, hi))
        if binding is None:
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
            self._bindings[lo, hi] = binding
            if len(self._bindings) > _KEPT_BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end((lo, hi))
        return binding

    def _swap(self, a: int, b: int) -> None:
        held_a, held_b = self.rows.length[a], self.rows.length[b]
        for buffer in self._kv:
            kept = buffer[a, :, :held_a].copy() if held_b else buffer[a, :, :held_a]
            buffer[a, :, :held_b] = buffer[b, :, :held_b]
            buffer[b, :, :held_a] = kept
        self.rows.swap(a, b)
