"""The folder for temporary files, and what to do where there is none."""

from __future__ import annotations

import tempfile

from crossover.models.errors import CrossoverError


def temporary_folder() -> str:
    """Return the folder in which temporary files and folders are made.

    Raises CrossoverError if no folder for them can be written to, as in a container with a
    read-only root file system.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise CrossoverError(
            "No folder for temporary files can be written to, neither TMPDIR nor /tmp. Set TMPDIR "
            "to a folder that can."
        ) from None
