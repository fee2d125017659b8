"""The torch backend on tiny folders: held to the contract, to transformers' generate, and, for its
GPU parts, to the same logic on the
CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.convert.torch import int4_groups, int8_rows, make_torch, rounded_tokens, unpacked
from models.errors import BrokenWeights, UnsupportedModel
from models.manifest import read_manifest
from models.synthetic.write import write_hf_folder
from serving.backends.base import EngineConfig
from serving.backends.torch.backend import TorchBackend
from serving.backends.torch.cuda_graphs import (
    DecodeGraphs,
    batch_buckets,
    bucket_of,
    context_buckets,
)
from serving.backends.torch.matrices import WIDEN_ELEMENTS, Widened, dynamic_int8
from serving.backends.torch.model import rope_tables
from serving.backends.torch.sampler import draw, drawable
from serving.backends.torch.settings import check_options
from serving.errors import BackendUnavailable, OutOfMemory, Unsupported
from serving.sampling.sampler import sample
from serving.sampling.types import NO_TOKEN, Row, Sampling
from tests.serving.backends.backend_contract import (
    check_churn,
    check_contract,
    check_contradictions,
    check_prompt_scores,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import generate, greedy_alone, near_tie, prompt_of, row
from tests.serving.backends.hf_folders import generated, hf_folder, logprobs_of
from tests.shapes import TINY, TINY_LLAMA, TINY_LLAMA3

Make = Callable[..., TorchBackend]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[TorchBackend] = []

    def build(path: Path | str, **settings: Any) -> TorchBackend:
        settings = {"slots": 5, "context_tokens": 128, "threads": 1} | settings
        config = EngineConfig(backend="torch", model_path=str(path), model_name="m", **settings)
        opened.append(TorchBackend(config, lambda what, fraction: None))
        return opened[-1]

    yield build
    for backend in opened:
        backend.close()


# --- the right tokens


@pytest.mark.parametrize("shape", TINY)
def test_float32_gives_the_tokens_of_transformers(make: Make, shape: str) -> None:
    backend = make(hf_folder(shape))
    check_contract(backend, generated(hf_folder(shape)))
    check_churn(backend, generated(hf_folder(shape)), seed=1, requests=32, steps=2000)


def test_bfloat16_gives_the_same_tokens_alone_and_batched_up_to_ties(make: Make) -> None:
    folder = hf_folder("tiny-qwen2", "bf16")
    backend, alone, judge = make(folder), make(folder, slots=1), make(folder, slots=1)
    assert backend.info.weight_format == "bf16"
    check_contract(backend, greedy_alone(alone), tie=near_tie(judge, 0.3))
    prompt = prompt_of(backend, 30, 2)
    close = near_tie(judge, 0.3)
    expected = generated(folder)(prompt, 1)[0]  # of the same rounded weights, computed in float32
    token = generate(backend, prompt, 1)[0]
    assert token == expected or close(prompt, token, expected)


def test_long_prompts_cross_the_chunk_and_the_rope_scaling(make: Make) -> None:
    backend = make(
        hf_folder("tiny-llama3"), context_tokens=700, slots=3, options={"prefill_chunk": 100}
    )
    reference = generated(hf_folder("tiny-llama3"))
    prompt, other = prompt_of(backend, 640, 4), prompt_of(backend, 20, 5)
    first = backend.step([row(2, other, 0)])[0].token
    results = backend.step(
        [row(0, prompt, 0), row(2, [first], 20)]
    )  # seven passes, the last with the decode row
    assert [result.token for result in results] == [reference(prompt, 1)[0], reference(other, 2)[1]]


def test_a_full_row_between_others_costs_them_nothing(make: Make) -> None:
    backend = make(hf_folder("tiny-llama"), context_tokens=64, slots=3)
    reference = generated(hf_folder("tiny-llama"))
    full = prompt_of(backend, 64, 5)
    backend.step([row(1, full, 0)])
    others = {slot: prompt_of(backend, 9, slot) for slot in (0, 2)}
    last = {slot: backend.step([row(slot, others[slot], 0)])[0].token for slot in others}
    results = backend.step([row(slot, [last[slot]], 9) for slot in (0, 2)])
    assert [result.token for result in results] == [
        reference(others[slot], 2)[1] for slot in (0, 2)
    ]
    assert backend.step([row(1, full[63:], 63)])[0].token == reference(full, 1)[0]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_seeded_request_does_not_depend_on_its_batch_mates(make: Make, on_device: bool) -> None:
    backend = make(hf_folder("tiny-qwen3"))
    backend._device_sampling = on_device
    check_seeded(backend)


@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 200}], ids=["room", "preempting"])
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, settings: dict[str, Any]
) -> None:
    scheduler = check_scheduled(
        make(hf_folder("tiny-qwen2"), **settings), generated(hf_folder("tiny-qwen2"))
    )
    assert (scheduler.preemptions > 0) == ("kv_tokens" in settings)


@pytest.mark.parametrize("on_device", [False, True])
def test_prompt_logprobs_are_those_of_transformers(make: Make, on_device: bool) -> None:
    backend = make(hf_folder("tiny-llama3"))
    backend._device_sampling = on_device
    check_prompt_scores(
        backend, lambda tokens: logprobs_of(hf_folder("tiny-llama3"), tokens), tolerance=1e-3
    )


# --- what runs on a GPU, on the CPU


@pytest.mark.parametrize("shape", ["tiny-llama3", "tiny-qwen2"])
def test_the_bucketed_decode_step_gives_the_tokens_of_transformers(make: Make, shape: str) -> None:
    backend = make(hf_folder(shape))
    assert backend._model is not None
    logits = torch.empty(5, backend.info.vocabulary)
    backend._graphs = DecodeGraphs(backend._model, 5, logits, capture=False)  # eagerly
    backend._device_sampling = True
    check_contract(backend, generated(hf_folder(shape)))
    check_churn(backend, generated(hf_folder(shape)), seed=4, requests=32, steps=2000)


def test_buckets_cover_every_size_with_little_waste() -> None:
    assert (
        batch_buckets(1) == [1]
        and batch_buckets(5) == [1, 2, 4, 5]
        and batch_buckets(16) == [1, 2, 4, 8, 16]
    )
    assert context_buckets(192) == [192] and context_buckets(1088) == [256, 512, 1024, 1088]
    for rows in (1, 3, 16, 37, 128, 300):
        buckets = batch_buckets(rows)
        assert buckets == sorted(set(buckets)) and buckets[-1] == rows
        assert all(bucket_of(size, buckets) <= max(2 * size, 8) for size in range(1, rows + 1))
    with pytest.raises(ValueError, match="largest bucket"):
        bucket_of(9, [1, 8])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(temperature=0.9, top_p=0.9, top_k=50),
        Sampling(temperature=1.0, min_p=0.05),
        Sampling(temperature=1.0, min_p=0.02, top_p=0.8),
        Sampling(temperature=0.8, top_k=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [300, 6000])
def test_the_device_draws_what_the_host_draws(sampling: Sampling, vocabulary: int) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (64, vocabulary)).astype(np.float32)
    rows = [
        Row(
            0,
            np.array([1], np.int32),
            position,
            True,
            Sampling(**{**_fields(sampling), "seed": position * 31}),
        )
        for position in range(64)
    ]
    host = [result.token for result in sample(logits, rows)]
    tokens, good = draw(torch.from_numpy(logits), rows)
    assert good.float().mean() > 0.9, "proposals of a peaked row may all be refused"
    assert [a for a, fine in zip(tokens.tolist(), good, strict=True) if fine] == [
        b for b, fine in zip(host, good, strict=True) if fine
    ]


def test_the_device_says_when_it_cannot_draw() -> None:
    flat = torch.zeros(2, 9000)  # half of the mass is more than the candidates that are looked at
    flat[1, 0] = float("nan")
    rows = [row(0, [1], 3, sampling=Sampling(temperature=1.0, top_p=0.9, seed=1)), row(1, [1], 3)]
    _, good = draw(flat, rows)
    assert good.tolist() == [False, False]
    assert not drawable(row(0, [1], 0, sampling=Sampling(logprobs=1)))
    assert not drawable(row(0, [1], 0, sampling=Sampling(presence_penalty=0.5)))
    assert not drawable(replace(row(0, [1], 0), banned=(3,)))


def test_rows_that_the_device_cannot_draw_go_to_the_host(make: Make) -> None:
    backend, other = make(hf_folder("tiny-llama")), make(hf_folder("tiny-llama"))
    backend._device_sampling = True
    samplings = [
        Sampling(temperature=1.0, seed=1),
        Sampling(logprobs=2),
        Sampling(temperature=1.0, seed=2, logit_bias={7: 30.0}),
        Sampling(),
    ]
    rows = [
        row(slot, prompt_of(backend, 9, slot), 0, sampling=sampling)
        for slot, sampling in enumerate(samplings)
    ]
    mixed, host = backend.step(rows), other.step(rows)
    assert [result.token for result in mixed] == [result.token for result in host]
    assert mixed[1].logprobs is not None and mixed[2].token == 7


def test_nan_logits_draw_nothing(make: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folder("tiny-llama"), tmp_path / "nan"))
    (folder / "crossover.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    backend = make(folder)
    for on_device in (False, True):
        backend._device_sampling = on_device
        assert [found.token for found in backend.step([row(0, [5], 0)])] == [NO_TOKEN]


def test_a_gpu_is_asked_for_where_there_is_none(make: Make) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match="finds no GPU"):
        make(hf_folder("tiny-llama"), device="gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TINY)
def test_gpu_gives_the_tokens_of_transformers(make: Make, shape: str) -> None:
    backend = make(hf_folder(shape), device="gpu", weight_format="fp32")
    assert backend.info.details["graphs"] == "true"
    check_contract(backend, generated(hf_folder(shape)))
    check_churn(backend, generated(hf_folder(shape)), seed=5, requests=32, steps=2000)


@pytest.mark.gpu
def test_gpu_memory_is_refused_before_the_load(make: Make) -> None:
    with pytest.raises(OutOfMemory, match="fewer slots"):
        make(hf_folder("tiny-llama"), device="gpu", slots=5_000_000, context_tokens=2048)


# --- weights


@pytest.mark.parametrize("precision", ["int8", "dynamic-int8", "int4"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2"])
def test_packed_weights_give_the_same_tokens_alone_and_batched(
    make: Make, tmp_path: Path, shape: str, precision: str
) -> None:
    folder = make_torch(hf_folder(shape), tmp_path / "packed", precision, spec=TINY[shape])
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.quality_kl_nats is not None
    assert (
        0 < manifest.quality_kl_nats < {"int8": 2e-3, "dynamic-int8": 2e-2, "int4": 0.5}[precision]
    )
    backend, alone, judge = make(folder), make(folder, slots=1), make(folder, slots=1)
    assert backend.info.weight_format == precision
    check_contract(backend, greedy_alone(alone), tie=near_tie(judge, 0.3))
    predicted, measured = backend.info.predicted, backend.info.measured
    assert predicted is not None and measured is not None
    assert predicted.weight_bytes == pytest.approx(measured.weight_bytes, rel=0.05)
    with pytest.raises(Unsupported, match="packed beforehand"):
        make(folder, weight_format="bf16")


def test_dynamic_int8_is_exactly_the_rounded_product_in_any_company() -> None:
    generator = torch.Generator().manual_seed(7)
    weight, bias = torch.randn(48, 96, generator=generator), torch.randn(48, generator=generator)
    # a row of largest weights: pairs of products are as large as they can be, and must not overflow
    weight[5] = 3.0
    values, scale = int8_rows(weight)
    x = (
        torch.randn(9, 96, generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    )  # tokens of very different size
    x[4] = x[4].abs().amax()
    x[8] = 0.0
    matrix = dynamic_int8(values, scale, bias)
    together = matrix(x)
    exact = torch.nn.functional.linear(
        rounded_tokens(x).double(),
        unpacked("m", {"m.int8": values, "m.scale": scale}).double(),
        bias.double(),
    )
    torch.testing.assert_close(
        together.double(), exact, rtol=2e-6, atol=2e-5 * float(exact.abs().max()) / 1000
    )
    for one in range(9):
        assert torch.equal(matrix(x[one : one + 1])[0], together[one])
    assert matrix.resident_bytes == 48 * (96 + 12)


def test_packing_rounds_to_the_nearest_step() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    values, scale = int8_rows(weight)
    assert (
        unpacked("m", {"m.int8": values, "m.scale": scale}) - weight
    ).abs().max() <= scale.max() / 2 * 1.001
    nibbles, scales = int4_groups(weight)
    assert nibbles.shape == (6, 32) and nibbles.dtype == torch.uint8 and scales.shape == (6, 2)
    error = (
        (unpacked("m", {"m.int4": nibbles, "m.scale": scales}) - weight)
        .abs()
        .unflatten(1, (-1, 32))
        .amax(2)
    )
    assert (error <= scales / 2 * 1.001).all()


def test_widened_bfloat16_is_the_float32_product_of_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5000, 600, generator=generator).bfloat16()  # more than one block
    assert weight.numel() > WIDEN_ELEMENTS
    bias = torch.randn(5000, generator=generator)
    linear = Widened(weight, torch.empty(WIDEN_ELEMENTS), bias)
    for count in (1, 2, 3, 9):
        x = torch.randn(count, 600, generator=generator)
        torch.testing.assert_close(
            linear(x), x @ weight.float().T + bias, rtol=2e-2, atol=0.5 if count <= 2 else 1e-3
        )


def test_rope_tables_are_those_of_transformers() -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for shape in ("tiny-llama", "tiny-llama3"):
        rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(hf_folder(shape)))
        cos, sin = rotary(torch.zeros(1), torch.arange(1500)[None])
        mine = rope_tables(TINY[shape], 1500)
        torch.testing.assert_close(mine[0], cos[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mine[1], sin[0], rtol=1e-6, atol=1e-6)


def test_a_folder_of_transformers_5_gives_the_same_tokens(make: Make, tmp_path: Path) -> None:
    source = hf_folder("tiny-llama3")
    newer = Path(shutil.copytree(source, tmp_path / "newer"))
    (newer / "crossover.json").unlink()
    config = json.loads((newer / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "torch_dtype"):
        config.pop(key, None)
    assert config["rope_parameters"]["rope_theta"] == TINY_LLAMA3.rope_theta and config["dtype"]
    (newer / "config.json").write_text(json.dumps(config))
    backend = make(newer, context_tokens=600, slots=1)
    prompt = prompt_of(backend, 550, 8)
    assert generate(backend, prompt, 4) == generated(source)(prompt, 4)


def test_sharded_folders_are_read_whole(make: Make, tmp_path: Path) -> None:
    source = hf_folder("tiny-llama3")
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    where = {}
    for shard, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{shard}.safetensors")
        where.update(dict.fromkeys(part, f"model-{shard}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    backend = make(folder)
    prompt = prompt_of(backend, 20, 9)
    assert generate(backend, prompt, 4) == generated(source)(prompt, 4)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(BrokenWeights, match=r"model-1\.safetensors"):
        make(folder)


def test_broken_folders_are_named(make: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folder("tiny-llama"), tmp_path / "broken"))
    (folder / "crossover.json").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[: len(whole) // 2], whole[:5], b""):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(BrokenWeights, match=r"model\.safetensors"):
            make(folder)
    (folder / "model.safetensors").write_bytes(whole)
    tensors = load_file(folder / "model.safetensors")

    def saved(change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        copy = dict(tensors)
        change(copy)
        save_file(copy, folder / "model.safetensors")
        return folder

    with pytest.raises(BrokenWeights, match=r"lacks.*model\.layers\.1\.mlp\.up_proj\.weight"):
        make(saved(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")))
    with pytest.raises(BrokenWeights, match=r"model\.norm\.weight.*\[63\].*\[64\]"):
        make(saved(lambda t: t.update({"model.norm.weight": torch.ones(63)})))
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias"):
        make(saved(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})))


def test_foreign_architectures_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folder("tiny-llama"), tmp_path / "foreign"))
    config = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"model_type": "mistral", "sliding_window": 256}, "sliding_window 256"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModel, match=words):
            make(folder)
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "mistral", "sliding_window": None})
    )
    (folder / "crossover.json").unlink()
    prompt = [5, 9, 100, 33]
    assert generate(make(folder), prompt, 5) == generated(hf_folder("tiny-llama"))(
        prompt, 5
    )  # the same mathematics


# --- what it says and what it refuses


@pytest.mark.parametrize(
    ("shape", "weight_format"),
    [("tiny-llama", "fp32"), ("tiny-llama3", "bf16"), ("tiny-qwen3", "fp32")],
)
def test_memory_is_what_was_predicted(
    make: Make, tmp_path: Path, shape: str, weight_format: str
) -> None:
    backend = make(hf_folder(shape), weight_format=weight_format, slots=4, context_tokens=250)
    predicted, measured = backend.info.predicted, backend.info.measured
    assert predicted is not None and measured is not None
    assert predicted.kv_bytes == measured.kv_bytes
    assert predicted.weight_bytes == pytest.approx(measured.weight_bytes, rel=0.05)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(make: Make, tmp_path: Path) -> None:
    write_hf_folder(TINY_LLAMA, tmp_path / "huge", dtype="fp32")
    config = json.loads((tmp_path / "huge" / "config.json").read_text())
    (tmp_path / "huge" / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 500, "intermediate_size": 100_000_000})
    )
    (tmp_path / "huge" / "crossover.json").unlink()
    with pytest.raises(OutOfMemory, match="MiB"):
        make(tmp_path / "huge")


def test_weights_that_do_not_fit_into_the_container_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.machine.cgroup_memory_left", lambda root: 1 << 10)
    with pytest.raises(OutOfMemory, match="do not fit: 1 KiB are available"):
        make(hf_folder("tiny-llama"))
    make(hf_folder("tiny-llama"), check_memory=False)


@pytest.mark.parametrize(
    ("options", "device", "words"),
    [
        ({"graph": "true"}, "cpu", "no option 'graph'"),
        ({"graphs": "true"}, "cpu", "device gpu"),
        ({"device_sampling": "perhaps"}, "gpu", "'perhaps'"),
        ({"margin": 1.5}, "gpu", "1.5"),
        ({"margin": "nan"}, "gpu", "'nan'"),
        ({"prefill_chunk": 0}, "cpu", "0"),
    ],
)
def test_unknown_options_are_refused_by_name(
    options: dict[str, Any], device: str, words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        check_options(options, device)


def test_settings_that_it_cannot_do_are_refused(make: Make) -> None:
    folder = hf_folder("tiny-llama")
    for settings, words in (
        ({"weight_format": "Q4_0"}, "'Q4_0'"),
        ({"weight_format": "int4"}, "packed beforehand"),
        ({"weight_format": "fp16"}, "bf16 or fp32"),
        ({"context_tokens": 4096}, "4096"),
        ({"kv_dtype": "q8_0"}, "q8_0"),
        ({"weight_format": "fp32", "kv_dtype": "fp16"}, "kv_dtype fp16 cannot be had; .* fp32"),
        ({"device": "tpu"}, "'tpu'"),
    ):
        with pytest.raises(Unsupported, match=words):
            make(folder, **settings)


def test_a_row_that_contradicts_the_cache_ends_the_engine(make: Make) -> None:
    check_contradictions(make(hf_folder("tiny-llama")))


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}
