"""The console command in the environments of others: another encoding, no home directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "docs" / "results" / "demo"
WITHOUT_HOME = """
import os, pwd

def no_user(uid):
    raise KeyError(uid)

os.environ.pop("HOME", None)
pwd.getpwuid = no_user
import crossover.reports.chart_style
"""

INTERRUPTED = """
import os, signal, sys
import crossover

class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
crossover.main()
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_results_are_printed_in_any_encoding(encoding: str) -> None:
    """The dash of an interval is in neither of these."""
    command = [sys.executable, "-m", "crossover", "campaign", "show", str(DEMO)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert b"?" in shown.stdout


def test_charts_need_no_home_directory() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_HOME], check=True, timeout=60)


def test_an_interrupt_of_the_imports_shows_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")
