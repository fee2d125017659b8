"""A calibrated machine tells what other models take on it."""

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.capacity.machine_file import write_machine_file
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec, Routing
from crossover.reports.devices.calibrated_machines import (
    BIGGER_HALF_WIDTH,
    FORMAT_HALF_WIDTH,
    calibrated_machine,
)
from crossover.reports.devices.device_capacity import Service, Traffic
from crossover.reports.errors import ReportError
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.capacity.machine_files import machine_file, steps_of

MIXTURE = ladder_model("qwen3-30b-a3b").spec  # 8 of 128 experts


def truth(spec: ModelSpec) -> StepTimeModel:
    """Steps of a machine that reads 5 GB/s and has no other costs than the file says."""
    experts = 0 if spec.experts is None else spec.experts.parameters
    share = 0.0 if spec.experts is None else spec.experts.used / spec.experts.count
    size = spec.matrix_parameters - experts  # that every pass reads
    active = size + share * experts
    return StepTimeModel(
        base_seconds=size * 1e-10 + spec.layers * spec.hidden * 1e-8,
        row_seconds=active * 1e-12 + spec.vocabulary * spec.hidden * 1e-11,
        prompt_token_seconds=active * 2e-12,
        context_token_seconds=spec.layers * spec.heads * spec.head_dim * 1e-11,
        pass_seconds=size * 5e-11,
        expert_seconds=experts * 1e-10,
        experts=None if spec.experts is None else spec.experts.routing,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    models = (steps_of(name, truth(ladder_model(name).spec)) for name in ("135m", "360m"))
    write_machine_file(tmp_path / "machine.json", machine_file(*models))
    return tmp_path / "machine.json"


def test_a_measured_model_has_its_own_step_times_and_a_bigger_one_scales_by_shape(
    path: Path,
) -> None:
    machine = calibrated_machine(path)
    own, narrow, _ = machine.step_times(ladder_model("360m").spec, "Q4_0", 8, 1)
    assert own == truth(ladder_model("360m").spec)
    spec = ladder_model("3b").spec
    scaled, wide, _ = machine.step_times(spec, "Q4_0", 8, 1)
    for rows, prompt, context in ((1, 0, 200), (8, 0, 4000), (0, 512, 0), (4, 128, 1000)):
        assert scaled.seconds(rows, prompt, context) == pytest.approx(
            truth(spec).seconds(rows, prompt, context), rel=0.05
        )
    assert narrow < wide < machine.step_times(spec, "Q8_0", 8, 1)[1]


def test_the_prompt_cache_has_as_many_bytes_for_another_model(tmp_path: Path) -> None:
    steps = steps_of("135m", truth(ladder_model("135m").spec))
    settings = msgspec.structs.replace(
        steps.server.settings, stored_tokens=60_000, copy_token_seconds=5e-6
    )
    server = msgspec.structs.replace(steps.server, settings=settings)
    path = tmp_path / "machine.json"
    write_machine_file(path, machine_file(msgspec.structs.replace(steps, server=server)))
    machine = calibrated_machine(path)

    def settings_for(model: str) -> SchedulerSettings:
        spec = ladder_model(model).spec
        return Service(machine, spec, "Q4_0", Traffic(Demand(Workload(preset="chat")))).policy()

    assert settings_for("135m") == settings
    ratio = ladder_model("8b").spec.kv_bytes_per_token() / steps.model.kv_bytes_per_token()
    assert ratio > 2
    assert settings_for("8b").stored_tokens == int(60_000 / ratio)
    assert settings_for("8b").copy_token_seconds == pytest.approx(5e-6 * ratio)
    assert settings_for("qwen3.5-4b").stored_tokens == 0, "it has states, so no prompt cache"


@pytest.mark.parametrize("measured", ["dense", "experts"])
def test_a_mixture_goes_by_its_active_parameters_and_its_experts(
    measured: str, tmp_path: Path
) -> None:
    """Told from dense models, and from another mixture, as far as their steps are alike."""
    spec, smaller = MIXTURE, msgspec.structs.replace(MIXTURE, name="half", layers=24)
    assert smaller.experts is not None and smaller.counted_parameters is not None
    half = msgspec.structs.replace(
        smaller,
        counted_parameters=smaller.counted_parameters // 2,
        idle_parameters=smaller.idle_parameters // 2,
        experts=msgspec.structs.replace(
            smaller.experts, parameters=smaller.experts.parameters // 2
        ),
    )
    models = [steps_of(name, truth(ladder_model(name).spec)) for name in ("360m", "1b")]
    if measured == "experts":
        models = [
            msgspec.structs.replace(
                models[0],
                model=half,
                server=msgspec.structs.replace(models[0].server, step_times=truth(half)),
            )
        ]
    write_machine_file(tmp_path / "machine.json", machine_file(*models))
    step_times, half_width, _ = calibrated_machine(tmp_path / "machine.json").step_times(
        spec, "Q4_0", 8, 1
    )
    assert step_times.experts == Routing(128, 8)
    assert half_width == (BIGGER_HALF_WIDTH if measured == "experts" else FORMAT_HALF_WIDTH)
    for rows, prompt in ((1, 0), (16, 0), (0, 512)):
        assert step_times.seconds(rows, prompt, 0) == pytest.approx(
            truth(spec).seconds(rows, prompt, 0), rel=0.15
        )
    as_dense = truth(msgspec.structs.replace(spec, experts=None))
    assert step_times.seconds(1, 0, 0) < 0.2 * as_dense.seconds(1, 0, 0), (
        "one request reads few experts"
    )


def test_models_that_the_machine_file_lacks_are_refused(path: Path) -> None:
    machine = calibrated_machine(path)
    with pytest.raises(ReportError, match="says nothing about int8"):
        machine.step_times(ladder_model("1b").spec, "int8", 8, 1)
    with pytest.raises(ReportError, match="cannot share a step"):
        machine.step_times(ladder_model("1b").spec, "Q4_0", 8, 2)
    path.write_text('{"version": 1}')
    with pytest.raises(ReportError, match="version is 1. Run `crossover calibrate` again"):
        calibrated_machine(path)
