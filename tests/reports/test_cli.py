from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports.example_run import FACTS, RUNGS, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}


def crossover(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "crossover", *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_run(tmp_path_factory.mktemp("runs") / "small", SMALL, window=30.0)


def test_writes_beside_the_run_and_ends_with_sentence_and_path(small: Path) -> None:
    done = crossover("report", small, "--png")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-2].startswith("On this machine (AMD EPYC 7B13") and lines[-1] == f"Report: {small / 'report' / 'index.html'}"
    written = {path.name for path in (small / "report").iterdir()}
    assert {"index.html", "report.md", "cells.csv", "levels.csv", "gpus.csv", "crossover.png", "memory.png", "throughput.png"} <= written
    assert (small / "report" / "crossover.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "![Crossover map](crossover.png)" in (small / "report" / "report.md").read_text()


def test_formats_out_and_promise(small: Path, tmp_path: Path) -> None:
    done = crossover(
        "report", small, "--out", tmp_path / "out", "--format", "md,svg", "--promise", "reading", "--target", "0.8", "--rate", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "the reading promise" in done.stdout
    text = (tmp_path / "out" / "report.md").read_text()
    assert "for 80 % of requests" in text and "At the 2.0 requests/s that you ask for" in text
    assert not (tmp_path / "out" / "index.html").exists() and (tmp_path / "out" / "crossover.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "pdf"], "--format 'pdf' is none of html, md, csv, png, svg"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--promise", "soon"], "promise 'soon' is not one of chat"),
        (["--target", "1.5"], "target must be between 0 and 1"),
        (["--ttft", "-1"], "ttft_seconds must be above 0"),
    ],
)
def test_bad_options_are_one_sentence(small: Path, arguments: list[str], message: str) -> None:
    done = crossover("report", small, *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_no_run_there(tmp_path: Path) -> None:
    done = crossover("report", tmp_path)
    assert done.returncode == 2 and "holds no run" in done.stderr and "Traceback" not in done.stderr


def test_machines_that_differ_need_a_report_each(small: Path, tmp_path: Path) -> None:
    other = write_example_run(tmp_path / "other", SMALL, window=30.0, facts=FACTS | {"cpu_model": "Intel Xeon 6980P"})
    mixed = crossover("report", small, other)
    assert mixed.returncode == 2 and "differ in CPU: AMD EPYC 7B13 and Intel Xeon 6980P" in mixed.stderr
    apart = crossover("report", small, other, "--separate", "--out", tmp_path / "out", "--format", "md")
    assert apart.returncode == 0, apart.stderr
    assert (tmp_path / "out" / "small" / "report.md").exists() and (tmp_path / "out" / "other" / "report.md").exists()
    assert "Intel Xeon 6980P" in apart.stdout and "AMD EPYC 7B13" in apart.stdout
