"""Bounds and help of options, which are attached to a struct's fields as msgspec.Meta."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from crossover.serving.errors import ServingError

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]

ENGINE = "Engine"  # the panel of the help page for the options of an engine


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
