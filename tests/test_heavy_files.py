"""`--heavy` divides the test files, so that most workers do not import torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import HEAVY, pytest_ignore_collect

TESTS = Path(__file__).parent


def test_each_file_is_heavy_or_not(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = {}
    for choice in ("with", "only", "without"):
        monkeypatch.setattr(pytestconfig.option, "heavy", choice)
        collected[choice] = {
            path
            for path in TESTS.rglob("test_*.py")
            if not any(
                pytest_ignore_collect(part, pytestconfig)
                for part in (path, *path.parents)
                if part.is_relative_to(TESTS)
            )
        }
    assert collected["only"] and collected["without"]
    assert collected["only"].isdisjoint(collected["without"])
    assert collected["only"] | collected["without"] == collected["with"]


def test_only_heavy_files_import_torch_when_they_are_collected() -> None:
    importing = {
        path.relative_to(TESTS.parent).as_posix()
        for path in [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]
        if re.search(r"^(import|from) (torch|transformers)\b", path.read_text(), re.M)
    }
    assert importing and all(path.startswith(HEAVY) for path in importing)
