"""Loading a GGUF file with llama.cpp: settings, memory, what is refused and what is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossover.models.errors import BrokenWeights
from crossover.serving.errors import BackendUnavailable, KvFull, Unsupported
from tests.serving.backends.backend_contract import check_contradictions
from tests.serving.backends.backend_steps import Make, generate, greedy_unbatched, prompt_of, row


def test_kv_full_leaves_the_kv_as_it_was(make: Make) -> None:
    backend = make(slots=3, context_tokens=256, kv_tokens=256)
    unbatched = greedy_unbatched(make())
    prompt = prompt_of(backend, 150, seed=5)
    first = generate(backend, prompt, 3, slot=0)
    with pytest.raises(KvFull, match="256 KV tokens"):
        backend.step([row(1, prompt_of(backend, 140, seed=6), 0)])
    assert generate(backend, [*prompt, *first], 4, slot=0, start=152) == unbatched(
        [*prompt, *first], 4
    )
    backend.truncate(0, 0)
    other = prompt_of(backend, 140, seed=6)
    assert generate(backend, other, 4, slot=1) == unbatched(other, 4)


def test_a_row_that_contradicts_the_cache_ends_the_engine(make: Make) -> None:
    check_contradictions(make())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"options": {"flash_atention": "on"}}, Unsupported, "no option 'flash_atention'"),
        (
            {"options": {"flash_attention": "off"}, "kv_dtype": "q8_0"},
            Unsupported,
            "kv_dtype needs flash attention.*'q8_0'",
        ),
        ({"kv_tokens": 100}, Unsupported, "at least .* context_tokens = 256, got 100"),
        ({"kv_dtype": "int3"}, Unsupported, "kv_dtype must be one of .* got 'int3'"),
        ({"slots": 0}, Unsupported, "slots must be at least 1, got 0"),
        ({"slots": 100_000}, Unsupported, "slots must be at most"),
        ({"context_tokens": 4096}, Unsupported, "4096 exceeds the model's maximum of 2048"),
        ({"device": "gpu"}, BackendUnavailable, "built without GPU support"),
        (
            {"source": "/nowhere/model.gguf"},
            BrokenWeights,
            "The GGUF file model.gguf does not exist",
        ),
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


def test_broken_files_are_refused_with_llama_cpps_reason(
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
    progress: list[tuple[str, float | None]] = []
    make(progress=lambda what, fraction: progress.append((what, fraction)))
    fractions = [
        fraction for what, fraction in progress if what == "weights" and fraction is not None
    ]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0

    def gone(what: str, fraction: float | None) -> None:
        raise BrokenPipeError("the parent is gone")

    with pytest.raises(BrokenPipeError, match="the parent is gone"):
        make(progress=gone)


def test_a_tokenizer_read_after_the_engine_leaves_it_llama_cpps_words() -> None:
    code = (
        "from crossover.models.text.gguf_vocabulary import llama_library\n"
        "from crossover.serving.backends.llama_cpp.library import LOG, library\n"
        "llama = library()\n"
        "llama_library().llama_model_load_from_file(b'/no/x.gguf', "
        "llama.llama_model_default_params())\n"
        "print(LOG.reason())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "x.gguf" in done.stdout


ABORT = """
from crossover.serving.backends.llama_cpp.library import library
text = b"pre-allocated tensor (cache_k_l0) in a buffer (Vulkan0) that cannot run the operation"
library().llama_cpp._lib.ggml_abort(b"/x/y/ggml-backend.cpp", 941, text)
"""


def test_an_abort_is_reported_with_its_reason_only() -> None:
    done = subprocess.run([sys.executable, "-c", ABORT], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.strip().endswith("ggml-backend.cpp:941: " + ABORT.split('"')[1])
