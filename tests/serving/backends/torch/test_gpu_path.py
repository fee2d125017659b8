"""The torch backend's path on a GPU, on the CPU: its own code with a stand-in for CUDA's graphs and
for the flash kernel (tests/tools/fake_cuda.py). Nothing here has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from serving.backends.torch import memory_overhead as need
from serving.backends.torch.backend import TorchBackend, memory_errors
from serving.backends.torch.cuda_graphs import batch_buckets
from serving.errors import EngineFailed, OutOfMemory
from tests.serving.backends.backend_contract import check_contract, check_scheduled, check_seeded
from tests.serving.backends.backend_steps import Make, generate, prompt_of
from tests.serving.backends.hf_folders import generated, hf_folder
from tests.shapes import TINY, TINY_LLAMA
from tests.tools.fake_cuda import FakeCuda, install_flash


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    install_flash(monkeypatch)
    yield FakeCuda().install(monkeypatch)
    torch.backends.cuda.enable_cudnn_sdp(was)


def on_gpu(make: Make, shape: str, **settings: Any) -> TorchBackend:
    settings = {"device": "gpu", "weight_format": "fp32"} | settings
    backend: TorchBackend = make(hf_folder(shape), **settings)
    return backend


@pytest.mark.parametrize("shape", TINY)
def test_packed_attention_in_graphs_gives_the_tokens_of_transformers(
    make: Make, cuda: FakeCuda, shape: str
) -> None:
    backend = on_gpu(make, shape)
    assert backend.info.details["attention"] == "flash"
    check_contract(backend, generated(hf_folder(shape)))
    check_scheduled(backend, generated(hf_folder(shape)))
    assert sum(graph.replays for graph in cuda.graphs) > 100


def test_plain_attention_gives_the_same_tokens_without_graphs(
    make: Make, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "serving.backends.torch.backend.flash_trouble"
    monkeypatch.setattr(where, lambda *asked: "too old")
    backend = on_gpu(make, "tiny-llama3")
    assert backend.info.details["attention"] == "sdpa: too old" and not cuda.graphs
    check_contract(backend, generated(hf_folder("tiny-llama3")))


def test_a_long_context_needs_no_other_graph(make: Make, cuda: FakeCuda) -> None:
    backend = on_gpu(make, "tiny-llama3", slots=2, context_tokens=700)
    prompt = prompt_of(backend, 640, 4)
    assert generate(backend, prompt, 3) == generated(hf_folder("tiny-llama3"))(prompt, 3)
    assert len(cuda.graphs) == len(batch_buckets(2))


def test_seeded_requests_do_not_depend_on_their_batch_mates(make: Make, cuda: FakeCuda) -> None:
    check_seeded(on_gpu(make, "tiny-qwen3"))


def test_graphs_share_a_stream_and_keep_no_logits(make: Make, cuda: FakeCuda) -> None:
    backend = on_gpu(make, "tiny-llama", slots=16)
    assert len(cuda.streams) == 1 and set(cuda.capture_streams) == set(cuda.streams)
    assert cuda.kept_bytes == 0, "what a capture leaves alive, the next cannot use"
    assert backend._logits is not None and backend._logits.shape == (16, TINY_LLAMA.vocabulary)


@pytest.mark.parametrize("slots", [4, 24])
def test_the_memory_of_graphs_is_predicted(make: Make, cuda: FakeCuda, slots: int) -> None:
    on_gpu(make, "tiny-llama", slots=slots)
    assert need.pass_bytes(TINY_LLAMA, slots, slots, 4) == pytest.approx(cuda.pool_bytes, rel=0.05)


def test_a_capture_that_fails_costs_the_graphs_not_the_gpu(
    make: Make, cuda: FakeCuda, capfd: pytest.CaptureFixture[str]
) -> None:
    cuda.refuses_capture = "CUDA error: operation failed due to a previous error during capture"
    backend = on_gpu(make, "tiny-llama")
    assert "cannot be captured: CUDA error" in backend.info.details["graphs"]
    assert "torch: the decode step cannot be captured" in capfd.readouterr().err
    prompt = prompt_of(backend, 20, 1)
    assert generate(backend, prompt, 4) == generated(hf_folder("tiny-llama"))(prompt, 4)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", OutOfMemory),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", EngineFailed),
        ("nvrtc: error: NVRTC_ERROR_OUT_OF_MEMORY", OutOfMemory),
        ("CUDA error: device-side assert triggered", EngineFailed),
    ],
)
def test_errors_of_cudas_libraries_are_memory_or_not(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind), memory_errors("a step"):
        raise RuntimeError(text)
