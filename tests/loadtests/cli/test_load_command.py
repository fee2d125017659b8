"""`crossover load` as people run it: one level, on record, whatever the endpoint does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtests.analysis.level import levels_of
from loadtests.records.run_folder import read_records
from loadtests.records.run_journal import LevelPurpose

Start = Callable[..., str]
ROOT = Path(__file__).parents[3]
LOAD = "--workload 16x8 --rate 30".split()


def started(url: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "crossover", "load", url, *LOAD, "--out", str(folder), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_in(folder: Path) -> Path:
    (found,) = folder.glob("*-load")
    return found


def test_a_level_is_shown_and_on_record(truth_server: Start, tmp_path: Path) -> None:
    child = started(truth_server(ttft=0.02, case="load"), tmp_path, "--duration", "2")
    said = child.communicate(timeout=60)[0]
    assert child.returncode == 0, said
    assert "30.0 requests/s asked" in said and "SLO chat: 100.0% good" in said
    assert "TTFT" in said and "send lag" in said
    run = read_records(run_in(tmp_path))
    (level,) = levels_of(run)
    assert level.started.purpose is LevelPurpose.LOAD and level.rate == 30.0
    assert level.is_whole and not level.failed.any() and f"{len(level.due)} requests" in said
    assert run.samples_of(level.name), "and the machine beside it"
    assert level.finished is not None and level.finished.is_valid


@pytest.mark.parametrize(
    ("fail", "word"),
    [
        ("status:500", "http_500"),
        ("slam", "connection"),
        ("cut", "cut_off"),
        ("garbage", "stream_error"),
        ("error", "stream_error"),
    ],
)
def test_an_endpoint_that_breaks_in_the_middle_is_said_and_the_rest_counts(
    truth_server: Start, tmp_path: Path, fail: str, word: str
) -> None:
    url = truth_server(ttft=0.02, fail=fail, fail_after=20, case="breaks")
    child = started(url, tmp_path, "--duration", "2")
    said = child.communicate(timeout=90)[0]
    assert child.returncode == 0, said
    (level,) = levels_of(read_records(run_in(tmp_path)))
    failed = level.failures[word]
    assert f"failed: {failed} {word}" in said.replace("\n", " ")
    assert 10 <= int((~level.failed).sum()) <= 20 and failed > 10
    assert "SLO chat" in said and "fails" in said


def test_ctrl_c_leaves_what_was_recorded(truth_server: Start, tmp_path: Path) -> None:
    child = started(truth_server(ttft=0.02, case="stopped"), tmp_path, "--duration", "60")
    until = time.monotonic() + 60
    while not any(file.stat().st_size > 5000 for file in tmp_path.glob("*/requests.jsonl")):
        assert time.monotonic() < until and child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=30)[0]
    assert child.returncode not in (0, None) and "the records so far are in" in said
    run = read_records(run_in(tmp_path))
    assert len(list(run.requests())) > 10 and not run.damage()
    assert not run.finished_levels, "no level that ended is there, and none is told"
