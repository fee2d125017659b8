"""Files that people write, as structs: all that is wrong with one is said at once, in sentences.

tables = read_toml(Path("mine.toml"), BadCampaign)
file = converted(tables, CampaignFile, BadCampaign)

server.slots must be at least 1, got 0; modles is no key; known here: name, models, formats
"""

from __future__ import annotations

import enum
import re
import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from models.errors import CrossoverError
from serving.bounds import bound

T = TypeVar("T")
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def key(text: str) -> Meta:
    """What is said of a key."""
    return Meta(description=text)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a file: unknown keys are refused."""


def read_toml(path: Path, error: type[CrossoverError]) -> tuple[dict[str, Any], str]:
    """The tables of a file, and its text. Raises `error`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path} is no text: {problem.reason} at byte {problem.start}") from None
    return parse_toml(text, error, f"{path}: "), text


def parse_toml(text: str, error: type[CrossoverError], where: str = "") -> dict[str, Any]:
    """Raises `error`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise error(f"{where}no TOML: {problem}") from problem


def converted(given: Any, kind: type[T], error: type[CrossoverError]) -> T:
    """The struct. Raises `error` with every key, type and range that is wrong."""
    if faults := _faults(given, kind, ""):
        raise error("; ".join(faults))
    return msgspec.convert(given, kind)


def _faults(value: Any, kind: Any, name: str) -> list[str]:
    """What is wrong inside a value that should be of a type; where nothing is, with the value."""
    faults: list[str] = []
    for one in _options(kind):
        parts: list[tuple[Any, Any, str]] = []  # value, type, name
        origin, args = get_origin(one), get_args(one)
        if isinstance(value, dict) and isinstance(one, type) and issubclass(one, msgspec.Struct):
            table = one.__struct_config__
            if table.tag is not None and value.get(table.tag_field) != table.tag:
                continue
            fields = {field.encode_name: field for field in msgspec.structs.fields(one)}
            at = f"{name}." if name else ""
            unknown = value.keys() - fields.keys() - {table.tag_field}
            if unknown and table.forbid_unknown_fields:
                known = f"known here: {', '.join(fields)}"
                faults += [f"{at}{key} is no key; {known}" for key in sorted(unknown)]
            missing = [f.encode_name for f in fields.values() if f.required]
            faults += [f"{at}{key} is missing" for key in missing if key not in value]
            parts = [(value[k], f.type, f"{at}{k}") for k, f in fields.items() if k in value]
        elif isinstance(value, dict) and origin is dict:
            parts = [(item, args[1], f"{name}.{key}") for key, item in value.items()]
        elif isinstance(value, list) and (origin is list or args[1:] == (...,)):
            parts = [(item, args[0], f"{name}[{i}]") for i, item in enumerate(value)]
        faults += [fault for part in parts for fault in _faults(*part)]
    if not faults:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as problem:
            faults.append(_sentence(name, str(problem), _options(kind), value))
    return faults


def _options(kind: Any) -> list[Any]:
    """The types that a value may have."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for part in get_args(kind) for one in _options(part)]
    return [] if kind is NoneType else [kind]


def _sentence(name: str, problem: str, kinds: list[Any], value: Any) -> str:
    """msgspec's message as "server.slots must be at least 1, got 0"."""
    said, _, place = problem.partition(" - at `$")
    name = (name + place.rstrip("`")).lstrip(".")
    if place and isinstance(value, dict):
        value = value.get(place[1:-1])
    if missing := re.search("missing required field `(.*)`", said):
        return f"{name}.{missing[1]} is missing"
    if limit := bound(said):
        return f"{name} must be {limit}, got {value!r}"
    if wrong := re.fullmatch(r"Expected (`.*`), got `.*`", said):
        types = [TYPES.get(one, one) for one in re.findall(r"\w+", wrong[1]) if one != "null"]
        return f"{name} must be {' or '.join(types)}, got {value!r}"
    if said.startswith("Invalid enum value"):
        known = [repr(v) for one in kinds if get_origin(one) is Literal for v in get_args(one)]
        for one in kinds:
            if isinstance(one, enum.EnumMeta):
                known += [repr(value) for value in one._value2member_map_]
        return f"{name} must be one of {', '.join(known) or 'the known names'}, got {value!r}"
    got = "" if isinstance(value, dict) else f", got {value!r}"
    return f"{name}: {said}{got}" if name else said
