"""Bounds and help of options: msgspec.Meta in a struct's types holds them, this words them.

msgspec checks bounds when it decodes or converts data, not when a struct is made by its
constructor; `check` does that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from crossover.serving.errors import ServingError, Unsupported

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
T = TypeVar("T")

ENGINE = "Engine"  # the panel of the help page for the options of an engine

_BOUND = re.compile(r"Expected `\w+` (>=|>|<=|<) (\S+)(?: - at `\$\.(?:\w+\.)*(\w+)`)?")
_WORDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


class About(msgspec.Struct, frozen=True):
    """Help of an option. `flag`: its name on the command line, if it differs from the field's."""

    panel: str
    text: str
    flag: str = ""
    metavar: str = ""
    is_argument: bool = False  # a positional argument, without a flag


def option(
    panel: str, text: str, flag: str = "", metavar: str = "", is_argument: bool = False
) -> Meta:
    """Return the help of a field, for `Annotated[type, option(...)]`."""
    about_option = About(panel, text, flag, metavar, is_argument)
    return Meta(description=text, extra={"about": about_option})


def about(field: msgspec.structs.FieldInfo) -> About:
    """Return the help that `option` attached to this field."""
    help_of_field: About = next(
        meta.extra["about"] for meta in field.type.__metadata__ if meta.extra
    )
    return help_of_field


def flags_of(kind: type[Any]) -> dict[str, str]:
    """Return the option of the command line for each field."""
    return {
        field.name: f"--{about(field).flag or field.name.replace('_', '-')}"
        for field in msgspec.structs.fields(kind)
    }


def explained(problem: str, values: Mapping[str, Any], named: Callable[[str], str] = str) -> str:
    """Return msgspec's message; one about a bound becomes "slots must be at least 1, got 0"."""
    match = _BOUND.fullmatch(problem)
    if match is None or match[3] is None:
        return problem
    key = match[3]
    return f"{named(key)} must be {bound(problem)}, got {values.get(key)!r}"


def bound(problem: str) -> str | None:
    """Return "at least 1" for "Expected `int` >= 1"; None for any other message."""
    match = _BOUND.fullmatch(problem)
    return None if match is None else f"{_WORDS[match[1]]} {float(match[2]):g}"


def check(made: msgspec.Struct) -> None:
    """Check the bounds of every field, also in nested structs.

    Raises Unsupported with key, bound and value.
    """
    values = msgspec.to_builtins(made)
    try:
        msgspec.convert(values, type(made))
    except msgspec.ValidationError as problem:
        path = re.search(r"`\$\.((?:\w+\.)*)(\w+)", str(problem))
        for table in path[1].split(".")[:-1] if path else ():
            values = values[table]
        raise Unsupported(explained(str(problem), values), path and path[2]) from problem


def converted(
    values: Mapping[str, Any], kind: type[T], where: str, named: Callable[[str], str] = str
) -> T:
    """Return the struct with these values. Raises ServingError that names key, bound and value."""
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ServingError(f"{where}{named(key)} must be finite, got {value:g}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as problem:
        raise ServingError(where + explained(str(problem), values, named)) from problem


def unbounded(kind: Any) -> Any:
    """Return the type without bounds and help: `Annotated[int, Meta(ge=1)] | None` becomes
    `int | None`."""
    if get_origin(kind) is Annotated:
        return unbounded(get_args(kind)[0])
    args = get_args(kind)
    if len(args) == 2 and args[1] is type(None):
        return unbounded(args[0]) | None
    return kind


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of 24GiB, 24G (the same), 24GB (decimal) or a plain number of bytes.

    Raises ServingError, which names the option, for anything else and for less than 1 MiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B|)|)\s*", text, re.IGNORECASE)
    letter, suffix = (match[2] or " ", match[3] or "") if match else (" ", "")
    base = 1000 if suffix.lower() == "b" else 1024
    size = float(match[1]) * base ** " KMGT".index(letter.upper()) if match else 0.0
    if size < 1 << 20:
        raise ServingError(
            f"{option} {text!r} is not a size of at least 1 MiB. Write a size such as 24GiB or "
            "24GB."
        )
    return int(size)
