"""models = ["auto"]: which rungs are chosen, what is refused, and that a run keeps its choice."""

from pathlib import Path

import msgspec
import pytest

from loadtests.campaign.campaign_file import DEMO, Plan, parse_campaign, read_campaign
from loadtests.campaign.cell_planning import layout_of
from loadtests.campaign.cells import Cell
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import repeat_of
from loadtests.campaign.rungs import MEASURED, around_the_limit, forecasts, with_rungs
from loadtests.errors import BadCampaign
from models.ladder import rung
from serving.hardware.facts import HardwareFacts, allowed_cores, hardware_facts
from serving.placement.fastest_backend import EngineTimes, keep
from tests.loadtests.campaign.simulated import Simulated
from tests.tools.made_up_machines import FACTS

# Decode steps of one row and of eight, and prompt tokens/s, of a machine on which 135M takes 5 ms.
TIMES = {"smollm2-135m": (0.005, 0.022, 880.0), "llama-3.2-1b": (0.025, 0.120, 130.0)}
AUTO = """
name = "auto"
models = ["auto"]
backends = ["best"]
budget_seconds = 60
workload = {{ preset = "chat", scale = 0.03 }}
[slo]
ttft_seconds = 2.0
tpot_seconds = 0.2
target = 0.9
[server]
slots = 8
context_tokens = 512
cache = "{cache}"
[search]
calibration_seconds = 0
level_seconds_min = 10
level_seconds_max = 20
level_requests_min = 30
single_stream_requests = 3
"""


def times(name: str, speed: float = 1.0, threads: int = 2) -> EngineTimes:
    """Of a machine `speed` times as quick."""
    alone, together, tokens = TIMES[name]
    return EngineTimes(
        model=name,
        parameters=rung(name).spec.parameters,
        backend="llama_cpp",
        weight_format="Q4_0",
        threads=threads,
        slots=8,
        prompt_tokens=64,
        prompt_tokens_per_second=tokens * speed,
        decode_seconds=alone / speed,
        decode_slots_seconds=together / speed,
        spent_seconds=1.0,
        unix_seconds=0.0,
    )


def with_memory(gib: float) -> HardwareFacts:
    return msgspec.structs.replace(FACTS, memory_available_bytes=int(gib * 2**30))


def plan_of(cache: Path, more: str = "") -> Plan:
    return parse_campaign(AUTO.format(cache=cache) + more)


@pytest.mark.parametrize(
    ("speed", "gib", "chosen"),
    [
        (0.01, 24, ["smollm2-135m"]),  # plainly too slow
        (0.045, 24, ["smollm2-135m", "smollm2-360m"]),  # a little too slow, by the forecast
        (0.1, 24, ["smollm2-135m", "llama-3.2-1b"]),
        (0.5, 24, ["smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b"]),
        (1.0, 24, ["smollm2-135m", "smollm2-360m", "llama-3.2-3b", "llama-3.1-8b"]),
        (10.0, 256, ["llama-3.2-1b", "llama-3.2-3b", "qwen2.5-32b", "llama-3.3-70b"]),
        (10.0, 24, ["llama-3.2-1b", "llama-3.2-3b", "qwen2.5-32b"]),  # 70B does not fit
        (1.0, 0.45, ["smollm2-135m"]),  # as little as llama.cpp really takes
    ],
)
def test_the_rungs_move_with_the_machine(speed: float, gib: float, chosen: list[str]) -> None:
    campaign = plan_of(Path("c")).campaign
    found = forecasts([times(name, speed) for name in MEASURED], campaign, with_memory(gib))
    assert [one.model for one in around_the_limit(found)] == chosen


def test_the_line_goes_through_both_measured_rungs() -> None:
    campaign = msgspec.structs.replace(
        plan_of(Path("c")).campaign,
        slo=msgspec.structs.replace(plan_of(Path("c")).campaign.slo, ttft_seconds=None),
    )
    found = forecasts([times(name) for name in MEASURED], campaign, with_memory(24))
    alone = {one.model: one.of_limit for one in found}
    assert alone["smollm2-135m"] == pytest.approx(0.005 / 0.2)
    assert alone["llama-3.2-1b"] == pytest.approx(0.025 / 0.2)
    assert 0.055 / 0.2 < alone["llama-3.2-3b"] < 0.065 / 0.2
    assert all(one.requests_per_second > 0 for one in found)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A cache with both times of this machine."""
    layout = layout_of(Cell(key="", model="135m", weight_format="", backend=""), allowed_cores())
    assert layout is not None
    for name in MEASURED:
        keep(tmp_path, hardware_facts(), times(name, threads=layout.engine_threads))
    return tmp_path


def test_a_run_and_its_repeat_have_the_rungs_that_were_chosen(kept: Path, tmp_path: Path) -> None:
    world = Simulated()
    folder = world.run(plan_of(kept), tmp_path / "runs")
    models = ["llama-3.1-8b", "llama-3.2-3b", "smollm2-360m", "smollm2-135m"]
    assert [cell.model for cell in repeat_of(folder).cells] == models
    said = world.said.getvalue()
    assert "models auto: 4 rungs, by the step times of smollm2-135m and llama-3.2-1b" in said
    assert "llama-3.1-8b: alone at " in said


def test_what_is_not_measured_yet_stays_open_where_nothing_may_be_measured(tmp_path: Path) -> None:
    plan = with_rungs(plan_of(tmp_path), hardware_facts(), Progress(), may_measure=False)
    assert plan.is_auto and not plan.cells


@pytest.mark.parametrize(
    "change",
    [
        ('["auto"]', '["auto", "135m"]'),
        ('["best"]', '["mine:Engine"]'),
        ("budget_seconds = 60", 'cells = [{ model = "135m" }]'),
    ],
)
def test_what_does_not_go_with_auto(change: tuple[str, str]) -> None:
    with pytest.raises(BadCampaign, match=r"'auto'.* - at `\$.models`"):
        parse_campaign(AUTO.format(cache="c").replace(*change))


def test_the_demo_is_of_the_rungs_around_the_limit() -> None:
    plan = read_campaign(DEMO)
    assert plan.is_auto
    named = parse_campaign(plan.text, models=["1b", "135m"])
    assert [cell.model for cell in named.cells] == ["llama-3.2-1b", "smollm2-135m"]
    assert all(cell.is_best for cell in named.cells)
