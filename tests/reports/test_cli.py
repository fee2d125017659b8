from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from crossover import app
from reports.errors import ReportError
from tests.reports.example_run import FACTS, RUNGS, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}


def crossover(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output_of(done: Result) -> str:
    assert done.exit_code == 0, done.exception
    return done.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_run(tmp_path_factory.mktemp("runs") / "small", SMALL, window=30.0)


def test_writes_beside_the_run_and_ends_with_sentence_and_path(small: Path) -> None:
    done = crossover("report", small, "--png")
    lines = [line for line in output_of(done).splitlines() if line]
    assert (
        lines[-2].startswith("On this machine (AMD EPYC 7B13")
        and lines[-1] == f"Report: {small / 'report' / 'index.html'}"
    )
    written = {path.name for path in (small / "report").iterdir()}
    assert {
        "index.html",
        "report.md",
        "cells.csv",
        "levels.csv",
        "gpus.csv",
        "crossover.png",
        "memory.png",
        "throughput.png",
    } <= written
    assert (small / "report" / "crossover.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "![Crossover map](crossover.png)" in (small / "report" / "report.md").read_text()


def test_formats_out_and_slo(small: Path, tmp_path: Path) -> None:
    done = crossover(
        "report",
        small,
        "--out",
        tmp_path / "out",
        "--format",
        "md,svg",
        "--slo",
        "reading",
        "--target",
        "0.8",
        "--rate",
        "2",
    )
    assert "SLO reading: first token within 5 s" in output_of(done)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "for 80 % of requests" in text and "At your 2.0 requests/s, " in text
    charts = re.findall(r"\]\((\S+\.svg)\)", text)
    assert len(charts) > 3 and all((tmp_path / "out" / name).exists() for name in charts)
    assert not (tmp_path / "out" / "index.html").exists() and (
        tmp_path / "out" / "crossover.svg"
    ).read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "pdf"], "--format 'pdf' is none of html, md, csv, json, parquet, png, svg"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--slo", "soon"], "SLO 'soon' is not one of chat"),
        (["--target", "1.5"], "target must be between 0 and 1"),
        (["--ttft", "-1"], "ttft_seconds must be above 0"),
    ],
)
def test_bad_options_are_one_sentence(small: Path, arguments: list[str], message: str) -> None:
    done = crossover("report", small, *arguments)
    assert isinstance(done.exception, ReportError) and message in str(done.exception)


def test_a_strangers_run_does_not_say_where_its_report_is_written(
    small: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(small, run, ignore=shutil.ignore_patterns("report"))
    theirs = tmp_path / "somebody's"
    theirs.mkdir()
    (run / "report").symlink_to(theirs)
    refused = crossover("report", run, "--format", "csv")
    assert "report is a link; --out says where to write" in str(refused.exception)
    assert not list(theirs.iterdir())
    (run / "report").unlink()
    (run / "report").mkdir()
    (run / "report" / "cells.csv").symlink_to(theirs / "notes")
    output_of(crossover("report", run, "--format", "csv"))
    assert not list(theirs.iterdir()) and not (run / "report" / "cells.csv").is_symlink()


@pytest.mark.parametrize("option", ["--machine", "--plan"])
def test_files_are_read_before_anything_is_simulated(small: Path, option: str) -> None:
    done = crossover("report", small, option, "nope.file")
    assert "nope.file cannot be read" in str(done.exception)
    assert option == "--plan" or "--machine nope.file" in str(done.exception)
    assert "would hold" not in done.stderr


def test_no_run_there_is_one_sentence_and_exit_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crossover", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "holds no run" in done.stderr and "Traceback" not in done.stderr


def test_machines_that_differ_need_a_report_each(small: Path, tmp_path: Path) -> None:
    other = write_example_run(
        tmp_path / "other", SMALL, window=30.0, facts=FACTS | {"cpu_model": "Intel Xeon 6980P"}
    )
    mixed = crossover("report", small, other)
    assert "differ in CPU: AMD EPYC 7B13 and Intel Xeon 6980P" in str(mixed.exception)
    apart = crossover(
        "report", small, other, "--separate", "--out", tmp_path / "out", "--format", "md"
    )
    shown = output_of(apart)
    assert (tmp_path / "out" / "small" / "report.md").exists() and (
        tmp_path / "out" / "other" / "report.md"
    ).exists()
    assert "Intel Xeon 6980P" in shown and "AMD EPYC 7B13" in shown


WITHOUT_CHARTS = """
import sys
sys.modules |= {"altair": None, "vl_convert": None}
import crossover
crossover.main()
"""


def test_without_the_packages_that_draw_there_is_everything_but_the_page(
    small: Path, tmp_path: Path
) -> None:
    def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
        words = ["report", str(small), *map(str, options)]
        command = [sys.executable, "-c", WITHOUT_CHARTS, *words]
        return subprocess.run(command, capture_output=True, text=True)

    done = run("--out", tmp_path / "usual")
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (tmp_path / "usual").iterdir()}
    assert written == {"report.md", "cells.csv", "levels.csv", "gpus.csv"}
    note = "needs? altair and vl-convert-python, .* pip install 'llm-crossover\\[report\\]'"
    assert re.search(f"No page: it {note}", done.stderr)
    refused = run("--png", "--out", tmp_path / "asked")
    assert refused.returncode == 2 and re.search(f"charts {note}", refused.stderr)
    assert len(refused.stderr.splitlines()) == 1  # refused before the runs are predicted
    assert not (tmp_path / "asked").exists()
