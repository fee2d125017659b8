"""Loading a GGUF file with llama.cpp: settings, memory, what is refused and what is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.errors import BrokenWeights
from models.formats import weight_bytes
from models.random_weights import write_gguf
from models.spec import ModelSpec
from serving.backends.llama_cpp.extra_buffers import extra_bytes
from serving.errors import BackendUnavailable, KvFull, OutOfMemory, Unsupported
from tests.serving.backends.backend_steps import Make, generate, greedy_alone, prompt_of, row
from tests.shapes import TINY_QWEN3


def test_kv_full_leaves_the_kv_as_it_was(make: Make) -> None:
    backend = make(slots=3, context_tokens=256, kv_tokens=256)
    alone = greedy_alone(make())
    prompt = prompt_of(backend, 150, seed=5)
    first = generate(backend, prompt, 3, slot=0)
    with pytest.raises(KvFull, match="256 KV tokens"):
        backend.step([row(1, prompt_of(backend, 140, seed=6), 0)])
    assert generate(backend, [*prompt, *first], 4, slot=0, start=152) == alone([*prompt, *first], 4)
    backend.truncate(0, 0)
    other = prompt_of(backend, 140, seed=6)
    assert generate(backend, other, 4, slot=1) == alone(other, 4)


def test_steps_that_contradict_the_engine_are_errors(make: Make) -> None:
    backend = make(options={"step_tokens": 128})
    with pytest.raises(ValueError, match="a step of 129 tokens; at most 128"):
        backend.step([row(0, [5] * 129, 0)])
    with pytest.raises(ValueError, match="slot 2 holds 0 tokens, and a row starts at 4"):
        backend.step([row(2, [7], 4)])
    backend.close()
    backend.close()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"options": {"kv_unifed": True}}, Unsupported, "no option 'kv_unifed'"),
        ({"options": {"step_tokens": 0}}, Unsupported, "step_tokens .* must be at least 1, got 0"),
        (
            {"options": {"flash_attention": "off"}, "kv_dtype": "q8_0"},
            Unsupported,
            "kv_dtype needs flash attention.*'q8_0'",
        ),
        (
            {"options": {"kv_unified": False}, "kv_tokens": 300},
            Unsupported,
            "kv_tokens is a size of the unified pool",
        ),
        ({"kv_tokens": 100}, Unsupported, "at least .* context_tokens = 256, got 100"),
        ({"kv_dtype": "int3"}, Unsupported, "kv_dtype must be one of .* got 'int3'"),
        ({"slots": 0}, Unsupported, "slots must be at least 1, got 0"),
        ({"slots": 100_000}, Unsupported, "slots must be at most"),
        ({"context_tokens": 4096}, Unsupported, "4096, and the model was made for 2048"),
        ({"device": "gpu"}, BackendUnavailable, "built without GPU support"),
        ({"source": "/nowhere/model.gguf"}, BrokenWeights, "no GGUF file model.gguf"),
    ],
)
def test_bad_settings_are_refused_by_name(
    make: Make, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    import llama_cpp

    if settings.get("device") == "gpu" and llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this llama-cpp-python has GPU support")
    with pytest.raises(error, match=words):
        make(**settings)


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.machine.cgroup_memory_left", lambda root: 1 << 20)
    words = r"weights and KV cache.* need [\d.]+ MiB and 1 MiB are available"
    with pytest.raises(OutOfMemory, match=words):
        make()
    make(check_memory=False)


def test_broken_files_are_told_with_llama_cpps_reason(
    make: Make, gguf_file: Callable[..., Path], tmp_path: Path
) -> None:
    whole = gguf_file().read_bytes()
    path = tmp_path / "x.gguf"
    for data in (whole[: len(whole) // 2], b"hello" * 100, b""):
        path.write_bytes(data)
        with pytest.raises(BrokenWeights, match=r"cannot load x\.gguf: .+") as caught:
            make(path)
        assert str(tmp_path) not in str(caught.value)


def test_progress_and_an_exception_in_it(make: Make) -> None:
    said: list[tuple[str, float | None]] = []
    make(progress=lambda what, fraction: said.append((what, fraction)))
    fractions = [fraction for what, fraction in said if what == "weights" and fraction is not None]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0

    def gone(what: str, fraction: float | None) -> None:
        raise BrokenPipeError("the parent is gone")

    with pytest.raises(BrokenPipeError, match="the parent is gone"):
        make(progress=gone)


@pytest.mark.parametrize("kv_dtype", ["fp16", "q8_0"])
def test_memory_is_predicted_and_measured(make: Make, kv_dtype: str) -> None:
    info = make(TINY_QWEN3, slots=8, context_tokens=512, kv_dtype=kv_dtype).info
    assert info.predicted is not None and info.measured is not None
    kv = 8 * 512 * TINY_QWEN3.kv_bytes_per_token(kv_dtype)
    assert info.measured.kv_bytes == pytest.approx(kv, rel=0.02)
    assert info.predicted.kv_bytes == pytest.approx(kv, rel=0.02)
    assert info.predicted.weight_bytes == pytest.approx(info.measured.weight_bytes, rel=0.05)
    assert info.predicted.compute_bytes == pytest.approx(info.measured.compute_bytes, rel=0.02)


WIDE = ModelSpec(
    *("wide", "llama"),
    layers=2,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1408,
    vocabulary=4096,
    context=2048,
    tied=True,
    rope_theta=10_000.0,
)
AVX = frozenset({"avx2", "avx512f", "avx512_vnni"})


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("weight_format", ["F16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_weights_are_predicted_on_this_cpu_to_half_a_percent(
    make: Make, tmp_path: Path, weight_format: str, is_tied: bool
) -> None:
    """With the matrices that llama.cpp arranges anew."""
    path = tmp_path / "wide.gguf"
    write_gguf(msgspec.structs.replace(WIDE, tied=is_tied), path, weight_format)
    info = make(path).info
    assert info.predicted is not None and info.measured is not None
    assert info.predicted.weight_bytes == pytest.approx(info.measured.weight_bytes, rel=0.005)


# What llama.cpp said that it held, of a model of 6 such layers and 8192 tokens: one build of it
# with AMX and one without, on the same CPU.
@pytest.mark.parametrize(
    ("weight_format", "is_tied", "with_amx", "without"),
    [
        ("BF16", True, 43_809_505, 43_809_505),
        ("F16", True, 52_198_113, 43_809_505),
        ("F16", False, 52_198_113, 52_198_113),
        ("Q4_0", True, 16_861_102, 13_421_773),
        ("Q4_0", False, 15_781_069, 15_781_069),
    ],
)
def test_what_was_measured_on_both_kinds_of_cpu_is_planned(
    weight_format: str, is_tied: bool, with_amx: int, without: int
) -> None:
    spec = msgspec.structs.replace(WIDE, layers=6, vocabulary=8192, tied=is_tied)
    for isa, measured in ((AVX | {"amx_int8"}, with_amx), (AVX, without)):
        planned = weight_bytes(spec, weight_format) + extra_bytes(spec, weight_format, isa)
        assert planned == pytest.approx(measured, rel=0.001)


def test_a_tokenizer_read_after_the_engine_leaves_it_llama_cpps_words() -> None:
    code = (
        "from models.gguf_vocabulary import llama_library\n"
        "from serving.backends.llama_cpp.library import LOG, library\n"
        "llama = library()\n"
        "llama_library().llama_model_load_from_file(b'/no/x.gguf', "
        "llama.llama_model_default_params())\n"
        "print(LOG.reason())\n"
        "LOG.stop()\n"
        "print(LOG.reason())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after_failure, after_load = done.stdout.splitlines()
    assert "x.gguf" in after_failure and after_load == "no reason given"


ABORT = """
from serving.backends.llama_cpp.library import library
text = b"pre-allocated tensor (cache_k_l0) in a buffer (Vulkan0) that cannot run the operation"
library().llama_cpp._lib.ggml_abort(b"/x/y/ggml-backend.cpp", 941, text)
"""


def test_an_abort_says_its_reason_and_nothing_behind_it() -> None:
    done = subprocess.run([sys.executable, "-c", ABORT], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.splitlines()[-1].startswith("llama.cpp: the device cannot work on a layer's")
    assert done.stderr.strip().endswith("ggml-backend.cpp:941: " + ABORT.split('"')[1])
