"""Runs a GroupQueryAttention graph over fixed KV rows, without copying the cache between steps.

The keys and the values of each layer are one numpy buffer [rows, kv_heads, context, head_dim]. The
graph's past_* and present_* are bound to the same view of the rows of a call, so the operator
appends in place. It learns the length of each row from the sum of its `attention_mask`. Decode rows
of different lengths run in one call without padding, and a prompt is written straight into its row.
Short prompts share a call, padded on the right, so that the weights are read only once for them.

A KV row is a line of these buffers. It is not the Row of a step: which KV row belongs to which slot
changes, because a call needs neighboring KV rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from crossover.serving.backends.backend_interface import check_row
from crossover.serving.backends.onnx.onnx_folder import GraphFacts, RowLogits
from crossover.serving.errors import EngineFailed
from crossover.serving.sampling.step_inputs import Row

_MAX_BINDINGS = 256  # kept for reuse; one has two references per layer and no memory of its own
# Sharing a call saves time only if the prompts are short: four prompts of 16 tokens are 1.5 times
# as fast, of 64 tokens 1.2 times, and of 128 tokens not at all (1B, int8, two threads).
_MAX_SHARED_TOKENS = 256  # of all prompts of a call, with their padding
_MAX_PADDING = 1.25  # tokens of a shared call with padding, relative to those without
_MASK_MULTIPLE = 64  # mask widths are multiples of this, so that onnxruntime sees few shapes


class SlotGraph:
    """A session, its KV rows and its bindings.

    A call runs over neighboring KV rows. Sequences come and go in any order, so that a KV row which
    takes no part may lie between those of a call. It then swaps places with one of them, which
    copies what both hold.
    """

    def __init__(self, session: Any, facts: GraphFacts, slots: int, context_tokens: int) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._session = session
        self._context = context_tokens
        self._names = facts.kv_names
        self._kv_row_of = list(range(slots))  # by slot
        self._slot_of = list(range(slots))  # by KV row
        self._lengths = [0] * slots  # tokens that each KV row holds
        shape = (slots, facts.kv_heads, context_tokens, facts.head_dim)
        # Zeroed pages take no memory until they are written, so idle slots only take addresses.
        self._kv = [np.zeros(shape, np.float32) for _ in self._names]
        self._logits = np.zeros((slots, 1, facts.vocabulary), np.float32)
        self._columns = np.arange(context_tokens, dtype=np.int64)
        self._binding = lru_cache(_MAX_BINDINGS)(self._bind_kv_rows)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of slot `source` to slot `target`."""
        source_row, target_row = self._kv_row_of[source], self._kv_row_of[target]
        assert tokens <= self._lengths[source_row]
        for buffer in self._kv:
            buffer[target_row, :, :tokens] = buffer[source_row, :, :tokens]
        self._lengths[target_row] = tokens

    def state_bytes(self, tokens: int) -> int:
        """Return the bytes that `export` writes of a slot with so many tokens."""
        return sum(tokens * buffer[0, :, 0].nbytes for buffer in self._kv)

    def export(self, slot: int, target: npt.NDArray[np.uint8]) -> int:
        """Write the keys and values of a slot to `target`, layer by layer. Return the bytes."""
        kv_row = self._kv_row_of[slot]
        tokens = self._lengths[kv_row]
        for buffer, part in zip(self._kv, self._parts(target, tokens), strict=True):
            part[:] = buffer[kv_row, :, :tokens]
        return self.state_bytes(tokens)

    def load(self, slot: int, data: npt.NDArray[np.uint8], tokens: int) -> None:
        """Make a slot hold the first `tokens` tokens of what `export` wrote."""
        kv_row = self._kv_row_of[slot]
        stored_tokens = len(data) // self.state_bytes(1)
        for buffer, part in zip(self._kv, self._parts(data, stored_tokens), strict=True):
            buffer[kv_row, :, :tokens] = part[:, :tokens]
        self._lengths[kv_row] = tokens

    def _parts(self, data: npt.NDArray[np.uint8], tokens: int) -> list[npt.NDArray[np.float32]]:
        """Return the part of each buffer in exported bytes, [kv_heads, tokens, head_dim]."""
        _, heads, _, width = self._kv[0].shape
        size = heads * tokens * width
        values = data[: self.state_bytes(tokens)].view(np.float32)
        return [
            values[index * size : (index + 1) * size].reshape(heads, tokens, width)
            for index in range(len(self._kv))
        ]

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of a slot."""
        kv_row = self._kv_row_of[slot]
        self._lengths[kv_row] = min(tokens, self._lengths[kv_row])

    def group_prompts(self, prompts: list[Row]) -> list[list[Row]]:
        """Return the prompts in groups that share a call: prompts that have just begun, are short
        and of about the same length, and whose KV rows are neighbors."""
        groups: list[list[Row]] = []
        for row in sorted(prompts, key=lambda row: self._kv_row_of[row.slot]):
            if groups and self._can_share([*groups[-1], row]):
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _can_share(self, prompts: list[Row]) -> bool:
        """Return whether these prompts, in the order of their KV rows, can and should share a
        call."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        padded_tokens = max(lengths) * len(prompts)
        if padded_tokens > min(_MAX_SHARED_TOKENS, _MAX_PADDING * sum(lengths)):
            return False
        if any(prompt.start for prompt in prompts):
            return False
        first, last = self._kv_row_of[prompts[0].slot], self._kv_row_of[prompts[-1].slot]
        return last - first == len(prompts) - 1

    def run(self, rows: list[Row]) -> RowLogits:
        """Run rows of one token each, one longer row, or a group of `group_prompts`, in one call.

        The logits are overwritten by the next call with the same slots. Raises EngineFailed.
        """
        for row in rows:
            check_row(row, self._lengths[self._kv_row_of[row.slot]], self._context)
        first = self._make_neighbors([row.slot for row in rows])
        rows = sorted(rows, key=lambda row: self._kv_row_of[row.slot])
        end = first + len(rows)
        lengths = [row.position for row in rows]  # after this call
        self._lengths[first:end] = lengths
        ids = np.zeros((len(rows), max(len(row.tokens) for row in rows)), np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row.tokens)] = row.tokens
        width = max(lengths)
        if 1 in ids.shape:  # decode rows, or one prompt
            # A wider mask gives onnxruntime fewer shapes to plan. With several prompts,
            # GroupQueryAttention would take the added columns for tokens before the prompts.
            width = min(self._context, -(-width // _MASK_MULTIPLE) * _MASK_MULTIPLE)
        mask = (self._columns[:width] < np.array(lengths)[:, None]).astype(np.int64)
        logits = self._logits[first:end]
        binding = self._binding(first, end)
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_ortvalue_output("logits", self._ort.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(binding)
        sampling = [index for index, row in enumerate(rows) if row.wants_token]
        if len(sampling) == len(rows):
            return RowLogits(logits[:, 0], rows)
        return RowLogits(logits[sampling, 0], [rows[index] for index in sampling])

    def _make_neighbors(self, slots: list[int]) -> int:
        """Swap KV rows until those of these slots are neighbors. Return the first of them."""
        kv_rows = {self._kv_row_of[slot] for slot in slots}
        first = min(kv_rows)
        target = range(first, first + len(kv_rows))
        incoming = sorted(kv_rows.difference(target))
        outgoing = [kv_row for kv_row in target if kv_row not in kv_rows]
        for one_row, other_row in zip(incoming, outgoing, strict=True):
            self._swap(one_row, other_row)
        return first

    def _swap(self, a: int, b: int) -> None:
        """Swap two KV rows: their slots, and the keys and values that they hold."""
        tokens_a, tokens_b = self._lengths[a], self._lengths[b]
        for buffer in self._kv:
            # Without tokens in b nothing overwrites a, so no copy of it is needed.
            saved_a = buffer[a, :, :tokens_a].copy() if tokens_b else buffer[a, :, :tokens_a]
            buffer[a, :, :tokens_b] = buffer[b, :, :tokens_b]
            buffer[b, :, :tokens_a] = saved_a
        self._lengths[a], self._lengths[b] = tokens_b, tokens_a
        self._slot_of[a], self._slot_of[b] = self._slot_of[b], self._slot_of[a]
        self._kv_row_of[self._slot_of[a]] = a
        self._kv_row_of[self._slot_of[b]] = b

    def _bind_kv_rows(self, first: int, end: int) -> Any:
        """Return an onnxruntime binding of the KV rows from `first` to before `end`. Those of each
        layer are both input and output of the graph.

        Raises EngineFailed if onnxruntime copies them.
        """
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
