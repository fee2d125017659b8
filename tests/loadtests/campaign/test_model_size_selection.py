"""models = ["auto"]: which rungs are chosen, what is refused, and that a run keeps its choice; and
the fastest engine, by what it would hold.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtests.campaign.campaign_file import DEMO, Cell, Plan, parse_campaign, read_campaign
from loadtests.campaign.cell_selection import law_of_times, layout_of
from loadtests.campaign.model_size_selection import (
    MEASURED,
    around_the_limit,
    forecasts,
    on_the_line,
    with_rungs,
)
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import repeat_of
from loadtests.campaign.server_launch import serve_command
from loadtests.errors import BadCampaign
from loadtests.records.run_folder import read_records
from loadtests.records.run_journal import EngineChosen, of_kind
from models.ladder import rung
from serving.hardware.machine_facts import HardwareFacts, allowed_cores, hardware_facts
from serving.placement.fastest_backend import EngineTimes, keep
from tests.loadtests.campaign.simulated import Simulated, killed_after
from tests.tools.made_up_machines import FACTS

# Decode steps of one row and of eight, and prompt tokens/s, of a machine on which 135M takes 5 ms.
TIMES = {"smollm2-135m": (0.005, 0.022, 880.0), "llama-3.2-1b": (0.025, 0.120, 130.0)}
AUTO = """
name = "auto"
models = ["auto"]
backends = ["best"]
budget_seconds = 60
[workload]
preset = "sharegpt"
max_prompt_tokens = 512
max_output_tokens = 256
[slo]
ttft_seconds = 2.0
tpot_seconds = 0.2
target = 0.9
[server]
slots = 8
context_tokens = 1024
cache = "{cache}"
[search]
confirm = 0
"""


def times(
    name: str,
    speed: float = 1.0,
    backend: str = "llama_cpp",
    weight_format: str = "Q4_0",
    prompt_tokens: int = 128,
) -> EngineTimes:
    """Of a machine `speed` times as quick."""
    alone, together, tokens = TIMES[name]
    layout = layout_of(Cell(key="", model="135m", weight_format="", backend=""), allowed_cores())
    assert layout is not None
    return EngineTimes(
        model=name,
        parameters=rung(name).spec.parameters,
        backend=backend,
        weight_format=weight_format,
        threads=layout.engine_threads,
        slots=8,
        prompt_tokens=prompt_tokens,
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
        (0.02, 24, ["135m"]),  # plainly too slow
        (0.3, 24, ["135m", "360m"]),
        (1.0, 24, ["135m", "360m", "1b"]),
        (3.0, 24, ["135m", "360m", "1b", "3b"]),
        (8.0, 24, ["360m", "1b", "3b", "8b"]),
        (30.0, 256, ["3b", "8b", "14b", "32b"]),
        (30.0, 12, ["1b", "3b", "8b", "14b"]),  # what fits in memory all keeps the SLO
    ],
)
def test_the_rungs_move_with_the_machine(speed: float, gib: float, chosen: list[str]) -> None:
    laws = [law_of_times(times(name, speed)) for name in MEASURED]
    found = around_the_limit(forecasts(laws, plan_of(Path("c")).campaign, with_memory(gib)))
    assert [one.model.rpartition("-")[2] for one in found] == chosen


def test_the_line_goes_through_both_measured_rungs() -> None:
    laws = [law_of_times(times(name)) for name in MEASURED]
    for name, law in zip(MEASURED, laws, strict=True):
        again = on_the_line(laws, rung(name).spec.matrix_parameters)
        assert again.seconds(1, 0, 0) == pytest.approx(law.seconds(1, 0, 0))
        assert law.seconds(8, 0, 0) == pytest.approx(TIMES[name][1])
    big = on_the_line(laws, rung("llama-3.2-3b").spec.matrix_parameters)
    assert 0.055 < big.seconds(1, 0, 0) < 0.07


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A cache with the times of this machine: onnx is twice as quick where it was timed."""
    cache = tmp_path / "cache"
    for name in MEASURED:
        for tokens in (128, 256):
            keep(cache, hardware_facts(), times(name, prompt_tokens=tokens))
            onnx = times(name, 2.0, "onnx", "int8", tokens)
            keep(cache, hardware_facts(), onnx)
    return cache


def test_a_run_and_its_repeat_have_the_rungs_that_were_chosen(kept: Path, tmp_path: Path) -> None:
    world = Simulated()
    plan = with_rungs(plan_of(kept), hardware_facts(), Progress(world.said))
    models = [cell.model for cell in plan.cells]
    assert models[0] == "smollm2-135m" and len(models) >= 2
    said = world.said.getvalue()
    assert "rungs, by the step times of smollm2-135m and llama-3.2-1b" in said
    assert "smollm2-135m: predicted " in said


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
    with pytest.raises(BadCampaign, match="models 'auto' are rungs"):
        parse_campaign(AUTO.format(cache="c").replace(*change))


def test_the_demo_is_of_the_rungs_around_the_limit() -> None:
    plan = read_campaign(DEMO)
    assert plan.is_auto
    named = parse_campaign(plan.text, models=["1b", "135m"])
    assert [cell.model for cell in named.cells] == ["llama-3.2-1b", "smollm2-135m"]
    assert all(cell.is_best for cell in named.cells)


@pytest.fixture
def best(kept: Path) -> Plan:
    return parse_campaign(AUTO.format(cache=kept).replace('"auto"]', '"135m"]'))


def test_the_fastest_engine_is_the_one_that_would_hold_most(best: Plan, tmp_path: Path) -> None:
    """On record with the others, and what is served and repeated after it."""
    world = Simulated()
    folder = world.run(best, tmp_path / "runs")
    (choice,) = of_kind(read_records(folder).events, EngineChosen)
    assert (choice.backend, choice.weight_format) == ("onnx", "int8")
    rates = {one.backend: one.requests_per_second for one in choice.engines}
    assert rates["onnx"] == pytest.approx(2 * (rates["llama_cpp"] or 0), rel=0.35)
    assert "best engine: of the engines that can run here" in world.said.getvalue()
    (cell,) = repeat_of(folder).cells
    assert (cell.key, cell.backend) == ("smollm2-135m-best", "onnx")
    layout = layout_of(cell, allowed_cores())
    assert layout is not None
    words = serve_command(cell, best.campaign, layout, tmp_path / "ready.json")
    options = dict(zip(words, words[1:], strict=False))
    assert (options["--backend"], options["--format"]) == ("onnx", "int8")
    assert options["--policy"] == "cpu-only"


def test_a_run_that_was_killed_goes_on_with_the_engine_it_chose(
    best: Plan, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, out = Simulated(), tmp_path / "runs"
    with killed_after(monkeypatch, 6):
        world.run(best, out)
    (folder,) = out.iterdir()
    (kept / "engine-times.json").unlink()  # another choice would have to measure
    world.resume(folder)
    assert len(of_kind(read_records(folder).events, EngineChosen)) == 1


@pytest.mark.parametrize("server", ['policy = "gpu-only"', "options = { mlock = true }"])
def test_what_the_fastest_engine_cannot_be_asked_for(server: str) -> None:
    text = AUTO.format(cache="c").replace("[server]", f"[server]\n{server}")
    with pytest.raises(BadCampaign, match="server.*'best' chooses among"):
        parse_campaign(text)


def test_the_fastest_engine_is_one_cell_for_all_formats() -> None:
    more = AUTO.format(cache="c").replace('["auto"]', '["135m"]\nformats = ["Q4_0", "int4"]')
    (cell,) = parse_campaign(more).cells
    assert (cell.key, cell.formats) == ("smollm2-135m-best", ("Q4_0", "int4"))
