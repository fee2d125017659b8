"""Turns tokens into text as they arrive, with UTF-8 and stop strings that span several tokens.

    >>> text = StreamText([b"Hel", b"lo", b" wor", b"ld"], stops=["wor"])
    >>> [text.push(token) for token in (0, 1, 2)]
    [('Hel', False), ('lo', False), (' ', True)]

The deltas together are the decoded text, cut at the first stop string. Each token is decoded once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_UTF8 = codecs.getincrementaldecoder("utf-8")


class StreamText:
    """One sequence's text. `table` maps token id to bytes (special tokens to b"")."""

    __slots__ = ("_table", "_stops", "_include_stop", "_decoder", "_held")

    def __init__(
        self, table: Sequence[bytes], stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._table = table
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._decoder = _UTF8("replace")
        self._held = ""  # text that may begin a stop string

    def push(self, token: int, check_stops: bool = True) -> tuple[str, bool]:
        """Return the text that can be sent after this token, and whether a stop string ended it."""
        new_text = self._decoder.decode(self._table[token])
        if not self._stops:
            return new_text, False
        text = self._held + new_text
        self._held = ""
        if not check_stops:
            return text, False
        # The earliest stop string; of several that start there, the longest.
        matches = [(at, -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            first, length = min(matches)
            return text[: first - length] if self._include_stop else text[:first], True
        held_characters = max(_beginning(text, stop) for stop in self._stops)
        self._held = text[len(text) - held_characters :]
        return text[: len(text) - held_characters], False

    def finish(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD."""
        held_text = self._held + self._decoder.decode(b"", True)
        self._held = ""
        return held_text


def _beginning(text: str, stop: str) -> int:
    """Return how many characters at the end of the text begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
