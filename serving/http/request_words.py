"""Turns msgspec's validation errors into sentences for people.

explain("Invalid enum value 'xml' - at `$.response_format.type`", ChatRequest)
# ("response_format.type", "'xml' is not supported here. Use 'text', 'json_object', ...")
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as inspect

MAX_CHARACTERS = 600  # of msgspec's message, which repeats a key or value of any length
# msgspec's message, and the path that it names: "Expected `int`, got `str` - at `$.n`".
_MESSAGE_AND_PATH = re.compile(
    r"^(?P<message>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL
)
# The messages that are reworded.
_FIELD = re.compile(r"(?P<problem>unknown|missing required) field `(?P<name>.*)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>.*)`, got `(?P<got>.*)`")
_BOUND = re.compile(r"Expected `(?P<type>\w+)`(?: of length)? (?P<sign>>=|<=|>|<) (?P<limit>.*)")
_WRONG_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
# One step of a path: a key, or an index in brackets, for which the group is None.
_PATH_STEP = re.compile(r"(?P<key>[^.\[\]]+)|\[[^\]]*\]")
_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_SIGN_WORDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_LENGTH_UNITS = {  # singular, plural
    "str": ("character", "characters"),
    "array": ("entry", "entries"),
    "object": ("entry", "entries"),
}
# Keys of OpenAI's API that this server does not support, and what to use instead.
NOT_OFFERED = {
    "audio": "This server answers with text only.",
    "best_of": "Request n answers with logprobs and choose one.",
    "echo": "Use POST /tokenize to get the tokens of a prompt.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "moderation": "Leave it out.",
    "prediction": "Leave it out.",
    "prompt_cache_options": "Leave it out.",
    "prompt_cache_retention": "Leave it out.",
    "reasoning_effort": "Use chat_template_kwargs, which the model's chat template reads.",
    "suffix": "Describe the ending of the text in the prompt.",
    "verbosity": "Describe the length of the answer in the prompt.",
    "web_search_options": "Leave it out.",
}


def explain(problem: str, request: type) -> tuple[str, str]:
    """Return the path of the wrong key, as OpenAI writes it, and a sentence about it.

    `problem`: msgspec's message. The path is "" if the problem is the body as a whole.
    """
    if len(problem) > MAX_CHARACTERS:  # shortened in the middle, because its end has the path
        half = MAX_CHARACTERS // 2
        problem = f"{problem[:half]}...{problem[-half:]}"
    match = _MESSAGE_AND_PATH.match(problem)
    assert match is not None, "the expression matches any text"
    message = match["message"]
    path = (match["path"] or "").removesuffix("[...]")
    if field := _FIELD.search(message):
        path = f"{path}.{field['name']}" if path else field["name"]
        if field["problem"] == "unknown":
            return path, "This key is unknown. GET /openapi.json lists all keys of a request."
        return path, "This key is missing."
    if path in NOT_OFFERED:
        return path, f"This server does not support this key. {NOT_OFFERED[path]}"
    return path, _sentence_about_value(message, path, request)


def _sentence_about_value(message: str, path: str, request: type) -> str:
    """Return msgspec's message about the value at this path as a sentence."""
    if mismatch := _WRONG_TYPE.fullmatch(message):
        expected = [name for name in mismatch["expected"].split(" | ") if name != "null"]
        got = _TYPE_WORDS.get(mismatch["got"], mismatch["got"])
        if mismatch["got"] == "float":  # whole numbers such as 2.0 are accepted as integers
            got = "a number with a fraction"
        if not expected:
            return f"Only null is supported here, but this is {got}."
        expected_words = " or ".join(_TYPE_WORDS.get(name, name) for name in expected)
        return f"This must be {expected_words}, but it is {got}."
    if bound := _BOUND.fullmatch(message):
        bound_words, limit = _SIGN_WORDS[bound["sign"]], bound["limit"]
        if bound["type"] not in _LENGTH_UNITS:
            return f"This must be {bound_words} {float(limit):g}."
        singular, plural = _LENGTH_UNITS[bound["type"]]
        return f"This must have {bound_words} {limit} {singular if limit == '1' else plural}."
    if wrong_value := _WRONG_VALUE.fullmatch(message):
        # A value may be allowed by several types of a union; each is listed once.
        allowed = dict.fromkeys(map(repr, _allowed_values(request, path)))
        advice = f" Use {', '.join(allowed)}." if allowed else ""
        sentence = f"{wrong_value['value']} is not supported here.{advice}"
        return sentence.replace("True", "true").replace("False", "false")
    return f"{message[:1].upper()}{message[1:]}."


@functools.cache
def _type_info(request: type) -> inspect.Type:
    return inspect.type_info(request)


def _allowed_values(request: type, path: str) -> Iterator[Any]:
    """Yield the values that a Literal or a tag at this path may have."""
    types = [*_alternatives(_type_info(request))]
    for step in _PATH_STEP.finditer(path):
        types = [
            alternative
            for outer_type in types
            for inner_type in _types_inside(outer_type, step["key"])
            for alternative in _alternatives(inner_type)
        ]
    for literal in types:
        if isinstance(literal, inspect.LiteralType):
            yield from literal.values


def _alternatives(value_type: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types that a value of this type may have: each type of a union, without the
    descriptions and bounds around it."""
    if isinstance(value_type, inspect.UnionType):
        for alternative in value_type.types:
            yield from _alternatives(alternative)
    elif isinstance(value_type, inspect.Metadata):
        yield from _alternatives(value_type.type)
    else:
        yield value_type


def _types_inside(outer_type: inspect.Type, key: str | None) -> Iterator[inspect.Type]:
    """Yield the types at a key of an object, or of the items of a list (`key` None)."""
    if isinstance(outer_type, inspect.StructType) and key is not None:
        if key == outer_type.tag_field:
            yield inspect.LiteralType((outer_type.tag,))
        for field in outer_type.fields:
            if field.encode_name == key:
                yield field.type
    elif isinstance(outer_type, inspect.ListType) and key is None:
        yield outer_type.item_type
    elif isinstance(outer_type, inspect.DictType):
        yield outer_type.value_type
