"""`crossover selftest` as people run it: one of its parts, really; and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.cli.selftest_command import show_selftest
from loadtests.selftest.selftest import Report
from loadtests.selftest.selftest_checks import below, near

ROOT = Path(__file__).parents[3]


def test_the_self_test_passes_its_counts_and_refuses_a_wrong_part_by_name() -> None:
    command = [sys.executable, "-m", "crossover", "selftest"]
    done = subprocess.run(
        [*command, "--only", "counts", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    rows = {row["what"]: row for row in report["rows"]}
    assert set(rows) == {"cut off", "refused (429)", "whole"}
    assert all(row["truth"] == row["measured"] > 0 for row in rows.values()) and report["passed"]
    done = subprocess.run(
        [*command, "--only", "tea"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "'tea' is not one of times, counts" in done.stderr


def test_the_table_has_a_line_a_world_and_all_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        near("w", "TTFT p50", 0.060, 0.0602, 0.001, "seconds"),
        near("w", "TTFT p99", 0.060, 0.0608, 0.001, "seconds"),
        near("w", "E2E p99", 1.0, 1.0, 0.01, "seconds"),
        near("bad", "answers", 100, 98, 0, "count"),
        below("bad", "send lag p99", 0.02, 0.01, "seconds"),
        near("bad", "TPOT p50", 0.01, 0.01, 0.001, "seconds"),
    ]
    show_selftest(Report(rows=rows, seconds=61.0))
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert sum("TTFT" in line for line in lines) == 1 and "3 of 3  TTFT p99" in said
    assert "answers" in said and "at most 10.0 ms" in said and "TPOT" not in said
    assert "4 of 6 checks pass, in 1 min" in said and "repeat on a quiet one" in said
