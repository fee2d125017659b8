"""The models file of `serve --models-file`: TOML with a [[model]] table for each model."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from serving.errors import ServingError


def entries(file: str, where: str) -> list[dict[str, Any]]:
    """The [[model]] tables of a models file. Raises ServingError."""
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ServingError(f"{where}: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ServingError(f"{where} is no TOML: {problem}") from problem
    entries = content.pop("model", [])
    if content:
        raise ServingError(
            f"{where}: unknown key {next(iter(content))!r}; [[model]] sections are known"
        )
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not entries:
        raise ServingError(f"{where} has no [[model]] section")
    return list(entries)
