"""`crossover plan` as it is called: text, JSON, the example, wrong input."""

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from crossover import app, main
from reports.plan.ranking import VERSION, Plan
from tests.docs_of_structs import schema_of

PLAN = """
model = "1b"
requests = 500
devices = ["NVIDIA L4"]
[forecast]
peak_rate = 0.5
[workload]
preset = "chat"
scale = 0.1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_the_first_line_is_the_answer(file: Path) -> None:
    said = CliRunner().invoke(app, ["plan", str(file)])
    assert said.exit_code == 0, said.output
    first = said.stdout.replace("\n", " ")
    assert first.startswith("Rent 1 x NVIDIA L4 all month, $588") and "90 % certainty" in first


def test_json_is_as_its_schema_says(file: Path) -> None:
    said = CliRunner().invoke(app, ["plan", str(file), "--json", "--rate", "2"])
    found = json.loads(said.stdout)
    jsonschema.validate(found, schema_of(Plan))
    assert (found["kind"], found["version"]) == ("crossover-plan", VERSION)
    assert found["sentence"].startswith("Rent 1 x NVIDIA L4") and found["notes"]
    assert found["demand"]["peak_rate"] == 2.0
    assert found["options"][0]["machine"] == "NVIDIA L4" and found["options"][0]["suffices"]


def test_an_example_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said = CliRunner().invoke(app, ["plan", "--example"])
    assert 'model = "8b"' in said.stdout and "[forecast]" in said.stdout


def test_wrong_input_is_one_sentence(monkeypatch: pytest.MonkeyPatch, file: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    file.write_text(PLAN.replace("peak_rate", "peek_rate"))
    for arguments, said in (
        ([str(file)], "unknown field `peek_rate` - at `$.forecast`; known here: peak_rate"),
        (["--model", "1b", "--rate", "-1"], "--rate must be above 0 requests/s, got -1.0"),
        (["--model", "1b", "--rate", "1", "--run", "/none"], "at `--run /none`"),
        ([], "give a plan file, or --model and --rate"),
    ):
        monkeypatch.setattr("sys.argv", ["crossover", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_rate_takes_the_place_of_those_of_the_file(file: Path) -> None:
    file.write_text(PLAN.replace("peak_rate = 0.5", "users = 100\nrequests_per_user = 10"))
    said = CliRunner().invoke(app, ["plan", str(file), "--json", "--rate", "2"])
    found = json.loads(said.stdout)
    assert found["demand"]["peak_rate"] == 2.0
    assert found["own_machines"] == ["No machine of yours is in this plan: --run, --machine."]
