"""Bounds of options and keys, and the texts about them.

The texts stand in the file options.toml of each package, in a table for each struct, so that a
struct shows its fields and a help page can be read as a whole.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from crossover.serving.errors import ServingError

MAX_NUMBER = 10**9  # of what users set: larger numbers are mistakes, and fail late
Count = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
Share = Annotated[float, Meta(gt=0, lt=1)]


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user reads about an option or key."""

    text: str
    panel: str = ""  # of the help page
    flag: str = ""  # on the command line, if it differs from the field's name
    metavar: str = ""
    is_argument: bool = False  # a positional argument, without a flag


def texts_of(kind: type[Any]) -> dict[str, About]:
    """Return the texts of a struct's fields, in the order of the help page, which is that of
    options.toml."""
    from inspect import get_annotations  # here, since an engine needs no texts

    owners: dict[str, type] = {}  # field -> the class that declares it
    for base in reversed(kind.__mro__):
        owners |= dict.fromkeys(get_annotations(base), base)
    packages = dict.fromkeys(_package(owners[name]) for name in kind.__struct_fields__)
    texts = {
        name: about
        for package in packages
        for (class_name, name), about in texts_in(package).items()
        if name in kind.__struct_fields__
        and (_package(owners[name]), owners[name].__name__) == (package, class_name)
    }
    # A struct whose fields are rows of a table says of them what the table does.
    made = getattr(kind, "field_texts", dict[str, str])()
    return texts | {name: About(text) for name, text in made.items()}


@functools.cache
def texts_in(package: str) -> dict[tuple[str, str], About]:
    """Return the texts in the options.toml of a package, by class and field.

    Names in braces that the table `lists` has are replaced by its lists.
    """
    import tomllib

    path = Path(sys.modules[package].__path__[0], "options.toml")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    lists = tables.pop("lists", {})
    texts = {}
    for class_name, fields in tables.items():
        for name, value in fields.items():
            keys = value if isinstance(value, dict) else {"text": value}
            text = " ".join(keys["text"].split())
            for list_name, members in lists.items():
                text = text.replace(f"{{{list_name}}}", members)
            texts[class_name, name] = msgspec.convert({**keys, "text": text}, About)
    return texts


def _package(kind: type) -> str:
    """Return the package with the class's options.toml: crossover.serving, for example."""
    return ".".join(kind.__module__.split(".")[:2])


def flags_of(kind: type[Any]) -> dict[str, str]:
    """Return the option of the command line for each field."""
    return {
        name: f"--{about.flag or name.replace('_', '-')}" for name, about in texts_of(kind).items()
    }


def unbounded(kind: Any) -> Any:
    """Return the type without bounds: `Annotated[int, Meta(ge=1)] | None` becomes
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
