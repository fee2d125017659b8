"""One sequence as its reader sees it: an asynchronous iterator of Deltas that waits for nobody.

    async for delta in stream:
        ...
    stream.cancel()

The engine never waits for a reader: what arrives between two reads is merged into one Delta. With `whole=True` there is exactly one
Delta, at the end; since its reader has seen nothing before, such a sequence can begin anew on another engine up to its last token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serving.messages import Delta, Submit


class Stream:
    """The Deltas of one sequence, up to and including the one with `finish`. For one reader, on the event loop."""

    def __init__(self, submit: Submit, cancel: Callable[[int], None], arrived: float, whole: bool = False) -> None:
        self.id = submit.id
        self.submit = submit
        self.arrived = arrived  # the supervisor's clock
        self.attempts = 1  # engines it was given to
        self.finished = False
        self.handed_over = False  # the reader has seen something: it cannot begin anew
        self._whole = whole
        self._cancel = cancel
        self._pieces: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def cancel(self) -> None:
        """Give the sequence up; its last Delta (finish "cancelled") still comes. Harmless once it has finished."""
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
        self.finished = delta.finish is not None
        if self._waiter is not None and not self._waiter.done() and self._readable():
            self._waiter.set_result(None)

    def begin_anew(self) -> None:
        """Forget what has come so far; only while nothing has been handed over."""
        self._pieces = []
        self.attempts += 1

    def _readable(self) -> bool:
        return bool(self._pieces) and (self.finished or not self._whole)


def merged(pieces: list[Delta]) -> Delta:
    """Consecutive Deltas of one sequence (at least one) as one: text joined, tokens summed, details appended, what only one knows kept."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    details = [detail for piece in pieces for detail in piece.details]
    return Delta(
        id=first.id,
        tokens=sum(piece.tokens for piece in pieces),
        text="".join(piece.text for piece in pieces),
        finish=last.finish,
        details=details,
        cached_tokens=next((p.cached_tokens for p in pieces if p.cached_tokens is not None), None),
        error=last.error,
        queue_seconds=next((p.queue_seconds for p in pieces if p.queue_seconds is not None), None),
        prefill_seconds=next((p.prefill_seconds for p in pieces if p.prefill_seconds is not None), None),
        prompt_details=next((p.prompt_details for p in pieces if p.prompt_details is not None), None),
    )
