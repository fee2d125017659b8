"""GGUF files as people have them: of any type, of other architectures, damaged; back to floats."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, LlamaFileType

from models.conversion import compared, open_source, prose
from models.convert_to_gguf import gguf_logits
from models.convert_to_onnx import graph_logits
from models.errors import ModelError, UnsupportedModel
from models.formats import weight_bytes
from models.gguf_reader import read_header
from models.gguf_vocabulary import llama_library
from models.manifest import manifest_path
from models.random_weights import write_gguf
from models.resolve import resolve
from models.tokenizer import try_tokenizer
from tests.serving.backends.hf_folders import children_here
from tests.shapes import TINY_LLAMA

WIDE = msgspec.structs.replace(TINY_LLAMA, hidden=256, intermediate=512, heads=4, head_dim=64)
IDS = np.arange(16)[None] + 300
TYPES = "Q4_1 Q5_0 Q5_K_M Q6_K Q3_K_S Q2_K IQ4_XS IQ4_NL MXFP4_MOE TQ2_0".split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("whole") / "whole.gguf"
    write_gguf(WIDE, file, "F32")
    manifest_path(file).unlink()
    return file


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A small file that is not ours."""
    write_gguf(TINY_LLAMA, tmp_path / "foreign.gguf", "Q8_0")
    manifest_path(tmp_path / "foreign.gguf").unlink()
    return tmp_path / "foreign.gguf"


@pytest.mark.parametrize("kind", TYPES)
def test_any_type_that_llama_cpp_writes_is_taken(kind: str, whole: Path, tmp_path: Path) -> None:
    file, llama = tmp_path / "x.gguf", llama_library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = {one.name.removeprefix("MOSTLY_"): one.value for one in LlamaFileType}[kind]
    files = (str(whole).encode(), str(file).encode())
    assert llama.llama_model_quantize(*files, ctypes.byref(params)) == 0
    found = resolve(str(file), kind="gguf")
    assert (found.weight_format, found.spec.parameters) == (kind, WIDE.parameters)
    assert resolve(str(file), kind="gguf", weight_format=kind.lower()) == found
    tensors = read_header(file).tensors.values()
    assert sum(one.bytes for one in tensors) < os.path.getsize(file) < whole.stat().st_size / 2
    if kind != "MXFP4_MOE":  # which are experts, and there are none
        size = sum(one.bytes for one in tensors)
        assert weight_bytes(found.spec, kind) == pytest.approx(size, rel=0.5)
    assert np.isfinite(gguf_logits(file, IDS)).all()


def test_onnx_is_made_of_the_floats_that_a_file_stands_for(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children_here(monkeypatch)
    found = resolve(str(foreign), kind="onnx", weight_format="fp32", cache=tmp_path / "cache")
    assert (found.name, found.weight_format, found.synthetic) == ("foreign", "fp32", False)
    assert found.tokenizer_path == str(foreign) and found.quality_kl_nats is not None
    assert found.quality_kl_nats < 1e-6
    ids = open_source(foreign).ids(prose(), 2, 32)
    assert ids is not None and ids.shape == (2, 32)
    logits = graph_logits(Path(found.path, "model.onnx"), ids, found.spec)
    assert compared(gguf_logits(foreign, ids), logits).kl_nats < 1e-2  # llama.cpp rounds to 8 bits
    with pytest.raises(UnsupportedModel, match="foreign.gguf is a GGUF file.* torch wants"):
        resolve(str(foreign), kind="hf", cache=tmp_path / "cache")


def test_another_architecture_is_described_and_not_rebuilt(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of attention: llama.cpp reads them, our own shapes have none."""
    children_here(monkeypatch)
    file = tmp_path / "biased.gguf"
    writer = GGUFWriter(file, "llama")
    reader = GGUFReader(foreign)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for layer in range(TINY_LLAMA.layers):
        writer.add_tensor(f"blk.{layer}.attn_output.bias", np.ones(TINY_LLAMA.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = resolve(str(file), kind="gguf", cache=tmp_path / "cache")
    extra = TINY_LLAMA.layers * TINY_LLAMA.hidden
    assert found.spec.parameters == TINY_LLAMA.parameters + extra
    assert np.isfinite(gguf_logits(file, IDS)).all()
    with pytest.raises(
        UnsupportedModel, match=r"biased.gguf has the tensor blk.0.attn_output.bias"
    ):
        resolve(str(file), kind="onnx", cache=tmp_path / "cache")
    assert not [
        one for one in (tmp_path / "cache").rglob("*") if one.suffix != ".lock" and one.is_file()
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"GGUF", b"GGML", "is no GGUF file: it begins with b'GGML'"),
        (b"llama", b"lxama", "foreign.gguf: unknown model architecture: 'lxama'"),
        (b"gpt2", b"gpt9", "foreign.gguf: .*gpt9"),
        (b"token_embd.weight", b"token_embx.weight", "no embedding matrix token_embd.weight"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "no tensor blk.1.attn_q.weight"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_leaves_nothing(
    old: bytes,
    new: bytes,
    said: str,
    foreign: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    foreign.write_bytes(foreign.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=said) as problem:
        try_tokenizer(Path(resolve(str(foreign), kind="gguf", cache=tmp_path / "cache").path))
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "cache").exists()
    assert capfd.readouterr().err == ""
