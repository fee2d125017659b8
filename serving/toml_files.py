"""Reads TOML files into structs and reports all faults of a file at once, in sentences.

tables = read_toml(Path("mine.toml"), BadCampaign)
file = converted(tables[0], CampaignFile, BadCampaign)

server.slots must be at least 1, got 0; modles is not a known key (known keys: name, models, ...)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from crossover.models.errors import CrossoverError, printable
from crossover.serving.option_help import bound

T = TypeVar("T")
TYPES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}
TYPES |= {"array": "a list", "object": "a table"}


def key(text: str) -> Meta:
    """Return the description of a key, for `Annotated[type, key(...)]`."""
    return Meta(description=text)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a file: unknown keys are refused."""


def read_toml(path: Path, error: type[CrossoverError]) -> tuple[dict[str, Any], str]:
    """Return the tables of a file and its text. Raises `error`."""
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
    except (ValueError, RecursionError) as problem:  # also numbers and nesting that Python refuses
        raise error(f"{where}This is not valid TOML: {problem}") from problem


def converted(given: Any, kind: type[T], error: type[CrossoverError]) -> T:
    """Return the struct. Raises `error` with every key, type and range that is wrong."""
    if faults := list(_faults(given, kind, "")):
        raise error("; ".join(faults))
    return msgspec.convert(given, kind)


def _faults(value: Any, kind: Any, name: str) -> Iterator[str]:
    """Yield the faults inside a value of this type, or else those of the value itself."""
    faults: list[str] = []
    for option_type in _options(kind):
        args = get_args(option_type)
        if (
            isinstance(value, dict)
            and isinstance(option_type, type)
            and issubclass(option_type, msgspec.Struct)
        ):
            faults += _faults_of_table(value, option_type, f"{name}." if name else "")
        elif isinstance(value, dict) and get_origin(option_type) is dict:
            for item, item_value in value.items():
                faults += _faults(item_value, args[1], f"{name}.{item}")
        elif isinstance(value, list) and get_origin(option_type) in (list, tuple):
            for position, item_value in enumerate(value):
                faults += _faults(item_value, args[0], f"{name}[{position}]")
    if not faults:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as problem:
            faults.append(_sentence(name, str(problem), _options(kind), value))
    yield from faults


def _faults_of_table(value: dict[str, Any], kind: type[msgspec.Struct], at: str) -> Iterator[str]:
    """Yield unknown keys, missing keys, and the faults of the values."""
    config = kind.__struct_config__
    if config.tag is not None and value.get(str(config.tag_field)) != config.tag:
        return  # the value is of another type of a tagged union
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    if config.forbid_unknown_fields:
        for name in sorted(value.keys() - fields.keys() - {config.tag_field}):
            yield f"{at}{name} is not a known key (known keys: {', '.join(fields)})"
    for name, field in fields.items():
        if name in value:
            yield from _faults(value[name], field.type, f"{at}{name}")
        elif field.required:
            yield f"{at}{name} is missing"


def _options(kind: Any) -> list[Any]:
    """Return the types that a value may have."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [option_type for part in get_args(kind) for option_type in _options(part)]
    return [] if kind is NoneType else [kind]


def _sentence(name: str, problem: str, kinds: list[Any], value: Any) -> str:
    """Return msgspec's message as "server.slots must be at least 1, got 0"."""
    message, _, place = problem.partition(" - at `$")
    name = (name + place.rstrip("`")).lstrip(".")
    if place and isinstance(value, dict):
        value = value.get(place[1:-1])
    if limit := bound(message):
        return f"{name} must be {limit}, got {value!r}"
    if type_match := re.fullmatch(r"Expected (`.*`), got `.*`", message):
        types = [
            TYPES.get(option_type, option_type)
            for option_type in re.findall(r"\w+", type_match[1])
            if option_type != "null"
        ]
        return f"{name} must be {' or '.join(types)}, got {value!r}"
    if message.startswith("Invalid enum value"):
        allowed = [
            v
            for option_type in kinds
            if get_origin(option_type) is Literal
            for v in get_args(option_type)
        ]
        for option_type in kinds:
            allowed += (
                [member.value for member in option_type]
                if hasattr(option_type, "__members__")
                else []
            )
        return f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
    got = "" if isinstance(value, dict) else f", got {value!r}"
    return f"{name}: {message}{got}" if name else message
