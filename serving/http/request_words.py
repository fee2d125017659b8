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

MAX_CHARACTERS = 600  # of a complaint, which repeats a key or value of any length
_COMPLAINT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(unknown|missing required) field `(.*)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(.*)`, got `(.*)`")
_BOUND = re.compile(r"Expected `(\w+)`(?: of length)? (>=|<=|>|<) (.*)")
_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[[^\]]*\]")
_NOUNS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_UNITS = {  # one, several
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


def explain(complaint: str, request: type) -> tuple[str, str]:
    """Return the path of the key as OpenAI writes it ("" for the whole body), and a sentence."""
    if len(complaint) > MAX_CHARACTERS:  # its end, which says where, is kept
        half = MAX_CHARACTERS // 2
        complaint = f"{complaint[:half]}...{complaint[-half:]}"
    match = _COMPLAINT.match(complaint)
    assert match is not None, "it matches any text"
    message, path = match["what"], (match["path"] or "").removesuffix("[...]")
    if field := _FIELD.search(message):
        path = f"{path}.{field[2]}" if path else field[2]
        if field[1] != "unknown":
            return path, "This key is missing."
        return path, "This key is unknown. GET /openapi.json lists all keys of a request."
    if path in NOT_OFFERED:
        return path, f"This server does not support this key. {NOT_OFFERED[path]}"
    if wrong := _WRONG_TYPE.fullmatch(message):
        kinds = [_NOUNS.get(kind, kind) for kind in wrong[1].split(" | ") if kind != "null"]
        got = "a number with a fraction" if wrong[2] == "float" else _NOUNS.get(wrong[2], wrong[2])
        if not kinds:
            return path, f"Only null is supported here, but this is {got}."
        return path, f"This must be {' or '.join(kinds)}, but it is {got}."
    if bound := _BOUND.fullmatch(message):
        kind, sign, limit = bound.groups()
        if kind in _UNITS:
            unit = _UNITS[kind][limit != "1"]
            return path, f"This must have {_BOUNDS[sign]} {limit} {unit}."
        return path, f"This must be {_BOUNDS[sign]} {float(limit):g}."
    if value := _VALUE.fullmatch(message):
        choices = ", ".join(dict.fromkeys(map(repr, _choices(request, path))))
        choices = choices.replace("True", "true").replace("False", "false")
        value_text = value[1].replace("True", "true").replace("False", "false")
        return path, f"{value_text} is not supported here.{f' Use {choices}.' if choices else ''}"
    return path, f"{message[:1].upper()}{message[1:]}."


@functools.cache
def _type_of(request: type) -> inspect.Type:
    return inspect.type_info(request)


def _choices(request: type, path: str) -> Iterator[Any]:
    """Yield the values that a Literal or a tag at this path may have."""
    kinds = [_type_of(request)]
    for step in _STEP.finditer(path):
        kinds = [inner for kind in _plain(kinds) for inner in _inside(kind, step[1])]
    for kind in _plain(kinds):
        if isinstance(kind, inspect.LiteralType):
            yield from kind.values


def _plain(kinds: list[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield the types without the unions and descriptions around them."""
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            yield from _plain([*kind.types])
        elif isinstance(kind, inspect.Metadata):
            yield from _plain([kind.type])
        else:
            yield kind


def _inside(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """Yield the types of a struct's field, or of a list's or object's items (`name` None)."""
    if isinstance(kind, inspect.StructType) and name is not None:
        if name == kind.tag_field:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == name:
                yield field.type
    elif isinstance(kind, inspect.ListType) and name is None:
        yield kind.item_type
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
