"""Turns tokens into text as they arrive, with UTF-8 and stop strings that span several tokens.

    >>> text = StreamText([b"Hel", b"lo", b" wor", b"ld"], stops=["wor"])
    >>> [text.push(token) for token in (0, 1, 2)]
    [('Hel', False), ('lo', False), (' ', True)]

The deltas together are the decoded text, cut at the first stop string. Each token is decoded once.
Stop strings are looked for in the answer only, not in the model's thoughts before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

import msgspec

_UTF8 = codecs.getincrementaldecoder("utf-8")


class ThoughtMarks(msgspec.Struct, frozen=True, array_like=True):
    """How a model marks its thoughts. `is_open`: the prompt ends inside of one. `only_first`: the
    marks count only at the beginning of the text."""

    opens: list[str]
    closes: list[str]
    is_open: bool = False
    only_first: bool = False


class _ThoughtFilter:
    """Separates the thoughts of a text that comes in pieces, with the white space behind them, from
    its answer."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._marks = marks
        self._state: Literal["start", "thought", "gap", "answer"] = (
            "thought" if marks.is_open else "start"
        )
        self._unread = ""  # the end of the text, if it may be the beginning of a mark

    def push(self, text: str, last: bool = False) -> list[tuple[str, bool]]:
        """Return what this text adds in pieces, each with whether it belongs to the answer."""
        text = self._unread + text
        self._unread = ""
        pieces: list[tuple[str, bool]] = []
        while text:
            is_answer = self._state == "answer"
            if self._state in ("start", "gap"):
                begin = text.lstrip()
                marks = self._marks.opens if self._state == "start" or self._rereads else []
                if any(begin.startswith(mark) for mark in marks):
                    self._state = "thought"
                    continue
                if not last and any(mark.startswith(begin) for mark in marks or [""]):
                    if self._state == "gap":  # white space belongs to no answer
                        pieces.append((text[: len(text) - len(begin)], False))
                        text = begin
                    self._unread = text
                    return pieces
                if self._state == "gap":
                    pieces.append((text[: len(text) - len(begin)], False))
                    text = begin
                self._state = "answer"
                continue
            marks = self._marks.opens if is_answer else self._marks.closes
            if is_answer and not self._rereads:
                pieces.append((text, True))
                return pieces
            found = [(start, mark) for mark in marks if (start := text.find(mark)) >= 0]
            if found:
                start, mark = min(found)
                end = start if is_answer else start + len(mark)
                pieces.append((text[:end], is_answer))
                text = text[end:]
                self._state = "thought" if is_answer else "gap"
                continue
            held = 0 if last else max(_stop_prefix_length(text, mark) for mark in marks)
            sendable = len(text) - held
            pieces.append((text[:sendable], is_answer))
            self._unread = text[sendable:]
            return pieces
        return pieces

    @property
    def _rereads(self) -> bool:
        """Return whether another thought may follow."""
        return not self._marks.only_first


class StreamText:
    """The text of one sequence.

    `table`: the bytes of each token, by its id; b"" for special tokens. `include_stop`: the text
    ends with the stop string instead of before it. `thoughts`: how the text marks thoughts; None:
    it has none.
    """

    __slots__ = ("_table", "_stops", "_include_stop", "_decoder", "_unsent", "_thoughts")

    def __init__(
        self,
        table: Sequence[bytes],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        thoughts: ThoughtMarks | None = None,
    ) -> None:
        self._table = table
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._decoder = _UTF8("replace")
        self._unsent = ""  # the end of the text, if it may be the beginning of a stop string
        self._thoughts: _ThoughtFilter | None = None
        if thoughts is not None and self._stops:
            self._thoughts = _ThoughtFilter(thoughts)

    def push(self, token: int, check_stops: bool = True) -> tuple[str, bool]:
        """Return the text that can be sent after this token, and whether a stop string ended it."""
        new_text = self._decoder.decode(self._table[token])
        if not self._stops:
            return new_text, False
        if self._thoughts is None:
            return self._push_answer(new_text, check_stops)
        return self._push_pieces(self._thoughts.push(new_text), check_stops)

    def _push_pieces(self, pieces: list[tuple[str, bool]], check_stops: bool) -> tuple[str, bool]:
        """Do what `push` does, for text of which each piece is or is not part of the answer."""
        texts: list[str] = []
        for piece, is_answer in pieces:
            if is_answer:
                text, is_stopped = self._push_answer(piece, check_stops)
            else:
                text, is_stopped = self._unsent + piece, False
                self._unsent = ""
            texts.append(text)
            if is_stopped:
                return "".join(texts), True
        return "".join(texts), False

    def _push_answer(self, new_text: str, check_stops: bool) -> tuple[str, bool]:
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
        rest = self._decoder.decode(b"", True)
        if self._thoughts is not None:
            pieces = self._thoughts.push(rest, last=True)
            rest = "".join(piece for piece, _ in pieces)
        unsent = self._unsent + rest
        self._unsent = ""
        return unsent


def _stop_prefix_length(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
