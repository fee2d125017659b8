"""`report --machine FILE`: the run's models on a machine that was calibrated."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossover import app
from loadtests.calibrate.machine_file import write_machine_file
from reports.errors import ReportError
from reports.render.markdown import markdown
from reports.render.page import page
from reports.write import Asked, read, write
from tests.loadtests.calibrate.machine_files import machine_file
from tests.reports.example_run import RUNGS, write_example_run

TWO = {name: (RUNGS[name][0], (1.6,)) for name in ("smollm2-135m", "llama-3.2-3b")}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "lab.json"
    write_machine_file(path, machine_file())
    return path


def test_every_model_has_a_capacity_there_or_the_reason_why_not(
    tmp_path: Path, machine: Path
) -> None:
    run = write_example_run(tmp_path / "run", TWO, window=30.0)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["campaign"]["workload"] = {
        "preset": "chat",
        "max_prompt_tokens": 128,
        "max_output_tokens": 64,
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    out = tmp_path / "out"
    asked = Asked(("csv",), machines=(machine,), predicts=False)
    found = read([run], asked)
    write(found, out, asked)
    with (out / "machines.csv").open() as file:
        small, big = csv.DictReader(file)
    assert small["machine"] == "Test CPU, 2 cores" and small["kind"] == "calibrated"
    low, estimate, high = (
        float(small[f"{name}_per_second_predicted"]) for name in ("low", "estimate", "high")
    )
    assert 0 < low < estimate < high
    # 3B: 3.2e9 x 0.1 ns = 0.32 s a token, above the SLO's 0.1.
    assert float(big["estimate_per_second_predicted"]) == 0.0 and "at no rate" in big["reason"]
    texts = (
        markdown(found.run, found.crossover, (), {}),
        page(found.run, found.crossover, ()),
    )
    for text in texts:
        assert "Other machines" in text and "Test CPU, 2 cores" in text


def test_a_wrong_file_is_refused_by_name(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "run", TWO, window=30.0)
    path = tmp_path / "lab.json"
    path.write_text('{"version": 7}')
    done = CliRunner().invoke(app, ["report", str(run), "--machine", str(path)])
    assert isinstance(done.exception, ReportError)
    assert "--machine" in str(done.exception) and "version is 7" in str(done.exception)
