"""What is installed is what the project says: names, extras, the console command, the pinned set,
the fixed top level.
"""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

from crossover import VERBS, VERSION

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_top_level_is_the_agreed_one() -> None:
    for name in ("serving", "models", "loadtests", "reports", "docker", "tests"):
        assert (ROOT / name).is_dir(), name
    for name in (
        "pyproject.toml",
        "README.md",
        "SECURITY.md",
        "LICENSE",
        "Makefile",
        "crossover.py",
        "constraints.txt",
        ".ci/run",
    ):
        assert (ROOT / name).is_file(), name


def test_version_and_command() -> None:
    assert PROJECT["version"] == VERSION == version("llm-crossover")
    (command,) = [
        point for point in entry_points(group="console_scripts") if point.name == "crossover"
    ]
    assert command.value == "crossover:main"


def test_every_verb_of_the_table_answers_help(
    crossover: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for verb in VERBS:
        done = crossover(verb, "--help")
        assert done.returncode == 0, (verb, done.stderr)
        assert "Usage" in done.stdout, verb


def test_the_named_packages_are_dependencies_of_all_and_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {"transformers", "torch", "optimum", "onnxruntime", "llama-cpp-python", "locust"}
    everything = {
        re.split(r"[\[<>=;]", line)[0].strip() for extra in extras.values() for line in extra
    }
    assert named <= everything
    pins = dict(
        re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    )
    normal = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pins.items()}
    for name in sorted(named | {"pytest"}):
        assert version(name).split("+")[0] == normal[name], name


def test_the_wheel_holds_the_four_packages_their_data_and_no_weights(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if not name.startswith("llm_crossover")} == {
        "models",
        "serving",
        "loadtests",
        "reports",
        "crossover.py",
    }
    assert any(name.startswith("models/data/") and name.endswith(".json") for name in names)
    assert not [name for name in names if name.endswith((".gguf", ".safetensors", ".onnx"))]
    assert {"loadtests/demo.toml", "loadtests/llama-server.toml"} <= {*names}
