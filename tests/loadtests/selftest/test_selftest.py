"""`crossover selftest`: one of its parts, really; a second try; its table."""

from __future__ import annotations

from contextlib import nullcontext
from io import StringIO

import pytest

from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.cli.selftest_command import show_selftest
from crossover.loadtests.selftest import selftest
from crossover.loadtests.selftest.selftest import Check, conversations, counts, open_bench


def test_the_self_test_passes_its_counts() -> None:
    with open_bench() as bench:
        rows = {row.what: row for row in counts(bench)}
    assert set(rows) == {"cut off", "refused (429)", "whole"}
    assert all(row.truth == row.measured and row.truth and row.passed for row in rows.values())


def test_the_self_test_has_conversations_that_are_reused_and_think_first() -> None:
    """Every turn is sent or recorded as missing, and the server's cached tokens are those seen."""
    with open_bench() as bench:
        rows = {row.what: row for row in conversations(bench)}
    exact = [row for row in rows.values() if row.truth is not None and not row.limit]
    assert len(exact) == 3 and all(row.passed and row.truth for row in exact)
    assert rows["turns that never came"].measured, "some sessions ended early"
    assert (rows["TTFA p50, s"].truth or 0) > 0.05, "behind the reasoning"


@pytest.mark.parametrize("second", [1.05, 2.0])
def test_a_part_that_is_off_is_run_once_more(
    second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hiccup does not come twice; what is wrong does."""
    found = iter([2.0, second, 7.0])
    for part in ("counts", "conversations", "pace", "limit"):
        monkeypatch.setattr(selftest, part, lambda bench: [])
    monkeypatch.setattr(selftest, "open_bench", nullcontext)
    monkeypatch.setattr(
        selftest, "times", lambda bench: [Check("w", "TTFT", 1.0, next(found), 0.1)]
    )
    output = StringIO()
    with Progress(output) as progress:
        rows = selftest.run_selftest(progress)
    assert [(row.measured, row.passed) for row in rows] == [(second, second < 2.0)]
    assert "repeating w: TTFT is off" in output.getvalue()


def test_the_table_has_a_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Check("w", "TTFT p50, s", 0.060, 0.0602, 0.001),
        Check("bad", "answers", 100, 98, 0),
        Check("bad", "send delay p99, s", None, 0.02, 0.01),
    ]
    show_selftest(rows)
    output = capsys.readouterr().out
    assert "TTFT p50" in output and "at most 0.01" in output and "equal" in output
    assert "1 of 3 checks pass" in output and "Repeat this on an idle machine" in output
