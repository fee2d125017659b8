"""The choice between engines, by step times that are known."""

import math
import time

import msgspec
import pytest

from serving.placement.fastest_backend import (
    EngineCandidate,
    EngineTimes,
    Work,
    choose,
    requests_per_second,
)

FEW = Work(prompt_tokens=10, output_tokens=101, streams=1)
MANY = Work(prompt_tokens=200, output_tokens=11, streams=8)


def times(prefill: float, alone: float, together: float) -> EngineTimes:
    return EngineTimes(
        model="m",
        parameters=1,
        backend="",
        weight_format="",
        threads=1,
        slots=8,
        prompt_tokens=64,
        prompt_tokens_per_second=prefill,
        decode_seconds=alone,
        decode_slots_seconds=together,
        spent_seconds=1.0,
        unix_seconds=time.time(),
    )


def candidate(
    backend: str, weight_format: str, found: EngineTimes | None, why_not: str = ""
) -> EngineCandidate:
    return EngineCandidate(
        backend=backend, weight_format=weight_format, times=found, why_not=why_not
    )


FOUR_BITS = candidate("llama_cpp", "Q4_0", times(100.0, 0.010, 0.080))
EIGHT_BITS = candidate("onnx", "int8", times(200.0, 0.015, 0.060))


def test_a_request_takes_its_prefill_and_its_share_of_the_steps() -> None:
    found = times(100.0, 0.010, 0.080)
    assert math.isclose(1 / requests_per_second(found, FEW), 10 / 100 + 100 * 0.010)
    assert math.isclose(1 / requests_per_second(found, MANY), 200 / 100 + 10 * 0.080 / 8)
    four = Work(prompt_tokens=0, output_tokens=8, streams=4)  # three sevenths of the way to 8 rows
    assert math.isclose(1 / requests_per_second(found, four), 7 * (0.010 + 0.070 * 3 / 7) / 4)


def test_the_work_decides_between_the_same_two_engines() -> None:
    alone, many = choose([FOUR_BITS, EIGHT_BITS], FEW), choose([FOUR_BITS, EIGHT_BITS], MANY)
    assert (alone.backend, alone.weight_format) == ("llama_cpp", "Q4_0")
    assert (many.backend, many.weight_format) == ("onnx", "int8")
    assert "2.0 x that of llama_cpp Q4_0" in many.reason
    assert [one.requests_per_second is not None for one in many.candidates] == [True, True]


def test_where_eight_bits_do_not_fit_four_are_taken() -> None:
    short = msgspec.structs.replace(EIGHT_BITS, why_not="needs 20 GiB, 16 GiB may be used")
    choice = choose([FOUR_BITS, short], MANY)
    assert choice.weight_format == "Q4_0"
    assert "the only engine" in choice.reason
    assert choice.candidates[1].requests_per_second is not None  # shown beside the winner


@pytest.mark.parametrize("faster", [1.0, 1.08])
def test_a_near_tie_is_said_and_goes_to_the_format_nearer_to_the_float_model(
    faster: float,
) -> None:
    four = candidate("llama_cpp", "Q4_0", times(100.0 * faster, 0.010 / faster, 0.080 / faster))
    eight = candidate("onnx", "int8", times(100.0, 0.010, 0.080))
    choice = choose([four, eight], MANY)
    assert choice.weight_format == "int8"
    assert "near tie with llama_cpp Q4_0" in choice.reason
    assert "4.5 bits are further from the float model" in choice.reason


def test_what_was_not_measured_loses_against_what_was() -> None:
    choice = choose([candidate("llama_cpp", "Q4_0", None), EIGHT_BITS], FEW)
    assert choice.backend == "onnx"
    assert "no other engine was measured" in choice.reason
    none = choose([candidate("llama_cpp", "Q4_0", None), candidate("onnx", "int8", None)], FEW)
    assert none.backend == "llama_cpp" and "none of which was measured" in none.reason


def test_a_choice_by_disturbed_measurements_says_so() -> None:
    quiet = choose([FOUR_BITS, EIGHT_BITS], MANY)
    found = msgspec.structs.replace(times(200.0, 0.015, 0.060), waited_share=0.3)
    busy = choose([FOUR_BITS, candidate("onnx", "int8", found)], MANY)
    assert busy.reason == quiet.reason + "; other work on the machine disturbed the measurement"


def test_where_no_engine_is_possible_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        choose([candidate("onnx", "int8", None, "not installed")], FEW)
