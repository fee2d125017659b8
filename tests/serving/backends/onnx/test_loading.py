"""Loading graphs: settings, memory, the layout of the hub, what is refused and what is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from models.onnx_files import graph_of, patterns
from models.resolve import resolve
from models.tokenizer import load_tokenizer
from serving.backends.onnx.graph import graph_file, weight_bytes
from serving.errors import BackendUnavailable, OutOfMemory, Unsupported
from serving.registry.engine_config import backend_of_path
from tests.serving.backends.backend_contract import check_contract
from tests.serving.backends.backend_steps import Make
from tests.serving.backends.hf_folders import generated, onnx_folder, onnx_source


def test_the_engine_process_imports_no_torch() -> None:
    code = (
        "import sys; from serving.backends.backend_interface import EngineConfig; from "
        "serving.backends.onnx.backend import OnnxBackend; "
        "OnnxBackend(EngineConfig(backend='onnx', model_path=sys.argv[1], model_name='m', slots=1, "
        "context_tokens=64), lambda *a: None); "
        "found = {'torch', 'transformers', 'onnx'} & set(sys.modules); assert not found, found"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(onnx_folder("llama-fp32"))], check=True, timeout=60
    )


def test_settings_that_the_graph_cannot_do_are_refused(make: Make) -> None:
    folder = onnx_folder("llama-fp32")
    with pytest.raises(Unsupported, match="4096.*2048"):
        make(folder, context_tokens=4096)
    for kv_dtype in ("q8_0", "fp16", "int3"):
        with pytest.raises(Unsupported, match=f"kv_dtype {kv_dtype} cannot be had; .* is fp32"):
            make(folder, kv_dtype=kv_dtype)
    make(folder, kv_dtype="fp32")
    with pytest.raises(Unsupported, match="no option 'spining'"):
        make(folder, options={"spining": "true"})
    with pytest.raises(Unsupported, match="prefill_chunk .* got 0"):
        make(folder, options={"prefill_chunk": 0})
    with pytest.raises(BackendUnavailable, match="gpu"):
        make(folder, device="gpu")
    with pytest.raises(OutOfMemory, match="KV cache"):
        make(folder, slots=100_000_000)


def test_a_graph_that_does_not_fit_into_the_container_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.machine.cgroup_memory_left", lambda root: 1 << 10)
    with pytest.raises(OutOfMemory, match="the weights of .* need .* 1 KiB are available"):
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
    from onnx import TensorProto, helper

    source = onnx.load(str(onnx_folder("llama-fp32") / "model.onnx"))
    source.graph.input.append(
        helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3])
    )
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    encoder = helper.make_graph(nodes, "encoder", ends[:1], ends[1:])
    made = helper.make_model(encoder, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for model, words in ((source, "pixel_values"), (made, "no causal language model")):
        onnx.save(model, str(tmp_path / "model.onnx"))
        with pytest.raises(UnsupportedModel, match=words):
            make(tmp_path)


def test_which_file_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="neither"):
        graph_file(tmp_path / "nothing")
    (tmp_path / "onnx").mkdir()
    with pytest.raises(UnknownModel, match="holds no graph"):
        graph_file(tmp_path)
    for name in ("model_q4.onnx", "model_fp16.onnx"):
        (tmp_path / "onnx" / name).write_bytes(b"x")
    assert graph_file(tmp_path).name == "model_q4.onnx"
    assert graph_file(tmp_path / "onnx/model_fp16.onnx").name == "model_fp16.onnx"


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as the hub library keeps it: links into blobs, and under onnx/ a graph for each
    format, as transformers.js has them.
    """
    source, root = onnx_folder("qwen3-growing"), tmp_path_factory.mktemp("hub")
    repository = root / "models--someone--tiny"
    blobs, commit = repository / "blobs", "0123456789abcdef0123456789abcdef01234567"
    files = repository / "snapshots" / commit
    for folder in (files / "onnx", blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    whole = onnx.load(str(source / "model.onnx"))
    beside = {"save_as_external_data": True, "location": "model.onnx_data", "size_threshold": 0}
    onnx.save(whole, str(files / "onnx" / "model.onnx"), **beside)
    quantised = files / "onnx" / "model_quantized.onnx"
    quantize_dynamic(source / "model.onnx", quantised, weight_type=QuantType.QInt8)
    shutil.copy(quantised, files / "onnx" / "model_q4.onnx")  # only the name says the format
    names = ("config", "tokenizer", "tokenizer_config", "generation_config")
    for name in names:
        shutil.copy(source / f"{name}.json", files / f"{name}.json")
    for number, file in enumerate(sorted(path for path in files.rglob("*") if path.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    return root


@pytest.mark.parametrize(
    ("weight_format", "file"),
    [("fp32", "model.onnx"), (None, "model_q4.onnx"), ("int8", "model_quantized.onnx")],
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
    assert "growing" in backend.info.details["graph"]
    if weight_format == "fp32":
        check_contract(backend, generated(onnx_source("qwen3-growing")))


def test_a_format_that_the_repository_lacks_is_named(hub_cache: Path) -> None:
    (folder,) = hub_cache.glob("models--someone--tiny/snapshots/*")
    with pytest.raises(UnknownModel, match=r"no graph of format fp16; it has onnx/model\.onnx, "):
        graph_of(folder, "fp16")
    assert backend_of_path(folder) == "onnx"
    assert patterns("int4")[0][-3:] == [
        "onnx/model_q4.onnx",
        "onnx/model_q4.onnx_data*",
        "onnx/model_q4.onnx.data*",
    ]


def test_what_the_converter_wrote_is_in_the_details(make: Make) -> None:
    info = make(onnx_folder("llama-int8")).info
    assert info.weight_format == "int8" and "bits" in info.details["made_by"]
