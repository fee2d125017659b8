"""Serving a graph whose KV cache grows: past_key_values in, longer present.* out.

optimum exports it and most hub repositories hold it. Each step copies the whole cache (several
times slower than fixed_kv_cache.py). Decode rows of different lengths go through one call, padded
on the left. Graphs without position_ids count positions from the padded length: those run row by
row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from crossover.serving.backends.backend_interface import check_row
from crossover.serving.backends.onnx.onnx_folder import GraphFacts, Logits, Part
from crossover.serving.sampling.step_inputs import Row

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

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` entries of slot `source` into slot `target`."""
        assert tokens <= self._caches[source][0].shape[1]
        self._caches[target] = [part[:, :tokens].copy() for part in self._caches[source]]

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep only the first `tokens` entries of a slot."""
        self._caches[slot] = [part[:, :tokens] for part in self._caches[slot]]

    def sharing(self, prompts: list[Row]) -> list[list[Row]]:
        """Each alone."""
        return [[row] for row in prompts]

    def run(self, rows: list[Row]) -> Part:
        """Return rows of equally many tokens; in one call where the graph is told their
        positions."""
        for row in rows:
            check_row(row, self._caches[row.slot][0].shape[1], self._context)
        together = [rows] if self._facts.position_ids else [[row] for row in rows]
        logits = np.concatenate([self._call(each) for each in together])
        asked = [at for at, row in enumerate(rows) if row.wants_token]
        return logits[asked], [rows[at] for at in asked]

    def _call(self, rows: list[Row]) -> Logits:
        """Logits [rows, vocabulary] after the last tokens; the rows' caches grow."""
        starts, ids = [row.start for row in rows], np.array([row.tokens for row in rows], np.int64)
        width, count = max(starts), ids.shape[1]
        padding = np.array([width - start for start in starts])
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": ids,
            "attention_mask": (np.arange(width + count) >= padding[:, None]).astype(np.int64),
        }
        if self._facts.position_ids:
            feeds["position_ids"] = np.add.outer(np.array(starts), np.arange(count))
        for part, name in enumerate(self._pasts):
            shape = (len(rows), self._facts.kv_heads, width, self._facts.head_dim)
            feeds[name] = joined = np.zeros(shape, np.float32)
            for index, row in enumerate(rows):
                joined[index, :, padding[index] :] = self._caches[row.slot][part][:, : row.start]
        logits, *present = self._session.run(self._outputs, feeds)
        for index, row in enumerate(rows):
            self._caches[row.slot] = [whole[index, :, padding[index] :] for whole in present]
        result: Logits = logits[:, -1]
        return result
