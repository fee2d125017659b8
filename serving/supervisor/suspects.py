"""Requests that were with engines when those died: who of them is tried alone, and who is refused.

    suspects.died_with(requests, now)          # those that an engine had that died
    suspects.check(request, now)               # a new one; raises Unavailable
    suspects.admitted(id, request); suspects.showed(id); suspects.ended(id, naturally=True)

Two deaths make a suspect of all that were there: of suspects one at a time may be before its first
token, so that the next death tells who it was. Equal requests count as one, whatever their seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from serving.engine.messages import GenerationRequest
from serving.errors import Unavailable

SUSPECT_DEATHS = 2
REFUSED_DEATHS = 4
REFUSED_SECONDS = 600.0
_KEPT = 4096
_encoder = msgspec.msgpack.Encoder()


class _Deaths(NamedTuple):
    """Engines that died while they had a request."""

    engines: int = 0
    last: float = 0.0
    is_guilty: bool = False


class Suspects:
    """Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._deaths: dict[bytes, _Deaths] = {}
        self._marks: dict[int, bytes] = {}  # of suspects that were admitted
        self._alone: bytes | None = None  # of the one that has shown no token yet

    def check(self, request: GenerationRequest, now: float) -> None:
        """Raises Unavailable where an equal request was with too many engines that died."""
        mark = self._mark(request)
        deaths = self._deaths.get(mark, _Deaths())
        left = deaths.last + REFUSED_SECONDS - now
        if deaths.engines < SUSPECT_DEATHS or left <= 0:
            return
        if deaths.is_guilty:
            text = f"{deaths.engines} engines died while they answered this request"
            raise Unavailable(f"{text}; it is not tried again yet", left, "engine_killer")
        if self._alone not in (None, mark):
            text = "engines died while they answered this request; it is tried after another such"
            raise Unavailable(text, 1.0, "engine_suspect")

    def admitted(self, sequence: int, request: GenerationRequest) -> None:
        mark = self._mark(request)
        if self._deaths.get(mark, _Deaths()).engines >= SUSPECT_DEATHS:
            self._marks[sequence] = self._alone = mark

    def showed(self, sequence: int) -> None:
        """It has a token: the next suspect may come."""
        if self._alone is not None and self._marks.get(sequence) == self._alone:
            self._alone = None

    def ended(self, sequence: int, naturally: bool) -> None:
        self.showed(sequence)
        mark = self._marks.pop(sequence, None)
        if mark is not None and naturally:
            self._deaths.pop(mark, None)

    def died_with(self, requests: Iterable[GenerationRequest], now: float) -> list[bool]:
        """An engine died that had these. True for each that is not tried again: it was the one
        before its first token, or was with too many. However many are equal, it is one death."""
        marks = [self._mark(request, always=True) for request in requests]
        guilty = {mark: self._died_with(mark, now) for mark in dict.fromkeys(marks)}
        return [guilty[mark] for mark in marks]

    def _died_with(self, mark: bytes, now: float) -> bool:
        before = self._deaths.pop(mark, _Deaths())
        count = before.engines + 1 if now - before.last < REFUSED_SECONDS else 1
        is_guilty = mark == self._alone or count >= REFUSED_DEATHS
        self._deaths[mark] = _Deaths(count, now, is_guilty)
        if len(self._deaths) > _KEPT:
            del self._deaths[next(iter(self._deaths))]
        return is_guilty

    def _mark(self, request: GenerationRequest, always: bool = False) -> bytes:
        if not self._deaths and not always:
            return b""
        sampling = msgspec.structs.replace(request.sampling, seed=0)
        content = _encoder.encode((request.prompt, request.max_tokens, sampling))
        return hashlib.blake2b(content, digest_size=16).digest()
