"""The marks around the parts of an answer: reasoning, channels, function calls.

The chat template shows in which dialect a model marks them. Many marks are control tokens, which
decode to no text. `with_marks` gives the marks of the model's dialect their text, so that an answer
can be divided at them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from crossover.models.text.tokenizer import Tokenizer

# tags: <think>...</think>, <tool_call>...</tool_call>, as Qwen, Granite, DeepSeek and many others.
# gemma: <|channel>thought...<channel|>, <|tool_call>call:name{...}<tool_call|>, of Gemma 4.
# harmony: <|channel|>analysis<|message|>...<|end|>, of gpt-oss.
Dialect = Literal["tags", "gemma", "harmony"]

_MARKS: dict[Dialect, tuple[str, ...]] = {
    "tags": (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|tool_call|>",
        "<response>",
        "</response>",
    ),
    "gemma": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "harmony": (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
}


def dialect_of(template: str) -> Dialect:
    """Return the dialect of a chat template."""
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "<|channel>" in template or "<|tool_call>" in template:
        return "gemma"
    return "tags"


def with_marks(table: list[bytes], tokenizer: Tokenizer) -> list[bytes]:
    """Return a copy of `table`, the bytes of each token, in which control tokens that are marks
    have their text."""
    template = tokenizer.chat_template or ""
    marks = {mark for mark in _MARKS[dialect_of(template)] if mark in template}
    table_with_marks = [*table]
    for token in tokenizer.special_ids if marks else ():
        if token < len(table_with_marks) and (text := tokenizer.token_text(token)) in marks:
            table_with_marks[token] = text.encode()
    return table_with_marks
