"""Which engines are looked at, and the table that spares a second measurement. No engine runs here:
the table's rows are scripted.
"""

from pathlib import Path

import msgspec
import pytest

from models.ladder import rung
from serving.hardware.machine_facts import hardware_facts
from serving.placement.fastest_backend import (
    EngineCandidate,
    EngineChoice,
    EngineTimes,
    Question,
    Work,
    choice_lines,
    fastest_backend,
    keep,
    known_times,
    read_table,
    table_path,
)
from serving.placement.placement_policy import NoPlacement, PlacementRequest

FACTS = msgspec.structs.replace(
    hardware_facts(), memory_available_bytes=64 << 30, cgroup_memory_bytes=None
)


def row(
    weight_format: str, seconds: float, backend: str = "onnx", model: str = "135m"
) -> EngineTimes:
    """Of an engine whose decode step takes `seconds`, whatever is in it."""
    spec = rung(model).spec
    return EngineTimes(
        model=spec.name,
        parameters=spec.parameters,
        backend=backend,
        weight_format=weight_format,
        threads=1,
        slots=8,
        prompt_tokens=64,
        prompt_tokens_per_second=1 / seconds,
        decode_seconds=seconds,
        decode_slots_seconds=seconds,
        spent_seconds=1.0,
        unix_seconds=0.0,
    )


def asked(
    cache: Path,
    model: str = "135m",
    formats: tuple[str, ...] = (),
    slots: int = 8,
) -> Question:
    return Question(
        source=model,
        request=PlacementRequest(model=rung(model).spec, slots=slots, context_tokens=512),
        work=Work(prompt_tokens=40, output_tokens=40, streams=8),
        threads=1,
        cores=(0,),
        formats=formats,
        cache=str(cache),
    )


def chosen(question: Question, memory_bytes: int = 64 << 30) -> EngineChoice:
    facts = msgspec.structs.replace(FACTS, memory_available_bytes=memory_bytes)
    return fastest_backend(question, facts, print, lambda what, fraction: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With a table in which the onnx engine is twice as quick, three times in int4."""
    keep(tmp_path, FACTS, row("Q4_0", 0.02, "llama_cpp"))
    keep(tmp_path, FACTS, row("int8", 0.01))
    keep(tmp_path, FACTS, row("int4", 0.0066))
    return tmp_path


def test_the_kept_table_is_used_and_nothing_is_measured_or_made(cache: Path) -> None:
    choice = chosen(asked(cache))
    assert (choice.backend, choice.weight_format) == ("onnx", "int8")
    assert "2.0 x that of llama_cpp Q4_0" in choice.reason
    assert [path.name for path in cache.iterdir()] == [table_path(cache).name]
    lines = choice_lines(choice)
    assert len(lines) == 3 and "prompts 50 tokens/s" in lines[1] and "cannot" not in lines[2]


def test_times_of_another_kv_type_are_not_used(cache: Path) -> None:
    question = msgspec.structs.replace(asked(cache), may_measure=False)
    request = msgspec.structs.replace(question.request, kv_dtype="fp32")
    engine = EngineCandidate(backend="llama_cpp", weight_format="Q4_0")
    found = [
        known_times(one, engine, request.model, FACTS, print, lambda what, fraction: None)
        for one in (question, msgspec.structs.replace(question, request=request))
    ]
    assert found[0] is not None and found[1] is None


def test_a_big_model_whose_weights_are_not_made_is_judged_by_a_smaller_rung(cache: Path) -> None:
    for backend, name, seconds in (("llama_cpp", "Q4_0", 0.2), ("onnx", "int8", 0.1)):
        keep(cache, FACTS, row(name, seconds, backend, "1b"))
    choice = chosen(asked(cache, "8b"))
    assert choice.backend == "onnx" and "measured on llama-3.2-1b and scaled" in choice.reason
    mine, smaller = (rung(name).spec.matrix_parameters for name in ("8b", "1b"))
    times = choice.candidates[1].times
    assert times is not None and times.model == "llama-3.1-8b"
    assert times.decode_seconds == pytest.approx(0.1 * mine / smaller)
    assert not list(cache.glob("synthetic/llama*"))


def test_no_engine_of_1b_to_8b_is_left_out_on_24_gib(cache: Path) -> None:
    for model in ("1b", "3b", "8b"):
        question = msgspec.structs.replace(asked(cache, model), may_measure=False)
        assert [one.why_not for one in chosen(question, 22 << 30).candidates] == ["", ""]


def test_the_formats_asked_for_limit_the_engines(cache: Path) -> None:
    choice = chosen(asked(cache, formats=("q4_0",)))
    assert [one.name for one in choice.candidates] == ["llama_cpp Q4_0"]
    assert chosen(asked(cache, formats=("Q4_0", "int4"))).weight_format == "int4"
    with pytest.raises(NoPlacement, match="no engine of the CPU has the format Q9"):
        chosen(asked(cache, formats=("Q9",)))


def test_where_eight_bits_do_not_fit_four_serve(cache: Path) -> None:
    choice = chosen(asked(cache, "3b"), 3 << 30)
    assert choice.weight_format == "Q4_0" and "the only engine" in choice.reason
    assert "int8 needs" in choice.candidates[1].why_not


def test_where_nothing_fits_the_arithmetic_of_each_is_told(cache: Path) -> None:
    with pytest.raises(NoPlacement, match=r"llama_cpp Q4_0: .* needs .*; onnx int8: "):
        chosen(asked(cache, "3b"), 1 << 30)


def test_a_row_is_replaced_by_a_newer_one(cache: Path) -> None:
    keep(cache, FACTS, row("int8", 0.04))
    rows, note = read_table(cache, FACTS)
    assert len(rows) == 3 and note == ""
    assert chosen(asked(cache)).backend == "llama_cpp"


@pytest.mark.parametrize("change", ["machine", "version", "broken"])
def test_a_table_of_another_machine_or_version_is_void_and_says_why(
    cache: Path, change: str
) -> None:
    facts = FACTS
    path = table_path(cache)
    if change == "machine":
        facts = msgspec.structs.replace(FACTS, cpu_model="another")
        expected = f"CPU {FACTS.cpu_model} then, another now"
    elif change == "version":
        path.write_text(path.read_text().replace('"version": 2', '"version": 0'))
        expected = "has version 0"
    else:
        path.write_text(path.read_text()[:-20])
        expected = "cannot be read"
    rows, note = read_table(cache, facts)
    assert rows == ()
    assert expected in note
    keep(cache, facts, row("Q4_0", 0.01, "llama_cpp"))
    assert len(read_table(cache, facts)[0]) == 1


def test_beside_requests_nothing_is_measured_and_the_usual_order_holds(cache: Path) -> None:
    known = asked(cache)
    table_path(cache).unlink()
    question = msgspec.structs.replace(known, may_measure=False)
    choice = chosen(question)
    assert choice.backend == "llama_cpp" and "none of which was measured" in choice.reason
    assert not list(cache.iterdir())
