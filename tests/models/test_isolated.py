"""Work in child processes."""

import time
from pathlib import Path

import psutil
import pytest

from models.isolated import run_python


def test_a_child_is_run_with_our_packages_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").write_text("raise SystemExit('wrong package')")
    monkeypatch.chdir(tmp_path)
    code = "import models.errors, os; print(os.environ['TOLD'])"
    ran = run_python("-c", code, environment={"TOLD": "so"})
    assert (ran.status, ran.output) == (0, b"so\n"), ran.error


def test_a_childs_end_has_a_reason() -> None:
    assert run_python("-c", "raise SystemExit('no such thing')").reason == "no such thing"
    assert run_python("-c", "import os; os.abort()").reason == "ended by SIGABRT"
    assert run_python("-c", "raise SystemExit(3)").reason == "exit status 3"


def test_at_its_time_limit_a_child_is_killed_with_what_it_started(tmp_path: Path) -> None:
    grandchild = "import time, sys; open(sys.argv[1], 'w').close(); time.sleep(60)"
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}, "
        "sys.argv[1]])"
    )
    started = time.perf_counter()
    ran = run_python("-c", code, str(tmp_path / "there"), timeout_seconds=2.0)
    assert ran.status is None and time.perf_counter() - started < 30
    assert (tmp_path / "there").exists()
    alive = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert not alive
