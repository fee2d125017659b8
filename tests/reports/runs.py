"""Run folders for reports: campaigns on a simulated machine, whose steps grow with the model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from crossover.loadtests.campaign.resume_state import CellState
from crossover.models.identity.model_ladder import ladder_model
from crossover.reports.answers.model_answers import ModelAnswer, answers_of
from crossover.reports.render.html_page import page
from crossover.reports.report_data import ReportData, read_report
from crossover.reports.sections.all_sections import sections_of
from crossover.reports.sections.section import Section
from tests.loadtests.campaign.simulated import Simulated, campaign
from tests.loadtests.capacity.few_requests import few_requests
from tests.loadtests.capacity.known_server import SETTINGS

H200_RUN = Path(__file__).parents[2] / "docs" / "results" / "h200"
LADDER = '["135m", "360m", "1b", "8b"]'


def run_folder(
    out: Path,
    models: str = LADDER,
    *,
    quicker: float = 1.0,
    most_tokens: tuple[int, int] = (128, 32),
    budget: float = 1200,
) -> Path:
    """A campaign of a machine that reads 10 GB/s: 135M quick, 8B not even alone."""
    world = Simulated(policy=SETTINGS)
    world.facts = msgspec.structs.replace(world.facts, cpu_model="AMD EPYC", allowed_cores=2)

    def opening(state: CellState) -> None:
        size = ladder_model(state.cell.model).spec.parameters / quicker
        world.base, world.row, world.prompt = size * 1e-10, size * 1e-11, size * 8e-12

    world.opening = opening
    return world.run(campaign(budget, models=models, ttft=2.0, most_tokens=most_tokens), out)


@cache
def shown() -> tuple[Path, ReportData, tuple[ModelAnswer, ...]]:
    """One run of the ladder, read: made once a process, with few simulated requests."""
    with few_requests():
        folder = run_folder(Path(mkdtemp(prefix="crossover-report-")))
        data = read_report(folder)
        return folder, data, tuple(answers_of(data))


@cache
def short_run() -> Path:
    """A run of the smallest and the largest model of the ladder: made once a process."""
    return run_folder(Path(mkdtemp(prefix="crossover-report-")), '["135m", "8b"]')


@cache
def shown_page() -> str:
    """The page of `shown`: made once a process."""
    _, data, answers = shown()
    with few_requests():
        return page(data, answers, sections_of(data, answers))


@cache
def h200() -> tuple[ReportData, list[ModelAnswer], dict[str, Section]]:
    """The run of a machine with a GPU, read once a process, with its sections by slug."""
    data = read_report(H200_RUN)
    answers = answers_of(data)
    return data, answers, {section.slug: section for section in sections_of(data, answers)}


@cache
def h200_page() -> str:
    """The page of `h200`: made once a process."""
    data, answers, sections = h200()
    return page(data, answers, list(sections.values()))
