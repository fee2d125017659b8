"""A calibration of tiny models: through llama.cpp, in real children, to a file; and its parts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtests.calibrate.calibrate import hardware_of
from loadtests.calibrate.law import law_of
from loadtests.calibrate.machine_file import Step, read_machine_file
from loadtests.calibrate.step_grid import Grid, grid_of
from models.synthetic.write import write_gguf
from serving.backends.backend_interface import BackendInfo
from serving.hardware.machine_facts import hardware_facts
from serving.sampling.step_rows import Row, Sampled
from tests.shapes import TINY_LLAMA, TINY_LLAMA3

ROOT = Path(__file__).parents[3]
# Without these the verb must work: extras that a machine with llama.cpp alone does not have.
ABSENT = ("torch", "onnx", "onnxruntime", "locust", "gevent", "scipy", "transformers", "altair")
GRID = Grid(
    rows=(1, 2, 4),
    deep_rows=(1, 4),
    head_rows=(1, 4),
    contexts=(16, 64),
    prompts=(8, 32),
    mixed_tokens=16,
)


class Scripted:
    """A backend on a clock of its own: 2 ms a step, 1 ms a decode row (0.7 without logits), 0.5 ms
    a prompt token, 10 us a token of context, `pass_seconds` for each prompt beside others or beside
    decode rows; every fifth step something else takes 50 ms.
    """

    def __init__(self, slots: int, pass_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.steps = 0
        self.pass_seconds = pass_seconds
        self.info = BackendInfo("", "cpu", "", slots, 1024, 1024 * slots, 300, "", 512)

    def step(self, rows: list[Row]) -> list[Sampled]:
        self.now += 0.002 + (0.050 if self.steps % 5 == 4 else 0.0)
        self.steps += 1
        prompts = sum(len(row.tokens) > 1 for row in rows)
        self.now += self.pass_seconds * (prompts - (prompts == len(rows)) if prompts else 0)
        for row in rows:
            count = len(row.tokens)
            if count == 1:
                self.now += (0.001 if row.wants_token else 0.0007) + 1e-5 * row.start
            else:
                self.now += 0.0005 * count
        return [Sampled(7) for row in rows if row.wants_token]

    def copy(self, source: int, target: int, tokens: int) -> None:
        pass


def test_the_law_of_a_grid_is_that_of_the_script() -> None:
    backend = Scripted(8)
    heard = list(grid_of(backend, GRID.within(8), lambda: backend.now))  # type: ignore[arg-type]
    assert len(heard) == GRID.within(8).figures
    law = law_of([one.step for one in heard if one.step is not None])
    assert law.base_seconds == pytest.approx(0.002)
    assert law.prompt_token_seconds == pytest.approx(0.0005)
    assert law.kv_token_seconds == pytest.approx(1e-5, rel=0.05)
    assert law.seconds(3, 0, 300) == pytest.approx(0.002 + 0.003 + 0.003, rel=0.02)
    without = {one.head[0]: one.head[1] for one in heard if one.head is not None}
    assert without[4] == pytest.approx(0.002 + 4 * 0.0007 + 64e-5, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_what_another_pass_costs_is_read_off_steps_of_several(seconds: float) -> None:
    backend = Scripted(8, seconds)
    heard = list(grid_of(backend, GRID.within(8), lambda: backend.now))  # type: ignore[arg-type]
    law = law_of([one.step for one in heard if one.step is not None])
    assert law.pass_seconds == pytest.approx(seconds, rel=0.02, abs=2e-4)
    assert law.base_seconds == pytest.approx(0.002) and law.rows_seconds(4) > 0
    assert GRID.within(2).mixed == ((1, 1), (0, 2)), "as many slots as there are"


def test_a_law_has_no_negative_cost_and_rows_never_cost_less_than_fewer() -> None:
    law = law_of(
        [
            *(Step(0.0, 16.0, 0.0, 0.010), Step(0.0, 64.0, 0.0, 0.100)),  # below the origin
            *(Step(1.0, 0.0, 16.0, 0.020), Step(2.0, 0.0, 32.0, 0.018)),
            Step(1.0, 0.0, 64.0, 0.019),  # quicker with more context
        ]
    )
    assert law.base_seconds == 0.0 and law.kv_token_seconds == 0.0
    assert law.rows == ((1.0, 0.020), (2.0, 0.020))


def run(folder: Path, *more: str) -> subprocess.Popen[str]:
    """The verb with two tiny models; it and its children cannot import ABSENT."""
    absent = folder / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text("raise ImportError(__name__)")
    given = ["calibrate", "--slots", "2", "--threads", "1", "--beside-others", *more]
    for spec in (TINY_LLAMA, TINY_LLAMA3):
        path = folder / f"{spec.name}.gguf"
        write_gguf(spec, path, "Q4_0")
        given += ["--model", str(path)]
    return subprocess.Popen(
        [sys.executable, "-c", "import crossover; crossover.main()", *given],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{absent}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_verb_writes_a_file_with_llama_cpp_alone(tmp_path: Path) -> None:
    child = run(tmp_path, "--part-seconds", "0.02", "--name", "tiny", "--watts", "5")
    said, why = child.communicate(timeout=120)
    assert child.returncode == 0, why
    assert "memory reads" in said and "machine.json" in said
    found = read_machine_file(tmp_path / "machine.json")
    assert [one.model.name for one in found.engines] == [TINY_LLAMA.name, TINY_LLAMA3.name]
    for one in found.engines:
        assert one.law.seconds(1, 0, 128) > 0 and one.law.prompt_token_seconds > 0
        assert len(one.head) == 2 and one.version
    assert (found.name, found.watts, found.owned) == ("tiny", 5.0, True)
    assert found.bandwidth[0].bytes_per_second > 1e8
    assert {one.numbers for one in found.matrix_rates} == {"fp32"}
    text = (tmp_path / "machine.json").read_text()
    for private in (hardware_facts().hostname, str(tmp_path), str(Path.home())):
        assert private not in text or len(private) < 6


def test_ctrl_c_leaves_no_file_and_no_child(tmp_path: Path) -> None:
    child = run(tmp_path, "--part-seconds", "30")
    assert child.stderr is not None
    child.stderr.readline()  # it has begun
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    _, why = child.communicate(timeout=30)  # ends only when no child holds the pipes
    assert child.returncode == 2 and "was not written" in why
    assert not list(tmp_path.glob("machine*")) and not list(tmp_path.glob(".machine*"))


def test_a_wrong_option_is_one_sentence(
    tmp_path: Path, crossover: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = crossover("calibrate", "--out", str(tmp_path / "none" / "m.json"))
    assert done.returncode == 2 and "there is no folder" in done.stderr
    done = crossover("calibrate", "--backend", "nonsense", "--out", str(tmp_path / "m.json"))
    assert done.returncode == 2 and "nonsense" in done.stderr
    done = crossover("calibrate", "--price-source", "x" * 201, "--out", str(tmp_path / "m.json"))
    assert done.returncode == 2 and "--price-source must be at most 200" in done.stderr


def test_memory_channels_are_counted_and_a_kernel_is_its_number(tmp_path: Path) -> None:
    for controller, dimm, channel in (("mc0", 0, 0), ("mc0", 1, 0), ("mc0", 2, 1), ("mc1", 0, 0)):
        folder = tmp_path / f"sys/devices/system/edac/mc/{controller}/dimm{dimm}"
        folder.mkdir(parents=True)
        (folder / "dimm_location").write_text(f"channel {channel} slot {dimm} \n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\n")
    found = hardware_of(hardware_facts(), tmp_path)
    assert found.memory_channels == 3 and found.memory_bytes == 1 << 20
    assert set(found.kernel) <= set("0123456789.")
