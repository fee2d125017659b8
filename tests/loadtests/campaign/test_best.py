"""Cells of the backend `best`: the choice, its record, and what is served after it."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadtests.campaign.campaign_file import Plan, parse_campaign
from loadtests.campaign.cell_planning import layout_of
from loadtests.campaign.run_state import repeat_of
from loadtests.campaign.servers import serve_command
from loadtests.comparison.run_values import read as read_values
from loadtests.errors import BadCampaign
from loadtests.records.events import EngineChosen, of_kind
from loadtests.records.run_folder import read_events
from loadtests.terminal.run import show_run
from models.ladder import rung
from reports.run import read_run
from reports.write import Asked, write_report
from serving.hardware.facts import allowed_cores, hardware_facts
from serving.placement.fastest_backend import EngineTimes, keep
from tests.loadtests.campaign.simulated import Simulated, killed_after

CAMPAIGN = """
name = "best"
models = ["135m"]
backends = ["best"]
budget_seconds = 60
workload = {{ prompt_tokens = 40, output_tokens = 20 }}
{more}
[slo]
ttft_seconds = 0.3
tpot_seconds = 0.1
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


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """On a machine whose table says that onnx is twice as quick."""
    cache = tmp_path / "cache"
    found = parse_campaign(CAMPAIGN.format(cache=cache, more=""))
    layout = layout_of(found.cells[0], allowed_cores())
    assert layout is not None
    spec = rung("135m").spec
    for backend, name, seconds in (("llama_cpp", "Q4_0", 0.02), ("onnx", "int8", 0.01)):
        one = EngineTimes(
            model=spec.name,
            parameters=spec.parameters,
            backend=backend,
            weight_format=name,
            threads=layout.engine_threads,
            slots=8,
            prompt_tokens=64,
            prompt_tokens_per_second=1 / seconds,
            decode_seconds=seconds,
            decode_slots_seconds=2 * seconds,
            spent_seconds=1.0,
            unix_seconds=0.0,
        )
        keep(cache, hardware_facts(), one)
    return found


def choices(folder: Path) -> list[EngineChosen]:
    return of_kind(read_events(folder).records, EngineChosen)


def test_the_best_engine_is_one_cell_for_all_formats() -> None:
    more = 'formats = ["Q4_0", "int8"]'
    cells = parse_campaign(CAMPAIGN.format(cache="c", more=more)).cells
    assert [(cell.key, cell.formats) for cell in cells] == [
        ("smollm2-135m-best", ("Q4_0", "int8"))
    ]


@pytest.mark.parametrize("server", ['policy = "gpu-only"', "options = { mlock = true }"])
def test_what_the_best_engine_cannot_be_asked_for(server: str) -> None:
    text = CAMPAIGN.format(cache="c", more="").replace("[server]", f"[server]\n{server}")
    with pytest.raises(BadCampaign, match=r"'best'.* - at `\$.server"):
        parse_campaign(text)


def test_the_choice_is_on_record_and_the_report_shows_the_losers(
    plan: Plan, tmp_path: Path
) -> None:
    world = Simulated()
    folder = world.run(plan, tmp_path)
    (choice,) = choices(folder)
    assert (choice.backend, choice.weight_format) == ("onnx", "int8")
    assert [(one.backend, one.is_chosen) for one in choice.engines] == [
        ("llama_cpp", False),
        ("onnx", True),
    ]
    assert "best engine: onnx int8" in world.said.getvalue()
    (cell,) = read_run(folder).cells
    assert (cell.backend, cell.weight_format) == ("onnx", "int8")
    out = tmp_path / "report"
    write_report([folder], out, Asked(formats=("html", "md")))
    for name in ("report.md", "index.html"):
        text = (out / name).read_text()
        assert "2.0 x that of llama_cpp Q4_0" in text and "tokens/s, one stream" in text


def test_a_run_that_was_killed_goes_on_with_the_engine_it_chose(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Simulated()
    with killed_after(monkeypatch, 6):
        world.run(plan, tmp_path)
    (folder,) = (path.parent for path in tmp_path.glob("*/manifest.json"))
    (tmp_path / "cache" / "engine-times.json").unlink()  # another choice would have to measure
    world.resume(folder)
    assert len(choices(folder)) == 1


def test_a_repeat_a_comparison_and_the_server_have_the_engine_that_was_chosen(
    plan: Plan, tmp_path: Path
) -> None:
    folder = Simulated().run(plan, tmp_path)
    (compared,) = read_values(folder).cells
    assert (compared.facts["backend"], compared.facts["format"]) == ("onnx", "int8")
    console = Console(file=StringIO(), width=200)
    show_run(folder, console)
    assert "best engine: onnx int8: " in console.file.getvalue()  # type: ignore[attr-defined]
    (cell,) = repeat_of(folder).cells
    assert (cell.key, cell.backend) == ("smollm2-135m-best", "onnx")
    layout = layout_of(cell, allowed_cores())
    assert layout is not None
    words = serve_command(cell, plan.campaign, layout, tmp_path / "ready.json")
    options = dict(zip(words, words[1:], strict=False))
    assert (options["--backend"], options["--format"]) == ("onnx", "int8")
    assert options["--policy"] == "cpu-only"
