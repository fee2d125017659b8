"""A model's text as reasoning, content and calls, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.http.tool_calls import MOST_BLANK, AnswerForm, Part, Splitter

NAMES = frozenset({"add", "now"})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'
HERMES = AnswerForm("maybe", "hermes", NAMES)
LIST = AnswerForm(None, "list", NAMES)
ADD = ("call", "add", {"a": 1, "b": "</x>"})


def split(form: AnswerForm, text: str, size: int) -> list[Part]:
    splitter = Splitter(form)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return parts + splitter.finish()


def merged(parts: list[Part]) -> list[Any]:
    """Neighbouring texts of a kind as one; a call as (kind, name, arguments)."""
    found: list[Any] = []
    for part in parts:
        if part.call is not None:
            call = part.call.function
            found.append(("call", call.name, json.loads(call.arguments)))
        elif found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        (HERMES, "Four <b>\n\n is", [("content", "Four <b>\n\n is")]),
        (
            HERMES,
            f"<think>\n2 < 3</think>\n\nSo:\n{CALL}\n{CALL}",
            [("reasoning", "2 < 3"), ("content", "So:\n"), ADD, ADD],
        ),
        (HERMES, "<thin", [("content", "<thin")]),
        (HERMES, "<think>no end", [("reasoning", "no end")]),
        (AnswerForm("open"), "2+2</think>\n4", [("reasoning", "2+2"), ("content", "4")]),
        (AnswerForm("maybe"), "a <think>b</think>", [("content", "a <think>b</think>")]),
        # what is no call stays what the model said
        (HERMES, "<tool_call>{'a'}</tool_call>", [("content", "<tool_call>{'a'}</tool_call>")]),
        (HERMES, CALL[:-20], [("content", CALL[:-20])]),
        (
            HERMES,
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            [("content", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>')],
        ),
        (
            LIST,
            '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
            [("call", "now", {}), ("call", "now", {})],
        ),
        (LIST, '[{"name": "now", "argum', [("content", '[{"name": "now", "argum')]),
        (LIST, "[" * 5000 + '{"name": NaN}', [("content", "[" * 5000 + '{"name": NaN}')]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_text_has_the_same_parts_however_it_comes(
    form: AnswerForm, text: str, parts: list[Any], size: int
) -> None:
    assert merged(split(form, text, size)) == parts


def test_text_is_given_on_as_it_comes() -> None:
    splitter = Splitter(HERMES)
    assert splitter.push("<think>a") == [Part("reasoning", "a")]
    assert splitter.push("b</thi") == [Part("reasoning", "b")]
    assert splitter.push("nk>c<") == [Part("content", "c")]
    assert splitter.push("d") == [Part("content", "<d")]


@pytest.mark.parametrize("form", [HERMES, AnswerForm("open", "hermes", NAMES)])
@pytest.mark.parametrize("text", [" ", "\n", "\n </thi"])
def test_an_answer_of_blanks_is_not_held_back_and_looked_at_again(
    form: AnswerForm, text: str
) -> None:
    """Each push looked at all of it: of a megabyte, for seconds."""
    splitter = Splitter(form)
    for _ in range(50):
        splitter.push(text * 100)
    assert len(splitter._held) <= MOST_BLANK
