"""A mixture of experts, from its campaign to what the report says of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.campaign.campaign_file import Plan
from crossover.loadtests.records.journal_events import Calibrated, of_kind
from crossover.loadtests.records.run_folder import read_records
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import Routing
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.render.html_page import page
from crossover.reports.report_data import CellData, read_report
from crossover.reports.sections.all_sections import sections_of
from crossover.reports.sections.crossover_map import crossover_map
from crossover.reports.sections.speeds import batch_size, batching_sentence
from crossover.serving.capacity.step_time_model import StepTimeModel
from tests.loadtests.campaign.simulated import Simulated, campaign, on_machine, with_experts
from tests.loadtests.capacity.known_server import EXPERTS_STEP_TIMES, SETTINGS, KnownServer

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

SPEC = ladder_model("qwen3-30b-a3b").spec  # 8 of 128 experts
# Of a 4-bit mixture on two cores, whose kernels take each row by itself.
FOUR_BIT = StepTimeModel(
    base_seconds=0.0018,
    row_seconds=0.00412,
    prompt_token_seconds=0.00254,
    pass_seconds=0.0077,
    experts=Routing(128, 8),
)


def test_step_times_of_a_mixture_have_experts_and_the_report_explains_them(tmp_path: Path) -> None:
    world = Simulated(
        serving=lambda seed, at, start: KnownServer(EXPERTS_STEP_TIMES.seconds), policy=SETTINGS
    )
    folder = world.run(with_experts(campaign(more='devices = ["cpu"]'), SPEC), tmp_path)
    (made,) = of_kind(read_records(folder).events, Calibrated)
    assert made.server is not None
    assert made.server.step_times.experts == EXPERTS_STEP_TIMES.experts
    assert made.server.step_times.expert_seconds == pytest.approx(
        EXPERTS_STEP_TIMES.expert_seconds, rel=0.1
    )
    data = read_report(folder)
    answers = answers_of(data)
    (cell,) = data.cells
    assert "31B, 3.0B active" in page(data, answers, sections_of(data, answers))
    section = batch_size(data, answers)
    assert section is not None and "its 8 of 128 experts make it fast for one" in section.sentence
    assert sentence(cell, FOUR_BIT) == (
        "qwen3-30b-a3b on the CPU: its 8 of 128 experts make it fast for one user (169 tokens/s) "
        "and slow for many: 16 concurrent requests give 1.4x the throughput of one."
    )
    # A step whose weights all rows share is fast for many too.
    shared = msgspec.structs.replace(FOUR_BIT, base_seconds=0.02, row_seconds=1e-5)
    assert sentence(cell, shared).startswith("Batching 16 requests of qwen3-30b-a3b on the CPU")


def test_models_stand_by_their_active_parameters_and_the_mixture_before_a_dense_8b(
    tmp_path: Path,
) -> None:
    """The axis is speed: 30 billion parameters of which 3 are active are before 8 billion."""
    plan = on_machine(campaign(300, models='["1b", "8b"]', more='devices = ["cpu"]'))
    mixture = with_experts(Plan(plan.campaign, plan.cells[:1], plan.text), SPEC).cells
    world = Simulated(policy=SETTINGS)
    folder = world.run(Plan(plan.campaign, [*plan.cells[1:], *mixture], plan.text), tmp_path)
    data = read_report(folder)
    names = ["qwen3-30b-a3b", "llama-3.1-8b"]
    assert [cell.model for cell in data.cells] == names
    answers = answers_of(data)
    assert [answer.model for answer in answers] == names
    chart = crossover_map(answers, data)
    assert chart is not None
    assert chart.svg.index("31B, 3.0B active") < chart.svg.index("8.0B")


def sentence(cell: CellData, step_times: StepTimeModel) -> str:
    """On batches of up to 16 requests of a cell with these step times, without their contexts."""
    steps = {rows: step_times.seconds(rows, 0, 0) for rows in (1, 2, 4, 8, 16)}
    assert cell.server is not None
    server = msgspec.structs.replace(cell.server, step_times=step_times)
    return batching_sentence(msgspec.structs.replace(cell, server=server), steps)
