"""One eager pass over decode rows and prompt pieces: its tokens, positions and spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from serving.backends.kv_slots import RowMap, Window
from serving.backends.torch.model import (
    DecodeSpan,
    PromptSpan,
    SlotModel,
    additive_mask,
    seen_width,
)
from serving.sampling.types import Row


class StepBatch:
    """Tokens of one pass, laid end to end. Adding rows moves their lengths in `rows`."""

    def __init__(self, model: SlotModel, rows: RowMap, columns: Tensor) -> None:
        self._model = model
        self._rows = rows
        self._columns = columns  # arange(model.width) on the device
        self._ids: list[Any] = []
        self._positions: list[Any] = []
        self._spans: list[DecodeSpan | PromptSpan] = []
        self._count = 0
        self.wanted: list[Row] = []  # rows that want a token, in the logits' order
        self._at: list[int] = []  # where in the pass their last token is

    def add_decode(self, rows: list[Row], window: Window) -> None:
        """One token for each row of the window; riders compute a dummy. Add it first."""
        lo, count = window.lo, window.hi - window.lo
        length = np.array(self._rows.length[lo : window.hi], np.int64)
        tokens = np.zeros(count, np.int64)
        for row in sorted(rows, key=lambda row: self._rows.row_of[row.slot]):
            place = self._rows.row_of[row.slot]
            tokens[place - lo] = row.tokens[0]
            self._rows.length[place] += 1
            if row.wants_token:
                self.wanted.append(row)
                self._at.append(place - lo)
        model, columns = self._model, self._columns
        width = seen_width(int(length.max()) + 1, model.width)
        allowed = columns[None, :width] <= torch.from_numpy(length).to(model.device)[:, None]
        mask = additive_mask(allowed, model.dtype)[:, None, None]
        self._spans.append(DecodeSpan(0, lo, window.hi, mask, columns[:count]))
        self._ids.append(tokens)
        self._positions.append(length)
        self._count += count

    def add_prompt(self, row: Row, tokens: Any, start: int) -> None:
        """The piece `tokens` of a prompt from position `start` on."""
        place, count, columns = self._rows.row_of[row.slot], len(tokens), self._columns
        mask = None
        if start:
            allowed = columns[None, : start + count] <= columns[start : start + count, None]
            mask = additive_mask(allowed, self._model.dtype)
        self._spans.append(PromptSpan(self._count, count, place, start, mask))
        self._ids.append(tokens.astype(np.int64))
        self._positions.append(np.arange(start, start + count))
        self._count += count
        self._rows.length[place] = start + count
        if row.wants_token:
            self.wanted.append(row)
            self._at.append(self._count - 1)

    def run(self) -> Tensor:
        """Logits float32 [n, vocabulary] of `wanted`."""
        device, at = self._model.device, self._at
        ids = torch.from_numpy(np.concatenate(self._ids)).to(device)
        positions = torch.from_numpy(np.concatenate(self._positions)).to(device)
        chosen = None
        if len(at) != self._count:
            chosen = torch.tensor(at, dtype=torch.int64, device=device)
        return self._model.forward(ids, positions, self._spans, chosen)
