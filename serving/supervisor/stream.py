"""One sequence as its reader sees it: an asynchronous iterator of Deltas.

    async for delta in stream:
        ...
    stream.cancel()

The engine never waits for a reader: what arrives between two reads is merged into one Delta. Where
the request says `whole` there is one Delta, at the end; such a sequence can begin again on another
engine up to its last token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

from serving.engine.messages import Delta, GenerationRequest

MOST_PIECES = 1000  # that a reader leaves are merged: a hundred thousand at once take 50 ms
# Of a Delta: known once in a sequence.
_ONCE = ("cached_tokens", "queue_seconds", "prefill_seconds", "reasoning_tokens")


class Stream:
    """The Deltas of one sequence, up to the one with `finish`. For one reader, on one loop."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        cancel: Callable[[int], None],
        arrived: float,
    ) -> None:
        self.id = number
        self.request = request
        self.arrived = arrived  # the supervisor's clock
        self.places: list[int] = []  # of the engines it was given to
        self.finished = False
        self.handed_over = False  # the reader has seen something: it cannot begin again
        self._cancel = cancel
        self._pieces: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def cancel(self) -> None:
        """Give the sequence up; its last Delta (finish "cancelled") still comes."""
        if not self.finished:
            self._cancel(self.id)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._readable():
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = merged(self._pieces)
        self._pieces = []
        self.handed_over = True
        self._ended = delta.finish is not None
        return delta

    def push(self, delta: Delta) -> None:
        """The supervisor's side: one more Delta. Ignored after the last one."""
        if self.finished:
            return
        self._pieces.append(delta)
        if len(self._pieces) >= MOST_PIECES:
            self._pieces = [merged(self._pieces)]
        self.finished = delta.finish is not None
        if self._waiter is not None and not self._waiter.done() and self._readable():
            self._waiter.set_result(None)

    def start_again(self) -> None:
        """Forget what has come so far; only while nothing has been handed over."""
        self._pieces = []

    def _readable(self) -> bool:
        if self.finished or self.request.whole:
            return bool(self._pieces) and self.finished
        return any(piece.tokens for piece in self._pieces)


def merged(pieces: list[Delta]) -> Delta:
    """Consecutive Deltas of one sequence (at least one) as one."""
    if len(pieces) == 1:
        return pieces[0]

    def first(field: str) -> Any:
        values = (getattr(piece, field) for piece in pieces)
        return next((value for value in values if value is not None), None)

    scores = [piece.prompt_details for piece in pieces if piece.prompt_details is not None]
    return Delta(
        id=pieces[0].id,
        tokens=sum(piece.tokens for piece in pieces),
        text="".join(piece.text for piece in pieces),
        finish=pieces[-1].finish,
        details=[detail for piece in pieces for detail in piece.details],
        prompt_details=list(chain(*scores)) if scores else None,
        error=pieces[-1].error,
        parameter=pieces[-1].parameter,
        **{name: first(name) for name in _ONCE},
    )
