"""What people use of the torch backend on a GPU, against transformers on the same weights: bf16,
flash attention, captured steps, prompts in pieces beside rows that decode, launched steps, copies;
and float32, which has no flash kernel, by the plain path.

Each test runs twice: on a stand-in for CUDA (tests/tools/fake_cuda.py), and, marked `gpu`, on the
GPU of this machine (tests/bench/gpu.sh). What is asserted are promises to a user: tokens, and that
the path is the one that he was told of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from crossover.models.identity.resolve_model import resolve
from crossover.models.weights.random_weights import write_hf_folder
from crossover.serving.errors import OutOfMemory
from tests.serving.backends.backend_contract import (
    check_contract,
    check_logprobs,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import Make, greedy_unbatched, near_tie
from tests.serving.backends.hf_folders import generated, hf_folder, logprobs_of
from tests.serving.backends.torch.mixed_steps import Played, check_tokens, play
from tests.shapes import TINY, TINY_LLAMA
from tests.tools.fake_cuda import FakeCuda, install_flash

LENGTHS = [1, 2, 3, 17, 64, 65, 127, 128]
LONG_LENGTHS = [*LENGTHS, 200, 255, 256, 257, 300, 400, 511, 700]
ON_DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)

ON_EVERY_RUN = ("tiny-llama3",)
SHAPES = [
    pytest.param(name, marks=[] if name in ON_EVERY_RUN else [pytest.mark.slow]) for name in TINY
]


@pytest.fixture(params=["cpu", ON_DEVICE])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the device "gpu" is: torch's "cuda", or "cpu" with a stand-in for it."""
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    if request.param == "cpu":
        install_flash(monkeypatch)
        FakeCuda().install(monkeypatch)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(had_cudnn)


def fast(make: Make, folder: Path, **settings: Any) -> Any:
    """The backend as people run it on a GPU; its flash kernel and captured steps are in use."""
    backend = make(folder, device="gpu", weight_format="bf16", **settings)
    details = backend.info.details
    assert details["attention"] == "flash" and not details["graphs"].startswith("false"), details
    return backend


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_launched_and_copied_steps_give_the_tokens_of_transformers(
    make: Make, gpu: str, shape: str
) -> None:
    folder = hf_folder(shape, "bf16")
    backend = fast(make, folder, slots=len(LENGTHS), context_tokens=256)
    check_tokens(folder, play(backend, LENGTHS, piece=40), gpu)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_of_the_usual_sizes(make: Make, gpu: str, head_dim: int, tmp_path: Path) -> None:
    spec = msgspec.structs.replace(TINY_LLAMA, head_dim=head_dim)
    write_hf_folder(spec, tmp_path, dtype="bf16", seed=7)
    backend = fast(make, tmp_path, slots=4, context_tokens=256)
    check_tokens(tmp_path, play(backend, [130, 3, 64, 17], piece=33), gpu)


def test_a_wrong_token_is_found(make: Make, gpu: str) -> None:
    """The judge of the tests above: one token that the model did not mean is no near-tie."""
    folder = hf_folder("tiny-llama", "bf16")
    first, *others = play(fast(make, folder, slots=2), [9, 3], piece=8)
    check_tokens(folder, [first, *others], gpu)
    at = first.prompt_tokens + 4
    tokens = [*first.tokens[:at], (first.tokens[at] + 1) % TINY_LLAMA.vocabulary]
    with pytest.raises(AssertionError, match="worst gap"):
        check_tokens(folder, [Played(tokens, first.prompt_tokens), *others], gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.2-1b"])
def test_models_of_the_ladder_give_the_tokens_of_transformers(make: Make, model: str) -> None:
    folder = Path(resolve(model, kind="hf", weight_format="bf16").path)
    backend = fast(make, folder, slots=len(LONG_LENGTHS), context_tokens=1024, step_tokens=2048)
    played = play(backend, LONG_LENGTHS, piece=100)
    backend.close()
    check_tokens(folder, played, "cuda")


@pytest.mark.gpu  # on the stand-in test_gpu_path.py does it with float32
def test_bf16_gives_the_same_tokens_single_and_in_any_batch_up_to_ties(make: Make) -> None:
    folder = hf_folder("tiny-qwen2", "bf16")
    backend, unbatched, judge = fast(make, folder), fast(make, folder), fast(make, folder)
    reference, close = greedy_unbatched(unbatched), near_tie(judge, 0.3)
    check_contract(backend, reference, tie=close)
    check_scheduled(backend, reference, tie=close)


@pytest.mark.parametrize("shape", ["tiny-llama3", "tiny-qwen3"])
def test_float32_gives_the_tokens_of_transformers_by_the_plain_path(
    make: Make, gpu: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu == "cpu":  # the stand-in's flash kernel takes any type
        where = "crossover.serving.backends.torch.backend.why_no_flash"
        monkeypatch.setattr(where, lambda *_: "float32 has no flash kernel")
    backend = make(hf_folder(shape), device="gpu", weight_format="fp32")
    assert backend.info.details["attention"].startswith("sdpa: ")
    judge = make(hf_folder(shape), device="gpu", weight_format="fp32", slots=1)
    check_contract(backend, generated(hf_folder(shape)), tie=near_tie(judge, 1e-3))


def test_float32_draws_by_seed_and_reports_logprobs(make: Make, gpu: str) -> None:
    check_seeded(make(hf_folder("tiny-qwen3"), device="gpu", weight_format="fp32"))
    backend = make(hf_folder("tiny-llama3"), device="gpu", weight_format="fp32")
    exact = hf_folder("tiny-llama3")
    check_logprobs(backend, lambda tokens: logprobs_of(exact, tokens), tolerance=1e-3)


@pytest.mark.gpu
def test_what_does_not_fit_in_the_gpus_memory_is_refused_as_that(make: Make) -> None:
    """The cause is memory, so that the next engine serves."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    token_bytes = TINY_LLAMA.kv_bytes_per_token("bf16")
    slots = 2 * total_bytes // (token_bytes * TINY_LLAMA.context)
    folder, context = hf_folder("tiny-llama", "bf16"), TINY_LLAMA.context
    with pytest.raises(OutOfMemory, match="did not fit in memory"):
        make(
            folder,
            device="gpu",
            slots=slots,
            context_tokens=context,
            step_tokens=slots,
            weight_format="bf16",
        )
