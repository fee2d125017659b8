"""Bounds and help of values: msgspec.Meta in a struct's types says them, this says them in words.

Meta is checked where data is decoded or converted, not where a struct is made by its constructor;
`check` is for those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from serving.errors import ServingError, Unsupported

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
T = TypeVar("T")

ENGINE = "Engine"  # the panel of the help page with what an engine is started with

_BOUND = re.compile(r"Expected `\w+` (>=|>|<=|<) (\S+)(?: - at `\$\.(?:\w+\.)*(\w+)`)?")
_WORDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


class About(msgspec.Struct, frozen=True):
    """Help of an option. `flag`: its name on the command line, where it is not the field's name."""

    panel: str
    text: str
    flag: str = ""
    metavar: str = ""
    is_argument: bool = False  # it stands without a flag


def option(
    panel: str, text: str, flag: str = "", metavar: str = "", is_argument: bool = False
) -> Meta:
    """For `Annotated[type, option(...)]`."""
    said = About(panel, text, flag, metavar, is_argument)
    return Meta(description=text, extra={"about": said})


def about(field: msgspec.structs.FieldInfo) -> About:
    """What `option` said of this field."""
    said: About = next(meta.extra["about"] for meta in field.type.__metadata__ if meta.extra)
    return said


def flags_of(kind: type[Any]) -> dict[str, str]:
    """The option of the command line for each field."""
    fields = msgspec.structs.fields(kind)
    return {one.name: f"--{about(one).flag or one.name.replace('_', '-')}" for one in fields}


def explained(problem: str, values: Mapping[str, Any], named: Callable[[str], str] = str) -> str:
    """msgspec's sentence; one about a bound as "slots must be at least 1, got 0"."""
    found = _BOUND.fullmatch(problem)
    if found is None or found[3] is None:
        return problem
    key = found[3]
    return f"{named(key)} must be {bound(problem)}, got {values.get(key)!r}"


def bound(problem: str) -> str | None:
    """ "Expected `int` >= 1" -> "at least 1"; None for a sentence about something else."""
    found = _BOUND.fullmatch(problem)
    return None if found is None else f"{_WORDS[found[1]]} {float(found[2]):g}"


def check(made: msgspec.Struct) -> None:
    """Raises Unsupported with key, bound and value where a field is outside its bounds, in a struct
    inside it too."""
    values = msgspec.to_builtins(made)
    try:
        msgspec.convert(values, type(made))
    except msgspec.ValidationError as problem:
        found = re.search(r"`\$\.((?:\w+\.)*)(\w+)", str(problem))
        for table in found[1].split(".")[:-1] if found else ():
            values = values[table]
        raise Unsupported(explained(str(problem), values), found and found[2]) from problem


def converted(
    values: Mapping[str, Any], kind: type[T], where: str, named: Callable[[str], str] = str
) -> T:
    """The struct of these values. Raises ServingError that names key, bound and value."""
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ServingError(f"{where}{named(key)} must be finite, got {value:g}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as problem:
        raise ServingError(where + explained(str(problem), values, named)) from problem


def unbounded(kind: Any) -> Any:
    """The type without bounds and help: `Annotated[int, Meta(ge=1)] | None` -> `int | None`."""
    if get_origin(kind) is Annotated:
        return unbounded(get_args(kind)[0])
    args = get_args(kind)
    if len(args) == 2 and args[1] is type(None):
        return unbounded(args[0]) | None
    return kind


def parse_bytes(text: str, option: str) -> int:
    """24GiB, 24G (the same), 24GB (decimal) or a number of bytes from 1 MiB on. Raises
    ServingError, which names the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B|)|)\s*", text, re.IGNORECASE)
    letter, suffix = (match[2] or " ", match[3] or "") if match else (" ", "")
    base = 1000 if suffix.lower() == "b" else 1024
    size = float(match[1]) * base ** " KMGT".index(letter.upper()) if match else 0.0
    if size < 1 << 20:
        raise ServingError(f"{option} {text!r} is no size; write it like 24GiB or 24GB")
    return int(size)
