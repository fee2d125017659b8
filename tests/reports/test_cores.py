"""A campaign with several numbers of cores: a configuration for each, and what the report says."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from crossover.cli import app
from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.campaign.cell_selection import layout_of
from crossover.loadtests.campaign.resume_state import CellState
from crossover.loadtests.errors import BadCampaign
from crossover.reports.answers.cores_needed import (
    cells_by_cores,
    least_cores,
    parse_rate,
    pod_request,
    pods_yaml,
)
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.chart_style import svg
from crossover.reports.errors import ReportError
from crossover.reports.render.markdown import markdown
from crossover.reports.report_data import Memory, ReportData, read_report
from crossover.reports.sections import cores_section
from crossover.reports.sections.all_sections import sections_of
from crossover.serving.hardware.machine_facts import allowed_cores
from tests.loadtests.campaign.simulated import Simulated, campaign, on_machine
from tests.loadtests.capacity.known_server import SETTINGS

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

DEMO = Path(__file__).parents[2] / "docs" / "results" / "demo"
needs_two_cores = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
CORES = "[server]\ncores = [1, 2]"


@cache
def run_on_cores() -> Path:
    """A run of a simulated server whose steps take half the time on two cores."""
    world = Simulated(policy=SETTINGS)

    def opening(state: CellState) -> None:
        seconds = 0.08 / (state.cell.cores or 1)
        world.base, world.row, world.prompt = seconds, seconds / 40, seconds / 40

    world.opening = opening
    plan = campaign(1600, ttft=2.0, more="server.cores = [1, 2]")
    return world.run(plan, Path(mkdtemp(prefix="crossover-cores-")))


@cache
def data() -> ReportData:
    return read_report(run_on_cores())


@needs_two_cores
def test_a_configuration_is_measured_with_each_number_of_cores() -> None:
    plan = on_machine(f'name = "x"\nmodels = ["135m"]\n{CORES}')
    assert [cell.cores for cell in plan.cells] == [1, 2]
    keys = [cell.key for cell in plan.cells]
    assert len(set(keys)) == 2 and keys[0].endswith("-1-cores")
    layouts = [layout_of(cell, plan.campaign, (0, 1)) for cell in plan.cells]
    assert [layout.engine for layout in layouts] == [(0,), (0, 1)]
    assert [layout.engine_threads for layout in layouts] == [1, 2]
    (single,) = on_machine('name = "x"\nmodels = ["135m"]\n[server]\ncores = 1').cells
    assert single.cores is None and "cores" not in single.key


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ("[]", r"server.cores = \[\] names no number"),
        ("[0]", "server.cores"),
        ("[1, 4096]", "server.cores: 4096 cores are not available for the engine"),
        ("[1, 1]", "twice"),
    ],
)
def test_impossible_numbers_of_cores_are_refused_before_anything_runs(
    cores: str, message: str
) -> None:
    with pytest.raises(BadCampaign, match=message):
        on_machine(f'name = "x"\nmodels = ["135m"]\n[server]\ncores = {cores}')


@needs_two_cores
def test_the_report_shows_capacity_against_cores() -> None:
    one, two = cells_by_cores(data())
    assert (one.cores, two.cores) == (1, 2)
    rates = [row.cell.estimated_rate or 0.0 for row in (one, two)]
    assert 1.5 * rates[0] < rates[1] < 3 * rates[0]
    answers = answers_of(data())
    sections = {section.slug: section for section in sections_of(data(), answers)}
    section = sections["cores"]
    assert "on 2 cores has" in section.sentence and "on 1 core." in section.sentence
    assert [row[2] for row in section.table.rows] == ["1", "2"]
    assert svg(section.charts[0].spec or {}, 430).startswith("<svg")
    assert "Capacity against cores" in markdown(data(), answers, [section])
    # The best configuration of the model is that with two cores.
    assert answers[0].cell.cores == 2


@needs_two_cores
def test_the_least_cores_for_a_rate_are_named() -> None:
    rows = cells_by_cores(data())
    low, high = (row.cell.confirmed_rate or row.cell.capacity_interval.low for row in rows)
    assert "1 core serves" in least_cores(rows, 0.9 * low)[0]
    assert "2 cores serve" in least_cores(rows, (low + high) / 2)[0]
    assert "the most that were measured, do not serve" in least_cores(rows, 10 * high)[0]
    result = CliRunner().invoke(app, ["report", str(run_on_cores()), "--cores-for", "20/min"])
    assert result.exit_code == 0 and "1 core serves 20 requests a minute" in result.output
    assert (run_on_cores() / "report/pods.yaml").is_file()


@pytest.mark.parametrize(
    ("text", "rate"), [("20/min", 20 / 60), ("0.5/s", 0.5), (" 90 / h", 0.025)]
)
def test_a_rate_is_read_with_its_unit(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["20", "0/s", "-1/s", "20/day", ""])
def test_a_rate_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ReportError, match="--cores-for '.*' is not a rate"):
        parse_rate(text)


@needs_two_cores
def test_pods_request_what_was_measured() -> None:
    resources = yaml.safe_load(pods_yaml(data()))
    assert [*resources] == [row.cell.key for row in cells_by_cores(data())]
    assert [one["requests"]["cpu"] for one in resources.values()] == ["1100m", "2100m"]
    cell = cells_by_cores(data())[0].cell
    assert cell.ready is not None
    ready = msgspec.structs.replace(cell.ready, layout={"engine": [0, 1], "api": [0, 1]})
    memory = Memory(peak_bytes=1500 << 20)
    shared = msgspec.structs.replace(cell, ready=ready, memory=memory)
    assert pod_request(shared, 2) == ("2", "2048Mi")
    apart = msgspec.structs.replace(ready, layout={"engine": [0, 32], "api": [1, 33]})
    hyperthreads = msgspec.structs.replace(cell, ready=apart, memory=Memory())
    assert pod_request(hyperthreads, 1) == ("2100m", None)


def test_other_runs_have_no_pods() -> None:
    demo = read_report(DEMO)
    assert pods_yaml(demo) == "" and cells_by_cores(demo) == []
    assert cores_section.cores(demo, ()) is None


def test_the_campaign_keeps_a_single_number_as_it_was() -> None:
    plan = parse_campaign('name = "x"\nmodels = ["135m"]\n[server]\ncores = 1')
    assert plan.campaign.server.core_counts == [None]
    assert plan.campaign.server.cores_of(None) == 1
