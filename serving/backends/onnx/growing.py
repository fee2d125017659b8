"""Serving a graph whose KV cache grows: past_key_values in, longer present.* out.

optimum exports it and most hub repositories hold it. Each step copies the whole cache (several
times slower than fused.py). Decode rows of different lengths go through one call, padded on the
left. Graphs without position_ids count positions from the padded length: those run row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.backends.onnx.graph import GraphFacts, Logits, Part
from serving.errors import EngineFailed
from serving.sampling.step_rows import Row

Cache = list[npt.NDArray[np.float32]]  # per layer key, value: [kv_heads, tokens, head_dim]


class GrowingGraph:
    """A session and one cache per slot."""

    def __init__(self, session: Any, facts: GraphFacts, slots: int, context_tokens: int) -> None:
        self._session = session
        self._facts = facts
        self._context = context_tokens
        self._pasts = [f"past_key_values.{name}" for name in facts.kv_names]
        self._outputs = ["logits", *(f"present.{name}" for name in facts.kv_names)]
        empty = np.zeros((facts.kv_heads, 0, facts.head_dim), np.float32)
        self._caches: list[Cache] = [[empty] * len(self._pasts) for _ in range(slots)]

    def decode(self, rows: list[Row]) -> Part:
        """Rows of one token each."""
        together = [rows] if self._facts.position_ids else [[row] for row in rows]
        logits = np.concatenate([self._call(each, 0, 1) for each in together])
        asked = [at for at, row in enumerate(rows) if row.wants_token]
        return logits[asked], [rows[at] for at in asked]

    def prefill(self, rows: list[Row], chunk: int) -> Iterator[Part]:
        """Longer rows, in calls of at most `chunk` tokens."""
        for row in rows:
            for first in range(0, len(row.tokens), chunk):
                logits = self._call([row], first, min(len(row.tokens), first + chunk))
            if row.wants_token:
                yield logits, [row]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of slot `source` into slot `target`."""
        held = self._caches[source][0].shape[1]
        if tokens > held:
            raise EngineFailed(f"slot {source} holds {held} tokens, {tokens} were to be copied")
        self._caches[target] = [part[:, :tokens].copy() for part in self._caches[source]]

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep only the first `tokens` entries of a slot."""
        self._caches[slot] = [part[:, :tokens] for part in self._caches[slot]]

    def _call(self, rows: list[Row], first: int, last: int) -> Logits:
        """Logits [rows, vocabulary] after tokens first..last of rows, padded on the left; the
        rows' caches grow by them."""
        starts = [row.start + first for row in rows]
        for row, start in zip(rows, starts, strict=True):
            held = self._caches[row.slot][0].shape[1]
            if start > held or row.start + len(row.tokens) > self._context:
                raise EngineFailed(
                    f"slot {row.slot} holds {held} of {self._context} tokens; a row of "
                    f"{len(row.tokens)} tokens cannot start at {row.start}"
                )
        width, count = max(starts), last - first
        padding = np.array([width - start for start in starts])
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.stack([row.tokens[first:last] for row in rows]).astype(np.int64),
            "attention_mask": (np.arange(width + count) >= padding[:, None]).astype(np.int64),
        }
        if self._facts.position_ids:
            feeds["position_ids"] = np.add.outer(np.array(starts), np.arange(count))
        for part, name in enumerate(self._pasts):
            shape = (len(rows), self._facts.kv_heads, width, self._facts.head_dim)
            feeds[name] = joined = np.zeros(shape, np.float32)
            for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
                joined[index, :, width - start :] = self._caches[row.slot][part][:, :start]
        logits, *present = self._session.run(self._outputs, feeds)
        for index, row in enumerate(rows):
            self._caches[row.slot] = [whole[index, :, padding[index] :] for whole in present]
        result: Logits = logits[:, -1]
        return result
