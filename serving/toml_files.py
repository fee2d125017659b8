"""Reads TOML files into structs and reports all faults of a file at once, in sentences.

tables = read_toml(Path("mine.toml"), BadCampaign)
file = converted(tables[0], CampaignFile, BadCampaign)

server.slots must be at least 1, got 0; modles is not a known key (known keys: name, models, ...)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from crossover.models.errors import CrossoverError, printable
from crossover.serving.option_help import bound

T = TypeVar("T")
TYPE_WORDS = {  # for the types in msgspec's messages
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def key(text: str) -> Meta:
    """Return the description of a key, for `Annotated[type, key(...)]`."""
    return Meta(description=text)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a file: unknown keys are refused."""


def read_toml(path: Path, error: type[CrossoverError]) -> tuple[dict[str, Any], str]:
    """Return the decoded tables of a file, and its text. Raises `error`."""
    name = printable(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")  # with a byte order mark or without
    except OSError as problem:
        raise error(f"{name} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        why = f"{problem.reason} at byte {problem.start}"
        raise error(f"{name} is not UTF-8 text: {why}") from None
    except ValueError as problem:  # a null character
        raise error(f"{name} cannot be read: {problem}") from None
    return parse_toml(text, error, f"{name}: "), text


def parse_toml(text: str, error: type[CrossoverError], where: str = "") -> dict[str, Any]:
    """Return the tables of a TOML text. Raises `error`."""
    try:
        return tomllib.loads(text)
    # ValueError: also a number with too many digits. RecursionError: lists nested too deeply.
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}This is not valid TOML: {problem}") from problem


def converted(tables: Any, struct_type: type[T], error: type[CrossoverError]) -> T:
    """Return decoded TOML as a struct. Raises `error`, which lists every key that is unknown or
    missing and every value of a wrong type or out of range."""
    if faults := list(_faults(tables, struct_type, "")):
        raise error("; ".join(faults))
    return msgspec.convert(tables, struct_type)


def _faults(value: Any, value_type: Any, name: str) -> Iterator[str]:
    """Yield the faults inside a table or list, or else the fault of the value itself.

    `value_type`: the type that the struct declares. `name`: the value's place in the file.
    """
    faults: list[str] = []
    for alternative in _alternatives(value_type):
        origin, args = get_origin(alternative), get_args(alternative)
        is_struct = isinstance(alternative, type) and issubclass(alternative, msgspec.Struct)
        if isinstance(value, dict) and is_struct:
            faults += _faults_of_table(value, alternative, f"{name}." if name else "")
        elif isinstance(value, dict) and origin is dict:
            for key_name, item in value.items():
                faults += _faults(item, args[1], f"{name}.{key_name}")
        elif isinstance(value, list) and origin in (list, tuple):
            for index, item in enumerate(value):
                faults += _faults(item, args[0], f"{name}[{index}]")
    if not faults:
        try:
            msgspec.convert(value, value_type)
        except msgspec.ValidationError as problem:
            faults.append(_sentence(name, str(problem), _alternatives(value_type), value))
    yield from faults


def _faults_of_table(
    table: dict[str, Any], struct_type: type[msgspec.Struct], prefix: str
) -> Iterator[str]:
    """Yield unknown keys, missing keys, and the faults of the values. `prefix`: of their names."""
    config = struct_type.__struct_config__
    if config.tag is not None and table.get(str(config.tag_field)) != config.tag:
        return  # the table is of another type of a tagged union
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct_type)}
    if config.forbid_unknown_fields:
        for name in sorted(table.keys() - fields.keys() - {config.tag_field}):
            yield f"{prefix}{name} is not a known key (known keys: {', '.join(fields)})"
    for name, field in fields.items():
        if name in table:
            yield from _faults(table[name], field.type, f"{prefix}{name}")
        elif field.required:
            yield f"{prefix}{name} is missing"


def _alternatives(value_type: Any) -> list[Any]:
    """Return the types that a value of this type may have: each type of a union but None, without
    the bounds and descriptions around it."""
    if get_origin(value_type) is Annotated:
        return _alternatives(get_args(value_type)[0])
    if get_origin(value_type) in (Union, UnionType):
        return [alternative for part in get_args(value_type) for alternative in _alternatives(part)]
    return [] if value_type is NoneType else [value_type]


def _sentence(name: str, problem: str, alternatives: list[Any], value: Any) -> str:
    """Return msgspec's message about a value as "server.slots must be at least 1, got 0"."""
    message, _, path = problem.partition(" - at `$")  # ".key" or "[0]" inside the value
    path = path.rstrip("`")
    name = (name + path).lstrip(".")
    if path and isinstance(value, dict):
        value = value.get(path.removeprefix("."))
    if limit := bound(message):
        return f"{name} must be {limit}, got {value!r}"
    if mismatch := re.fullmatch(r"Expected (?P<types>`.*`), got `.*`", message):
        type_names = [word for word in re.findall(r"\w+", mismatch["types"]) if word != "null"]
        expected = " or ".join(TYPE_WORDS.get(type_name, type_name) for type_name in type_names)
        return f"{name} must be {expected}, got {value!r}"
    if message.startswith("Invalid enum value"):
        allowed: list[Any] = []
        for alternative in alternatives:
            if get_origin(alternative) is Literal:
                allowed += get_args(alternative)
            elif isinstance(alternative, type) and issubclass(alternative, Enum):
                allowed += [member.value for member in alternative]
        return f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
    got = "" if isinstance(value, dict) else f", got {value!r}"
    return f"{name}: {message}{got}" if name else message
