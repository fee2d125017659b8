"""The report of a run of conversations: what prefix caching is worth stands on its first screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.render.first_screen_png import drawing
from crossover.reports.render.html_page import page
from crossover.reports.render.json_and_csv import numbers
from crossover.reports.render.markdown import markdown
from crossover.reports.report_data import read_report
from tests.loadtests.campaign.simulated import Simulated
from tests.loadtests.campaign.test_cell_runner import TALK
from tests.reports.runs import shown


def test_what_prefix_caching_is_worth_stands_below_the_sentence_of_every_output(
    tmp_path: Path,
) -> None:
    world = Simulated(base=0.02, row=0.004, prompt=0.0014)
    folder = world.run(parse_campaign(TALK), tmp_path)
    data = read_report(folder)
    answers = answers_of(data)
    screen = first_screen_of(data, answers)
    capacity = data.cells[0].capacity
    assert capacity is not None and capacity.estimated_rate and capacity.users
    assert capacity.estimated_rate_without_reuse
    said = re.fullmatch(
        r"Prefix caching raises the capacity of (\S+) on the CPU from ([\d.]+) to ([\d.]+) "
        r"requests a minute, which serves about ([\d.]+) users at a time\.",
        screen.prefix_reuse,
    )
    assert said is not None, screen.prefix_reuse
    model, *figures = said.groups()
    without_reuse, with_reuse, users = map(float, figures)
    assert model == data.cells[0].model
    assert without_reuse / 60 == pytest.approx(capacity.estimated_rate_without_reuse, rel=0.05)
    assert with_reuse / 60 == pytest.approx(capacity.estimated_rate, rel=0.05)
    assert users == pytest.approx(capacity.users, rel=0.05)
    header = page(data, answers, []).partition("</header>")[0]
    assert screen.headline in re.sub("<.*?>", "", header) and screen.prefix_reuse in header
    lines = markdown(data, answers, []).splitlines()
    assert lines[:3] == [f"# {screen.headline}", "", screen.prefix_reuse]
    assert numbers(data, answers)["prefix_reuse"] == screen.prefix_reuse
    assert "Prefix caching raises" in drawing(data, answers)
    printed = CliRunner().invoke(cli.app, ["report", str(folder), "--format", "md"]).output
    assert printed.splitlines()[:2] == [screen.headline, screen.prefix_reuse]


def test_a_run_of_single_requests_has_no_such_sentence() -> None:
    folder, data, answers = shown()
    assert first_screen_of(data, answers).prefix_reuse == ""
    assert numbers(data, answers)["prefix_reuse"] is None
    done = CliRunner().invoke(cli.app, ["report", str(folder), "--json"])
    assert json.loads(done.stdout)["prefix_reuse"] is None
