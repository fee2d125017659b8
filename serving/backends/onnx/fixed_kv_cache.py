"""Serving a GroupQueryAttention graph over fixed KV rows, with no copying between steps.

Each layer's keys and values are one numpy buffer [rows, kv_heads, context, head_dim]. The graph's
past_* and present_* are bound to the same view of the rows of a call, so the operator appends in
place; how long each row is enters by the sums of `attention_mask`. A ragged decode step is one call
with no padding, and a prompt is prefilled straight into its row. Short prompts share a call, padded
right: all weights are read once for them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from crossover.serving.backends.backend_interface import check_row
from crossover.serving.backends.onnx.onnx_folder import GraphFacts, Part
from crossover.serving.errors import EngineFailed
from crossover.serving.sampling.step_inputs import Row

_KEPT_BINDINGS = 256  # a binding holds two references a layer and no memory of its own
# A call of prompts saves time where it is short: 1.5 x at 4 of 16 tokens, 1.2 x at 4 of 64, nothing
# at 4 of 128 (1B, int8, two threads).
_SHARED_TOKENS = 256
_SHARED_PADDING = 1.25  # tokens with padding / tokens, at most
_MASK_GRAIN = 64  # mask widths are multiples of this, so that onnxruntime sees few different shapes


class SlotGraph:
    """A session, its KV rows and its bindings.

    A call runs over neighbouring rows. Slots come and go in any order: where a row in between takes
    no part, rows swap places, one copy of what they hold.
    """

    def __init__(self, session: Any, facts: GraphFacts, slots: int, context_tokens: int) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._session = session
        self._context = context_tokens
        self._names = facts.kv_names
        self._row_of = list(range(slots))
        self._slot_of = list(range(slots))
        self._length = [0] * slots  # valid tokens of each row
        shape = (slots, facts.kv_heads, context_tokens, facts.head_dim)
        # Zeroed pages cost nothing until they are written: idle slots take address space only.
        self._kv = [np.zeros(shape, np.float32) for _ in self._names]
        self._out = np.zeros((slots, 1, facts.vocabulary), np.float32)
        self._columns = np.arange(context_tokens, dtype=np.int64)
        self._binding = lru_cache(_KEPT_BINDINGS)(self._bind_rows)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of slot `source` into slot `target`."""
        a, b = self._row_of[source], self._row_of[target]
        assert tokens <= self._length[a]
        for buffer in self._kv:
            buffer[b, :, :tokens] = buffer[a, :, :tokens]
        self._length[b] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` entries of a slot."""
        row = self._row_of[slot]
        self._length[row] = min(tokens, self._length[row])

    def sharing(self, prompts: list[Row]) -> list[list[Row]]:
        """Return the prompts in groups that share a call: short ones from their first token, of
        about the same length, in rows side by side."""
        groups: list[list[Row]] = []
        for row in sorted(prompts, key=lambda row: self._row_of[row.slot]):
            joined = [*groups[-1], row] if groups else [row]
            lengths = [len(member.tokens) for member in joined]
            max_tokens = min(_SHARED_TOKENS, _SHARED_PADDING * sum(lengths))
            first, last = (self._row_of[joined[at].slot] for at in (0, -1))
            is_short = max(lengths) * len(joined) <= max_tokens and not any(
                member.start for member in joined
            )
            if groups and is_short and last - first == len(joined) - 1:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def run(self, rows: list[Row]) -> Part:
        """Run rows of one token each, one longer row, or a group of `sharing`, in one call. Return
        the logits of the rows that want a token, and these rows; the logits stay until the next
        call with their slots."""
        for row in rows:
            check_row(row, self._length[self._row_of[row.slot]], self._context)
        first = self._side_by_side([row.slot for row in rows])
        rows = sorted(rows, key=lambda row: self._row_of[row.slot])
        end = first + len(rows)
        lengths = [row.position for row in rows]  # after this call
        self._length[first:end] = lengths
        ids = np.zeros((len(rows), max(len(row.tokens) for row in rows)), np.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row.tokens)] = row.tokens
        width = max(lengths)
        if 1 in ids.shape:  # wider, GroupQueryAttention takes a call of several prompts for a past
            width = min(self._context, -(-width // _MASK_GRAIN) * _MASK_GRAIN)
        mask = (self._columns[:width] < np.array(lengths)[:, None]).astype(np.int64)
        binding, out = self._binding(first, end), self._out[first:end]
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_ortvalue_output("logits", self._ort.OrtValue.ortvalue_from_numpy(out))
        self._session.run_with_iobinding(binding)
        sampling_rows = [at for at, row in enumerate(rows) if row.wants_token]
        return out[:, 0] if len(sampling_rows) == len(rows) else out[sampling_rows, 0], [
            rows[at] for at in sampling_rows
        ]

    def _side_by_side(self, slots: list[int]) -> int:
        """Swap rows until those of these slots are neighbours; return the first of them."""
        members = {self._row_of[slot] for slot in slots}
        inside = range(min(members), min(members) + len(members))
        outgoing = [row for row in inside if row not in members]
        for a, b in zip(sorted(members.difference(inside)), outgoing, strict=True):
            self._swap(a, b)
        return inside.start

    def _swap(self, a: int, b: int) -> None:
        """Swap two rows: their slots, and the keys and values that they hold."""
        tokens_a, tokens_b = self._length[a], self._length[b]
        for buffer in self._kv:
            saved_a = buffer[a, :, :tokens_a].copy() if tokens_b else buffer[a, :, :tokens_a]
            buffer[a, :, :tokens_b] = buffer[b, :, :tokens_b]
            buffer[b, :, :tokens_a] = saved_a
        self._length[a], self._length[b] = tokens_b, tokens_a
        self._slot_of[a], self._slot_of[b] = self._slot_of[b], self._slot_of[a]
        self._row_of[self._slot_of[a]], self._row_of[self._slot_of[b]] = a, b

    def _bind_rows(self, first: int, end: int) -> Any:
        """Return an onnxruntime binding of the KV rows from `first` to before `end`, each layer's
        as input and as output of the graph. Raises EngineFailed if onnxruntime copies them."""
        binding = self._session.io_binding()
        for name, buffer in zip(self._names, self._kv, strict=True):
            view = self._ort.OrtValue.ortvalue_from_numpy(buffer[first:end])
            if view.data_ptr() != buffer[first:end].ctypes.data:
                raise EngineFailed(
                    "onnxruntime copied a KV buffer instead of using it in place, so this version "
                    "cannot be used"
                )
            binding.bind_ortvalue_input(f"past_key_values.{name}", view)
            binding.bind_ortvalue_output(f"present.{name}", view)
        return binding
