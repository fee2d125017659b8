"""The atlas: many machine files on one page, and the machines of a plan."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.capacity.machine_file import (
    read_machine_file,
    write_machine_file,
)
from crossover.reports.answers.atlas import Atlas, atlas_of
from crossover.reports.devices.calibrated_machines import read_machines
from crossover.reports.errors import ReportError
from crossover.reports.render.atlas_page import atlas_page
from crossover.reports.render.atlas_text import as_json, capacities, details, terminal_lines
from crossover.reports.render.export_run import export_machine
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.capacity.machine_files import machine_file, steps_of

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "docs" / "atlas"
RUNS = {"epyc-2-cores": "demo", "epyc-1-core": "llama-server", "xeon-16-cores-h200": "h200"}
SMALL = StepTimeModel(base_seconds=0.01, row_seconds=0.001, prompt_token_seconds=0.0005)
# All requests are 100 + 50 tokens.
DEMAND = Demand(Workload(prompt_tokens=100, output_tokens=50))


def write_machines(folder: Path) -> None:
    """Two machines: a slow one with two models and a price, and a fast one without a price."""
    slow = machine_file(
        steps_of("135m", SMALL), steps_of("360m", SMALL.slower(3)), dollars_per_hour=0.36
    )
    fast = machine_file(steps_of("135m", SMALL.slower(0.5)), name="fast")
    write_machine_file(folder / "slow.json", msgspec.structs.replace(slow, name="slow"))
    write_machine_file(folder / "fast.json", fast)


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Atlas:
    folder = tmp_path_factory.mktemp("machines")
    write_machines(folder)
    return atlas_of(read_machines([folder]), DEMAND, SLO_PRESETS["chat"])


def test_entries_are_sorted_by_the_price_of_tokens_and_those_without_a_price_come_last(
    atlas: Atlas,
) -> None:
    assert [(entry.measured.name, entry.steps.model.name) for entry in atlas.entries] == [
        ("slow", "smollm2-135m"),
        ("slow", "smollm2-360m"),
        ("fast", "smollm2-135m"),
    ]
    cheapest = atlas.entries[0]
    assert cheapest.capacity.low is not None and cheapest.token_price is not None
    # 0.36 $/h are 0.0001 $/s, which buys low * 50 output tokens
    assert cheapest.token_price == pytest.approx(0.0001 / (cheapest.capacity.low * 50) * 1e6)
    assert atlas.entries[-1].token_price is None
    fast, slow = (atlas.best(machine, "smollm2-135m") for machine in atlas.machines)
    assert fast is not None and slow is not None
    assert fast.capacity.rate and slow.capacity.rate
    assert fast.capacity.rate > 1.5 * slow.capacity.rate
    assert slow.capacity.grade == "estimated"
    assert atlas.best(atlas.machines[0], "smollm2-360m") is None
    assert "the cheapest output tokens are those of smollm2-135m on slow: $" in atlas.headline


def test_tables_have_machines_by_models_and_the_speed_of_one_stream_and_of_all_slots(
    atlas: Atlas,
) -> None:
    matrix = capacities(atlas)
    assert matrix.columns == ("machine", "smollm2-135m", "smollm2-360m")
    assert [row[0] for row in matrix.rows] == ["fast", "slow"] and matrix.rows[0][2] == "–"
    table = details(atlas)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    # 10 ms + 1 ms a row: 1 / 0.011 s and 8 / 0.018 s
    assert (row["1 stream"], row["batched"]) == ("91 tokens/s", "444 tokens/s (8)")
    assert (row["price"], row["measured"]) == ("$0.360/h, 2026-11-24", "2026-11-24, 1.0")
    assert dict(zip(table.columns, table.rows[2], strict=True))["price"] == "not known"
    numbers = json.loads(as_json(atlas))
    assert numbers["entries"][0]["dollars_per_million_tokens"] == atlas.entries[0].token_price
    assert numbers["entries"][2]["dollars_per_hour"] is None


def test_a_model_that_misses_the_slo_says_so_and_has_no_price(tmp_path: Path) -> None:
    write_machine_file(
        tmp_path / "slow.json", machine_file(steps_of("135m", SMALL.slower(99)), dollars_per_hour=1)
    )
    atlas = atlas_of(read_machines([tmp_path]), DEMAND, SLO_PRESETS["chat"])
    assert capacities(atlas).rows[0][1] == "misses the SLO unloaded"
    assert atlas.entries[0].token_price is None
    assert atlas.headline == "1 measured machine, none of which serves a model at a known price."
    assert "misses the SLO unloaded" in "\n".join(terminal_lines(atlas))


def test_the_page_works_offline_and_has_every_machine_and_a_chart_of_shared_models(
    atlas: Atlas,
) -> None:
    page = atlas_page(atlas)
    assert atlas.headline.partition(":")[0] in re.sub(r"<[^>]+>", "", page)
    assert page.count("<figure") == 1, "only smollm2-135m was measured on both machines"
    assert not re.search(r"""(?:src|href)=["']?(?!#)""", page) and "<script" not in page
    for name in ("fast", "slow", "smollm2-360m", "$0.360/h, 2026-11-24"):
        assert name in page


def test_the_command_writes_the_page_and_refuses_a_bad_file_by_name(tmp_path: Path) -> None:
    write_machines(tmp_path)
    out = tmp_path / "atlas.html"
    words = ["atlas", str(tmp_path), "--workload", "100x50", "--out", str(out)]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0 and f"written: {out}" in done.output
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "broken.json").write_text("{")
    done = CliRunner().invoke(cli.app, words)
    assert "broken.json cannot be read" in str(done.exception)
    done = CliRunner().invoke(cli.app, ["atlas", str(tmp_path), "--slo", "chatt"])
    assert "--slo " in str(done.exception) and "chatt" in str(done.exception)


@pytest.mark.parametrize("name", RUNS)
def test_a_shipped_machine_file_is_what_the_command_makes_of_its_run(
    name: str, tmp_path: Path
) -> None:
    lines = export_machine(ROOT / "docs" / "results" / RUNS[name], tmp_path / "again.json")
    shipped = read_machine_file(SHIPPED / f"{name}.json")
    again = read_machine_file(tmp_path / "again.json")
    assert again == shipped and again.measured_on in lines[0]
    with pytest.raises(ReportError, match="exists already. Give a new file"):
        export_machine(ROOT / "docs" / "results" / RUNS[name], tmp_path / "again.json")


def test_every_file_of_the_atlas_passes_the_checks() -> None:
    files = sorted(SHIPPED.glob("*.json"))
    machines = read_machines([SHIPPED])
    assert {machine.path for machine in machines} == set(files)
    for machine in machines:
        texts = set(_texts(msgspec.to_builtins(machine.file)))
        assert not [text for text in texts if "/" in text.replace("GNU/Linux", "") or "@" in text]
    gpu = next(machine for machine in machines if machine.device == "gpu")
    assert gpu.name == "NVIDIA H200" and gpu.machine.dollars_per_hour is not None


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def planned(folder: Path, model: str, weight_format: str = "") -> dict[str, dict[str, Any]]:
    """The options of a plan by name, among the machines of a folder and an L4."""
    tables = [f'model = "{model}"', 'slo = "batch"']
    tables += [f'format = "{weight_format}"'] if weight_format else []
    tables += ["workload = {prompt_tokens = 100, output_tokens = 50}", "forecast.peak_rate = 1"]
    plan_file = folder.parent / "plan.toml"
    plan_file.write_text("\n".join(tables))
    words = ["plan", str(plan_file), "--device", "NVIDIA L4", "--json", "--machines", str(folder)]
    done = CliRunner().invoke(cli.app, words)
    assert done.exception is None, done.exception
    return {option["machine"]: option for option in json.loads(done.stdout)["options"]}


def test_a_plan_chooses_among_measured_machines_and_predicted_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "machines"
    folder.mkdir()
    write_machines(folder)
    options = planned(folder, "135m")
    grades = {name: options[name]["known_by"] for name in ("slow", "fast", "NVIDIA L4")}
    assert grades == {"slow": "estimated", "fast": "estimated", "NVIDIA L4": "predicted"}
    assert options["slow"]["dollars"] > 0
    assert options["fast"]["dollars"] is None, "no price is not free"
    assert planned(folder, "1b")["slow"]["known_by"] == "predicted"


def test_a_plan_takes_the_format_that_a_cpu_was_measured_in_unless_it_names_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "machines" / "onnx.json"
    path.parent.mkdir()
    steps = steps_of("135m", SMALL, "int8")
    write_machine_file(path, machine_file(steps, name="onnx", dollars_per_hour=0.1))
    assert planned(path, "135m")["onnx"]["known_by"] == "estimated"
    assert planned(path, "1b")["onnx"]["suffices"] != "no"
    refused = planned(path, "135m", "Q4_0")["onnx"]
    assert refused["suffices"] == "no" and "says nothing about Q4_0" in refused["note"]
