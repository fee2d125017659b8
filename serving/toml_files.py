"""Reads TOML files. crossover.serving.faults makes structs of their tables.

tables, text = read_toml(Path("mine.toml"), BadCampaign)
file = converted(tables, CampaignFile, BadCampaign)
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.errors import CrossoverError, printable


class TomlTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a file: unknown keys are refused."""


def read_toml(path: Path, error: type[CrossoverError]) -> tuple[dict[str, Any], str]:
    """Return the decoded tables of a file, and its text. Raises `error`."""
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
    # ValueError: also a number with too many digits. RecursionError: lists nested too deeply.
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}This is not valid TOML: {problem}") from problem
