"""The answers of other families as they write them: channels of gpt-oss, Gemma 4's marks, tags of
Qwen3.5 and Granite. Each is split into reasoning, content and calls, or is plain content; no mark
is ever left beside what it marks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from crossover.models.text.answer_marks import dialect_of, with_marks
from crossover.serving.http.answer_parts import OutputParser, format_of_output
from crossover.serving.http.tool_calls import call_format_of

PARAMETERS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
    "edit": {
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array"},
            "dry": {"type": "boolean"},
        }
    },
}
# What each template has of the marks that it teaches; the rest of it is of no matter here.
HARMONY = "<|start|>assistant<|channel|>analysis<|message|>{{ m }}<|end|> to=functions."
GEMMA = '<|turn>model\n<|channel>thought\n<channel|> <|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
QWEN35 = "<think>\n</think> <tool_call>\n<function=f>\n<parameter=a>\n</parameter></function>"
QWEN3_CODER = QWEN35.removeprefix("<think>\n</think> ")
GRANITE3 = "<think></think> <response></response> <|tool_call|>[]"
GRANITE4 = '<tool_call>{"name": <n>, "arguments": <a>}</tool_call>'
PLAIN = "{{ m.content }}"
END_THINK = "<think>\n"

Parts = list[tuple[Any, ...]]
WEATHER = ("call", "weather", {"city": "Oslo", "days": 2})
CASES: dict[str, tuple[str, str, str, Parts]] = {
    # name: template, end of the prompt, what the model says, its parts
    "gpt-oss thinks and answers": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>2+2 is easy.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Four.",
        [("reasoning", "2+2 is easy."), ("content", "Four.")],
    ),
    "gpt-oss calls": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}<|call|>',
        [("reasoning", "I ask."), WEATHER],
    ),
    "gpt-oss calls, the recipient first, and the end token drawn": (
        HARMONY,
        "<|start|>assistant",
        " to=functions.weather<|channel|>commentary<|message|>" + json.dumps(WEATHER[2]),
        [WEATHER],
    ),
    "gpt-oss says what it is about to do, and calls twice": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>"
        "commentary to=functions.now<|message|>{}<|call|><|start|>assistant<|channel|>commentary "
        "to=functions.now<|message|>{}",
        [("content", "Let me look."), ("call", "now", {}), ("call", "now", {})],
    ),
    "gpt-oss cut off in its thoughts": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Well, if",
        [("reasoning", "Well, if")],
    ),
    "gpt-oss cut off in a header": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>final<|message|>Four.<|end|><|start|>assis",
        [("content", "Four.")],
    ),
    "gpt-oss calls what it was not told of": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        [("content", "{}")],
    ),
    "gpt-oss without channels": (HARMONY, "<|start|>assistant", "Four.", [("content", "Four.")]),
    "gpt-oss whose prompt has opened the analysis": (
        HARMONY,
        "<|start|>assistant<|channel|>analysis<|message|>",
        "2+2<|end|><|start|>assistant<|channel|>final<|message|>Four",
        [("reasoning", "2+2"), ("content", "Four")],
    ),
    "gemma answers": (GEMMA, "<|turn>model\n", "Four.", [("content", "Four.")]),
    "gemma thinks and answers": (
        GEMMA,
        "<|turn>model\n",
        "<|channel>thought\n2+2<channel|>Four.",
        [("reasoning", "2+2"), ("content", "Four.")],
    ),
    "gemma with an empty thought": (
        GEMMA,
        "<|turn>model\n",
        "<|channel>thought\n<channel|>Four.",
        [("content", "Four.")],
    ),
    "gemma whose prompt has opened the thought": (
        GEMMA,
        "<|turn>model\n<|channel>thought\n",
        "2+2<channel|>Four.",
        [("reasoning", "2+2"), ("content", "Four.")],
    ),
    "gemma calls": (
        GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nI ask.<channel|><|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}'
        "<tool_call|>",
        [("reasoning", "I ask."), WEATHER],
    ),
    "gemma calls with a nested value, quotes and commas in a text": (
        GEMMA,
        "<|turn>model\n",
        'So:<|tool_call>call:now{a:[1,{b:<|"|>x, "y"}<|"|>}],c:null,d:true}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        [
            ("content", "So:"),
            ("call", "now", {"a": [1, {"b": 'x, "y"}'}], "c": None, "d": True}),
            ("call", "now", {}),
        ],
    ),
    "gemma's call cut off": (
        GEMMA,
        "<|turn>model\n",
        "<|tool_call>call:weather{city:",
        [("content", "call:weather{city:")],
    ),
    "qwen3.5 thinks and calls": (
        QWEN35,
        END_THINK,
        "I ask.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>"
        "\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        [("reasoning", "I ask.\n"), WEATHER],
    ),
    "qwen3.5: a text that looks like a number stays one": (
        QWEN35,
        "<think>\n\n</think>\n\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n"
        "</tool_call>",
        [("call", "weather", {"city": "12"})],
    ),
    "qwen3.5: no parameters, and JSON as its elders": (
        QWEN35,
        "<think>\n\n</think>\n\n",
        '<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>{"name": "now", '
        '"arguments": {}}</tool_call>',
        [("call", "now", {}), ("call", "now", {})],
    ),
    "qwen3.5 calls what it was not told of": (
        QWEN35,
        END_THINK,
        "</think><tool_call><function=rm></function></tool_call>",
        [("content", "<tool_call><function=rm></function></tool_call>")],
    ),
    "qwen3-coder calls without the mark before it": (
        QWEN3_CODER,
        "assistant\n",
        "I will look.\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n"
        "2\n</parameter>\n</function>\n</tool_call>",
        [("content", "I will look.\n"), WEATHER],
    ),
    "qwen3-coder calls without a mark before or behind it": (
        QWEN3_CODER,
        "assistant\n",
        "<function=now>\n</function>",
        [("call", "now", {})],
    ),
    "qwen3-coder speaks of a function that it does not have": (
        QWEN3_CODER,
        "assistant\n",
        "Write <function=f> there.",
        [("content", "Write <function=f> there.")],
    ),
    "granite 4 calls": (
        GRANITE4,
        "assistant",
        f"So:\n<tool_call>\n{json.dumps({'name': 'weather', 'arguments': WEATHER[2]})}\n"
        "</tool_call>",
        [("content", "So:\n"), WEATHER],
    ),
    "granite 3 thinks and answers": (
        GRANITE3,
        "assistant",
        "<think>2+2</think>\n<response>Four.</response>",
        [("reasoning", "2+2"), ("content", "Four.")],
    ),
    "granite 3 calls": (
        GRANITE3,
        "assistant",
        f"<|tool_call|>{json.dumps([{'name': 'weather', 'arguments': WEATHER[2]}])}",
        [WEATHER],
    ),
}


# Whole answers, as these models write them when they work on something.
CODE = 'def f(a):\n    """Return <b>."""\n    return {"a": a < 2} if a else [\'</p>\', "{}"]\n'
EDIT = (
    "call",
    "edit",
    {"path": "a/b.py", "text": CODE.rstrip("\n"), "lines": [1, 2], "dry": False},
)
GEMMA_EDIT = ("call", "edit", {"path": "a/b.py", "text": CODE, "lines": [1, 2], "dry": False})
SMOLLM2 = (  # SmolLM2-135M-Instruct, greedy
    '```python\ndef is_even(num):\n    """Return True if the given number is even, False if it\'s '
    'odd."""\n    if num % 2 == 0:\n        return "Even"\n    else:\n        return "Odd"\n```\n\n'
    "This function uses the modulo operator (`%`) to check if the given number is even or odd. If "
    'it\'s even, it returns "Even". If it\'s odd, it returns "Odd".'
)
WHOLE: dict[str, tuple[str, str, str, Parts]] = {
    "gpt-oss works": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>The user wants an edit.\n\nWe need `edit`; it takes "
        '{"path": ...}. Then check the weather < 3 days.<|end|><|start|>assistant<|channel|>'
        "commentary<|message|>I change the file, then I look.\n\n1. edit\n2. look<|end|><|start|>"
        f"assistant<|channel|>commentary to=functions.edit <|constrain|>json<|message|>"
        f"{json.dumps(GEMMA_EDIT[2])}<|call|><|start|>assistant to=functions.weather<|channel|>"
        f"commentary json<|message|>{json.dumps(WEATHER[2], indent=1)}<|call|>",
        [
            (
                "reasoning",
                "The user wants an edit.\n\nWe need `edit`; it takes "
                '{"path": ...}. Then check the weather < 3 days.',
            ),
            ("content", "I change the file, then I look.\n\n1. edit\n2. look"),
            GEMMA_EDIT,
            WEATHER,
        ],
    ),
    "gpt-oss thinks twice and answers in Markdown": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Then: a|b.<|end|><|start|>assistant<|channel|>final<|message|>| a | b |\n|---|---|\n| "
        "`<|` | 1 < 2 |\n\n```html\n<p>&lt;</p>\n```<|return|>",
        [
            ("reasoning", "First.Then: a|b."),
            ("content", "| a | b |\n|---|---|\n| `<|` | 1 < 2 |\n\n```html\n<p>&lt;</p>\n```"),
        ],
    ),
    "gpt-oss answers with JSON that it was held to": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>JSON.<|end|><|start|>assistant<|channel|>final <|constrain|>"
        'json<|message|>{"a": [1, 2]}<|return|>',
        [("reasoning", "JSON."), ("content", '{"a": [1, 2]}')],
    ),
    "gpt-oss calls from its analysis": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>analysis "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}<|call|>',
        [("reasoning", "Look."), WEATHER],
    ),
    "qwen3.5 works": (
        QWEN35,
        END_THINK,
        "The user wants an edit: if a < 2 then <b>.\n\nLet me do so.\n</think>\n\nI change the "
        "file, then I look.\n\n<tool_call>\n<function=edit>\n<parameter=path>\na/b.py\n"
        "</parameter>\n"
        f"<parameter=text>\n{CODE}</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n"
        "<parameter=dry>\nfalse\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        [
            ("reasoning", "The user wants an edit: if a < 2 then <b>.\n\nLet me do so.\n"),
            ("content", "I change the file, then I look.\n\n"),
            EDIT,
            WEATHER,
        ],
    ),
    "qwen3.5 thinks and answers in Markdown": (
        QWEN35,
        END_THINK,
        "Is 1 < 2?\n</think>\n\nYes: `1 < 2`.\n\n```html\n<p></p>\n```",
        [("reasoning", "Is 1 < 2?\n"), ("content", "Yes: `1 < 2`.\n\n```html\n<p></p>\n```")],
    ),
    "qwen3-coder works": (
        QWEN3_CODER,
        "assistant\n",
        "I change the file.\n<tool_call>\n<function=edit>\n<parameter=path>\na/b.py\n</parameter>\n"
        f"<parameter=text>\n{CODE}</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n"
        "<parameter=dry>\nfalse\n</parameter>\n</function>\n</tool_call>",
        [("content", "I change the file.\n"), EDIT],
    ),
    "gemma works": (
        GEMMA,
        "<|turn>model\n",
        "<|channel>thought\nThe user wants an edit: a < 2, {b}.\n\nLet me do so.\n<channel|>I "
        'change the file.\n<|tool_call>call:edit{path:<|"|>a/b.py<|"|>,text:<|"|>'
        f'{CODE}<|"|>,lines:[1,2],dry:false}}<tool_call|><|tool_call>call:weather{{city:<|"|>Oslo<|"|>,'
        "days:2}<tool_call|>",
        [
            ("reasoning", "The user wants an edit: a < 2, {b}.\n\nLet me do so.\n"),
            ("content", "I change the file.\n"),
            GEMMA_EDIT,
            WEATHER,
        ],
    ),
    "granite 4 works": (
        GRANITE4,
        "assistant",
        "I change the file.\n<tool_call>\n"
        f"{json.dumps({'name': 'edit', 'arguments': GEMMA_EDIT[2]})}\n</tool_call>\n"
        f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': WEATHER[2]})}\n"
        "</tool_call>",
        [("content", "I change the file.\n"), GEMMA_EDIT, WEATHER],
    ),
    "granite 4 passes the arguments as a text": (
        GRANITE4,
        "assistant",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"days\\": 2}"}'
        "</tool_call>",
        [WEATHER],
    ),
} | {
    f"an answer of SmolLM2, which has no marks, where {name} is expected": (
        template,
        "assistant\n",
        SMOLLM2,
        [("content", SMOLLM2)],
    )
    for name, template in (
        ("gpt-oss", HARMONY),
        ("gemma", GEMMA),
        ("qwen3.5", QWEN35),
        ("qwen3-coder", QWEN3_CODER),
        ("granite 3", GRANITE3),
        ("granite 4", GRANITE4),
    )
}
MARKS = ("<|", "<think>", "</think>", "<tool_call", "</tool_call", "<function", "<channel|>")


def split(name: str, cases: dict[str, tuple[str, str, str, Parts]], *pieces: int) -> Parts:
    """The parts of a case's answer that comes in pieces of these sizes, the last size repeated."""
    template, end, text, _ = cases[name]
    calls = call_format_of(template)
    form = format_of_output(template, f"a prompt {end}", calls, PARAMETERS, is_constrained=False)
    assert form is not None
    splitter, found, start, sizes = OutputParser(form), list[tuple[Any, ...]](), 0, [*pieces]
    while start < len(text):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        for part in splitter.push(text[start : start + size], start + size >= len(text)):
            if part.call is not None:
                call = part.call.function
                found.append(("call", call.name, json.loads(call.arguments)))
            elif found and found[-1][0] == part.kind:
                found[-1] = (part.kind, found[-1][1] + part.text)
            else:
                found.append((part.kind, part.text))
        start += size
    return [one for one in found if one[0] == "call" or one[1].strip()]


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_split_as_its_family_writes_it(name: str, size: int) -> None:
    assert split(name, CASES, size) == CASES[name][3]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_is_split_alike_wherever_it_is_cut_and_leaves_no_mark(name: str) -> None:
    """In two pieces, cut at each place, and in even pieces of each size to 40 characters."""
    *_, text, expected = WHOLE[name]
    found = split(name, WHOLE, len(text))
    assert found == expected
    shown = "".join(str(part[1]) for part in found if part[0] != "call").replace("`<|`", "")
    assert not [mark for mark in MARKS if mark in shown]
    for cut in range(1, len(text)):
        assert split(name, WHOLE, cut, len(text)) == expected, cut
    for size in range(1, 41):
        assert split(name, WHOLE, size) == expected, size


def test_answers_without_marks_or_under_a_grammar_are_only_content() -> None:
    assert call_format_of(PLAIN) is None
    assert format_of_output(PLAIN, "x", None, {}, is_constrained=False) is None
    for template in (HARMONY, GEMMA, QWEN35):
        assert format_of_output(template, "x", None, {}, is_constrained=True) is None
        listed = format_of_output(template, "x", "list", PARAMETERS, is_constrained=True)
        assert listed is not None and (listed.reasoning, listed.dialect) == (None, "tags")


class Marks:
    """A tokenizer with control tokens."""

    def __init__(self, template: str, tokens: list[str]) -> None:
        self.chat_template, self._tokens = template, tokens
        self.special_ids = frozenset(range(len(tokens)))

    def token_text(self, token: int) -> str:
        return self._tokens[token]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (HARMONY, ["<|start|>", "<|message|>", "<|end|>"]),
        (GEMMA, ["<|channel>", '<|"|>']),
        (PLAIN, []),
        (GRANITE4, ["<tool_call>"]),
    ],
)
def test_control_tokens_that_mark_a_dialect_have_their_text(
    template: str, shown: list[str]
) -> None:
    names = ["<|start|>", "<|message|>", "<|end|>", "<|channel>", '<|"|>', "<tool_call>", "<eos>"]
    marks: Any = Marks(template, names)
    table = with_marks([b""] * len(names), marks)
    assert [text.decode() for text in table if text] == shown
    assert dialect_of(PLAIN) == "tags"


@pytest.mark.parametrize("tags", ["<parameter=a>", "<parameter=a>\n</parameter>", "\n"])
def test_a_call_with_many_tags_takes_time_linear_in_them(tags: str) -> None:
    output_format = format_of_output(QWEN3_CODER, "assistant\n", "hermes", PARAMETERS, False)
    assert output_format is not None
    parser = OutputParser(output_format)
    started = time.process_time()
    parts = parser.push("<tool_call>\n<function=now>", False)
    for _ in range(26_000):  # as an engine sends it, token by token
        parts += parser.push(tags, False)
    parts += parser.push("</function></tool_call>", True)
    assert time.process_time() - started < 3  # 0.1 s on an idle core
    assert [part.kind for part in parts] == ["content" if tags == "<parameter=a>" else "call"]
