"""`crossover calibrate`: a server that the campaign starts, and its step-time model in
machine.json."""

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.machine_of_run import machine_of_run
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.cli.calibrate_command import (
    CalibrateOptions,
    plan_of,
    speeds_in_words,
)
from crossover.loadtests.errors import LoadError
from crossover.loadtests.records.run_folder import read_records
from tests.loadtests.capacity.machine_files import machine_file

OPTIONS = CalibrateOptions(models=("135m",), backend="fake", slots=4)


def measured(tmp_path: Path, step_seconds: float) -> Path:
    """A run of a server whose steps take so long, 2 ms more a row and 0.1 ms a prompt token."""
    plan = plan_of(OPTIONS)
    options = {"step_seconds": step_seconds, "row_seconds": 0.002, "prompt_token_seconds": 0.0001}
    server = msgspec.structs.replace(plan.campaign.server, options=options)
    search = msgspec.structs.replace(plan.campaign.search, single_stream_requests=3)
    workload = msgspec.structs.replace(plan.campaign.workload, max_output_tokens=32)
    campaign = msgspec.structs.replace(
        plan.campaign, server=server, search=search, workload=workload, disturbance="ignore"
    )
    plan = msgspec.structs.replace(plan, campaign=campaign)
    with Progress() as progress:
        return run(plan, tmp_path, progress)


@pytest.mark.clock
def test_the_step_times_of_a_real_server_are_in_the_file(tmp_path: Path) -> None:
    found, left_out = machine_of_run(read_records(measured(tmp_path, 0.02)))
    assert left_out == []
    assert found.name.endswith(" cores")
    (one,) = found.models
    assert one.backend == "fake" and one.server.settings.slots == 4
    step_times = one.server.step_times
    for rows in (1, 4):
        assert step_times.seconds(rows, 0, 0) == pytest.approx(0.02 + 0.002 * rows, rel=0.25)
    assert step_times.seconds(0, 400, 0) == pytest.approx(0.06, rel=0.5)


def test_several_models_are_one_campaign_that_confirms_nothing() -> None:
    plan = plan_of(CalibrateOptions(models=("135m", "360m", "135m")))
    assert plan.campaign.models == ["135m", "360m"]
    assert plan.campaign.search.confirm == 0
    with pytest.raises(LoadError, match="nonsense"):
        plan_of(CalibrateOptions(models=("135m",), backend="nonsense"))


def test_a_machine_file_is_summarized_in_one_line_per_model() -> None:
    lines = speeds_in_words(machine_file(taken_share=0.2))
    assert "smollm2-135m Q4_0 on llama_cpp: prompts 712 tokens/s" in lines[0]
    assert "148 with 1, 199 with 8 (steps within 10%)" in lines[0]
    assert "other processes took up to 20%" in lines[2]
