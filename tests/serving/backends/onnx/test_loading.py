"""Loading graphs: settings, memory, the layout of the hub, what is refused and what is told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from crossover.models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from crossover.serving.backends.onnx.onnx_folder import graph_file
from crossover.serving.errors import BackendUnavailable, Unsupported
from tests.serving.backends.backend_steps import Make
from tests.serving.backends.hf_folders import onnx_folder


def test_the_engine_process_imports_no_torch() -> None:
    code = (
        "import sys; from crossover.serving.backends.backend_interface import EngineConfig; "
        "from crossover.serving.capacity.scheduler_settings import SchedulerSettings; from "
        "crossover.serving.backends.onnx.backend import OnnxBackend; "
        "OnnxBackend(EngineConfig(backend='onnx', model_path=sys.argv[1], model_name='m', "
        "settings=SchedulerSettings(slots=1, context_tokens=64)), lambda *a: None); "
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
        with pytest.raises(Unsupported, match=f"kv_dtype {kv_dtype} is not available; .* is fp32"):
            make(folder, kv_dtype=kv_dtype)
    make(folder, kv_dtype="fp32")
    with pytest.raises(Unsupported, match="no option 'spining'"):
        make(folder, options={"spining": "true"})
    with pytest.raises(BackendUnavailable, match="gpu"):
        make(folder, device="gpu")


@pytest.mark.parametrize(
    ("spinning", "shares_cores", "spins"),
    [(None, False, "true"), (None, True, "false"), (True, True, "true"), (False, False, "false")],
)
def test_threads_spin_unless_another_engine_shares_their_cores(
    make: Make, spinning: bool | None, shares_cores: bool, spins: str
) -> None:
    options = {"spinning": spinning}
    backend = make(onnx_folder("llama-fp32"), options=options, shares_cores=shares_cores)
    assert backend.info.details["spinning"] == spins


def test_damaged_files_are_named(make: Make, tmp_path: Path) -> None:
    folder = onnx_folder("llama-fp32")
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    data = (cut / "model.onnx.data").read_bytes()
    (cut / "model.onnx.data").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenWeights, match=r"model\.onnx"):
        make(cut)
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
    for model, words in ((source, "pixel_values"), (made, "not a supported causal language model")):
        onnx.save(model, str(tmp_path / "model.onnx"))
        with pytest.raises(UnsupportedModel, match=words):
            make(tmp_path)


def test_which_file_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="neither"):
        graph_file(tmp_path / "nothing")
    with pytest.raises(UnknownModel, match=r"model\.onnx"):
        graph_file(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"x")
    assert graph_file(tmp_path).name == "model.onnx"


def test_what_the_converter_wrote_is_in_the_details(make: Make) -> None:
    info = make(onnx_folder("llama-int8")).info
    assert info.weight_format == "int8" and "bits" in info.details["made_by"]
