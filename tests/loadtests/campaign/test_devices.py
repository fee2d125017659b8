"""Which devices of a machine a campaign measures, with which engines, and in how much of its time.
The GPU is a made-up one: its facts, and what each backend says of it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.campaign.campaign_file import (
    DEMO,
    Cell,
    Plan,
    parse_campaign,
    read_campaign,
)
from crossover.loadtests.campaign.cell_selection import (
    layout_of,
    placement_policy_of,
    question_of,
    why_not,
)
from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of
from crossover.loadtests.campaign.server_launch import info_of, serve_command
from crossover.loadtests.campaign.time_budget import cells_to_confirm, share_budget
from crossover.loadtests.errors import BadCampaign
from crossover.loadtests.records.journal_events import (
    CellReady,
    CellSkipped,
    EngineInfo,
    device_of,
    of_kind,
)
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.errors import Cause
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import HardwareFacts, hardware_facts
from crossover.serving.placement.engine_times import EngineTimes, save_times
from crossover.serving.placement.fastest_backend import BEST, EngineCandidate
from tests.loadtests.campaign.simulated import Simulated, campaign, on_machine
from tests.tools.made_up_machines import FACTS

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

GIB = 1 << 30
H200 = GpuFacts(
    "NVIDIA H200", "nvidia", 140 * GIB, 139 * GIB, "580.1", uuid="GPU-1", power_limit_watts=700.0
)
TWO = 'name = "x"\nmodels = ["1b", "8b"]\n'
NO_LLAMA = {"llama_cpp": (Cause.backend_missing, "this build of llama.cpp is for the CPU only")}
NO_TORCH = {"torch": (Cause.backend_missing, "this build of torch is for the CPU only")}
NONE: dict[str, tuple[Cause, str]] = {}


def with_gpu(gpu: GpuFacts = H200, facts: HardwareFacts = FACTS) -> HardwareFacts:
    return msgspec.structs.replace(facts, gpus=(gpu,), gpu_cause=None, gpu_note=None)


def here(
    text: str, trouble: dict[str, tuple[Cause, str]] = NO_LLAMA, facts: HardwareFacts | None = None
) -> Plan:
    """The plan of a campaign on a machine with these facts, by default one with an H200."""
    return on_machine(text, facts or with_gpu(), trouble)


def keys(plan: Plan) -> list[str]:
    return [cell.key for cell in plan.cells]


@pytest.mark.parametrize(
    ("more", "trouble", "expected"),
    [
        ("", NO_LLAMA, ["Q4_0-llama_cpp-cpu", "bf16-torch-gpu"]),
        ("", NO_TORCH, ["Q4_0-llama_cpp-cpu", "Q4_0-llama_cpp-gpu"]),
        ("", NO_LLAMA | NO_TORCH, ["Q4_0-llama_cpp"]),
        ('backends = ["best"]', NO_LLAMA, ["best-cpu", "bf16-torch-gpu"]),
        ('backends = ["torch", "onnx"]', NO_LLAMA, ["int8-onnx-cpu", "bf16-torch-gpu"]),
        ('backends = ["torch"]', NO_LLAMA, ["bf16-torch-cpu", "bf16-torch-gpu"]),
        ('backends = ["onnx"]', NO_LLAMA, ["int8-onnx"]),
        ('formats = ["bf16"]', NO_LLAMA, ["BF16-llama_cpp-cpu", "bf16-torch-gpu"]),
        ('formats = ["Q4_0"]', NONE, ["Q4_0-llama_cpp-cpu", "Q4_0-llama_cpp-gpu"]),
        ('formats = ["Q4_0"]', NO_LLAMA, ["Q4_0-llama_cpp"]),
        ('formats = ["fp16"]', NO_LLAMA, ["fp16-torch"]),
        ('devices = ["cpu"]', NO_LLAMA, ["Q4_0-llama_cpp"]),
        ('devices = ["gpu"]', NO_LLAMA, ["bf16-torch"]),
        ('devices = ["gpu"]\nbackends = ["torch", "onnx"]', NO_LLAMA, ["bf16-torch"]),
    ],
)
def test_each_model_is_measured_on_each_device_by_its_engines(
    more: str, trouble: dict[str, tuple[Cause, str]], expected: list[str]
) -> None:
    """Where one device is measured, keys are as they always were."""
    models = ("llama-3.2-1b", "llama-3.1-8b")
    plan = here(TWO + more, trouble)
    assert keys(plan) == [f"{model}-{key}" for model in models for key in expected]
    for cell in plan.cells:
        last = cell.key.rpartition("-")[2]
        assert cell.device in ({last} if last in ("cpu", "gpu") else {"cpu", "gpu"})
        policy = placement_policy_of(cell)
        assert policy == f"{cell.device}-only", "the device measured is the one named"
    assert plan.campaign.devices == list(dict.fromkeys(cell.device for cell in plan.cells))


def test_a_machine_without_a_gpu_measures_as_before() -> None:
    for more in ("", 'devices = ["cpu"]'):
        plan = here(TWO + more, facts=FACTS)
        assert keys(plan) == ["llama-3.2-1b-Q4_0-llama_cpp", "llama-3.1-8b-Q4_0-llama_cpp"]
        assert {cell.device for cell in plan.cells} == {"cpu"}
    target = 'name = "x"\n[target]\nurl = "http://127.0.0.1:1"\nmodel = "m"'
    assert [cell.device for cell in here(target).cells] == [None]


@pytest.mark.parametrize(
    ("more", "facts", "message"),
    [
        ('devices = ["gpu"]', FACTS, "The GPU cannot be measured here: .*Use .'cpu'.$"),
        (
            'devices = ["cpu", "gpu"]\nbackends = ["onnx"]',
            None,
            "GPU cannot be measured here with backends = onnx: backend .onnx. does not run",
        ),
        (
            'devices = ["gpu"]\nformats = ["Q4_0"]',
            None,
            r"formats = Q4_0: .*llama_cpp cannot use it: .*Engines that can: torch \(bf16, fp16",
        ),
        (
            'devices = ["cpu", "gpu"]\nformats = ["fp16"]',
            None,
            "The CPU cannot be measured here with formats = fp16: torch runs it there, but",
        ),
        ('devices = ["tpu"]', None, r"devices\[0\] must be one of 'cpu', 'gpu', got 'tpu'"),
        ('devices = ["gpu", "gpu"]', None, "devices names a device twice"),
        ('server.policy = "gpu-only"', None, "server.policy is not a known key"),
        (
            'devices = ["gpu"]\nbackends = []\n[[engines]]\nname = "v"\ncommand = "v {port}"',
            None,
            "devices apply only to Crossover's own",
        ),
        ("server.gpu = { slotz = 4 }", None, "server.gpu.slotz is not a known key"),
    ],
)
def test_devices_that_are_not_here_are_refused_with_what_is(
    more: str, facts: HardwareFacts | None, message: str
) -> None:
    with pytest.raises(BadCampaign, match=message):
        here(TWO + more, NO_LLAMA, facts)


def test_a_refusal_quotes_each_backend_on_the_gpu() -> None:
    with pytest.raises(
        BadCampaign, match=r"torch cannot use it: this build .*; .*llama_cpp cannot use it: .* CPU"
    ):
        here(f'{TWO}devices = ["gpu"]', NO_LLAMA | NO_TORCH)
    target = 'name = "x"\ndevices = ["gpu"]\n[target]\nurl = "http://127.0.0.1:1"'
    with pytest.raises(BadCampaign, match="so devices must not be set"):
        parse_campaign(target)


def test_a_model_that_does_not_fit_the_gpu_is_skipped_with_the_arithmetic(tmp_path: Path) -> None:
    small = msgspec.structs.replace(H200, name="RTX", total_bytes=12 * GIB, free_bytes=11 * GIB)
    facts = with_gpu(small, hardware_facts())
    plan = here(f"{TWO}server.slots = 4", facts=facts)
    on_gpu = [cell for cell in plan.cells if cell.device == "gpu"]
    assert why_not(on_gpu[0], plan.campaign, facts) is None
    why = why_not(on_gpu[1], plan.campaign, facts)
    assert why is not None and "llama-3.1-8b in bf16 needs" in why and "on the GPU (weights" in why


def test_the_records_of_a_run_on_both_devices_name_the_device(tmp_path: Path) -> None:
    """Cells, keys, levels and the GPU's own facts; resumed, the run is complete."""
    world = Simulated(facts=with_gpu(facts=hardware_facts()), trouble=NO_LLAMA | NO_TORCH)
    folder = world.run(campaign(models='["135m"]', search="confirm = 0"), tmp_path)
    run = read_records(folder)
    kept, cells = campaign_of(run.manifest)
    assert [(cell.key, cell.device) for cell in cells] == [
        ("smollm2-135m-fake-cpu", "cpu"),
        ("smollm2-135m-fake-gpu", "gpu"),
    ]
    assert kept.devices == ["cpu", "gpu"] and not of_kind(run.events, CellSkipped)
    (gpu,) = run.manifest.server_facts["gpus"]
    assert (gpu["name"], gpu["power_limit_watts"]) == ("NVIDIA H200", 700.0)
    records = [CellRecord(run.events, kept, cell) for cell in cells]
    assert [one.device for one in records] == ["cpu", "gpu"]
    assert [one.min_level_seconds for one in records] == [60.0, 20.0]
    world.resume(folder)


def test_a_run_without_devices_takes_them_from_its_engines() -> None:
    """Format 5 before cells had a device: the shipped runs, and one of a GPU."""
    info = info_of({"engine": {"backend": "torch", "device": "gpu"}, "device_name": "NVIDIA H200"})
    assert (info.name, info.device, info.device_name) == ("torch", "gpu", "NVIDIA H200")
    ready = CellReady(cell="c", info=info)
    assert device_of(None, ready) == "gpu" and device_of("cpu", ready) == "cpu"
    assert device_of(None, None) is None
    assert device_of(None, CellReady(cell="c", info=EngineInfo())) is None
    old = msgspec.convert(
        {"key": "c", "model": "m", "weight_format": "bf16", "backend": "torch"}, Cell
    )
    plan = parse_campaign(TWO)
    assert CellRecord([ready], plan.campaign, old).device == "gpu"
    assert placement_policy_of(old) == "auto"


def test_a_server_is_started_on_its_device_with_that_devices_settings(tmp_path: Path) -> None:
    text = f"{TWO}[server]\nslots = 8\ncontext_tokens = 2048\n[server.gpu]\ncontext_tokens = 1536"
    plan = here(text)
    found = []
    for cell in plan.cells[:2]:
        layout = layout_of(cell, plan.campaign)
        words = serve_command(cell, plan.campaign, layout, tmp_path / "ready.json")
        options = dict(zip(words, words[1:], strict=False))
        names = ("--policy", "--backend", "--slots", "--context")
        found.append([options.get(name) for name in names])
    assert found == [
        ["cpu-only", "llama_cpp", "8", "2048"],
        ["gpu-only", "torch", None, "1536"],  # as many slots as its memory has room for
    ]
    assert [cell.slots for cell in plan.cells[:2]] == [8, None]
    with pytest.raises(BadCampaign, match="do not fit in server.gpu.context_tokens = 128"):
        parse_campaign(
            f"{TWO}server.gpu = {{ context_tokens = 128 }}\n"
            "workload = { prompt_tokens = 99, output_tokens = 99 }"
        )


def test_a_gpu_takes_the_seconds_that_it_needs_and_the_cpu_has_the_rest() -> None:
    text = f"{TWO}slo = {{ ttft_seconds = 1.0, tpot_seconds = 0.1 }}\n[search]\nconfirm = 1"
    plan = here(text)
    confirmed = cells_to_confirm(plan.campaign, plan.cells)
    assert confirmed == {"llama-3.2-1b-Q4_0-llama_cpp-cpu", "llama-3.1-8b-bf16-torch-gpu"}
    found = [share_budget(plan.cells, confirmed, 480.0, plan.campaign)[key] for key in keys(plan)]
    # Single streams 8 s, bursts 5 s; a level of 30 times the TTFT limit, 10 s around it.
    assert found == [480 - 13 - 80 - 53, 13.0, 80.0, 53.0]
    only = [cell for cell in plan.cells if cell.device == "gpu"]
    both = {cell.key for cell in only}
    assert set(share_budget(only, both, 480.0, plan.campaign).values()) == {240.0}, (
        "nobody else has it"
    )
    little = share_budget(plan.cells, confirmed, 40.0, plan.campaign)
    assert sum(little.values()) == pytest.approx(40.0) and min(little.values()) > 0


# models = ["auto"] on both sides.


def with_times(cache: Path, speed: float, facts: HardwareFacts) -> None:
    """Keeps step times of MEASURED on llama_cpp in this cache."""
    cell = Cell(key="m", model="llama-3.2-1b", weight_format="", backend=BEST, device="cpu")
    question = question_of(cell, parse_campaign(_demo(cache)).campaign)
    times = EngineTimes(
        slots=8,
        prompt_tokens_per_second=130.0 * speed,
        pass_seconds=0.0,
        decode_seconds=0.025 / speed,
        decode_slots_seconds=0.120 / speed,
    )
    engine = EngineCandidate(backend="llama_cpp", weight_format="Q4_0")
    save_times(str(cache), facts, question.key(engine), times)


def _demo(cache: Path) -> str:
    text = read_campaign(DEMO).text
    return text.replace("[server]\n", f'[server]\ncache = "{cache}"\n')


def test_the_demo_measures_both_sides_within_its_eight_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the CPU's limit, the same on the GPU, and the largest that fits there."""
    free: list[int] = [10_000 * GIB]
    where = "crossover.loadtests.campaign.auto_models.free_disk_bytes"
    monkeypatch.setattr(where, lambda cache: free[0])
    facts = with_gpu(facts=msgspec.structs.replace(FACTS, memory_available_bytes=60 * GIB))
    with_times(tmp_path, 4.0, facts)
    plan = here(_demo(tmp_path), facts=facts)
    by_device: dict[str, list[str]] = {}
    for cell in plan.cells:
        by_device.setdefault(str(cell.device), []).append(cell.model)
    assert len(by_device["cpu"]) == 3 and set(by_device["cpu"]) < set(by_device["gpu"])
    assert by_device["gpu"][-1] == "qwen2.5-32b"
    confirmed = cells_to_confirm(plan.campaign, plan.cells)
    assert len(confirmed) == 4
    found = share_budget(plan.cells, confirmed, plan.campaign.budget_seconds or 0.0, plan.campaign)
    assert sum(found.values()) == pytest.approx(480.0)
    for cell in plan.cells:
        least = 100.0 if cell.device == "cpu" and cell.key in confirmed else 13.0
        assert found[cell.key] >= least, cell.key
    named = 'name = "demo"\ndevices = ["gpu", "cpu"]'
    gpu_first = here(_demo(tmp_path).replace('name = "demo"', named, 1), facts=facts)
    keys = {(cell.device, cell.model) for cell in gpu_first.cells}
    assert keys == {(cell.device, cell.model) for cell in plan.cells}
    free[0] = 30 * GIB  # there is no room to make the weights of 32 billion parameters
    smaller = here(_demo(tmp_path), facts=facts)
    assert smaller.campaign.models[-1] in ("llama-3.1-8b", "qwen2.5-14b")
    gpu_only = here(_demo(tmp_path).replace('name = "demo"', 'name = "demo"\ndevices = ["gpu"]', 1))
    assert {cell.device for cell in gpu_only.cells} == {"gpu"} and len(gpu_only.cells) == 4
