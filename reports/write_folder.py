"""Writes a folder of files: a report, or a copy of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crossover.models.weights.weights_manifest import write_atomically
from crossover.reports.errors import ReportError


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files into a folder, which is made if it does not exist. Return their paths.

    `contents`: name of a file -> its bytes. Raises ReportError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as problem:
        raise ReportError(f"{folder} cannot be written: {problem.strerror}") from problem
    return [folder / name for name in contents]
