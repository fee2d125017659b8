"""The decision where a model runs: facts in, words and numbers out."""

from typing import Any

import msgspec
import pytest

from crossover.models import formatting
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.backend_table import BACKENDS
from crossover.serving.errors import Cause, Unsupported
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engines import Obstacles
from crossover.serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Placement,
    explain,
    plan,
)
from crossover.serving.server_options import Policy
from tests.tools.with_settings import placement_request

GIB = 1 << 30
SMALL = ladder_model("135m").spec
EIGHT = ladder_model("8b").spec
TIMED = ("onnx", "llama_cpp")  # onnx is the quicker one


def machine(memory_gib: float = 32, **changes: Any) -> HardwareFacts:
    facts = HardwareFacts(
        cpu_model="Test CPU",
        architecture="x86_64",
        isa=("avx2",),
        logical_cores=8,
        physical_cores=4,
        allowed_cores=(0, 1, 2, 3),
        memory_total_bytes=int(memory_gib * GIB),
        memory_available_bytes=int(memory_gib * GIB),
        gpu_cause="no_device",
        gpu_note="this machine has no GPU",
        system="Linux",
        kernel="6",
        python="3.11",
    )
    return msgspec.structs.replace(facts, **changes)


def with_gpu(free_gib: float = 80, **changes: Any) -> HardwareFacts:
    gpu = GpuFacts("Test GPU", "nvidia", 80 * GIB, int(free_gib * GIB), "550.1")
    return machine(gpus=(gpu,), gpu_cause=None, gpu_note=None, **changes)


def planned(
    spec: ModelSpec,
    facts: HardwareFacts,
    policy: Policy = Policy.auto,
    missing: dict[str, str] | None = None,
    gpu_trouble: dict[str, tuple[Cause, str]] | None = None,
    **options: Any,
) -> Placement:
    request = placement_request(model=spec, policy=policy, **{"context_tokens": 2048, **options})
    return plan(request, facts, Obstacles(missing or {}, gpu_trouble or {}))


def causes(placement: Placement) -> list[Cause]:
    return [reason.cause for reason in placement.reasons if reason.cause is not None]


def place(attempt: Attempt) -> tuple[str, str, str]:
    return attempt.device, attempt.backend, attempt.weight_format


def test_auto_without_a_gpu_chooses_the_cpu_and_explains_it() -> None:
    placement = planned(SMALL, machine())
    assert place(placement) == ("cpu", "llama_cpp", "Q4_0")
    assert causes(placement) == [Cause.no_device]
    text = "\n".join(explain(placement))
    assert "no_device: this machine has no GPU" in text
    assert "on the CPU with llama_cpp, format Q4_0" in text and "(Test CPU)" in text
    assert formatting.size(placement.need_bytes) in text


def test_a_prompt_cache_is_part_of_the_memory_and_the_first_to_get_less() -> None:
    without = planned(SMALL, machine(), prompt_cache_bytes=0)
    cached = planned(SMALL, machine(), prompt_cache_bytes=GIB)
    assert cached.memory.prompt_cache_bytes == GIB
    assert cached.need_bytes == without.need_bytes + GIB
    assert "prompt cache 1 GiB" in "\n".join(explain(cached))
    room = without.need_bytes / 0.95 / GIB + 0.5
    reduced = planned(SMALL, machine(memory_gib=room), prompt_cache_bytes=GIB)
    assert reduced.fits and reduced.settings == without.settings
    assert 0.4 * GIB < reduced.memory.prompt_cache_bytes < 0.5 * GIB
    assert "prompt cache reduced from 1 GiB to" in "\n".join(explain(reduced))


def test_the_default_prompt_cache_takes_a_quarter_of_what_is_left() -> None:
    without = planned(SMALL, machine(), prompt_cache_bytes=0)
    assert without.memory.prompt_cache_bytes == 0
    large = planned(SMALL, machine())
    assert large.memory.prompt_cache_bytes == 4 * GIB
    assert large.need_bytes == without.need_bytes + 4 * GIB and not causes(large)[1:]
    small = planned(SMALL, machine(memory_gib=4))
    left_bytes = 0.95 * 4 * GIB - without.need_bytes
    assert small.memory.prompt_cache_bytes == pytest.approx(left_bytes / 4, abs=2)
    assert small.settings == without.settings, "the context is not shortened for it"
    tiny = planned(SMALL, machine(), context_tokens=128, slots=4)
    assert tiny.memory.prompt_cache_bytes == 8 * tiny.memory.kv_bytes < 4 * GIB
    hybrid = planned(ladder_model("qwen3.5-4b").spec, machine(32), slots=4, context_tokens=256)
    states_bytes = hybrid.memory.state_bytes
    assert states_bytes > 0
    assert hybrid.memory.prompt_cache_bytes == 8 * (hybrid.memory.kv_bytes + states_bytes)
    for options in ({"backend": "torch"}, {"prefix_reuse": False}):
        placement = planned(SMALL, machine(), **options)
        assert placement.memory.prompt_cache_bytes == 0
        assert "prompt cache" not in "\n".join(explain(placement)), "nobody requested one"


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        (SMALL, {"backend": "torch"}, "no prompt cache, which torch on the CPU does not have"),
        (SMALL, {"prefix_reuse": False}, "no prompt cache, since prefix reuse is off"),
    ],
)
def test_without_a_prompt_cache_the_explanation_says_why(
    spec: ModelSpec, options: dict[str, Any], reason: str
) -> None:
    placement = planned(spec, machine(), prompt_cache_bytes=GIB, **options)
    assert placement.memory.prompt_cache_bytes == 0
    assert reason in "\n".join(explain(placement))


def test_auto_with_a_gpu_uses_it_and_keeps_the_cpu_to_fall_back_to() -> None:
    placement = planned(EIGHT, with_gpu())
    on_gpu, on_cpu = ("gpu", "torch", "bf16"), ("cpu", "llama_cpp", "Q4_0")
    assert place(placement) == on_gpu
    assert [place(attempt) for attempt in placement.attempts] == [on_gpu, on_cpu]
    assert any("falls back to CPU llama_cpp (Test CPU)" in line for line in explain(placement))


@pytest.mark.parametrize(
    ("missing", "order", "expected"),
    [
        (("llama_cpp",), (), [("onnx", "int8"), ("torch", "bf16")]),
        (("llama_cpp", "onnx"), (), [("torch", "bf16")]),
        ((), TIMED, [("onnx", "int8"), ("torch", "bf16")]),
        (("onnx",), TIMED, [("llama_cpp", "Q4_0"), ("torch", "bf16")]),
    ],
)
def test_the_gpu_falls_back_to_the_best_engine_of_the_cpu_that_is_installed(
    missing: tuple[str, ...], order: Any, expected: list[tuple[str, str]]
) -> None:
    """`order`: as the step times of this machine say. torch on the CPU is the last resort: it needs
    the files that the GPU's engine has.
    """
    facts = with_gpu(memory_available_bytes=64 * GIB)
    missing_reasons = dict.fromkeys(missing, "its package is not installed (pip install it)")
    placement = planned(EIGHT, facts, missing=missing_reasons, cpu_order=order)
    later = [(one.backend, one.weight_format) for one in placement.attempts[1:]]
    assert later == expected
    text = "\n".join(explain(placement))
    assert f"falls back to CPU {expected[0][0]}" in text and "no fallback" not in text
    for name in missing:
        assert f"backend '{name}' cannot run: its package is not installed (pip install" in text


def test_the_start_reports_a_missing_fallback_and_the_reason() -> None:
    small = with_gpu(memory_available_bytes=2 * GIB)
    text = "\n".join(explain(planned(EIGHT, small, missing={"onnx": "not installed"})))
    assert "no fallback: no engine can run llama-3.1-8b on the CPU, for the reasons below" in text
    assert "requests get 503" in text and "backend 'onnx' cannot run: not installed" in text
    assert text.count("insufficient_memory") == 1, "the smallest format says it for all"
    text = "\n".join(explain(planned(EIGHT, with_gpu(), Policy.gpu_only)))
    assert "no fallback: the policy gpu-only excludes the CPU" in text


def test_a_context_is_not_cut_for_the_last_resort() -> None:
    """float32 KV of torch on a CPU without bf16 takes twice the memory of llama_cpp's."""
    facts = with_gpu(memory_available_bytes=40 * GIB)
    options: dict[str, Any] = {"context_tokens": None, "slots": 4}
    without = planned(EIGHT, facts, missing={"torch": "none"}, backend="llama_cpp", **options)
    found = planned(EIGHT, facts, **options).settings
    assert found.context_tokens >= without.settings.context_tokens


def test_predicted_memory_is_weights_and_kv_and_overhead() -> None:
    placement = planned(EIGHT, machine(), slots=4, context_tokens=1000, weight_format="Q8_0")
    token_bytes = EIGHT.kv_bytes_per_token("fp16")
    assert placement.settings.kv_tokens == 4000
    assert (
        placement.memory.kv_bytes == 4096 * token_bytes
    )  # llama.cpp's rows are multiples of 256 tokens
    assert placement.memory.weight_bytes == pytest.approx(EIGHT.parameters * 8.5 / 8, rel=0.01)
    cache, buffers = placement.memory.kv_bytes, placement.memory.buffer_bytes
    parts = placement.memory.weight_bytes, cache, buffers, placement.memory.overhead_bytes
    parts += (placement.memory.prompt_cache_bytes,)
    assert placement.need_bytes == sum(parts) and min(parts) > 0
    few = planned(EIGHT, machine(), context_tokens=100, kv_tokens=123)
    assert few.memory.kv_bytes == 123 * token_bytes
    assert planned(EIGHT, machine(), weight_bytes=5 * GIB).memory.weight_bytes == 5 * GIB
    narrow = planned(EIGHT, machine(), kv_dtype="q8_0")
    assert narrow.memory.kv_bytes < planned(EIGHT, machine()).memory.kv_bytes


@pytest.mark.parametrize("memory_gib", [12, 24, 4000])
@pytest.mark.parametrize("spec", [SMALL, EIGHT])
def test_the_default_context_is_the_models_own_as_far_as_memory_allows(
    spec: ModelSpec, memory_gib: float
) -> None:
    placement = planned(spec, machine(memory_gib), weight_format="Q4_0", context_tokens=None)
    assert placement.free_bytes is not None
    share = (placement.memory.kv_bytes + placement.memory.buffer_bytes) / placement.free_bytes
    if placement.settings.context_tokens > 2048:
        assert share <= 0.25
    if placement.settings.context_tokens < spec.context:
        assert 2 * share > 0.25 and placement.settings.context_tokens >= 2048
    if memory_gib == 4000:
        assert placement.settings.context_tokens == spec.context
    on_gpu = planned(EIGHT, with_gpu(24), context_tokens=None)
    assert on_gpu.device == "gpu"
    assert on_gpu.settings.context_tokens < EIGHT.context, "not lost for it"


@pytest.mark.parametrize("backend", ["torch", "llama_cpp"])
@pytest.mark.parametrize("free_gib", [19.5, 24, 40, 130])
def test_a_gpu_has_as_many_slots_as_memory_has_room_for(backend: str, free_gib: float) -> None:
    """At most 256; a CPU has 16, and what somebody asked for is left as it is."""
    facts = with_gpu(free_gib, memory_available_bytes=120 * GIB)
    options: dict[str, Any] = {"backend": backend, "weight_format": None}
    on_gpu, on_cpu = planned(EIGHT, facts, **options).attempts
    slots = on_gpu.settings.slots
    assert on_gpu.fits and 1 <= slots <= 256
    if slots < 256:  # one more would not fit
        more = planned(EIGHT, facts, slots=slots + 1, check_memory=False, **options)
        assert not more.attempts[0].fits
    else:
        assert free_gib == 130 or backend == "llama_cpp"
    assert (on_gpu.settings.prefill_tokens, on_gpu.settings.step_tokens) == (2048, 2048)
    settings = on_cpu.settings
    assert (settings.slots, settings.prefill_tokens, settings.step_tokens) == (16, 256, 512)
    few = planned(EIGHT, facts, slots=3, prefill_tokens=100, step_tokens=300, **options)
    for attempt in few.attempts:
        settings = attempt.settings
        assert (settings.slots, settings.prefill_tokens, settings.step_tokens) == (3, 100, 300)


def test_a_step_has_room_for_a_token_of_each_slot() -> None:
    assert planned(SMALL, machine(), slots=400).settings.step_tokens == 800
    with pytest.raises(NoPlacement, match="step_tokens = 8 is too small for .* 16 slots"):
        planned(SMALL, machine(), step_tokens=8)


def test_a_gpu_that_is_too_small_is_a_reason_with_both_numbers_and_what_would_fit() -> None:
    facts = with_gpu(free_gib=20, memory_available_bytes=120 * GIB)
    options: dict[str, Any] = {"context_tokens": 4096, "backend": "torch", "weight_format": "bf16"}
    placement = planned(EIGHT, facts, slots=64, **options)
    assert placement.device == "cpu" and causes(placement) == [Cause.insufficient_vram]
    text = placement.reasons[0].text
    assert "needs" in text and "19 GiB may be used" in text
    assert "slots instead of 64 would fit" in text
    fitting = int(text.split("; ")[1].split()[0])
    assert planned(EIGHT, facts, slots=fitting, **options).device == "gpu"
    assert planned(EIGHT, facts, slots=fitting + 1, **options).device == "cpu"


def test_the_policies_exclude_a_device_and_report_it() -> None:
    placement = planned(SMALL, with_gpu(), Policy.cpu_only)
    assert placement.device == "cpu" and causes(placement) == [Cause.forced]
    placement = planned(SMALL, with_gpu(), Policy.gpu_only)
    assert placement.device == "gpu" and len(placement.attempts) == 1
    assert causes(placement) == [Cause.forced]
    with pytest.raises(NoPlacement, match="this machine has no GPU"):
        planned(SMALL, machine(), Policy.gpu_only)
    with pytest.raises(NoPlacement, match="VRAM|GPU"):
        planned(ladder_model("70b").spec, with_gpu(20), Policy.gpu_only)


def test_a_backend_that_cannot_use_the_gpu_gives_way_to_one_that_can() -> None:
    trouble = {"torch": (Cause.backend_missing, "this build of torch is for the CPU only")}
    placement = planned(SMALL, with_gpu(), gpu_trouble=trouble)
    assert place(placement) == ("gpu", "llama_cpp", "Q4_0")
    assert causes(placement) == [Cause.backend_missing]
    both = {**trouble, "llama_cpp": (Cause.arch_unsupported, "no kernel image")}
    placement = planned(SMALL, with_gpu(), gpu_trouble=both)
    assert placement.device == "cpu"
    assert causes(placement) == [Cause.backend_missing, Cause.arch_unsupported]


def test_a_missing_package_is_a_cause_on_either_device() -> None:
    missing = {name: "not installed" for name in BACKENDS if name != "onnx"}
    placement = planned(SMALL, with_gpu(), missing=missing, backend="onnx")
    assert (placement.device, placement.backend) == ("cpu", "onnx")
    assert causes(placement) == [Cause.backend_missing]
    assert place(planned(SMALL, machine(), missing=missing)) == ("cpu", "onnx", "int8")
    with pytest.raises(NoPlacement, match="llama_cpp.*not installed.*onnx.*not installed"):
        planned(SMALL, machine(), missing={**missing, "onnx": "not installed"})


def test_what_does_not_fit_in_memory_is_an_error_unless_allowed() -> None:
    with pytest.raises(NoPlacement, match="70b.*use a smaller model or format"):
        planned(ladder_model("70b").spec, machine(16))
    placement = planned(ladder_model("70b").spec, machine(16), check_memory=False)
    assert placement.device == "cpu" and Cause.insufficient_memory in causes(placement)
    assert any("does not fit" in line for line in explain(placement))


def test_the_context_is_cut_to_the_models_own_and_that_is_reported() -> None:
    placement = planned(SMALL, machine(), context_tokens=10**6)
    assert placement.settings.context_tokens == SMALL.context
    assert "context reduced from 1000000" in placement.reasons[0].text


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1, got 0"),
        (
            {"kv_tokens": 8, "context_tokens": 256},
            "kv_tokens = 8 is too small for one sequence of context_",
        ),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises((Unsupported, NoPlacement), match=f"^{message}"):
        planned(SMALL, machine(), **sizes)


@pytest.mark.parametrize(
    ("facts", "weight_format", "expected"),
    [
        (machine(), None, ("cpu", "llama_cpp")),
        (with_gpu(), None, ("gpu", "torch")),
        (machine(), "int8", ("cpu", "onnx")),
        (machine(), "bf16", ("cpu", "torch")),
        (machine(), "BF16", ("cpu", "llama_cpp")),
        (with_gpu(), "Q4_K_M", ("gpu", "llama_cpp")),
        (with_gpu(), "int8", ("cpu", "onnx")),
    ],
)
def test_the_format_decides_the_backend_where_the_user_names_none(
    facts: HardwareFacts, weight_format: str | None, expected: tuple[str, str]
) -> None:
    placement = planned(SMALL, facts, weight_format=weight_format)
    assert (placement.device, placement.backend) == expected


def test_a_format_that_the_gpus_engines_lack_is_the_reason_why_the_cpu_serves() -> None:
    placement = planned(SMALL, with_gpu(), weight_format="int8")
    (reason,) = placement.reasons
    assert reason.cause is Cause.unsupported
    assert (
        "which no engine can run in int8 on the GPU. Engines that can: llama_cpp (" in reason.text
    )


def test_formats_are_spelt_as_the_backend_spells_them() -> None:
    assert planned(SMALL, machine(), weight_format="q4_k_m").weight_format == "Q4_K_M"
    with pytest.raises(
        NoPlacement,
        match="torch cannot run in Q4_0 on the CPU. Engines that can: .*torch .bf16, fp16",
    ):
        planned(SMALL, machine(), backend="torch", weight_format="Q4_0")


@pytest.mark.parametrize(
    ("backend", "weight_format", "isa", "stored"),
    [
        ("llama_cpp", "Q4_0", ("avx2",), "fp16"),
        ("onnx", "int4", ("avx2",), "fp32"),
        ("torch", "bf16", ("avx2",), "fp32"),
        ("torch", "bf16", ("avx2", "avx512f", "avx512bw", "avx512vl"), "bf16"),
    ],
)
def test_the_kv_cache_is_planned_as_the_backend_stores_it(
    backend: str, weight_format: str, isa: tuple[str, ...], stored: str
) -> None:
    settings: dict[str, Any] = {"backend": backend, "weight_format": weight_format}
    for options in ("auto", stored):
        placement = planned(SMALL, machine(isa=isa), kv_dtype=options, **settings)
        assert placement.settings.kv_dtype == stored
        tokens = placement.settings.slots * 2048
        assert placement.memory.kv_bytes == tokens * SMALL.kv_bytes_per_token(stored)
    if backend != "llama_cpp":
        refusal = f"{backend} on the CPU stores its KV cache in {stored}, not in q8_0"
        with pytest.raises(NoPlacement, match=refusal):
            planned(SMALL, machine(isa=isa), kv_dtype="q8_0", **settings)


def test_a_tied_embedding_is_planned_twice_on_a_cpu_with_amx() -> None:
    amx = ("avx2", "avx512f", "avx512_vnni", "amx_int8")
    settings: dict[str, Any] = {"backend": "llama_cpp", "weight_format": "F16"}
    with_amx = planned(SMALL, machine(isa=amx), **settings)
    without = planned(SMALL, machine(isa=amx[:-1]), **settings)
    assert with_amx.memory.weight_bytes == without.memory.weight_bytes
    embedding = 2 * SMALL.vocabulary * SMALL.hidden
    assert with_amx.memory.overhead_bytes - without.memory.overhead_bytes == embedding


def test_onnx_has_16_to_64_slots_by_the_memory_of_the_cpu() -> None:
    """KV cache and buffers take at most a quarter of the free memory, but 16 slots are always
    tried; a number that the user sets stays, and llama_cpp, which is slower with more, has 16."""
    slots_by_memory = {}
    for memory_gib in (3, 8, 16, 32, 256):
        placement = planned(SMALL, machine(memory_gib), backend="onnx")
        slots_by_memory[memory_gib] = placement.settings.slots
        if placement.settings.slots > 16:
            assert placement.memory.kv_bytes <= 0.25 * (placement.free_bytes or 0)
    assert list(slots_by_memory.values()) == [16, 16, 32, 64, 64]
    facts = machine(256)
    assert planned(SMALL, facts, backend="onnx", slots=5).settings.slots == 5
    with_cache = planned(SMALL, machine(32), backend="onnx", prompt_cache_bytes=26 * GIB)
    assert with_cache.settings.slots == 32, "the prompt cache that is asked for comes first"
    assert with_cache.memory.prompt_cache_bytes == 26 * GIB
    assert planned(SMALL, facts, backend="llama_cpp").settings.slots == 16
    assert planned(SMALL, facts, backend="torch").settings.slots == 16
    unknown = machine(memory_available_bytes=None)
    assert planned(SMALL, unknown, backend="onnx").settings.slots == 16
