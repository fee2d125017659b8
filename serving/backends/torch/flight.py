"""A step that was launched and is not waited for: its tokens are on their way to the host.

They stay on the device too, where the next step takes them from before the host has seen any.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from serving.backends.torch.settings import memory_errors
from serving.backends.torch.transfer import fetch
from serving.sampling.types import DRAWN, Row, Sampled


class Flight:
    """See serving.backends.base.Launched. `rows`: those that want a token, in the logits' order."""

    def __init__(self, tokens: Tensor, good: Tensor, rows: list[Row]) -> None:
        self.drawn = tokens  # int64 [n] on the device
        self._place = {row.slot: place for place, row in enumerate(rows)}
        self._host, self._copied = fetch(torch.stack((tokens, good.long())))

    def tokens(self) -> list[Sampled | None]:
        """See serving.backends.base.Launched.tokens."""
        with memory_errors("a step that was launched"):
            if self._copied is not None:
                self._copied.synchronize()
        tokens, good = self._host.tolist()
        places = [self._place[slot] for slot in sorted(self._place)]
        return [Sampled(tokens[place]) if good[place] else None for place in places]

    def numbered(self, rows: list[Row]) -> list[Row]:
        """The rows of the next step with -1 - n for the n-th token that this one draws."""
        return [
            replace(row, tokens=np.array([-1 - self._place[row.slot]], np.int32))
            if row.tokens[0] == DRAWN
            else row
            for row in rows
        ]


def known(ids: Tensor, drawn: Tensor | None) -> Tensor:
    """Token ids where -1 - n stood for drawn[n]."""
    if drawn is None or not len(drawn):
        return ids
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_(min=0)], ids)
