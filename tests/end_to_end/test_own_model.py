"""A model of one's own, as a GGUF file and as a folder: measured by a campaign, reported, planned
for and shared, all by the command line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from crossover import cli
from crossover.models.identity.model_ladder import packaged_file
from tests.gguf_files import folder_of

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests", "short_warmup")
FEW_REQUESTS = 500  # a rate: beside a real engine

MODEL = "smollm2-135m-instruct"
OWN = """
name = "own"
models = {models}
devices = ["cpu"]
disturbance = "ignore"
slo = "chat"
workload = {{ prompt_tokens = 60, output_tokens = 6 }}
[server]
slots = 4
cores = 1
context_tokens = 512
cache = "{cache}"
[search]
rates = [0.5]
level_seconds = 3
single_stream_requests = 2
single_stream_seconds = 3
"""


def crossover(*words: str | Path) -> Result:
    """A command line that ends well, within this process."""
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    return done


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "with_folder", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["file", "file, folder"]
)
def test_ones_own_file_and_folder_are_measured_reported_and_planned(
    with_folder: bool, tmp_path: Path
) -> None:
    """As README's second example: no key says an engine, a format or a route."""
    packaged, campaign = packaged_file(MODEL), tmp_path / "own.toml"
    assert packaged is not None
    file, runs = tmp_path / "Mine-Q4_1.gguf", tmp_path / "runs"
    file.symlink_to(packaged)
    models = [str(file)]
    if with_folder:
        models.append(str(folder_of(packaged, tmp_path / MODEL)))
    campaign.write_text(OWN.format(models=json.dumps(models), cache=tmp_path / "cache"))
    output = crossover("campaign", "run", campaign, "--out", runs).output
    assert "Mine-Q4_1-llama_cpp" in output
    assert (f"{MODEL}-int8-onnx" in output) is with_folder
    assert "requests go through the model's chat template" in output
    (folder,) = runs.iterdir()
    answers = json.loads(crossover("report", folder, "--json").stdout)["cells"]
    names = ["Mine-Q4_1", MODEL] if with_folder else ["Mine-Q4_1"]
    assert [(one["model"], one["parameters"]) for one in answers] == [
        (name, 134_515_008) for name in names
    ]
    for one in answers:
        assert one["state"] == "measured" and one["alone"]["ttft_seconds"] > 0
    file.unlink()  # the run knows its shape
    planned = json.loads(
        crossover("plan", "--model", "Mine-Q4_1", "--rate", "0.1", "--run", folder, "--json").stdout
    )
    assert planned["model"] == "Mine-Q4_1" and planned["weight_format"] == "Q4_1"
    crossover("report", folder, "--share", tmp_path / "shared")
    shared = b"".join(one.read_bytes() for one in (tmp_path / "shared").iterdir())
    assert str(tmp_path).encode() not in shared and b"Mine" not in shared
    assert '"parameters": 134515008' in crossover("report", tmp_path / "shared", "--json").stdout
