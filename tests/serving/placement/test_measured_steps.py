"""Step times as they are measured: of scripted backends, whose truth is known, and of real ones."""

from pathlib import Path

import pytest

from models.random_weights import write_gguf
from serving.backends.backend_interface import BackendInfo, EngineConfig
from serving.placement.fastest_backend import (
    EngineCandidate,
    MeasuringFailed,
    Work,
    choose,
    measured_steps,
    measured_times,
    prompt_class,
)
from serving.sampling.step_rows import Row, Sampled
from tests.serving.backends.hf_folders import onnx_folder
from tests.shapes import TINY_LLAMA3

PART_SECONDS = 0.05


class Scripted:
    """A backend on a clock of its own: a step takes 2 ms, 1 ms a decode row, 0.5 ms a prompt token;
    every fifth step the machine does something else for 50 ms.
    """

    def __init__(self, slots: int, step_tokens: int = 512) -> None:
        self.now = 0.0
        self.steps = 0
        self.held = [0] * slots
        self.info = BackendInfo("", "cpu", "", slots, 1024, 1024 * slots, 300, "", step_tokens)

    def step(self, rows: list[Row]) -> list[Sampled]:
        self.now += 0.002 + (0.050 if self.steps % 5 == 4 else 0.0)
        self.steps += 1
        for row in rows:
            assert row.start <= self.held[row.slot] and row.tokens.max() < self.info.vocabulary
            self.held[row.slot] = row.position
            count = len(row.tokens)
            self.now += 0.001 if count == 1 else 0.0005 * count
        return [Sampled(7) for _ in rows]


@pytest.mark.parametrize("slots", [1, 8])
def test_the_times_are_those_of_the_script(slots: int) -> None:
    backend = Scripted(slots)
    found = measured_steps(backend, 64, clock=lambda: backend.now)  # type: ignore[arg-type]
    law = {"base": 0.002, "row": 0.001, "prompt_token": 0.0005}
    for one in found:
        rows = law["row"] * one.decode_rows
        assert one.seconds == pytest.approx(
            law["base"] + rows + law["prompt_token"] * one.prompt_tokens
        )
    kinds = {(one.decode_rows, one.prompt_tokens) for one in found}
    assert {(0, 16), (0, 64), (1, 0), (slots, 0)} <= kinds
    assert ((7, 16) in kinds and (4, 0) in kinds) == (slots == 8)


def test_a_slow_engine_is_measured_in_little_time_all_the_same() -> None:
    backend = Scripted(16, step_tokens=32)
    found = measured_steps(backend, 256, 0.01, lambda: backend.now)  # type: ignore[arg-type]
    assert max(one.prompt_tokens for one in found) == 16
    assert max(backend.held[1:]) < 64


def test_prompts_of_a_length_class_share_their_rows() -> None:
    lengths = (0.5, 16, 17, 36, 100, 4000)
    assert [prompt_class(length) for length in lengths] == [16, 16, 32, 64, 128, 256]


def test_the_quicker_of_two_engines_in_processes_of_their_own_is_chosen() -> None:
    def measured(name: str, **options: float) -> EngineCandidate:
        config = EngineConfig("fake", "", name, slots=4, options=options)
        found = measured_times(config, TINY_LLAMA3, 16, PART_SECONDS)
        return EngineCandidate(backend=name, weight_format="", times=found)

    slow = measured("slow", step_seconds=0.02, row_seconds=0.01)
    quick = measured("quick", step_seconds=0.002, row_seconds=0.001)
    assert choose([slow, quick], Work(16, 16, 4)).backend == "quick"


def test_llama_cpp_and_onnx_are_measured_as_they_serve(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_gguf(TINY_LLAMA3, gguf, "Q4_0")
    for backend, path in (("llama_cpp", gguf), ("onnx", onnx_folder("llama3-int8"))):
        config = EngineConfig(backend, str(path), "tiny", slots=2, threads=1)
        found = measured_times(config, TINY_LLAMA3, 16, PART_SECONDS)
        assert found.prompt_tokens_per_second > 100
        assert 0 < found.decode_seconds < 1 and 0 < found.decode_slots_seconds < 1


def test_an_engine_that_cannot_load_says_why() -> None:
    config = EngineConfig("fake", "", "m", options={"fail_cause": "load_oom"})
    with pytest.raises(MeasuringFailed, match=r"fake.*told to fail with load_oom"):
        measured_times(config, TINY_LLAMA3, 16, PART_SECONDS)
