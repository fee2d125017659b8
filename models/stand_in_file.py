"""Recognizes what often lies in place of a file of weights: a pointer of git-lfs, or a web page."""

from __future__ import annotations

from pathlib import Path

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE_STARTS = (b"<!doctype", b"<html", b"<?xml")


def stand_in_words(path: Path) -> str | None:
    """Return what a file is in place of weights, and what to do, as a sentence; None: it is neither
    a pointer nor a page."""
    with path.open("rb") as file:
        start = file.read(512).lstrip()
    if start.startswith(_LFS_POINTER):
        return f"{str(path)!r} is a pointer of git-lfs, not the file itself. Run `git lfs pull`."
    if start.lower().startswith(_PAGE_STARTS):
        return (
            f"{str(path)!r} is a web page, not the file itself. Download it again from the link of "
            "the raw file."
        )
    return None
