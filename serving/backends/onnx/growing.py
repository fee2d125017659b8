"""Serving a graph whose KV cache grows: past_key_values in, longer present.* out.

optimum exports it and most hub repositories hold it. Each step copies the whole cache inside
onnxruntime (two to four times slower than fused.py). Decode rows of different lengths go through
one call, padded on the left; while the same rows decode, one step's outputs are the next one's
inputs, untouched. Graphs without position_ids count positions from the padded length: those run
row by row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.backends.onnx.graph import KV_TYPES, GraphFacts
from serving.errors import EngineFailed
from serving.sampling.step_rows import Row

Logits = npt.NDArray[np.float32]
Cache = list[npt.NDArray[Any]]  # per layer key, value: [kv_heads, tokens, head_dim]


@dataclass
class Batch:
    """Rows that decode together: slots, padding before each, cache [n, heads, width, head_dim]."""

    slots: list[int]
    padding: list[int]
    values: list[Any]
    width: int


class GrowingGraph:
    """A session and one cache per slot; see the module's docstring."""

    def __init__(self, session: Any, facts: GraphFacts, slots: int, context_tokens: int) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._session = session
        self._facts = facts
        self._context = context_tokens
        self._names = [
            f"{layer}.{kind}" for layer in range(facts.layers) for kind in ("key", "value")
        ]
        self._outputs = ["logits", *(f"present.{name}" for name in self._names)]
        self._empty = np.zeros((facts.kv_heads, 0, facts.head_dim), KV_TYPES[facts.kv_type])
        self._caches: list[Cache] = [[self._empty] * len(self._names) for _ in range(slots)]
        self._batch: Batch | None = None
        self.last_decode_seconds: float | None = None

    @property
    def kv_bytes(self) -> int:
        """What the caches take now; they grow with the sequences."""
        held = sum(part.nbytes for cache in self._caches for part in cache)
        if self._batch is not None:
            held += self._batch.width * len(self._batch.slots) * self._facts.kv_bytes_per_token
        return held

    def run(self, rows: list[Row], chunk: int) -> tuple[Logits, list[Row]]:
        """Logits [n, vocabulary] of the rows that want a token, and these rows in that order."""
        decoding = [row for row in rows if len(row.tokens) == 1]
        parts: list[tuple[Logits, Row]] = []
        self.last_decode_seconds = None
        if decoding and self._facts.position_ids:
            before = time.perf_counter()
            parts += self._decode(decoding)
            self.last_decode_seconds = time.perf_counter() - before
            alone = [row for row in rows if len(row.tokens) > 1]
        else:
            alone = rows
        for row in alone:
            logits = self._prefill(row, chunk)
            if row.wants_token:
                parts.append((logits, row))
        parts = [(logits, row) for logits, row in parts if row.wants_token]
        if not parts:
            return np.zeros((0, self._facts.vocabulary), np.float32), []
        logits = np.stack([logits for logits, _ in parts]).astype(np.float32, copy=False)
        return logits, [row for _, row in parts]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of slot `source` into slot `target`."""
        cache = self._take(source)
        if tokens > cache[0].shape[1]:
            raise EngineFailed(
                f"slot {source} holds {cache[0].shape[1]} tokens, {tokens} were to be copied"
            )
        self._drop(target)
        self._caches[target] = [part[:, :tokens].copy() for part in cache]

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep only the first `tokens` entries of a slot."""
        cache = self._take(slot)
        if tokens < cache[0].shape[1]:
            self._caches[slot] = [part[:, :tokens].copy() for part in cache]

    def close(self) -> None:
        """Drop every cache."""
        self._caches = []
        self._batch = None

    def _check(self, row: Row, held: int) -> None:
        if row.start > held or row.start + len(row.tokens) > self._context:
            raise EngineFailed(
                f"slot {row.slot} holds {held} of {self._context} tokens; a row of "
                f"{len(row.tokens)} tokens cannot start at {row.start}"
            )

    def _prefill(self, row: Row, chunk: int) -> Logits:
        cache = self._take(row.slot)
        self._check(row, cache[0].shape[1])
        past = [
            self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(part[None, :, : row.start]))
            for part in cache
        ]
        out: npt.NDArray[Any] = np.zeros(0)
        for first in range(0, len(row.tokens), chunk):
            ids = row.tokens[first : first + chunk].astype(np.int64)[None]
            start = row.start + first
            mask = np.ones((1, start + ids.shape[1]), np.int64)
            out, past = self._call(
                ids, mask, np.arange(start, start + ids.shape[1], dtype=np.int64)[None], past
            )
        self._caches[row.slot] = [value.numpy()[0] for value in past]
        last: Logits = out[0, -1].astype(np.float32)
        return last

    def _decode(self, rows: list[Row]) -> list[tuple[Logits, Row]]:
        batch = self._assemble(rows)
        self._batch = None  # its values are consumed, also if the call fails
        starts = np.array([row.start for row in rows], np.int64)
        padding = np.array(batch.padding, np.int64)
        mask = (np.arange(batch.width + 1)[None] >= padding[:, None]).astype(np.int64)
        ids = np.array([[row.tokens[0]] for row in rows], np.int64)
        out, values = self._call(ids, mask, starts[:, None], batch.values)
        self._batch = Batch(batch.slots, batch.padding, values, batch.width + 1)
        return [(out[index, -1], row) for index, row in enumerate(rows)]

    def _assemble(self, rows: list[Row]) -> Batch:
        """The last step's batch where it fits these rows, else a new one, padded on the left."""
        slots = [row.slot for row in rows]
        batch = self._batch
        if batch is not None and batch.slots == slots:
            held = [batch.width - pad for pad in batch.padding]
            if held == [row.start for row in rows] and batch.width < self._context:
                return batch
        if batch is not None:
            self._take(batch.slots[0])  # also for members that sit this step out
        caches = [self._take(slot) for slot in slots]
        for row, cache in zip(rows, caches, strict=True):
            self._check(row, cache[0].shape[1])
        width = max(row.start for row in rows)
        values = []
        for part in range(len(self._names)):
            joined = np.zeros(
                (len(rows), self._facts.kv_heads, width, self._facts.head_dim), self._empty.dtype
            )
            for index, row in enumerate(rows):
                joined[index, :, width - row.start :] = caches[index][part][:, : row.start]
            values.append(self._ort.OrtValue.ortvalue_from_numpy(joined))
        for slot in slots:
            self._caches[slot] = [self._empty] * len(self._names)
        return Batch(slots, [width - row.start for row in rows], values, width)

    def _take(self, slot: int) -> Cache:
        """The slot's cache; where it is inside the batch, the batch is taken apart first."""
        batch = self._batch
        if batch is not None and slot in batch.slots:
            self._batch = None
            whole = [value.numpy() for value in batch.values]
            for index, member in enumerate(batch.slots):
                pad = batch.padding[index]
                self._caches[member] = [part[index, :, pad:].copy() for part in whole]
        return self._caches[slot]

    def _drop(self, slot: int) -> None:
        self._take(slot)
        self._caches[slot] = [self._empty] * len(self._names)

    def _call(
        self,
        ids: npt.NDArray[np.int64],
        mask: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        past: list[Any],
    ) -> tuple[npt.NDArray[Any], list[Any]]:
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        if self._facts.position_ids:
            binding.bind_cpu_input("position_ids", positions)
        for name, value in zip(self._names, past, strict=True):
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        return logits.numpy(), list(present)
