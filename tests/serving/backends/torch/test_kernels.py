"""The kernels in Triton: held to the plain pass in Triton's interpreter, compiled for GPUs that are
not here. `make test-triton`; no number here comes from a GPU but in what is marked gpu.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from models.spec import ModelSpec
from serving.backends.base import EngineConfig
from serving.backends.kv_slots import RowMap
from serving.backends.torch.backend import TorchBackend
from serving.backends.torch.kernels.fused import INTERPRETED, FusedModel, load_kernels
from serving.backends.torch.model import SlotModel, rope_tables, turn_into, turn_table
from serving.backends.torch.packed import PackedCache
from serving.backends.torch.step_batch import StepBatch
from serving.backends.torch.weights import Weights
from serving.errors import Unsupported
from tests.serving.backends.backend_contract import check_contract
from tests.serving.backends.backend_steps import generate, greedy_alone, near_tie, prompt_of, row
from tests.serving.backends.hf_folders import generated, hf_folder
from tests.serving.backends.torch.engines import Make
from tests.shapes import TINY, TINY_LLAMA, TINY_LLAMA3
from tests.tools.fake_cuda import FakeCuda, install_flash
from tests.tools.step_counts import made_weights

CPU = torch.device("cpu")
IS_THERE = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = IS_THERE and os.environ.get(INTERPRETED) == "1"
WHY = f"needs triton and {INTERPRETED}=1; make test-triton has them"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason=WHY)
installed = pytest.mark.skipif(not IS_THERE, reason="triton is not installed; make test-triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A sum in another order moves a number by a rounding or two.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def _nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 as GPUs round it: Triton's interpreter cuts float32 off."""
    if not IS_INTERPRETED:
        return
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    others = interpreter._convert_float

    def converted(values: Any, kind: Any, wanted: Any, mode: Any) -> Any:
        if (kind, wanted) != (float32, bfloat16):
            return others(values, kind, wanted, mode)
        return torch.tensor(values).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, by: float = 1.0) -> Tensor:
    return (by * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def kernels() -> Any:
    load_kernels(CPU)
    return torch.ops.crossover


# --- each kernel beside what it stands for


@pytest.mark.triton
@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (3, 100), (5, 576), (2, 1)])
def test_the_sum_and_its_norm(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, delta = (drawn(seed, tokens, size, dtype=dtype) for seed in (1, 2))
    weight, summed = drawn(3, size, dtype=dtype), x + delta
    for added in (None, delta):
        before = x.clone() if added is None else summed
        y = kernels().add_norm(x, added, weight, 1e-5)
        assert torch.equal(x, before)
        expected = rms_norm(before, (size,), weight, 1e-5)
        torch.testing.assert_close(y, expected, rtol=CLOSE[dtype], atol=1e-6)


@pytest.mark.triton
@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 7), (3, 160), (2, 1030), (2, 1)])
def test_silu_of_gate_times_up(tokens: int, size: int, dtype: torch.dtype) -> None:
    pair = drawn(4, tokens, 2 * size, dtype=dtype, by=4.0)
    gate, up = pair.chunk(2, -1)
    expected = silu(gate).mul_(up)
    torch.testing.assert_close(kernels().silu_mul(pair), expected, rtol=CLOSE[dtype], atol=1e-6)


@pytest.mark.triton
@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["bare", "norms"])
@pytest.mark.parametrize(
    ("queries", "keys", "dim"), [(4, 2, 16), (4, 1, 32), (9, 3, 64), (5, 5, 24), (32, 8, 128)]
)
def test_the_turn_and_the_writing_of_keys_and_values(
    queries: int, keys: int, dim: int, norms: bool, dtype: torch.dtype
) -> None:
    for base in (TINY_LLAMA, TINY_LLAMA3):  # without and with Llama 3's scaling
        spec = msgspec.structs.replace(base, heads=queries, kv_heads=keys, head_dim=dim)
        cos, sin = (table.to(dtype) for table in rope_tables(spec, 192))
        at = torch.tensor([3 * 192 + 191, 0, 192, 5, 2 * 192 + 64])
        heads = drawn(5, len(at), queries + 2 * keys, dim, dtype=dtype)
        scales = drawn(6, queries + keys, dim, dtype=dtype) if norms else None
        ours, theirs = (PackedCache(spec, 4, 192, dtype, CPU) for _ in range(2))
        for cache in (ours, theirs):
            cache.layers[0].copy_(drawn(7, *cache.layers[0].shape))
        expected = heads.clone()
        source = turned = expected[:, :-keys]
        if scales is not None:
            source = rms_norm(turned, (dim,), None, 1e-6) * scales
        turn_into(turned, source.clone(), turn_table(cos, sin)[at % 192][:, None])
        theirs.write(0, expected, at)
        kernels().turn_and_store(heads, at, cos, sin, scales, 1e-6, ours.layers[0])
        close = {"rtol": CLOSE[dtype], "atol": (4 if norms else 1) * CLOSE[dtype]}
        torch.testing.assert_close(heads[:, :queries], expected[:, :queries], **close)
        torch.testing.assert_close(ours.layers[0], theirs.layers[0], **close)
        untouched = torch.ones(4 * 192, dtype=torch.bool).index_fill(0, at, False)
        assert torch.equal(ours.layers[0][untouched], theirs.layers[0][untouched])
        assert torch.equal(ours.layers[0][:, 1], theirs.layers[0][:, 1]), "values as they are"


# --- a whole model


def logits_of(kind: type[SlotModel], spec: ModelSpec, weights: Weights) -> tuple[Tensor, SlotModel]:
    """Of two prompts, and of a pass of two decode rows and a prompt between them."""
    model = kind(spec, weights, PackedCache(spec, 3, 64, weights.embedding.dtype, CPU))
    rows, found = RowMap(3, 63, 0.0), []
    for decoding, prompts in (([], [(0, 7), (2, 20)]), ([(0, 7), (2, 20)], [(1, 11)])):
        batch = StepBatch(model, rows, torch.arange(64))
        if decoding:
            batch.add_decode([row(slot, [9 + slot], start) for slot, start in decoding], [0, 2])
        for slot, count in prompts:
            piece = np.arange(count, dtype=np.int32) * 7 + slot
            batch.add_prompt(row(slot, piece.tolist(), 0), piece, 0)
        found.append(batch.run())
    return torch.cat(found), model


@pytest.mark.triton
@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", TINY)
@torch.inference_mode()
def test_a_model_is_as_near_to_float32_as_the_plain_pass(
    monkeypatch: pytest.MonkeyPatch, shape: str, dtype: torch.dtype
) -> None:
    install_flash(monkeypatch)
    load_kernels(CPU)
    spec = TINY[shape]
    seeds = iter(range(1000))
    rounded = made_weights(spec, lambda *shape: drawn(next(seeds), *shape, dtype=dtype, by=0.1))
    seeds = iter(range(1000))
    wide = made_weights(
        spec, lambda *shape: drawn(next(seeds), *shape, dtype=dtype, by=0.1).float()
    )
    exact, _ = logits_of(SlotModel, spec, wide)
    plain, _ = logits_of(SlotModel, spec, rounded)
    fused, model = logits_of(FusedModel, spec, rounded)
    assert isinstance(model, FusedModel) and fused.shape == (5, spec.vocabulary)
    size = exact.square().mean().sqrt()
    if dtype == torch.float32:
        assert (fused - exact).abs().max() < 1e-5 * size
    plain_off, fused_off = ((one - exact).square().mean().sqrt() for one in (plain, fused))
    assert fused_off < 1.25 * plain_off + 1e-6 * size < 0.1 * size


@pytest.mark.triton
@interpreted
def test_the_engine_gives_the_tokens_of_transformers_out_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    cuda = FakeCuda().install(monkeypatch)
    install_flash(monkeypatch)
    backend = engine({"kernels": "triton", "prefill_chunk": 64}, device="gpu", slots=3)
    torch.backends.cuda.enable_cudnn_sdp(was)
    assert isinstance(backend._model, FusedModel) and backend.info.details["kernels"] == "triton"
    prompt = prompt_of(backend, 20, 1)
    assert generate(backend, prompt, 6) == generated(hf_folder("tiny-qwen3"))(prompt, 6)
    assert sum(graph.replays for graph in cuda.graphs) >= 5
    backend.close()


# --- where it cannot run


def engine(options: dict[str, Any], **settings: Any) -> TorchBackend:
    config = EngineConfig(
        *("torch", str(hf_folder("tiny-qwen3")), "m"),
        **({"weight_format": "fp32", "context_tokens": 128} | settings),
        options=options,
    )
    return TorchBackend(config, lambda what, fraction: None)


def test_triton_where_it_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_THERE:
        with pytest.raises(Unsupported, match="kernels is triton, and the package triton is not"):
            engine({"kernels": "triton"})
        return
    monkeypatch.setenv(INTERPRETED, "1")
    with pytest.raises(Unsupported, match="which needs flash, and torch has the flash kernels for"):
        engine({"kernels": "triton"})
    monkeypatch.delenv(INTERPRETED)
    with pytest.raises(Unsupported, match="on a CPU they run only in Triton's interpreter"):
        engine({"kernels": "triton"})


# --- for GPUs


@pytest.mark.triton
@installed
def test_they_compile_for_the_gpus_that_are_not_here(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if key != INTERPRETED}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.compile_kernels"],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for target in ("cuda 89", "cuda 90", "hip gfx942"):
        assert sum(line.startswith(target) for line in lines) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TINY)
def test_gpu_gives_its_tokens_by_both_paths(make: Make, shape: str) -> None:
    settings = {"device": "gpu", "weight_format": "bf16"}
    folder = hf_folder(shape, "bf16")
    alone, judge = make(folder, slots=1, **settings), make(folder, slots=1, **settings)
    backend = make(folder, options={"kernels": "triton"}, **settings)
    assert backend.info.details["kernels"] == "triton"
    check_contract(backend, greedy_alone(alone), tie=near_tie(judge, 0.3))
