"""`crossover load` as people run it: one level, whatever the endpoint does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.waiting import wait_for

Start = Callable[..., str]
ROOT = Path(__file__).parents[3]
LOAD = "--workload 16x8 --rate 30".split()


def started(url: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "crossover", "load", url, *LOAD, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_level_is_shown(truth_server: Start) -> None:
    child = started(truth_server(ttft=0.02, case="load"), "--duration", "2")
    output = child.communicate(timeout=60)[0]
    assert child.returncode == 0, output
    for part in (
        " offered, nominal 30.0 requests/s)",
        "SLO chat: 100.0% SLO attainment",
        "TTFT",
        "send delay",
    ):
        assert part in output, part
    assert "# reqs" not in output  # Locust's own tables


def test_the_help_page_shows_table_names_in_brackets() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crossover", "load", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "with a [target]" in done.stdout


@pytest.mark.parametrize(
    ("fail", "word"),
    [("cut", "cut_off"), pytest.param("slam", "connection", marks=pytest.mark.slow)],
)
def test_an_endpoint_that_breaks_midway_is_reported_and_the_rest_counts(
    truth_server: Start, fail: str, word: str
) -> None:
    url = truth_server(ttft=0.02, fail=fail, fail_after=20, case="breaks")
    child = started(url, "--duration", "2")
    output = child.communicate(timeout=90)[0]
    assert child.returncode == 0, output
    failed = re.search(rf"failed: (\d+) {word}", output)
    assert failed is not None and 30 < int(failed[1]) < 60, output
    assert "SLO chat" in output and "misses" in output


def test_ctrl_c_ends_in_order(truth_server: Start) -> None:
    child = started(truth_server(ttft=0.02, case="stopped"), "--duration", "60")
    wait_for(psutil.Process(child.pid).children)  # the load generator was started
    child.send_signal(signal.SIGINT)
    output = child.communicate(timeout=30)[0]
    assert child.returncode == 2 and output.endswith("crossover: stopped.\n")


def test_more_users_than_fit_in_memory_are_refused() -> None:
    child = started("http://127.0.0.1:9", "--concurrency", "1000000000")
    output = child.communicate(timeout=60)[0]
    assert child.returncode == 2 and "--concurrency must be at most 100000" in output
