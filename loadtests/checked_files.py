"""Files that people write, as structs: all that is wrong with one is said at once, in sentences.

tables = read_toml(Path("mine.toml"), BadCampaign)
file = converted(tables, CampaignFile, BadCampaign)

server.slots must be at least 1, got 0; modles is no key; known here: name, models, formats
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

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
    while len(faults) < MOST_FAULTS:
        try:
            found = msgspec.convert(raw, kind)
        except msgspec.ValidationError as problem:
            path = _path_of(str(problem), raw, kind)
            name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
            if "missing required field" in str(problem) and name in faults:
                break  # it was there and wrong
            faults.setdefault(name, _sentence(name, str(problem), path, raw, kind))
            if not _taken_out(raw, path):
                break
        else:
            if not faults:
                return found
            break
    raise error("; ".join(faults.values()))


def _path_of(problem: str, raw: Any, kind: Any) -> Keys:
    """`... - at `$.cells[0].slots`` -> ["cells", 0, "slots"]; also a key that is not there."""
    place = re.search(r"at `(?:key in )?\$([^`]*)`", problem)
    path: Keys = []
    for name, number in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", place[1] if place else ""):
        if number == "...":  # a table of names: the first whose value is wrong
            path.append(_first_wrong(_value(raw, path), _kind_at(kind, path)))
        else:
            path.append(name or int(number))
    key = re.search(r"(?:unknown|missing required) field `([^`]*)`", problem)
    return [*path, key[1]] if key else path


def _first_wrong(named: Any, kind: Any) -> str:
    for name, value in named.items():
        try:
            msgspec.convert(value, _inside(kind, name))
        except msgspec.ValidationError:
            return str(name)
    return "..."


def _value(raw: Any, path: Sequence[str | int]) -> Any:
    """Raises LookupError, TypeError where there is none."""
    for part in path:
        raw = raw[part]
    return raw


def _taken_out(raw: Any, path: Sequence[str | int]) -> bool:
    try:
        del _value(raw, path[:-1])[path[-1]]
    except (LookupError, TypeError):
        return False
    return True


def _sentence(name: str, problem: str, path: Keys, raw: Any, kind: Any) -> str:
    """msgspec's message as "server.slots must be at least 1, got 0"."""
    if "unknown field" in problem:
        known = next(
            (one.__struct_fields__ for one in _kinds(_kind_at(kind, path[:-1])) if _is_struct(one)),
            (),
        )
        return f"{name} is no key" + (f"; known here: {', '.join(known)}" if known else "")
    if "missing required field" in problem:
        return f"{name} is missing"
    try:
        got = f", got {_value(raw, path)!r}" if path else ""
    except (LookupError, TypeError):
        got = ""
    said = problem.partition(" - at `")[0]
    if bound := re.fullmatch(r"Expected `\w+` (>=|>|<=|<) (\S+)", said):
        return f"{name} must be {LIMITS[bound[1]]} {float(bound[2]):g}{got}"
    if wrong := re.fullmatch(r"Expected (`.*`), got `.*`", said):
        types = [TYPES.get(one, one) for one in re.findall(r"\w+", wrong[1]) if one != "null"]
        return f"{name} must be {' or '.join(types)}{got}"
    if said.startswith("Invalid enum value"):
        choices = [one for one in _kinds(_kind_at(kind, path)) if get_origin(one) is Literal]
        listed = ", ".join(repr(value) for one in choices for value in get_args(one))
        return f"{name} must be one of {listed or 'the known names'}{got}"
    return f"{name}: {said}{got}" if name else said


def _kind_at(kind: Any, path: Sequence[str | int]) -> Any:
    """The type of what is at a path; None where it is not known."""
    for part in path:
        kind = _inside(kind, part)
    return kind


def _inside(kind: Any, part: str | int) -> Any:
    for one in _kinds(kind):
        if _is_struct(one) and part in one.__struct_fields__:
            return get_type_hints(one, include_extras=True)[str(part)]
        if get_origin(one) in (dict, list, tuple):
            return get_args(one)[1 if get_origin(one) is dict else 0]
    return None


def _kinds(kind: Any) -> Iterator[Any]:
    """The types that a hint allows: of `Annotated[list[Hardware] | None, ...]` the list, None."""
    if get_origin(kind) is Annotated:
        yield from _kinds(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _kinds(one)
    else:
        yield kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
