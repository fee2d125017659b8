"""Files that people write, as structs: all that is wrong with one is said at once, in sentences.

tables = read_toml(Path("mine.toml"), BadCampaign)
file = converted(tables, CampaignFile, BadCampaign)

server.slots must be at least 1, got 0; modles is no key; known here: name, models, formats
"""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Meta, inspect

from models.errors import CrossoverError

T = TypeVar("T")
Keys = list[str | int]
MOST_FAULTS = 50
LIMITS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
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
    """The struct. Raises `error` with every key, type and range that is wrong.

    msgspec names the first fault alone: it is noted, taken out, and the rest is tried again.
    """
    raw = copy.deepcopy(given)
    faults: dict[str, str] = {}
    gone: set[str] = set()  # what was taken out, and lists that lost items
    stood: dict[int, list[int]] = {}  # id of such a list -> where the items left stood at first
    while len(faults) < MOST_FAULTS:
        try:
            found = msgspec.convert(raw, kind)
        except msgspec.ValidationError as problem:
            said, _, place = str(problem).partition(" - at `")
            path, kinds = _place(said, place, raw, kind)
            names, values = [""], [raw]  # from the whole file to what is wrong
            for part in path:
                where = f".{part}"
                if isinstance(part, int):
                    where = f"[{stood[id(values[-1])][part] if id(values[-1]) in stood else part}]"
                names.append((names[-1] + where).lstrip("."))
                values.append(_item(values[-1], part))
            if names[-1] not in gone:
                got = "" if values[-1] is msgspec.UNSET else f", got {values[-1]!r}"
                faults.setdefault(names[-1], _sentence(names[-1], said, kinds, got))
            # a table goes that lacks a key, or had a wrong one
            end = len(path) - ("missing required field" in said)
            if end < 1 or values[end] is msgspec.UNSET:
                break
            holder, part = values[end - 1], path[end - 1]
            gone.add(names[end])
            if isinstance(holder, list):
                gone.add(names[end - 1])
                stood.setdefault(id(holder), list(range(len(holder)))).pop(int(part))
            del holder[part]
        else:
            if not faults:
                return found
            break
    raise error("; ".join(faults.values()))


def _item(holder: Any, part: str | int) -> Any:
    """UNSET: it is not there."""
    try:
        return holder[part]
    except (LookupError, TypeError):
        return msgspec.UNSET


def _place(said: str, place: str, raw: Any, kind: type[Any]) -> tuple[Keys, list[inspect.Type]]:
    """`$.cells[0].slots` -> ["cells", 0, "slots"], and what may stand there.

    A key that is unknown or missing is the last of the path; its types are those of its table.
    """
    path: Keys = []
    kinds, whole = _options(inspect.type_info(kind)), raw
    for name, number in re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", place):
        part = name or number
        if number == "...":  # a table of names: the first whose value is wrong
            part = _wrong_key(said, place, whole, raw, kind)
        elif number:
            part = int(number)
        path.append(part)
        kinds = [inside for one in kinds for inside in _inside(one, part)]
        try:
            raw = raw[part]
        except (LookupError, TypeError):
            break
    if key := re.search(r"(?:unknown|missing required) field `([^`]*)`", said):
        path.append(key[1])
    return path, kinds


def _wrong_key(said: str, place: str, whole: Any, table: Any, kind: type[Any]) -> str:
    """The first key of a table of names whose value alone is wrong in the same way; "...": none."""
    found, kept = "...", dict(table)
    for name, value in kept.items():
        table.clear()
        table[name] = value
        try:
            msgspec.convert(whole, kind)
        except msgspec.ValidationError as problem:
            if str(problem).partition(" - at `")[::2] == (said, place):
                found = name
                break
    table.clear()
    table.update(kept)
    return found


def _inside(kind: inspect.Type, part: str | int) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        return [one for f in kind.fields if f.encode_name == part for one in _options(f.type)]
    if isinstance(kind, inspect.DictType):
        return _options(kind.value_type)
    return _options(kind.item_type) if isinstance(kind, inspect.ListType) else []


def _options(kind: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have."""
    if isinstance(kind, inspect.Metadata):
        return _options(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [inside for one in kind.types for inside in _options(one)]
    return [kind]


def _sentence(name: str, said: str, kinds: list[inspect.Type], got: str) -> str:
    """msgspec's message as "server.slots must be at least 1, got 0"."""
    if "unknown field" in said:
        tables = [one for one in kinds if isinstance(one, inspect.StructType)]
        known = ", ".join(field.encode_name for one in tables[:1] for field in one.fields)
        return f"{name} is no key" + (f"; known here: {known}" if known else "")
    if "missing required field" in said:
        return f"{name} is missing"
    if bound := re.fullmatch(r"Expected `\w+` (>=|>|<=|<) (\S+)", said):
        return f"{name} must be {LIMITS[bound[1]]} {float(bound[2]):g}{got}"
    if wrong := re.fullmatch(r"Expected (`.*`), got `.*`", said):
        types = [TYPES.get(one, one) for one in re.findall(r"\w+", wrong[1]) if one != "null"]
        return f"{name} must be {' or '.join(types)}{got}"
    if said.startswith("Invalid enum value"):
        values = [list(one.values) for one in kinds if isinstance(one, inspect.LiteralType)]
        values += [[v.value for v in one.cls] for one in kinds if isinstance(one, inspect.EnumType)]
        listed = ", ".join(repr(value) for several in values for value in several)
        return f"{name} must be one of {listed or 'the known names'}{got}"
    return f"{name}: {said}{got}" if name else said
