"""A model's text as the parts of an answer: reasoning, content, and calls of tools.

    splitter = Splitter(AnswerForm(reasoning="maybe", calls="hermes", names=frozenset({"add"})))
    [*splitter.push("<think>2+2</think>Four"), *splitter.finish()]
    # [Part("reasoning", "2+2"), Part("content", "Four")]

Text is given on as it comes; a call is given on whole. What looks like a call and is none, or was
cut off, is content.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from serving.http.chat.tools import Format, calls_in
from serving.http.wire.responses import ToolCall

THINK, THOUGHT = "<think>", "</think>"
MOST_BLANK = 1000  # characters before a reasoning; looked at again with each token
_CALL, _CALLED = "<tool_call>", "</tool_call>"

Reasoning = Literal["maybe", "open"]


class AnswerForm(msgspec.Struct, frozen=True):
    """What to look for. `reasoning`: None, "maybe" (the text may open it), "open" (the prompt has
    opened it). `calls`: their format; None: none are looked for."""

    reasoning: Reasoning | None = None
    calls: Format | None = None
    names: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        return self.reasoning is None and self.calls is None


class Part(NamedTuple):
    kind: Literal["reasoning", "content", "call"]
    text: str
    call: ToolCall | None = None


class Splitter:
    """Of one sequence. It holds back no more than the beginning of a mark, and calls."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._held = ""
        self._pieces: list[str] = []  # of a call, or of an answer that may be one
        self.has_reasoning = form.reasoning == "open"
        self._state = {"maybe": "start", "open": "opened", None: "blank"}[form.reasoning]

    @property
    def is_reasoning(self) -> bool:
        """The reasoning has begun and has not ended."""
        return self._state in ("opened", "reasoning")

    def push(self, text: str) -> list[Part]:
        """The parts that this text adds."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""
        text = "".join(self._pieces) + self._held
        self._held = ""
        self._pieces = []
        if self.is_reasoning:
            return [Part("reasoning", text)] if text else []
        if self._state == "whole":
            return self._calls(text, text)
        if self._state == "call":
            text = _CALL + text
        elif self._state == "blank":
            text = text.strip()
        return [Part("content", text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        """One piece of what is held; False: more text is needed."""
        match self._state:
            case "start" | "blank":
                return self._begin()
            case "opened":
                self._held = self._held.lstrip("\n")
                if self._held:
                    self._state = "reasoning"
                return bool(self._held)
            case "reasoning":
                before, ended = self._until(THOUGHT)
                if before:
                    parts.append(Part("reasoning", before))
                if ended:
                    self._state = "blank"
                return ended
            case "content" if self._form.calls == "hermes":
                before, ended = self._until(_CALL)
                if before:
                    parts.append(Part("content", before))
                if ended:
                    self._state = "call"
                return ended
            case "call":
                before, ended = self._until(_CALLED)
                self._pieces.append(before)
                if ended:
                    text = "".join(self._pieces)
                    self._pieces = []
                    parts += self._calls(text, f"{_CALL}{text}{_CALLED}")
                    self._state = "blank"
                return ended
            case "whole":
                self._pieces.append(self._held)
            case _:
                if self._held:
                    parts.append(Part("content", self._held))
        self._held = ""
        return False

    def _begin(self) -> bool:
        """Before the first word: of the text, or of what follows the reasoning."""
        text = self._held.lstrip()
        if self._state == "start":
            if text.startswith(THINK):
                self._held = text[len(THINK) :]
                self._state = "opened"
                self.has_reasoning = True
                return True
            if THINK.startswith(text) and len(self._held) <= MOST_BLANK:
                return False
        else:
            self._held = text
            if not text:
                return False
        is_call = self._form.calls == "list" or (self._form.calls == "llama3" and text[:1] == "{")
        self._state = "whole" if is_call else "content"
        return True

    def _until(self, mark: str) -> tuple[str, bool]:
        """Text up to the mark, which is taken away, or up to what may be its beginning."""
        before, found, rest = self._held.partition(mark)
        if not found:
            sizes = range(min(len(mark) - 1, len(before)), 0, -1)
            keep = next((size for size in sizes if before.endswith(mark[:size])), 0)
            before, rest = before[: len(before) - keep], before[len(before) - keep :]
        self._held = rest
        return before, bool(found)

    def _calls(self, text: str, shown: str) -> list[Part]:
        calls = calls_in(text, self._form.names)
        if not calls:
            return [Part("content", shown)] if shown else []
        return [Part("call", "", call) for call in calls]
