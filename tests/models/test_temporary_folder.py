"""Where no folder for temporary files can be written to, one sentence says what to do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from crossover.loadtests.host.machine_lock import lock_file
from crossover.models.child_process import run_in_child
from crossover.models.errors import CrossoverError
from crossover.models.temporary_folder import temporary_folder


@pytest.fixture(autouse=True)
def _no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container whose root file system is read-only."""
    missing = str(tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [missing])


def test_one_sentence_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for needs_folder in (temporary_folder, lock_file):
        with pytest.raises(CrossoverError, match="Set TMPDIR to a folder"):
            needs_folder()


def test_work_in_a_child_process_needs_none() -> None:
    with pytest.raises(CrossoverError, match="died with status 1: .*no_such_module"):
        run_in_child("no_such_module:function", None)
