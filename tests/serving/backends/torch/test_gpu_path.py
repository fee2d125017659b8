"""The torch backend's path on a GPU, on the CPU: its own code with a stand-in for CUDA's graphs and
for the flash kernel (tests/tools/fake_cuda.py). Nothing here has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from crossover.serving.backends.torch import memory_overhead as need
from crossover.serving.backends.torch.backend import TorchBackend, memory_errors
from crossover.serving.backends.torch.cuda_graphs import step_shapes
from crossover.serving.errors import EngineFailed, OutOfMemory
from tests.serving.backends.backend_contract import check_contract, check_scheduled, check_seeded
from tests.serving.backends.backend_steps import Make, generate, prompt_of, row
from tests.serving.backends.hf_folders import generated, hf_folder
from tests.shapes import TINY, TINY_LLAMA
from tests.tools.fake_cuda import FakeCuda, install_flash

ON_EVERY_RUN = ("tiny-qwen3",)
SHAPES = [
    pytest.param(name, marks=[] if name in ON_EVERY_RUN else [pytest.mark.slow]) for name in TINY
]


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


@pytest.mark.parametrize("shape", SHAPES)
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
    where = "crossover.serving.backends.torch.backend.why_no_flash"
    monkeypatch.setattr(where, lambda *_: "too old")
    backend = on_gpu(make, "tiny-llama3")
    assert backend.info.details["attention"] == "sdpa: too old" and not cuda.graphs
    check_contract(backend, generated(hf_folder("tiny-llama3")))


def test_a_long_context_needs_no_other_graph(make: Make, cuda: FakeCuda) -> None:
    backend = on_gpu(make, "tiny-llama3", slots=2, context_tokens=700)
    prompt = prompt_of(backend, 640, 4)
    assert generate(backend, prompt, 3) == generated(hf_folder("tiny-llama3"))(prompt, 3)
    assert backend.info.details["graphs"] == "true"


def test_seeded_requests_do_not_depend_on_their_batch_mates(make: Make, cuda: FakeCuda) -> None:
    check_seeded(on_gpu(make, "tiny-qwen3"))


def test_graphs_share_a_stream_and_keep_no_logits(make: Make, cuda: FakeCuda) -> None:
    backend = on_gpu(make, "tiny-llama", slots=16)
    assert len(cuda.streams) == 1 and set(cuda.capture_streams) == set(cuda.streams)
    assert cuda.kept_bytes == 0, "what a capture leaves alive, the next cannot use"
    assert backend._logits is not None and backend._logits.shape == (16, TINY_LLAMA.vocabulary)


@pytest.mark.parametrize("slots", [4, 24])
def test_the_memory_of_captured_steps_is_predicted(make: Make, cuda: FakeCuda, slots: int) -> None:
    backend = on_gpu(make, "tiny-llama", slots=slots)
    limit = need.captured_tokens(TINY_LLAMA, backend.info.settings)
    shapes = step_shapes(slots, limit)
    steps = [graph.peak_bytes for graph in cuda.graphs[: len(shapes)]]
    largest, rows = shapes[-1].tokens, min(shapes[-1].tokens, slots)
    predicted = need.pass_bytes(TINY_LLAMA, largest, rows, 4, rows)
    assert predicted == pytest.approx(max(steps), rel=0.05)


def test_steps_with_prompts_are_captured_and_right(make: Make, cuda: FakeCuda) -> None:
    """Random steps of decode rows and pieces, some of which want no token: the tokens of kernels
    that are launched one by one, from a graph for all but the largest."""
    captured = on_gpu(make, "tiny-llama3", slots=9, context_tokens=128)
    launched = on_gpu(make, "tiny-llama3", slots=9, context_tokens=128)
    launched._graphs = None
    random = np.random.default_rng(5)
    cached = [0] * 9
    before = sum(graph.replays for graph in cuda.graphs)
    for _ in range(40):
        rows = []
        for slot in random.permutation(9)[: random.integers(1, 10)]:
            is_piece = cached[slot] == 0 or random.random() < 0.3
            count = int(random.integers(2, 40)) if is_piece else 1
            if cached[slot] + count > 128:
                cached[slot] = 0
            wants = bool(random.random() < 0.8)
            piece = random.integers(3, 200, count).tolist()
            rows.append(row(int(slot), piece, cached[slot], wants_token=wants))
            cached[slot] += count
        rows.sort(key=lambda one: one.slot)
        tokens = [one.token for one in captured.step(rows)]
        assert tokens == [one.token for one in launched.step(rows)]
    assert sum(graph.replays for graph in cuda.graphs) - before >= 40


def test_a_step_beyond_the_largest_graph_is_launched_kernel_by_kernel(
    make: Make, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(need, "TOKEN_BUCKETS", (16, 32))
    backend = on_gpu(make, "tiny-llama", slots=3)
    replays = {True: 0, False: 0}
    expected = generated(hf_folder("tiny-llama"))
    for count in (30, 33):
        before = sum(graph.replays for graph in cuda.graphs)
        prompt = prompt_of(backend, count, count)
        drawn = backend.step([row(0, prompt, 0)])
        assert drawn[0].token == expected(prompt, 1)[0]
        replays[count > 32] = sum(graph.replays for graph in cuda.graphs) - before
    assert replays == {False: 2, True: 1}, "the draw is a graph of its own"


def test_a_capture_that_fails_costs_the_graphs_not_the_gpu(
    make: Make, cuda: FakeCuda, capfd: pytest.CaptureFixture[str]
) -> None:
    cuda.refuses_capture = "CUDA error: operation failed due to a previous error during capture"
    backend = on_gpu(make, "tiny-llama")
    assert "cannot be captured: CUDA error" in backend.info.details["graphs"]
    assert "torch: steps cannot be captured" in capfd.readouterr().err
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
