"""Which engines are looked at, which is chosen, and the table that spares a second measurement: its
rows are scripted. Then real measurements.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from crossover.models.identity.identify_model import identify
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.random_weights import write_gguf
from crossover.serving.backends.backend_interface import BackendInfo, EngineConfig
from crossover.serving.capacity.scheduler_settings import RequestedSettings, SchedulerSettings
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.errors import ServingError
from crossover.serving.hardware.cpu_topology import Arrangement, arrangements, read_topology
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.placement import fastest_backend as fastest_backend_module
from crossover.serving.placement.engine_times import (
    EngineTimes,
    measure,
    measured_times,
    read_table,
    save_times,
    step_times_of_timings,
    table_path,
)
from crossover.serving.placement.engines import Wanted
from crossover.serving.placement.fastest_backend import (
    EngineCandidate,
    EngineChoice,
    EngineQuestion,
    fastest_backend,
)
from crossover.serving.placement.placement_policy import NoPlacement, PlacementRequest
from crossover.serving.sampling.step_inputs import Row, Sampled
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.campaign.simulated import rate_units_in
from tests.serving.backends.hf_folders import onnx_folder
from tests.serving.hardware.machine_trees import two_xeons
from tests.shapes import TINY_LLAMA3
from tests.tools.core_splits import split_of_one_core, split_of_tree

FACTS = msgspec.structs.replace(
    hardware_facts(), memory_available_bytes=64 << 30, cgroup_memory_bytes=None, isa=("avx2",)
)


WORK = Workload(prompt_tokens=40, output_tokens=40)


def times(seconds: float) -> EngineTimes:
    """Of an engine whose decode step takes `seconds`, whatever is in it."""
    return EngineTimes(
        slots=8,
        prompt_tokens_per_second=1 / seconds,
        pass_seconds=0.0,
        decode_seconds=seconds,
        decode_slots_seconds=seconds,
    )


def make_question(
    cache: Path,
    model: str = "135m",
    kv_dtype: str = "auto",
    formats: tuple[str, ...] = (),
    slots: int | None = 8,
    **more: Any,
) -> EngineQuestion:
    request = PlacementRequest(
        model=identify(model),
        wanted=Wanted(formats=formats),
        settings=RequestedSettings(slots=slots, context_tokens=512, kv_dtype=kv_dtype),
    )
    settings: dict[str, Any] = {"may_measure": False, "workload": WORK, **more}
    return EngineQuestion(
        request=request,
        split_of=split_of_one_core(),
        cache=str(cache),
        **settings,
    )


def keep_times(
    cache: Path,
    weight_format: str,
    found: EngineTimes,
    backend: str = "onnx",
    model: str = "135m",
    kv_dtype: str = "auto",
    slots: int | None = 8,
) -> None:
    engine = EngineCandidate(backend=backend, weight_format=weight_format)
    question = make_question(cache, model, kv_dtype, slots=slots)
    save_times(cache, FACTS, question.key(engine), found)


def chosen(
    cache: Path, model: str = "135m", memory_bytes: int = 64 << 30, **more: Any
) -> EngineChoice:
    question = make_question(cache, model, **more)
    facts = msgspec.structs.replace(FACTS, memory_available_bytes=memory_bytes)
    return fastest_backend(question, facts, print, lambda what, fraction: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With a table in which the onnx engine is twice as quick, three times in int4."""
    keep_times(tmp_path, "Q4_0", times(0.02), "llama_cpp")
    keep_times(tmp_path, "int8", times(0.01))
    keep_times(tmp_path, "int4", times(0.0066))
    return tmp_path


def test_the_kept_table_is_used_and_nothing_is_measured_or_made(cache: Path) -> None:
    choice = chosen(cache, may_measure=True)
    assert (choice.backend, choice.weight_format) == ("onnx", "int8")
    assert "under the SLO chat for the workload given" in choice.reason
    assert "prompts of 40 and answers of 40 tokens on average, 8 slots" in choice.reason
    assert [path.name for path in cache.iterdir()] == [table_path(cache).name]
    rates = [one.rate for one in choice.candidates]
    assert rates[1] > 1.5 * rates[0] > 0 and "onnx int8: " in choice.reason


def test_slots_that_are_not_set_are_those_with_the_highest_capacity(tmp_path: Path) -> None:
    """Steps take as long with many rows as with one, so more slots carry more, as far as memory
    goes."""
    quick_prompts = msgspec.structs.replace(times(0.05), prompt_tokens_per_second=5000)
    keep_times(tmp_path, "int8", quick_prompts, slots=None)
    keep_times(tmp_path, "Q4_0", times(0.5), "llama_cpp", slots=None)
    choice = chosen(tmp_path, slots=None)
    assert (choice.backend, choice.slots) == ("onnx", 64)
    assert "; with 64 slots it carries " in choice.reason
    assert len(rate_units_in(choice.reason)) == 1  # this line is in the log of `serve` too
    small = chosen(tmp_path, slots=None, memory_bytes=3 << 30)
    assert small.slots == 32 < 64, "a quarter of the memory"
    assert chosen(tmp_path, slots=8).slots is None, "the user's number stays"


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("amx_bf16", "torch"), ("avx512_bf16", "torch"), ("bf16", "torch"), ("avx512_vnni", "onnx")],
)
def test_torch_is_looked_at_where_the_cpu_multiplies_bf16(
    cache: Path, flag: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = msgspec.structs.replace(FACTS, isa=("avx2", flag))
    monkeypatch.setattr(fastest_backend_module, "missing_backends", dict)
    for backend, weight_format, seconds in (
        ("llama_cpp", "Q4_0", 0.02),
        ("onnx", "int8", 0.01),
        ("torch", "bf16", 0.002),
    ):
        engine = EngineCandidate(backend=backend, weight_format=weight_format)
        save_times(cache, facts, make_question(cache).key(engine), times(seconds))
    choice = fastest_backend(make_question(cache), facts, print, lambda what, fraction: None)
    assert choice.backend == expected


def test_torch_that_was_never_measured_is_left_out_where_it_may_not_be(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = msgspec.structs.replace(FACTS, isa=("amx_bf16",))
    monkeypatch.setattr(fastest_backend_module, "missing_backends", dict)
    for backend, weight_format in (("llama_cpp", "Q4_0"), ("onnx", "int8")):
        engine = EngineCandidate(backend=backend, weight_format=weight_format)
        save_times(cache, facts, make_question(cache).key(engine), times(0.01))
    question = make_question(cache, may_measure=True)
    choice = fastest_backend(question, facts, print, lambda what, fraction: None)
    assert [one.backend for one in choice.candidates] == ["llama_cpp", "onnx"]


@pytest.mark.parametrize(
    ("threads", "half_seconds", "chosen_threads"),
    [(8, 0.001, None), (15, 0.005, 7), (15, 0.02, 15), (9, 0.005, 4)],
)
def test_above_eight_threads_half_of_them_are_measured_too(
    cache: Path, threads: int, half_seconds: float, chosen_threads: int | None
) -> None:
    question = msgspec.structs.replace(
        make_question(cache), split_of=split_of_one_core(threads), are_threads_open=True
    )
    for count, seconds in ((threads, 0.01), (threads // 2, half_seconds)):
        split = split_of_one_core(count)(Arrangement(), 0)
        engine = EngineCandidate(backend="onnx", weight_format="int8", split=split)
        save_times(cache, FACTS, question.key(engine), times(seconds))
    choice = fastest_backend(question, FACTS, print, lambda what, fraction: None)
    assert (choice.backend, choice.threads) == ("onnx", chosen_threads)
    named = msgspec.structs.replace(question, are_threads_open=False)
    assert fastest_backend(named, FACTS, print, lambda *_: None).threads is None


@pytest.mark.parametrize(
    ("one_node", "all_nodes", "slo", "expected"),
    [
        (0.01, 0.01, "chat", (2, 2)),  # each engine serves as much as one on all nodes
        (0.01, 0.002, "chat", (1, 2)),  # one on all nodes serves more than two
        (0.2, 0.08, "chat", (1, 2)),  # on one node a token takes too long
        (0.2, 0.08, "batch", (1, 2)),
        (0.2, 0.15, "batch", (2, 2)),
    ],
)
def test_step_times_decide_between_an_engine_on_each_node_and_one_on_all(
    tmp_path: Path, one_node: float, all_nodes: float, slo: str, expected: tuple[int, int]
) -> None:
    """Of two sockets with 32 cores, of which HTTP has one."""
    tree = two_xeons(tmp_path)
    question = msgspec.structs.replace(
        make_question(tmp_path),
        split_of=split_of_tree(tree.cpus, tmp_path),
        arrangements=arrangements(read_topology(tree.cpus, tmp_path)),
        slo=SLO_PRESETS[slo],
    )
    for arrangement, seconds in zip(((2, 2), (1, 2)), (one_node, all_nodes), strict=True):
        split = question.split_of(Arrangement(*arrangement), 0)
        engine = EngineCandidate(backend="onnx", weight_format="int8", split=split)
        save_times(tmp_path, FACTS, question.key(engine), times(seconds))
    choice = fastest_backend(question, FACTS, print, lambda what, fraction: None)
    assert choice.split.arrangement == expected
    assert choice.threads == (31 if expected == (2, 2) else 63)
    on_each, on_all = (one for one in choice.candidates if one.backend == "onnx")
    assert on_each.name == "onnx int8 on each of 2 NUMA nodes with 31 threads"
    assert on_all.name == "onnx int8 on 2 NUMA nodes with 63 threads"
    assert f"{on_each.name}: " in choice.reason and f"{on_all.name}: " in choice.reason


def test_two_engines_carry_twice_as_much_as_one_of_them(tmp_path: Path) -> None:
    tree = two_xeons(tmp_path)
    question = msgspec.structs.replace(
        make_question(tmp_path, slots=None), split_of=split_of_tree(tree.cpus, tmp_path)
    )
    found = {}
    for engines in (1, 2):
        asked = msgspec.structs.replace(question, arrangements=(Arrangement(engines),))
        for backend, name in (("llama_cpp", "Q4_0"), ("onnx", "int8")):
            engine = EngineCandidate(backend=backend, weight_format=name)
            save_times(tmp_path, FACTS, asked.key(engine), times(0.01))
        found[engines] = fastest_backend(asked, FACTS, print, lambda what, fraction: None)
    one, two = (choice.candidates[1].rate for choice in found.values())
    assert 1.9 < two / one < 2.4
    assert found[2].split.arrangement == (2, 2) and found[2].slots is not None


def test_the_work_decides_between_the_same_two_engines(cache: Path) -> None:
    slow_prompts = msgspec.structs.replace(times(0.01), prompt_tokens_per_second=20.0)
    keep_times(cache, "int8", slow_prompts)
    short = msgspec.structs.replace(WORK, output_tokens=1)
    long = Workload(prompt_tokens=4, output_tokens=2000)
    assert chosen(cache, workload=short).backend == "llama_cpp"
    assert chosen(cache, workload=long).backend == "onnx"


@pytest.mark.parametrize(
    ("seconds", "slo", "expected", "words"),
    [
        (0.005, "chat", "llama_cpp", "llama_cpp Q4_0 is the best engine"),  # twice as quick
        (0.0095, "chat", "onnx", "more bits are preferred"),  # within the interval's width
        (0.0105, "chat", "onnx", "onnx int8 is the best engine"),
        (0.2, "chat", "onnx", "llama_cpp Q4_0: misses the SLO unloaded"),
        (0.005, "interactive", "llama_cpp", "under the SLO interactive"),
    ],
)
def test_most_capacity_under_the_slo_wins_and_what_is_as_good_goes_to_more_bits(
    cache: Path, seconds: float, slo: str, expected: str, words: str
) -> None:
    keep_times(cache, "Q4_0", times(seconds), "llama_cpp")
    choice = chosen(cache, slo=SLO_PRESETS[slo])
    assert choice.backend == expected and words in choice.reason


def test_where_none_meets_the_slo_unloaded_the_capacity_without_limits_decides(
    cache: Path,
) -> None:
    keep_times(cache, "Q4_0", times(0.5), "llama_cpp")
    keep_times(cache, "int8", times(1.0))
    choice = chosen(cache)
    assert choice.backend == "llama_cpp" and "no engine meets the SLO chat" in choice.reason
    assert all(one.rate > 0 for one in choice.candidates)


def test_a_row_is_replaced_by_a_newer_one(cache: Path) -> None:
    keep_times(cache, "int8", times(0.04))
    assert len(read_table(cache, FACTS)) == 3
    assert chosen(cache).backend == "llama_cpp"


def test_times_that_others_disturbed_serve_once_and_are_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_times(cache, "int8", msgspec.structs.replace(times(0.04), taken_share=0.2))
    assert chosen(cache).backend == "llama_cpp", "nothing may be measured: they are all there is"
    module = "crossover.serving.placement.fastest_backend"
    monkeypatch.setattr(
        f"{module}.find_files",
        lambda model, **more: SimpleNamespace(
            path="", name=model.name, weight_format="", tokenizer_path=""
        ),
    )
    monkeypatch.setattr(f"{module}.measured_times", lambda config, spec: times(0.01))
    for _ in range(2):
        assert chosen(cache, may_measure=True).backend == "onnx"
        monkeypatch.setattr(f"{module}.measured_times", None)  # from now on nothing is measured


def test_unknown_speeds_are_not_measured_beside_requests_and_the_default_order_applies(
    cache: Path,
) -> None:
    choice = chosen(cache, kv_dtype="fp32")
    assert choice.backend == "llama_cpp" and "onnx int8: not measured" in choice.reason
    keep_times(cache, "int8", times(0.01), kv_dtype="fp32")
    assert chosen(cache, kv_dtype="fp32").backend == "onnx", "what was measured wins"


def test_a_big_model_whose_weights_are_not_made_is_judged_by_a_smaller_rung(cache: Path) -> None:
    for backend, name, seconds in (("llama_cpp", "Q4_0", 0.2), ("onnx", "int8", 0.1)):
        keep_times(cache, name, times(seconds), backend, "1b")
    choice = chosen(cache, "8b", may_measure=True)
    assert choice.backend == "onnx"
    mine, smaller = (ladder_model(name).spec.active_parameters for name in ("8b", "1b"))
    scaled = choice.candidates[1].times
    assert scaled is not None
    assert scaled.decode_seconds == pytest.approx(0.1 * mine / smaller)
    assert not list(cache.glob("synthetic/llama*"))


def test_a_mixture_is_judged_by_its_active_parameters_and_what_a_step_reads(cache: Path) -> None:
    """Its prompts as of a model of 3 billion parameters; steps of 8 rows read 40 % of its experts,
    steps of one row 6 %."""
    keep_times(cache, "Q4_0", times(0.2), "llama_cpp", "1b")
    keep_times(cache, "int8", times(0.1), "onnx", "1b")
    spec, small = ladder_model("qwen3-30b-a3b").spec, ladder_model("1b").spec
    question = make_question(cache, "1b", may_measure=True)
    mixture = msgspec.structs.replace(question.request.model, name=spec.name, spec=spec)
    request = msgspec.structs.replace(question.request, model=mixture)
    question = msgspec.structs.replace(question, request=request)
    found = fastest_backend(question, FACTS, print, lambda what, fraction: None)
    scaled = found.candidates[0].times
    assert scaled is not None and spec.experts is not None
    own = spec.active_parameters / small.active_parameters
    assert 1 / scaled.prompt_tokens_per_second == pytest.approx(0.2 * own)
    assert scaled.decode_seconds == pytest.approx(0.2 * own)
    more = (spec.experts.expected_share(8) - 8 / 128) * spec.experts.parameters
    assert scaled.decode_slots_seconds == pytest.approx(
        0.2 * (own + more / small.active_parameters), rel=1e-3
    )


def test_no_engine_of_1b_to_8b_is_left_out_on_24_gib(cache: Path) -> None:
    for model in ("1b", "3b", "8b"):
        found = chosen(cache, model, memory_bytes=22 << 30).candidates
        assert [one.why_not for one in found] == ["", ""]


def test_the_requested_formats_limit_the_engines(cache: Path) -> None:
    choice = chosen(cache, formats=("q4_0",))
    assert [one.name for one in choice.candidates] == ["llama_cpp Q4_0"]
    assert chosen(cache, formats=("Q4_0", "int4")).weight_format == "int4"
    with pytest.raises(
        NoPlacement, match="which no engine can run in Q9 on the CPU. Engines that can: "
    ):
        chosen(cache, formats=("Q9",))


def test_four_bits_serve_where_eight_do_not_fit_and_nothing_fitting_is_an_error(
    cache: Path,
) -> None:
    choice = chosen(cache, "3b", memory_bytes=3 << 30)
    assert choice.weight_format == "Q4_0"
    assert "int8 needs" in choice.candidates[1].why_not
    with pytest.raises(NoPlacement, match=r"llama_cpp Q4_0: .* needs .*; onnx int8: "):
        chosen(cache, "3b", memory_bytes=1 << 30)


def test_a_table_of_another_machine_or_that_is_broken_is_void(cache: Path) -> None:
    other = msgspec.structs.replace(FACTS, cpu_model="another")
    assert read_table(cache, other) == {}
    table_path(cache).write_text(table_path(cache).read_text()[:-20])
    assert read_table(cache, FACTS) == {}
    keep_times(cache, "Q4_0", times(0.01), "llama_cpp")
    assert len(read_table(cache, FACTS)) == 1


class Scripted:
    """A backend on a clock of its own: a step takes 2 ms for its decode rows and 2 ms for each
    prompt, which is a pass of its own, 1 ms a decode row, and 0.5 ms a prompt token; every fifth
    step the machine does something else for 50 ms.
    """

    def __init__(self, slots: int, step_tokens: int = 512) -> None:
        self.now, self.steps = 0.0, 0
        self.cached = [0] * slots
        self.longest = 0
        settings = SchedulerSettings(slots=slots, context_tokens=1024, step_tokens=step_tokens)
        self.info = BackendInfo("", "cpu", "", settings, 300, "")

    def step(self, rows: list[Row]) -> list[Sampled]:
        lengths = [len(row.tokens) for row in rows]
        passes = (1 in lengths) + sum(length > 1 for length in lengths)
        self.now += 0.002 * passes + (0.050 if self.steps % 5 == 4 else 0.0)
        self.steps += 1
        for row in rows:
            assert row.start <= self.cached[row.slot] and row.tokens.max() < self.info.vocabulary
            self.cached[row.slot] = row.position
            count = len(row.tokens)
            self.longest = max(self.longest, count)
            self.now += 0.001 if count == 1 else 0.0005 * count
        return [Sampled(7) for _ in rows]


@pytest.mark.parametrize("slots", [1, 8])
def test_the_times_are_those_of_the_script(slots: int) -> None:
    backend = Scripted(slots)
    found = measure(backend, clock=lambda: backend.now)  # type: ignore[arg-type]
    assert found == EngineTimes(
        slots=slots,
        prompt_tokens_per_second=pytest.approx(1 / 0.0005),
        pass_seconds=pytest.approx(0.0 if slots == 1 else 0.002),
        decode_seconds=pytest.approx(0.003),
        decode_slots_seconds=pytest.approx(0.002 + slots * 0.001),
    )


@pytest.mark.parametrize("prompt_tokens", [8, 32, 256])
def test_a_prompt_beside_decode_rows_takes_as_long_as_it_took(prompt_tokens: int) -> None:
    """Its pass over the weights counts too, which a piece of a few tokens mostly consists of."""
    backend = Scripted(8)
    times = measure(backend, lambda: backend.now)  # type: ignore[arg-type]
    expected = 2 * 0.002 + 7 * 0.001 + prompt_tokens * 0.0005
    seconds = step_times_of_timings(times).seconds(7, prompt_tokens, 0, passes=2)
    assert seconds == pytest.approx(expected)


def test_a_slow_engine_is_measured_in_little_time_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Scripted(16, step_tokens=32)
    monkeypatch.setattr("crossover.serving.placement.engine_times.PART_SECONDS", 0.01)
    measure(backend, lambda: backend.now)  # type: ignore[arg-type]
    assert backend.longest == 17 and max(backend.cached[1:]) < 64


def test_llama_cpp_and_onnx_are_measured_as_they_serve(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_gguf(TINY_LLAMA3, gguf, "Q4_0")
    for backend, path in (("llama_cpp", gguf), ("onnx", onnx_folder("llama3-int8"))):
        config = EngineConfig(
            backend, str(path), "tiny", settings=SchedulerSettings(slots=2), threads=1
        )
        found = measured_times(config, TINY_LLAMA3)
        assert found.prompt_tokens_per_second > 100
        assert 0 < found.decode_seconds < 1 and 0 < found.decode_slots_seconds < 1


def test_an_engine_that_cannot_load_is_reported_with_the_reason() -> None:
    config = EngineConfig("fake", "", "m", options={"fail_cause": "load_oom"})
    with pytest.raises(ServingError, match=r"fake.*told to fail with load_oom"):
        measured_times(config, TINY_LLAMA3)
