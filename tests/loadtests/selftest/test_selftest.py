"""`crossover selftest`: one of its parts, really; and its table."""

from __future__ import annotations

import pytest

from loadtests.cli.selftest_command import show_selftest
from loadtests.selftest.selftest import Row, counts, open_bench


def test_the_self_test_passes_its_counts() -> None:
    with open_bench() as bench:
        rows = {row.what: row for row in counts(bench)}
    assert set(rows) == {"cut off", "refused (429)", "whole"}
    assert all(row.truth == row.measured and row.truth and row.passed for row in rows.values())


def test_the_table_has_a_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("w", "TTFT p50, s", 0.060, 0.0602, 0.001),
        Row("bad", "answers", 100, 98, 0),
        Row("bad", "send lag p99, s", None, 0.02, 0.01),
    ]
    show_selftest(rows)
    said = capsys.readouterr().out
    assert "TTFT p50" in said and "at most 0.01" in said and "equal" in said
    assert "1 of 3 checks pass" in said and "repeat on a quiet one" in said
