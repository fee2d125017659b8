"""tests/bench/gpu.sh as a script: which calls it makes, that it goes on where it was cut off, that
every wheel has a version. The calls themselves are a stand-in here.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "gpu.sh"
CALLS = [
    *("crossover", "pytest", "gpu_steps"),  # weights, tests, steps
    *("crossover", "gpu_faults"),  # cpu-weights, faults
    *["crossover"] * 3,  # campaign: run, show, report
    "torch_floor",
]


def called(
    folder: Path, *arguments: str, fails: str = "nothing", does: str = "true"
) -> tuple[int, list[str]]:
    """The script's status, and the modules that it ran, with a Python that fails on one of them.

    `does`: what this Python does at each, in the shell's words.
    """
    python, log = folder / "python", folder / "log"
    python.write_text(f'#!/bin/sh\necho "$2" >> {log}\n{does}\n[ "$2" != "tests.bench.{fails}" ]\n')
    python.chmod(0o755)
    log.write_text("")
    (folder / "out/runs/a-run").mkdir(parents=True, exist_ok=True)  # as a campaign leaves one
    environment = {**os.environ, "PYTHON": str(python), "CROSSOVER_CACHE": str(folder / "cache")}
    command = ["bash", str(SCRIPT), str(folder / "out"), "--device", "cpu", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    found = [line.removeprefix("tests.bench.") for line in log.read_text().split()]
    return done.returncode, found


def test_a_rehearsal_makes_every_call_once_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    status, calls = called(tmp_path, fails="gpu_faults")
    assert status == 1 and calls == CALLS, "one that fails stops no other"
    assert called(tmp_path) == (0, ["gpu_faults"]), "only what is not done"
    assert called(tmp_path) == (0, [])


def test_a_call_can_be_named_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    assert called(tmp_path, "faults") == (0, ["gpu_faults"])
    status, calls = called(tmp_path, "flor")
    assert status == 1 and calls == []
    assert (
        "there are weights tests steps cpu-weights faults campaign floor"
        in (tmp_path / "out/flor.txt").read_text()
    )


def test_a_call_is_ended_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALL_SECONDS", "0.3")
    assert called(tmp_path, "faults", does="exec sleep 20") == (1, ["gpu_faults"])
    assert not (tmp_path / "out/faults.done").exists()


def test_wheels_are_refused_by_no_size(tmp_path: Path) -> None:
    python = tmp_path / "python"
    wheels = tmp_path / "out/wheels"
    python.write_text(f"#!/bin/sh\nmkdir -p {wheels}\necho x > {wheels}/a.whl\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "WHEELS_MIB": "0"}
    command = ["bash", str(SCRIPT), str(tmp_path / "out"), "carry"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "1 wheels, 1 MiB\n"
    assert "more than 0 MiB (WHEELS_MIB)" in done.stderr


def test_every_wheel_that_is_carried_has_its_version() -> None:
    lines = (SCRIPT.parent / "gpu_wheels.txt").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert named and all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9.]*", line) for line in named)


@pytest.mark.parametrize("module", ["gpu_steps", "gpu_faults", "torch_floor"])
def test_the_script_gives_options_that_the_modules_have(module: str) -> None:
    _, _, call = SCRIPT.read_text().partition(f"tests.bench.{module} ")
    call = re.sub(r"\\\n\s*", "", call).partition("\n")[0]
    given = set(re.findall(r"--[a-z-]+", call))
    source = (SCRIPT.parent / f"{module}.py").read_text()
    assert given and given <= set(re.findall(r"\"(--[a-z-]+)\"", source))
