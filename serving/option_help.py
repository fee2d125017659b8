"""Bounds and help of options, which are attached to a struct's fields as msgspec.Meta.

msgspec checks bounds when it decodes or converts data, but not in a struct's constructor; `check`
does that. Errors about a bound are sentences here, without msgspec's own words.
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
_SIGN_WORDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


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
    for meta in field.type.__metadata__:
        if meta.extra:
            option_help: About = meta.extra["about"]
            return option_help
    raise LookupError(f"{field.name} has no help")


def flags_of(kind: type[Any]) -> dict[str, str]:
    """Return the option of the command line for each field."""
    return {
        field.name: f"--{about(field).flag or field.name.replace('_', '-')}"
        for field in msgspec.structs.fields(kind)
    }


def explained(problem: str, values: Mapping[str, Any], name_of: Callable[[str], str] = str) -> str:
    """Return msgspec's message; one about a bound becomes "slots must be at least 1, got 0".

    `name_of`: returns how a field is named to the user, such as its flag.
    """
    match = _BOUND.fullmatch(problem)
    if match is None or match[3] is None:
        return problem
    key = match[3]
    return f"{name_of(key)} must be {bound(problem)}, got {values.get(key)!r}"


def bound(problem: str) -> str | None:
    """Return "at least 1" for "Expected `int` >= 1"; None for any other message."""
    match = _BOUND.fullmatch(problem)
    return None if match is None else f"{_SIGN_WORDS[match[1]]} {float(match[2]):g}"


def check(struct: msgspec.Struct) -> None:
    """Check the bounds of every field, also in nested structs.

    Raises Unsupported with key, bound and value.
    """
    values = msgspec.to_builtins(struct)
    try:
        msgspec.convert(values, type(struct))
    except msgspec.ValidationError as problem:
        match = re.search(r"`\$\.([\w.]+)", str(problem))  # the path of the field
        if match is None:
            raise Unsupported(str(problem)) from problem
        *outer_keys, key = match[1].split(".")
        for outer_key in outer_keys:
            values = values[outer_key]
        raise Unsupported(explained(str(problem), values), key) from problem


def converted(
    values: Mapping[str, Any], kind: type[T], where: str, name_of: Callable[[str], str] = str
) -> T:
    """Return the struct with these values. Raises ServingError that names key, bound and value,
    after `where`. `name_of`: as for `explained`."""
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ServingError(f"{where}{name_of(key)} must be finite, got {value:g}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as problem:
        raise ServingError(where + explained(str(problem), values, name_of)) from problem


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
    size = 0.0
    pattern = r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<prefix>[KMGT])(?P<suffix>iB|B|)|)\s*"
    if match := re.fullmatch(pattern, text, re.IGNORECASE):
        prefix, suffix = match["prefix"] or "", match["suffix"] or ""
        base = 1000 if suffix.upper() == "B" else 1024
        exponent = ["", "K", "M", "G", "T"].index(prefix.upper())
        size = float(match["number"]) * base**exponent
    if size < 1 << 20:
        raise ServingError(
            f"{option} {text!r} is not a size of at least 1 MiB. Write a size such as 24GiB or "
            "24GB."
        )
    return int(size)
