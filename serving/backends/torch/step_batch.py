"""One eager pass over decode rows and prompt pieces: its tokens, positions and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from serving.backends.kv_slots import RowMap
from serving.backends.torch.flight import known
from serving.backends.torch.model import (
    DecodeSpan,
    PromptSpan,
    SlotModel,
    Spans,
    additive_mask,
    seen_width,
)
from serving.backends.torch.packed import Packed
from serving.backends.torch.transfer import send
from serving.sampling.types import Row


class StepBatch:
    """Tokens of one pass, laid end to end. Adding rows moves their lengths in `rows`."""

    def __init__(self, model: SlotModel, rows: RowMap, columns: Tensor) -> None:
        self._model = model
        self._rows = rows
        self._columns = columns  # arange(model.width) on the device
        self._ids: list[Any] = []
        self._positions: list[Any] = []
        self._decoding: Sequence[int] = ()  # KV rows
        self._prompts: list[tuple[int, int, int, int]] = []  # first, count, row, start
        self._count = 0
        self.wanted: list[Row] = []  # rows that want a token, in the logits' order
        self._at: list[int] = []  # where in the pass their last token is

    def add_decode(self, rows: list[Row], places: Sequence[int]) -> None:
        """One token for each of the KV rows `places`, ascending; what is there of no row computes
        a dummy. Add it first. Plain attention takes rows that lie side by side."""
        count, index_of = len(places), {place: index for index, place in enumerate(places)}
        length = np.array([self._rows.length[place] for place in places], np.int64)
        tokens = np.zeros(count, np.int64)
        for row in sorted(rows, key=lambda row: self._rows.row_of[row.slot]):
            place = self._rows.row_of[row.slot]
            tokens[index_of[place]] = row.tokens[0]
            self._rows.length[place] += 1
            if row.wants_token:
                self.wanted.append(row)
                self._at.append(index_of[place])
        self._decoding = places
        self._ids.append(tokens)
        self._positions.append(length)
        self._count += count

    def add_prompt(self, row: Row, tokens: Any, start: int) -> None:
        """The piece `tokens` of a prompt from position `start` on."""
        place, count = self._rows.row_of[row.slot], len(tokens)
        self._prompts.append((self._count, count, place, start))
        self._ids.append(tokens.astype(np.int64))
        self._positions.append(np.arange(start, start + count))
        self._count += count
        self._rows.length[place] = start + count
        if row.wants_token:
            self.wanted.append(row)
            self._at.append(self._count - 1)

    def run(self, out: Tensor | None = None, drawn: Tensor | None = None) -> Tensor:
        """Logits float32 [n, vocabulary] of `wanted`, in `out` where there is one. `drawn`: see
        serving.backends.torch.flight.known."""
        model = self._model
        arrays = [np.concatenate(self._ids), np.concatenate(self._positions)]
        arrays.append(np.array(self._at, np.int64))
        packed = self._packed_arrays(arrays[1]) if model.is_packed else []
        ids, positions, at, *rest = send([*arrays, *packed], model.device)
        step: Spans | Packed
        if model.is_packed:
            counts, held = np.diff(packed[1]), packed[3]
            to_at, starts_q, starts_k, used = rest
            most = int(counts.max()), int(held.max())
            step = Packed(to_at, starts_q, starts_k, used, *most)
        else:
            step = self._spans(positions)
        everything = len(self._at) == self._count
        ids = known(ids, drawn)
        return model.forward(ids, positions, step, None if everything else at, out)

    def _packed_arrays(self, positions: Any) -> list[Any]:
        """`at`, `starts_q`, `starts_k` and `held` of serving.backends.torch.packed.Packed."""
        places = list(self._decoding)
        counts = [1] * len(places)
        held: list[int] = (positions[: len(places)] + 1).tolist()
        for _, count, place, start in self._prompts:
            places.append(place)
            counts.append(count)
            held.append(start + count)
        width = self._model.width
        firsts = np.array(places, np.int64) * width
        return [
            np.repeat(firsts, counts) + positions,
            np.cumsum([0, *counts]).astype(np.int32),
            np.append(firsts, 0).astype(np.int32),
            np.array(held, np.int32),
        ]

    def _spans(self, positions: Tensor) -> Spans:
        """What plain attention is told."""
        model, columns = self._model, self._columns
        spans: Spans = []
        if self._decoding:
            lo, hi = self._decoding[0], self._decoding[-1] + 1
            width = seen_width(int(self._positions[0].max()) + 1, model.width)
            allowed = columns[None, :width] <= positions[: hi - lo, None]
            mask = additive_mask(allowed, model.dtype)[:, None, None]
            spans.append(DecodeSpan(0, lo, hi, mask, columns[: hi - lo]))
        for first, count, place, start in self._prompts:
            causal: Tensor | None = None
            if start or model.groups_prompts:
                allowed = columns[None, : start + count] <= columns[start : start + count, None]
                causal = additive_mask(allowed, model.dtype)
            spans.append(PromptSpan(first, count, place, start, causal))
        return spans
