"""Machine files: the machines that they describe, and which of them are refused."""

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.capacity.machine_file import Gpu, MachineFile, write_machine_file
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec, Routing
from crossover.reports.devices.calibrated_machines import (
    BIGGER_HALF_WIDTH,
    FORMAT_HALF_WIDTH,
    machines_of_file,
    measured_steps,
    read_machines,
)
from crossover.reports.devices.device_capacity import Service, Traffic
from crossover.reports.devices.device_catalog import device_of_driver_name
from crossover.reports.errors import ReportError
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import LOADED, Demand
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
    machine = machines_of_file(path)[0].machine
    own, narrow, _ = machine.step_times(ladder_model("360m").spec, "Q4_0", 8, 1)
    assert own == truth(ladder_model("360m").spec).slower(LOADED)
    spec = ladder_model("3b").spec
    scaled, wide, _ = machine.step_times(spec, "Q4_0", 8, 1)
    for rows, prompt, context in ((1, 0, 200), (8, 0, 4000), (0, 512, 0), (4, 128, 1000)):
        assert scaled.seconds(rows, prompt, context) == pytest.approx(
            LOADED * truth(spec).seconds(rows, prompt, context), rel=0.05
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
    (measured,) = machines_of_file(path)
    machine = measured.machine

    def settings_for(model: str) -> SchedulerSettings:
        spec = ladder_model(model).spec
        return Service(machine, spec, "Q4_0", Traffic(Demand(Workload(preset="chat")))).policy()

    assert settings_for("135m") == settings
    ratio = ladder_model("8b").spec.kv_bytes_per_token() / steps.model.kv_bytes_per_token()
    assert ratio > 2
    assert settings_for("8b").stored_tokens == int(60_000 / ratio)
    assert settings_for("8b").copy_token_seconds == pytest.approx(5e-6 * ratio)
    assert settings_for("8b").stored_sequence_tokens == 0
    hybrid, spec = settings_for("qwen3.5-4b"), ladder_model("qwen3.5-4b").spec
    ratio = spec.kv_bytes_per_token() / steps.model.kv_bytes_per_token()
    assert hybrid.stored_tokens == int(60_000 / ratio)
    states_bytes = hybrid.stored_sequence_tokens * spec.kv_bytes_per_token()
    assert states_bytes == pytest.approx(2 * spec.state_bytes_per_slot, rel=0.01)


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
    step_times, half_width, _ = machines_of_file(tmp_path / "machine.json")[0].machine.step_times(
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
    machine = machines_of_file(path)[0].machine
    with pytest.raises(ReportError, match="says nothing about int8"):
        machine.step_times(ladder_model("1b").spec, "int8", 8, 1)
    with pytest.raises(ReportError, match="cannot share a step"):
        machine.step_times(ladder_model("1b").spec, "Q4_0", 8, 2)
    path.write_text('{"version": 1}')
    with pytest.raises(ReportError, match="version is 1. Run `crossover calibrate` again"):
        machines_of_file(path)


def test_load_levels_narrow_the_interval_and_give_their_own_factor(tmp_path: Path) -> None:
    """As in the report of the run: LOADED stands in for a factor that no load level showed."""
    unloaded = steps_of("135m", truth(ladder_model("135m").spec))
    loaded = msgspec.structs.replace(unloaded, load_factor=1.2)
    widths = []
    for steps, factor in ((unloaded, LOADED), (loaded, 1.2)):
        step_times, half_width, _ = measured_steps(steps)
        assert step_times == unloaded.server.step_times.slower(factor)
        widths.append(half_width)
    assert widths[1] < widths[0] < BIGGER_HALF_WIDTH


def gpu_file(base_seconds: float = 0.005) -> MachineFile:
    """An H200 and the CPU beside it, both with 1b."""
    spec = ladder_model("1b").spec
    gpu_steps = msgspec.structs.replace(
        steps_of("1b", StepTimeModel(base_seconds=base_seconds), "bf16", slots=64),
        device="gpu",
        backend="torch",
    )
    file = machine_file(steps_of("1b", truth(spec)), gpu_steps)
    gpu = Gpu(name="NVIDIA H200", memory_bytes=150_754_820_096)
    hardware = msgspec.structs.replace(file.hardware, gpus=(gpu,))
    return msgspec.structs.replace(file, hardware=hardware)


def test_a_folder_gives_each_device_of_its_files_with_what_is_known_of_its_price(
    tmp_path: Path,
) -> None:
    write_machine_file(tmp_path / "b.json", gpu_file())
    rented = machine_file(dollars_per_hour=0.08, measured_on="2026-11-01")
    write_machine_file(tmp_path / "a.json", rented)
    (tmp_path / "README.md").write_text("not a machine file")
    own, cpu, gpu = read_machines([tmp_path])
    assert [(one.path.name, one.device) for one in (own, cpu, gpu)] == [
        ("a.json", "cpu"),
        ("b.json", "cpu"),
        ("b.json", "gpu"),
    ]
    assert (own.machine.dollars_per_hour, own.machine.price_date) == (0.08, "2026-11-01")
    assert (cpu.machine.dollars_per_hour, cpu.machine.price_date) == (None, "")
    listed = device_of_driver_name("NVIDIA H200", 150_754_820_096)
    assert listed is not None
    assert gpu.name == "NVIDIA H200" and gpu.machine.memory_bytes == 150_754_820_096
    assert gpu.machine.dollars_per_hour == listed.dollars_per_hour is not None
    assert gpu.machine.price_date == listed.price_date
    assert [steps.backend for steps in gpu.models] == ["torch"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="empty has no machine files"):
        read_machines([tmp_path / "empty"])


def replaced(file: MachineFile, keys: str, value: object) -> dict[str, object]:
    """The file with another value under a key such as `models.0.threads`."""
    raw = msgspec.to_builtins(file)
    *path, last = [int(key) if key.isdigit() else key for key in keys.split(".")]
    place = raw
    for key in path:
        place = place[key]
    place[last] = value
    return raw


STEP_TIMES = "server.step_times"


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("measured_on", "2026-02-30", "measured_on is '2026-02-30', which is not a date"),
        ("measured_on", "2999-01-01", "measured_on is 2999-01-01, which is in the future"),
        ("hardware.usable_cores", 3, "hardware.usable_cores is 3, but the machine has 2"),
        ("hardware.physical_cores", 4, "hardware.physical_cores is 4, but the machine has 2"),
        ("hardware.memory_bytes", 5 * 10**8, "weights take 728 MiB, but the memory has 477 MiB"),
        ("hardware.gpus", [], "llama-3.2-1b bf16 ran on a GPU, but hardware.gpus is empty"),
        ("models.0.threads", 3, "llama-3.2-1b Q4_0: threads is 3, but the machine has 2"),
        ("models.0.model.layers", 17, "the model of this name has"),
        (f"models.0.{STEP_TIMES}.error", 0.3, "step_times.error is 0.3"),
        (f"models.1.{STEP_TIMES}.base_seconds", 0, "a step of one request takes 0 s"),
        (f"models.1.{STEP_TIMES}.base_seconds", 0.0003, "the memory of NVIDIA H200 has 4,800 GB/s"),
        ("taken_share", 0.05, "taken_share is 0.05: other processes took 5 %"),
    ],
)
def test_a_file_that_cannot_be_true_is_refused_by_file_key_and_value(
    tmp_path: Path, keys: str, value: object, message: str
) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(msgspec.json.encode(gpu_file()))
    assert len(read_machines([path])) == 2
    path.write_bytes(msgspec.json.encode(replaced(gpu_file(), keys, value)))
    with pytest.raises(ReportError) as caught:
        read_machines([path])
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_larger_model_that_is_faster_and_a_model_given_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    slow, fast = StepTimeModel(base_seconds=0.02), StepTimeModel(base_seconds=0.01)
    write_machine_file(path, machine_file(steps_of("135m", slow), steps_of("360m", fast)))
    with pytest.raises(ReportError, match="360m Q4_0 takes 10 ms .*135m Q4_0 20 ms"):
        read_machines([path])
    write_machine_file(path, machine_file(steps_of("135m", slow), steps_of("135m", fast)))
    with pytest.raises(ReportError, match="smollm2-135m Q4_0 on llama_cpp twice"):
        read_machines([path])
