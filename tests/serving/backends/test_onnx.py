"""The onnx backend on tiny graphs made by the product's own converter: held to the contract and to
transformers' generate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization import QuantType, quantize_dynamic

from models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from models.readers.onnx import patterns
from models.resolve import resolve
from models.tokenization.tokenizer import load_tokenizer
from serving.backends.base import EngineConfig
from serving.backends.kv_slots import RowMap
from serving.backends.onnx.backend import OnnxBackend, OnnxOptions
from serving.backends.onnx.graph import graph_file, weight_bytes
from serving.backends.options import parse_options
from serving.errors import BackendUnavailable, OutOfMemory, Unsupported
from serving.registry.prepare import backend_of_path
from serving.sampling.types import Row, Sampling
from tests.serving.backends.backend_contract import (
    check_churn,
    check_contract,
    check_contradictions,
    check_prompt_scores,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import generate, greedy_alone, prompt_of, row
from tests.serving.backends.hf_folders import generated, logprobs_of, onnx_folder, onnx_source

Make = Callable[..., OnnxBackend]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[OnnxBackend] = []

    def build(path: Path | str, **settings: Any) -> OnnxBackend:
        settings = {
            "slots": 5,
            "context_tokens": 128,
            "threads": 1,
            "options": {"spinning": False},
        } | settings
        config = EngineConfig(backend="onnx", model_path=str(path), model_name="m", **settings)
        opened.append(OnnxBackend(config, lambda what, fraction: None))
        return opened[-1]

    yield build
    for backend in opened:
        backend.close()


# --- the right tokens


@pytest.mark.parametrize(
    "name", ["llama-fp32", "llama3-fp32", "qwen2-fp32", "qwen3-fp32", "mistral-fp32"]
)
def test_float_graphs_give_the_tokens_of_transformers(make: Make, name: str) -> None:
    backend = make(onnx_folder(name))
    assert backend.info.details["graph"] == "GroupQueryAttention"
    reference = generated(onnx_source(name))
    check_contract(backend, reference)
    check_churn(backend, reference, seed=1, requests=32, steps=2000)


@pytest.mark.parametrize("name", ["llama-fp32", "qwen3-growing"])
@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 200}], ids=["room", "preempting"])
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, name: str, settings: dict[str, Any]
) -> None:
    scheduler = check_scheduled(make(onnx_folder(name), **settings), generated(onnx_source(name)))
    assert (scheduler.preemptions > 0) == ("kv_tokens" in settings)


@pytest.mark.parametrize("name", ["llama3-fp32", "qwen3-growing"])
def test_prompt_logprobs_are_those_of_transformers(make: Make, name: str) -> None:
    check_prompt_scores(
        make(onnx_folder(name)),
        lambda tokens: logprobs_of(onnx_source(name), tokens),
        tolerance=1e-3,
    )


def test_growing_graphs_give_the_tokens_of_transformers(make: Make) -> None:
    backend = make(onnx_folder("qwen3-growing"))
    assert (
        backend.info.details["graph"] == "growing past_key_values"
        and "copied every step" in backend.info.details["batching"]
    )
    check_contract(backend, generated(onnx_source("qwen3-growing")))
    check_churn(backend, generated(onnx_source("qwen3-growing")), seed=2, requests=32, steps=2000)


@pytest.mark.parametrize("name", ["llama-int8", "qwen3-int4", "llama3-dynamic"])
def test_quantised_graphs_give_the_same_tokens_alone_and_batched(make: Make, name: str) -> None:
    backend, alone = make(onnx_folder(name)), make(onnx_folder(name), slots=1)
    check_contract(backend, greedy_alone(alone))
    check_churn(backend, greedy_alone(alone), seed=3, requests=32, steps=2000)


def test_a_foreign_dynamic_graph_says_that_it_depends_on_the_batch(
    make: Make, tmp_path: Path
) -> None:
    """One with a scale for the whole batch, as quantisers write them: ours have been rewritten
    (models/convert/onnx_per_token.py).
    """
    assert "batch_dependent" not in make(onnx_folder("llama3-dynamic")).info.details
    foreign = tmp_path / "foreign"
    shutil.copytree(onnx_folder("llama3-fp32"), foreign)
    for name in ("conversion.json", "crossover.json"):
        (foreign / name).unlink()
    quantize_dynamic(
        foreign / "model.onnx",
        foreign / "small.onnx",
        op_types_to_quantize=["MatMul"],
        weight_type=QuantType.QInt8,
    )
    (foreign / "small.onnx").replace(foreign / "model.onnx")
    backend = make(foreign)
    assert backend.info.details["batch_dependent"] == "true"
    prompt = prompt_of(backend, 20, 1)
    assert generate(backend, prompt, 6) == generate(backend, prompt, 6, slot=3)  # alone it repeats


def test_long_context_and_prompts_longer_than_the_chunk(make: Make) -> None:
    folder = onnx_folder("llama3-fp32")
    backend = make(folder, context_tokens=700, slots=2, options={"prefill_chunk": 100})
    prompt = prompt_of(
        backend, 640, 4
    )  # beyond the 512 tokens from which Llama 3's RoPE scaling takes effect
    assert generate(backend, prompt, 5, slot=1) == generated(onnx_source("llama3-fp32"))(prompt, 5)


def test_the_context_can_be_filled_to_the_last_token(make: Make) -> None:
    backend = make(onnx_folder("llama-fp32"), context_tokens=64, slots=3)
    full = prompt_of(backend, 64, 5)
    reference = generated(onnx_source("llama-fp32"))
    assert backend.step([row(1, full, 0)])[0].token == reference(full, 1)[0]
    # A full row between two that decode has no room for a dummy token and must be moved out of the
    # way.
    others = {slot: prompt_of(backend, 9, slot) for slot in (0, 2)}
    last = {slot: backend.step([row(slot, others[slot], 0)])[0].token for slot in others}
    results = backend.step([row(slot, [last[slot]], 9) for slot in (0, 2)])
    assert [result.token for result in results] == [
        reference(others[slot], 2)[1] for slot in (0, 2)
    ]
    assert backend.step([row(1, full[63:], 63)])[0].token == reference(full, 1)[0]


@pytest.mark.parametrize("name", ["qwen2-fp32", "llama-int8", "qwen3-growing"])
def test_a_seeded_request_does_not_depend_on_its_batch_mates(make: Make, name: str) -> None:
    check_seeded(make(onnx_folder(name)))


def test_logprobs_and_penalties_reach_the_sampler(make: Make) -> None:
    backend = make(onnx_folder("llama-fp32"))
    prompt = prompt_of(backend, 10, 7)
    greedy = backend.step([row(0, prompt, 0, sampling=Sampling(logprobs=3))])[0]
    assert (
        greedy.logprobs is not None
        and greedy.logprobs.top_ids[0] == greedy.token
        and greedy.logprobs.chosen < 0
    )
    banned = Row(0, np.array(prompt, np.int32), 0, True, banned=(greedy.token,))
    assert backend.step([banned])[0].token == greedy.logprobs.top_ids[1]


# --- what it says of itself


def test_memory_is_predicted_and_measured(make: Make) -> None:
    folder = onnx_folder("qwen2-fp32")
    backend = make(folder, slots=4, context_tokens=256)
    predicted, measured = backend.info.predicted, backend.info.measured
    assert predicted is not None and measured is not None
    assert (
        predicted.kv_bytes == measured.kv_bytes == 4 * 256 * 2 * 2 * 2 * 16 * 4
    )  # slots, context, layers, k and v, heads, width, float32
    files = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
    assert predicted.weight_bytes == files - 704 * 64 * 4  # an untied embedding stays mapped
    assert measured.weight_bytes is not None  # what it is worth shows on bigger graphs only


def test_the_engine_process_imports_no_torch() -> None:
    code = (
        "import sys; from serving.backends.base import EngineConfig; from "
        "serving.backends.onnx.backend import OnnxBackend; "
        "OnnxBackend(EngineConfig(backend='onnx', model_path=sys.argv[1], model_name='m', slots=1, "
        "context_tokens=64), lambda *a: None); "
        "found = {'torch', 'transformers', 'onnx'} & set(sys.modules); assert not found, found"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(onnx_folder("llama-fp32"))], check=True, timeout=60
    )


# --- what it refuses


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spining": "true"}, "no option 'spining'"),
        ({"spinning": "maybe"}, "'maybe'"),
        ({"optimisation": "max"}, "'max'"),
        ({"prefill_chunk": 0}, "0"),
        ({"prefill_chunk": "many"}, "'many'"),
        ({"file": 3}, "3"),
    ],
)
def test_unknown_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        parse_options(OnnxOptions, options, "onnx")


def test_settings_that_the_graph_cannot_do_are_refused(make: Make) -> None:
    folder = onnx_folder("llama-fp32")
    with pytest.raises(Unsupported, match="4096.*2048"):
        make(folder, context_tokens=4096)
    for kv_dtype in ("q8_0", "fp16", "int3"):
        with pytest.raises(Unsupported, match=f"kv_dtype {kv_dtype} cannot be had; .* is fp32"):
            make(folder, kv_dtype=kv_dtype)
    make(folder, kv_dtype="fp32")
    with pytest.raises(BackendUnavailable, match="gpu"):
        make(folder, device="gpu")
    with pytest.raises(OutOfMemory, match="KV cache"):
        make(folder, slots=100_000_000)


def test_a_graph_that_does_not_fit_into_the_container_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.machine.cgroup_memory_left", lambda root: 1 << 20)
    with pytest.raises(OutOfMemory, match="the weights of .* need .* 1 MiB are available"):
        make(onnx_folder("llama-fp32"))
    make(onnx_folder("llama-fp32"), check_memory=False)


def test_damaged_files_are_named(make: Make, tmp_path: Path) -> None:
    folder = onnx_folder("llama-fp32")
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    data = (cut / "model.onnx.data").read_bytes()
    (cut / "model.onnx.data").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenWeights, match=r"model\.onnx\.data"):
        make(cut)
    (cut / "crossover.json").unlink()  # without a manifest onnxruntime must notice
    with pytest.raises(BrokenWeights, match=r"model\.onnx"):
        make(cut)
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    (changed / "model.onnx.data").write_bytes(data[:-8] + b"flipped!")
    (changed / "crossover.verified").unlink(missing_ok=True)
    with pytest.raises(BrokenWeights, match="checksum"):
        make(changed)
    for content in (b"", b"not a graph at all"):
        (tmp_path / "model.onnx").write_bytes(content)
        with pytest.raises(BrokenWeights, match=r"model\.onnx"):
            make(tmp_path)


def test_a_graph_of_another_kind_is_refused_by_what_it_wants(make: Make, tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    source = onnx.load(str(onnx_folder("llama-fp32") / "model.onnx"))
    source.graph.input.append(
        helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3])
    )
    onnx.save(source, str(tmp_path / "model.onnx"))
    with pytest.raises(UnsupportedModel, match="pixel_values"):
        make(tmp_path)
    encoder = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    onnx.save(
        helper.make_model(encoder, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        str(tmp_path / "model.onnx"),
    )
    with pytest.raises(UnsupportedModel, match="no causal language model"):
        make(tmp_path)


def test_which_file_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="neither"):
        graph_file(tmp_path / "nothing")
    (tmp_path / "onnx").mkdir()
    for name in ("model_q4.onnx", "model_fp16.onnx"):
        (tmp_path / "onnx" / name).write_bytes(b"x")
    with pytest.raises(UnknownModel, match=r"onnx/model_fp16\.onnx, onnx/model_q4\.onnx"):
        graph_file(tmp_path)
    assert graph_file(tmp_path, "onnx/model_q4.onnx").name == "model_q4.onnx"
    with pytest.raises(UnknownModel, match="no such file"):
        graph_file(tmp_path, "../" + tmp_path.name + "x.onnx")
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"x")
    assert graph_file(tmp_path).name == "model.onnx"


# --- the hub's layout


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as the hub library keeps it: links into blobs, and under onnx/ a graph for each
    format, as transformers.js has them.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    source, root = onnx_folder("qwen3-growing"), tmp_path_factory.mktemp("hub")
    repository = root / "models--someone--tiny"
    blobs, commit = repository / "blobs", "0123456789abcdef0123456789abcdef01234567"
    files = repository / "snapshots" / commit
    (files / "onnx").mkdir(parents=True)
    blobs.mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    whole = onnx.load(str(source / "model.onnx"))
    onnx.save(
        whole,
        str(files / "onnx" / "model.onnx"),
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=0,
    )
    quantize_dynamic(
        source / "model.onnx", files / "onnx" / "model_quantized.onnx", weight_type=QuantType.QInt8
    )
    quantiser = MatMulNBitsQuantizer(
        onnx.load(str(source / "model.onnx")), block_size=32, is_symmetric=True
    )
    quantiser.process()
    quantiser.model.save_model_to_file(str(files / "onnx" / "model_q4.onnx"))
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        shutil.copy(source / name, files / name)
    for number, file in enumerate(sorted(path for path in files.rglob("*") if path.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    return root


@pytest.mark.parametrize(
    ("weight_format", "file"),
    [("fp32", "model.onnx"), (None, "model_q4.onnx"), ("dynamic-int8", "model_quantized.onnx")],
)
def test_repositories_of_the_hub_are_served(
    make: Make,
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_format: str | None,
    file: str,
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_cache))
    found = resolve("someone/tiny", kind="onnx", weight_format=weight_format)
    assert (Path(found.path).name, found.weight_format, found.quality_kl_nats) == (
        file,
        weight_format or "int4",
        None,
    )
    assert load_tokenizer(found.tokenizer_path).vocabulary == found.spec.vocabulary == 704
    assert weight_bytes(Path(found.path)) > 100_000
    backend = make(found.path, weight_format=found.weight_format)
    assert backend.info.details["graph"] == "growing past_key_values"
    if weight_format == "fp32":
        check_contract(backend, generated(onnx_source("qwen3-growing")))
        with_option = make(found.path, options={"file": "onnx/model_q4.onnx"})
        assert with_option.info.vocabulary == 704
        with pytest.raises(UnknownModel, match="no such file"):
            make(found.path, options={"file": "../blobs/0"})
    elif (
        weight_format is None
    ):  # blocks of integers, each row by itself: the same tokens in any company
        check_churn(backend, greedy_alone(make(found.path, slots=1)), seed=4)


def test_a_format_that_the_repository_lacks_is_named(hub_cache: Path) -> None:
    (folder,) = hub_cache.glob("models--someone--tiny/snapshots/*")
    with pytest.raises(
        UnknownModel, match=r"no graph of format int8; it has onnx/model\.onnx, onnx/model_q4\.onnx"
    ):
        resolve(str(folder), kind="onnx", weight_format="int8")
    assert backend_of_path(folder) == "onnx"
    assert patterns("int4")[0][-3:] == [
        "onnx/model_q4.onnx",
        "onnx/model_q4.onnx_data*",
        "onnx/model_q4.onnx.data*",
    ]


def test_a_row_that_contradicts_the_cache_ends_the_engine(make: Make) -> None:
    for name in ("llama-fp32", "qwen3-growing"):
        check_contradictions(make(onnx_folder(name)))


def test_what_the_converter_wrote_is_in_the_details(make: Make) -> None:
    folder = onnx_folder("qwen3-int4")
    facts = json.loads((folder / "conversion.json").read_text())
    info = make(folder).info
    assert info.weight_format == "int4" and info.details["exporter"] == "genai"
    assert float(info.details["quality_kl_nats"]) == pytest.approx(facts["kl_nats"], rel=0.01)


# --- rows and slots


def test_a_short_hole_is_ridden_and_a_long_one_closed() -> None:
    rows = RowMap(6, 100, rider_tokens=10.0)
    rows.length = [20] * 6
    assert rows.window([0, 1, 2]) == rows.window([0, 1, 2]) and rows.window([0, 1, 2]).riders == ()
    for _ in range(3):  # rent 10 a step, against a price of 40
        assert rows.window([0, 1, 3]).riders == (2,)
    closing = rows.window([0, 1, 3])
    assert (
        closing.riders == () and closing.swaps == ((3, 2),) and (closing.lo, closing.hi) == (0, 3)
    )


def test_a_full_row_is_never_ridden() -> None:
    rows = RowMap(3, 50, rider_tokens=0.0)
    rows.length = [10, 50, 10]
    window = rows.window([0, 2])
    assert window.swaps and not window.riders


@given(st.data())
def test_rows_stay_a_permutation_and_windows_cover_their_slots(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 9))
    rows = RowMap(slots, 40, data.draw(st.floats(0, 30)))
    for _ in range(12):
        for slot in range(slots):
            rows.length[rows.row_of[slot]] = data.draw(st.integers(0, 40))
        lengths = {slot: rows.length[rows.row_of[slot]] for slot in range(slots)}
        members = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
        window = rows.window(members)
        for a, b in window.swaps:
            rows.swap(a, b)
        assert sorted(rows.row_of) == list(range(slots)) and all(
            rows.row_of[rows.slot_of[row]] == row for row in range(slots)
        )
        assert {slot: rows.length[rows.row_of[slot]] for slot in range(slots)} == lengths
        inside = set(range(window.lo, window.hi))
        assert inside == {rows.row_of[slot] for slot in members} | set(window.riders)
        assert all(rows.length[rider] < 40 for rider in window.riders)
