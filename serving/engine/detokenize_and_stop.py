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
    """The text of one sequence.

    `table`: the bytes of each token, by its id; b"" for special tokens. `include_stop`: the text
    ends with the stop string instead of before it.
    """

    __slots__ = ("_table", "_stops", "_include_stop", "_decoder", "_unsent")

    def __init__(
        self, table: Sequence[bytes], stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._table = table
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._decoder = _UTF8("replace")
        self._unsent = ""  # the end of the text, if it may be the beginning of a stop string

    def push(self, token: int, check_stops: bool = True) -> tuple[str, bool]:
        """Return the text that can be sent after this token, and whether a stop string ended it."""
        new_text = self._decoder.decode(self._table[token])
        if not self._stops:
            return new_text, False
        text = self._unsent + new_text
        self._unsent = ""
        if not check_stops:
            return text, False
        # The earliest stop string. If several start at the same character, the longest of them.
        matches = [(start, -len(stop)) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            start, negative_length = min(matches)
            end = start - negative_length if self._include_stop else start
            return text[:end], True
        unsent = max(_stop_prefix_length(text, stop) for stop in self._stops)
        sendable = len(text) - unsent
        self._unsent = text[sendable:]
        return text[:sendable], False

    def finish(self) -> str:
        """Return the text that has not been sent. An incomplete character becomes U+FFFD."""
        unsent = self._unsent + self._decoder.decode(b"", True)
        self._unsent = ""
        return unsent


def _stop_prefix_length(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
