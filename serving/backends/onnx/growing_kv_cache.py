"""Runs a graph whose KV cache grows: it takes past_key_values and returns the longer present.*.

optimum writes such graphs, and most repositories of the hub have them. Each step copies the whole
cache, so they are several times slower than fixed_kv_cache.py. Decode rows of different lengths run
in one call, padded on the left. A graph without position_ids would count the padding as positions,
so its rows run one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from crossover.serving.backends.backend_interface import check_row
from crossover.serving.backends.onnx.onnx_folder import GraphFacts, Logits, RowLogits
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
        """Copy the first `tokens` tokens of slot `source` to slot `target`."""
        assert tokens <= self._caches[source][0].shape[1]
        self._caches[target] = [part[:, :tokens].copy() for part in self._caches[source]]

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of a slot."""
        self._caches[slot] = [part[:, :tokens] for part in self._caches[slot]]

    def group_prompts(self, prompts: list[Row]) -> list[list[Row]]:
        """Return each prompt as a group of its own, which has a call of its own."""
        return [[row] for row in prompts]

    def run(self, rows: list[Row]) -> RowLogits:
        """Run rows that have the same number of tokens. Raises EngineFailed."""
        for row in rows:
            check_row(row, self._caches[row.slot][0].shape[1], self._context)
        calls = [rows] if self._facts.has_position_ids else [[row] for row in rows]
        logits = np.concatenate([self._call(call) for call in calls])
        sampling = [index for index, row in enumerate(rows) if row.wants_token]
        return RowLogits(logits[sampling], [rows[index] for index in sampling])

    def _call(self, rows: list[Row]) -> Logits:
        """Run the graph once and replace the caches of the rows by its longer ones. Return the
        logits after the last token of each row, [rows, vocabulary]."""
        ids = np.array([row.tokens for row in rows], np.int64)
        starts = np.array([row.start for row in rows])
        past_tokens, new_tokens = int(starts.max()), ids.shape[1]
        padding = past_tokens - starts  # by row
        columns = np.arange(past_tokens + new_tokens)
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": ids,
            "attention_mask": (columns >= padding[:, None]).astype(np.int64),
        }
        if self._facts.has_position_ids:
            feeds["position_ids"] = np.add.outer(starts, np.arange(new_tokens))
        for part, name in enumerate(self._pasts):
            shape = (len(rows), self._facts.kv_heads, past_tokens, self._facts.head_dim)
            feeds[name] = padded = np.zeros(shape, np.float32)
            for index, row in enumerate(rows):
                padded[index, :, padding[index] :] = self._caches[row.slot][part][:, : row.start]
        logits, *presents = self._session.run(self._outputs, feeds)
        for index, row in enumerate(rows):
            self._caches[row.slot] = [part[index, :, padding[index] :] for part in presents]
        last_logits: Logits = logits[:, -1]
        return last_logits
