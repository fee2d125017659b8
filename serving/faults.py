"""Faults of data, in words. No other module reads msgspec's validation messages.

    fault_of("Expected `int` >= 1 - at `$.server.slots`", CampaignFile)
    # Fault(place="server.slots", kind="bound", rule="must be at least 1", got="")

`converted` reports all faults of a file or command line at once: "--slots must be at least 1, got
0; --port must be at most 65535, got 70000".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from enum import Enum
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import msgspec

from crossover.models.errors import CrossoverError
from crossover.serving.errors import Unsupported

T = TypeVar("T")

# msgspec's message, and the path that it names: "Expected `int`, got `str` - at `$.n`".
_MESSAGE_AND_PATH = re.compile(
    r"(?P<message>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL
)
_FIELD = re.compile(
    r"Object .*(?P<problem>unknown|missing required) field `(?P<name>.*)`", re.DOTALL
)
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>.*)`)?")
_BOUND = re.compile(r"Expected `(?P<type>\w+)`(?: of length)? (?P<sign>>=|<=|>|<) (?P<limit>\S+)")
_PATTERN = re.compile(r"Expected `str` matching regex (?P<pattern>.*)", re.DOTALL)
_WRONG_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
# One step of a path: a key, or an index in brackets, for which the group is None.
_PATH_STEP = re.compile(r"(?P<key>[^.\[\]]+)|\[[^\]]*\]")
_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "null": "null",
}
_SIGN_WORDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_LENGTH_UNITS = {  # singular, plural
    "str": ("character", "characters"),
    "array": ("entry", "entries"),
    "object": ("entry", "entries"),
}


class Fault(NamedTuple):
    """What is wrong with a value. `rule` continues a sentence that begins with the value's name."""

    place: str  # "server.slots", "engines[0].name"; "": the value as a whole
    kind: Literal["unknown key", "missing key", "type", "bound", "choice", "other"]
    rule: str  # "must be at least 1"; of a fault of kind "other", the message of who raised it
    got: str = ""  # what it is, where the message says so: "a string", "'xml'"

    def sentence(self, name: str, value: Any) -> str:
        """Return "slots must be at least 1, got 0" for the `name` and the value of the place."""
        if self.kind == "other":
            return f"{name}: {self.rule}" if name else self.rule
        if self.kind in ("unknown key", "missing key"):
            return f"{name} {self.rule}"
        return f"{name} {self.rule}, got {value!r}"


def fault_of(problem: str, kind: Any, table: str = "a table") -> Fault:
    """Return the fault that msgspec found in a value of type `kind`, from its message.

    `table`: what a mapping is called, as in "a table" of TOML.
    """
    match = _MESSAGE_AND_PATH.fullmatch(problem)
    assert match is not None, "the expression matches any text"
    message = match["message"]
    place = (match["path"] or "").removesuffix("[...]")
    if field := _FIELD.fullmatch(message):
        name = _joined(place, field["name"])
        if field["problem"] == "unknown":
            return Fault(name, "unknown key", _not_a_key(_types_at(kind, place)))
        return Fault(name, "missing key", "is missing")
    if mismatch := _WRONG_TYPE.fullmatch(message):
        type_words = _TYPE_WORDS | {"object": table}
        names = [name for name in mismatch["expected"].split(" | ") if name != "null"]
        expected = " or ".join(type_words.get(name, name) for name in names or ["null"])
        got = type_words.get(mismatch["got"], mismatch["got"] or "")
        if mismatch["got"] == "float" and "int" in names:
            got = "a number with a fraction"
        return Fault(place, "type", f"must be {expected}", got)
    if bound := _BOUND.fullmatch(message):
        limit = f"{_SIGN_WORDS[bound['sign']]} {float(bound['limit']):.15g}"
        if bound["type"] not in _LENGTH_UNITS:
            return Fault(place, "bound", f"must be {limit}")
        singular, plural = _LENGTH_UNITS[bound["type"]]
        unit = singular if bound["limit"] == "1" else plural
        return Fault(place, "bound", f"must have {limit} {unit}")
    if pattern := _PATTERN.fullmatch(message):
        return Fault(place, "bound", f"must match the pattern {pattern['pattern']}")
    if wrong_value := _WRONG_VALUE.fullmatch(message):
        value = {"True": "true", "False": "false"}.get(wrong_value["value"], wrong_value["value"])
        return Fault(place, "choice", _choice(_values_at(kind, place)), value)
    return Fault(place, "other", message)


def converted(
    values: Any,
    kind: type[T],
    error: type[CrossoverError],
    where: str = "",
    name_of: Callable[[str], str] = str,
) -> T:
    """Return decoded data as a struct. Raises `error`, which begins with `where` and lists every
    key that is unknown or missing and every value of a wrong type or out of range.

    `name_of`: returns how a field of the struct is named to the user, such as its flag.
    """
    try:
        struct = msgspec.convert(values, kind)
        if _is_finite(values):
            return struct
    except msgspec.ValidationError:
        pass  # all faults are listed below
    sentences = []
    for fault, value in _faults(values, kind, ""):
        field_name = re.split(r"[.\[]", fault.place)[0]
        name = name_of(field_name) + fault.place.removeprefix(field_name) if field_name else ""
        sentences.append(fault.sentence(name, value))
    if sentences:
        raise error(where + "; ".join(sentences))
    return msgspec.convert(values, kind)


def _is_finite(value: Any) -> bool:
    """Return whether decoded data has no infinite number, which bounds on one side allow."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check(struct: msgspec.Struct) -> None:
    """Check the bounds of every field, also in nested structs: a constructor does not.

    Raises Unsupported with key, bound and value.
    """
    for fault, value in _faults(msgspec.to_builtins(struct), type(struct), ""):
        key = fault.place.rpartition(".")[2]
        raise Unsupported(fault.sentence(key, value), key)


def _faults(value: Any, kind: Any, place: str) -> Iterator[tuple[Fault, Any]]:
    """Yield all faults of a value and of what it contains, each with the value that has it.

    msgspec stops at the first one. `place`: of the value in the whole.
    """
    has_inner_faults = False
    for inner_fault in _inner_faults(value, kind, place):
        has_inner_faults = True
        yield inner_fault
    if has_inner_faults:
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        fault = fault_of(str(problem), kind)
        if fault.place and isinstance(value, dict):
            value = value.get(fault.place)
        yield fault._replace(place=_joined(place, fault.place)), value
    else:
        if isinstance(value, float) and not math.isfinite(value):
            yield Fault(place, "bound", "must be finite"), value


def _inner_faults(value: Any, kind: Any, place: str) -> Iterator[tuple[Fault, Any]]:
    """Yield the faults of what a table or list contains."""
    for alternative in _alternatives(kind):
        if isinstance(value, dict) and _is_struct(alternative):
            yield from _faults_of_keys(value, alternative, place)
        elif isinstance(value, dict) and get_origin(alternative) is dict:
            for name, item in value.items():
                yield from _faults(item, get_args(alternative)[1], _joined(place, name))
        elif isinstance(value, list) and get_origin(alternative) in (list, tuple):
            for index, item in enumerate(value):
                yield from _faults(item, get_args(alternative)[0], f"{place}[{index}]")


def _faults_of_keys(
    table: dict[str, Any], struct_type: type[msgspec.Struct], place: str
) -> Iterator[tuple[Fault, Any]]:
    """Yield unknown keys, missing keys, and the faults of the values."""
    config = struct_type.__struct_config__
    if config.tag is not None and table.get(str(config.tag_field)) != config.tag:
        return  # the table is of another type of a tagged union
    fields = _fields(struct_type)
    if config.forbid_unknown_fields:
        for name in sorted(table.keys() - fields.keys() - {config.tag_field}):
            yield Fault(_joined(place, name), "unknown key", _not_a_key([struct_type])), None
    for name, field in fields.items():
        if name in table:
            yield from _faults(table[name], field.type, _joined(place, name))
        elif field.required:
            yield Fault(_joined(place, name), "missing key", "is missing"), None


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place and name and not name.startswith("[") else place + name


def _not_a_key(types: list[Any]) -> str:
    keys = [key for struct_type in types if _is_struct(struct_type) for key in _fields(struct_type)]
    return f"is not a known key (known keys: {', '.join(dict.fromkeys(keys))})"


def _choice(values: Iterator[Any]) -> str:
    # A value may be allowed by several types of a union; each is listed once.
    words = dict.fromkeys(str(v).lower() if isinstance(v, bool) else repr(v) for v in values)
    return f"must be {'one of ' if len(words) > 1 else ''}{', '.join(words)}"


def _is_struct(kind: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fields(struct_type: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a struct by their names in a file or request."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct_type)}


def _alternatives(kind: Any) -> list[Any]:
    """Return the types that a value of this type may have: each type of a union but None, without
    the bounds around it."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [alternative for part in get_args(kind) for alternative in _alternatives(part)]
    return [] if kind is NoneType else [kind]


def _types_at(kind: Any, path: str) -> list[Any]:
    """Return the types that the value at a path may have."""
    types = _alternatives(kind)
    for step in _PATH_STEP.finditer(path):
        types = [inner for outer in types for inner in _types_inside(outer, step["key"])]
    return types


def _types_inside(outer: Any, key: str | None) -> list[Any]:
    """Return the types at a key of a struct or dict, or of the items of a list (`key` None)."""
    if _is_struct(outer) and key is not None:
        fields = _fields(outer)
        return _alternatives(fields[key].type) if key in fields else []
    args = get_args(outer)
    if get_origin(outer) is dict:
        return _alternatives(args[1])
    return _alternatives(args[0]) if get_origin(outer) in (list, tuple) else []


def _values_at(kind: Any, path: str) -> Iterator[Any]:
    """Yield the values that a Literal, an Enum or a tag at this path may have."""
    for alternative in _types_at(kind, path):
        if get_origin(alternative) is Literal:
            yield from get_args(alternative)
        elif isinstance(alternative, type) and issubclass(alternative, Enum):
            yield from (member.value for member in alternative)
    outer_path, _, key = path.rpartition(".")
    for outer in _types_at(kind, outer_path):
        if _is_struct(outer) and outer.__struct_config__.tag_field == key:
            yield outer.__struct_config__.tag
