"""Tokens to text as they come: UTF-8 across token borders, stop strings across delta borders.

    >>> text = StreamText([b"Hel", b"lo", b" wor", b"ld"], stops=["wor"])
    >>> [text.push(token) for token in (0, 1, 2)]
    [('Hel', False), ('lo', False), (' ', True)]

The deltas together are the decoded text, cut at the first stop string. Each token is decoded once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

_UTF8 = codecs.getincrementaldecoder("utf-8")


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each beginning of a stop string, how long its longest end is that also begins it."""
    found = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[place] != stop[matched]:
            matched = found[matched - 1]
        matched += stop[place] == stop[matched]
        found[place] = matched
    return tuple(found)


class _Stop:
    """One stop string in a text that grows (Knuth, Morris and Pratt 1977): a few steps a character,
    whatever the strings are."""

    __slots__ = ("text", "matched", "_fallbacks")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters at the end of the text so far that begin the string
        self._fallbacks = _fallbacks(text)

    def end_in(self, fresh: str) -> int | None:
        """How many characters of `fresh` end the string's first occurrence; None: it has none."""
        text, fallbacks, matched = self.text, self._fallbacks, self.matched
        for place, character in enumerate(fresh, 1):
            while matched and character != text[matched]:
                matched = fallbacks[matched - 1]
            matched += character == text[matched]
            if matched == len(text):
                return place
        self.matched = matched
        return None


class StreamText:
    """One sequence's text. `table` maps token id to bytes (special tokens to b"")."""

    __slots__ = ("_table", "_stops", "_include_stop", "_decoder", "_held")

    def __init__(
        self, table: Sequence[bytes], stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._table = table
        self._stops = [_Stop(stop) for stop in stops if stop]
        self._include_stop = include_stop
        self._decoder = _UTF8("replace")
        self._held = ""

    def push(self, token: int, check_stops: bool = True) -> tuple[str, bool]:
        """Text that can be sent after this token, and whether a stop string ends the sequence."""
        fresh = self._decoder.decode(self._table[token])
        if not self._stops:
            return fresh, False
        text = self._held + fresh
        if not check_stops:
            self._held = ""
            for stop in self._stops:
                stop.matched = 0
            return text, False
        first, length = len(text), 0
        for stop in self._stops:
            end = stop.end_in(fresh)
            if end is not None:
                found = len(self._held) + end - len(stop.text)
                if (found, -len(stop.text)) < (first, -length):
                    first, length = found, len(stop.text)
        if length:
            self._held = ""
            return text[: first + length] if self._include_stop else text[:first], True
        keep = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""
        rest = self._held + self._decoder.decode(b"", True)
        self._held = ""
        return rest
