"""The report of a run of conversations: what prefix caching is worth stands on its first screen."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.render.first_screen_png import drawing
from crossover.reports.render.html_page import page
from crossover.reports.render.json_and_csv import numbers
from crossover.reports.render.markdown import markdown
from crossover.reports.report_data import read_report
from tests.reports.runs import shown

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")
FEW_REQUESTS = 500  # a rate: with fewer, the searches of conversations take longer

RUNS = Path(__file__).parents[1] / "bench" / "runs" / "truth-sessions.tar.xz"
NAME = "SmolLM2-135M-Instruct.Q4_1 on the CPU"


def test_what_prefix_caching_is_worth_stands_below_the_sentence_of_every_output(
    tmp_path: Path,
) -> None:
    with tarfile.open(RUNS) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "truth-sessions" / "q4_1-1"
    data = read_report(folder)
    (cell,) = data.cells
    answers = [ModelAnswer(model=cell.model, cpu=cell, slo=data.slo)]
    screen = first_screen_of(data, answers)
    assert screen.prefix_reuse == (
        f"Without prefix caching {NAME} misses the SLO even with one conversation at a time; with "
        "it the capacity is 25 requests a minute, which serves about 3.8 users at a time."
    )
    header = page(data, answers, []).partition("</header>")[0]
    assert screen.headline in re.sub("<.*?>", "", header) and screen.prefix_reuse in header
    lines = markdown(data, answers, []).splitlines()
    assert lines[:3] == [f"# {screen.headline}", "", screen.prefix_reuse]
    assert numbers(data, answers)["prefix_reuse"] == screen.prefix_reuse
    assert "Without prefix caching" in drawing(data, answers)
    printed = CliRunner().invoke(cli.app, ["report", str(folder), "--format", "csv"]).output
    assert printed.splitlines()[1] == screen.prefix_reuse
    # A machine that serves conversations without it, but fewer of them.
    assert cell.capacity is not None
    capacity = msgspec.structs.replace(cell.capacity, estimated_rate_without_reuse=0.2)
    slower = msgspec.structs.replace(cell, capacity=capacity)
    answers = [ModelAnswer(model=cell.model, cpu=slower, slo=data.slo)]
    assert first_screen_of(data, answers).prefix_reuse == (
        f"Prefix caching raises the capacity of {NAME} from 12 to 25 requests a minute, which "
        "serves about 3.8 users at a time."
    )


def test_a_run_of_single_requests_has_no_such_sentence() -> None:
    folder, data, answers = shown()
    assert first_screen_of(data, answers).prefix_reuse == ""
    assert numbers(data, answers)["prefix_reuse"] is None
    done = CliRunner().invoke(cli.app, ["report", str(folder), "--json"])
    assert json.loads(done.stdout)["prefix_reuse"] is None
