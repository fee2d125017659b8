"""Which engines are looked at, and the table that spares a second measurement. No engine runs here:
the table's rows are scripted.
"""

from pathlib import Path

import msgspec
import pytest

from models.ladder import rung
from serving.hardware.machine_facts import hardware_facts
from serving.placement.best_engine import Question, best_engine, choice_lines, known_times
from serving.placement.engine_choice import EngineCandidate, EngineChoice, EngineTimes, Work
from serving.placement.placement_policy import NoPlacement, PlacementRequest
from serving.placement.times_table import keep, machine_of, read_table, table_path

FACTS = msgspec.structs.replace(
    hardware_facts(), memory_available_bytes=64 << 30, cgroup_memory_bytes=None
)


def row(weight_format: str, seconds: float, backend: str = "onnx") -> EngineTimes:
    """Of the smallest rung, whose decode step takes `seconds`, whatever is in it."""
    spec = rung("135m").spec
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
    may_convert: bool = True,
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
        may_convert=may_convert,
    )


def chosen(question: Question, memory_bytes: int = 64 << 30) -> EngineChoice:
    facts = msgspec.structs.replace(FACTS, memory_available_bytes=memory_bytes)
    return best_engine(question, facts, print, lambda what, fraction: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With a table in which the onnx engine is twice as quick, three times in int4."""
    keep(tmp_path, FACTS, row("Q4_0", 0.02, "llama_cpp"))
    keep(tmp_path, FACTS, row("dynamic-int8", 0.01))
    keep(tmp_path, FACTS, row("int4", 0.0066))
    return tmp_path


def test_the_kept_table_is_used_and_nothing_is_measured_or_made(cache: Path) -> None:
    choice = chosen(asked(cache))
    assert (choice.backend, choice.weight_format) == ("onnx", "dynamic-int8")
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


def test_a_bigger_model_is_judged_by_the_smallest_rung(cache: Path) -> None:
    choice = chosen(asked(cache, "360m"))
    assert choice.backend == "onnx" and "measured on smollm2-135m and scaled" in choice.reason
    mine, smallest = (rung(name).spec.matrix_parameters for name in ("360m", "135m"))
    times = choice.candidates[1].times
    assert times is not None and times.model == "smollm2-360m"
    assert times.decode_seconds == pytest.approx(0.01 * mine / smallest)


def test_the_formats_asked_for_limit_the_engines(cache: Path) -> None:
    choice = chosen(asked(cache, formats=("q4_0",)))
    assert [one.name for one in choice.candidates] == ["llama_cpp Q4_0"]
    assert chosen(asked(cache, formats=("Q4_0", "int4"))).weight_format == "int4"
    with pytest.raises(NoPlacement, match="no engine of the CPU has the format Q9"):
        chosen(asked(cache, formats=("Q9",)))


def test_where_eight_bits_do_not_fit_four_serve(cache: Path) -> None:
    choice = chosen(asked(cache, "3b"), 3 << 30)
    assert choice.weight_format == "Q4_0" and "the only engine" in choice.reason
    assert "dynamic-int8 needs" in choice.candidates[1].why_not


def test_weights_that_take_minutes_or_too_much_memory_to_make_are_left_out(cache: Path) -> None:
    slow = chosen(asked(cache, "1b"))
    assert slow.backend == "llama_cpp"
    told = slow.candidates[1].why_not
    assert "takes about 3 min 40 s" in told and "crossover models make 1b --backend onnx" in told
    assert slow.candidates[1].requests_per_second is not None  # shown all the same
    big = chosen(asked(cache, "3b"), 24 << 30).candidates[1].why_not
    assert "making them takes 51.3 GiB of memory, of which 19.2 GiB may be used" in big
    server = chosen(asked(cache, may_convert=False))
    assert "its weights are not made: crossover models make" in server.candidates[1].why_not
    assert server.candidates[1].times is None


def test_no_weights_are_made_for_engines_that_cannot_be_chosen(tmp_path: Path) -> None:
    choice = chosen(asked(tmp_path, "1b"))
    assert choice.backend == "llama_cpp"
    assert [one.times for one in choice.candidates] == [None, None]
    assert not list(tmp_path.iterdir())


def test_where_nothing_fits_the_arithmetic_of_each_is_told(cache: Path) -> None:
    with pytest.raises(NoPlacement, match=r"llama_cpp Q4_0: .* needs .*; onnx dynamic-int8: "):
        chosen(asked(cache, "3b"), 1 << 30)


def test_a_row_is_replaced_by_a_newer_one(cache: Path) -> None:
    keep(cache, FACTS, row("dynamic-int8", 0.04))
    table, note = read_table(cache, FACTS)
    assert len(table.rows) == 3 and note == ""
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
        path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
        expected = "has version 0"
    else:
        path.write_text(path.read_text()[:-20])
        expected = "cannot be read"
    table, note = read_table(cache, facts)
    assert table.rows == () and table.machine == machine_of(facts)
    assert expected in note
    keep(cache, facts, row("Q4_0", 0.01, "llama_cpp"))
    assert len(read_table(cache, facts)[0].rows) == 1


def test_beside_requests_nothing_is_measured_and_the_usual_order_holds(cache: Path) -> None:
    known = asked(cache)
    table_path(cache).unlink()
    question = msgspec.structs.replace(known, may_measure=False)
    choice = chosen(question)
    assert choice.backend == "llama_cpp" and "none of which was measured" in choice.reason
    assert not list(cache.iterdir())
