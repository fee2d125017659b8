"""Tests in workers that are forks: runs of pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests.tools.forked_workers import run_in_forks
def pytest_addoption(parser): parser.addoption("--forks", type=int, default=0)
def pytest_runtestloop(session):
    if count := session.config.getoption("forks"):
        run_in_forks(session, count, lambda nodeid: nodeid.partition("::")[0])
        return True
"""

FIXTURE = """
import os, pytest
@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    with open({log!r}, "a") as log: print("made", made, file=log)
    yield made
    with open({log!r}, "a") as log: print("ended", made, file=log)
"""

DIES = """
import os, pytest, signal
def test_passes(folder): assert not list(folder.iterdir())
def test_fails(folder): print("words of a test"); assert folder is None
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
@pytest.mark.skip(reason="of a reason")
def test_is_skipped(): pass
def test_comes_after(folder): assert folder.is_dir()
"""

WAITS = """
import time
def test_waits(folder): time.sleep(0.5)
def test_has_no_fixture(nothing): pass
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The tests above in two workers."""
    files = {
        "conftest.py": CONFTEST + FIXTURE.format(log=str(folder / "log")),
        "test_dies.py": DIES,
        "test_waits.py": WAITS,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--forks", "2", "-ra", *options, folder],
        cwd=folder,
        env=os.environ
        | {
            "COLUMNS": "200",
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
    )


def made_and_ended(folder: Path) -> tuple[set[str], set[str]]:
    events = [line.split() for line in (folder / "log").read_text().splitlines()]
    made, ended = ([path for event, path in events if event == kind] for kind in ("made", "ended"))
    assert len(set(made)) == len(made) and len(set(ended)) == len(ended)
    return set(made), set(ended)


def test_failures_are_reported_and_those_of_a_process_end_with_its_test(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert re.search(r"2 failed, 3 passed, 1 skipped, 1 error in ", done.stdout), done.stdout
    assert "words of a test" in done.stdout and "of a reason" in done.stdout
    assert "FAILED test_dies.py::test_fails" in done.stdout
    assert "FAILED test_dies.py::test_dies - The process that ran this test ended" in done.stdout
    assert "fixture 'nothing' not found" in done.stdout
    # A fixture of a session is one of a worker. Only the killed one has left its own.
    made, ended = made_and_ended(tmp_path)
    assert len(made) == 3 and len(ended) == 2 and ended < made


def test_workers_end_their_fixtures_after_the_first_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "-x")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout
    assert "1 failed" in done.stdout and "test_dies - " not in done.stdout
    made, ended = made_and_ended(tmp_path)
    assert made and made == ended
