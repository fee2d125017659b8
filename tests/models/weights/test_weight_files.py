"""Which files of a folder, or of a hub's repository, are the model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from crossover.models.errors import BrokenWeights, ModelError
from crossover.models.identity.resolve_model import resolve
from crossover.models.shape.hf_config import read_config
from crossover.models.weights.safetensors_reader import INDEX, read_tensors, weight_files
from crossover.models.weights.weights_manifest import cache_dir, expand_home

TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = ["consolidated.safetensors", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("files", "index", "weights"),
    [
        (["model.safetensors"], None, ["model.safetensors"]),
        (["model.safetensors", *OTHERS], None, ["model.safetensors"]),
        (["model.safetensors", "second.safetensors"], None, ["model.safetensors"]),
        ([*TWO, *OTHERS], TWO, TWO),
        ([*TWO, "model.safetensors"], TWO, TWO),
        (["mine.safetensors", *OTHERS], None, ["mine.safetensors"]),
        (OTHERS, None, []),
    ],
)
def test_the_weights_of_a_folder(
    tmp_path: Path, files: list[str], index: list[str] | None, weights: list[str]
) -> None:
    for name in files:
        save_file({name: np.zeros(2, np.float32)}, tmp_path / name)
    if index is not None:
        found = {"weight_map": {name: name for name in index}}
        (tmp_path / INDEX).write_text("\ufeff" + json.dumps(found), encoding="utf-8")
    assert weight_files(tmp_path) == weights
    if weights:
        assert sorted(read_tensors(tmp_path)) == weights


@pytest.mark.parametrize("index", ["[", "{}", '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(BrokenWeights, match=INDEX):
        weight_files(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": TWO[0]}}))
    with pytest.raises(BrokenWeights, match=TWO[0]):
        read_tensors(tmp_path)


def test_only_files_that_the_index_names_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    patterns: list[list[str]] = []
    has_index = False

    def snapshot(repository: str, allow_patterns: list[str], **_: Any) -> str:
        patterns.append(allow_patterns)
        if INDEX in allow_patterns and has_index:
            found = {"weight_map": {"a": TWO[0], "b": TWO[1]}}
            (tmp_path / INDEX).write_text(json.dumps(found))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for wanted in (["model.safetensors"], TWO):
        patterns.clear()
        with pytest.raises(ModelError):  # there is no config.json
            resolve("org/name", kind="hf")
        fetched = {one for names in patterns for one in names if one.endswith(".safetensors")}
        assert fetched == {*wanted} and not any("*.safetensors" in names for names in patterns)
        has_index = True


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('\ufeff{"model_type": "llama"}', encoding="utf-8")
    assert read_config(tmp_path) == {"model_type": "llama"}


def test_without_a_home_there_is_a_sentence_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pwd

    def nobody(_: Any) -> Any:
        raise KeyError("uid not found")

    for name in ("HOME", "CROSSOVER_CACHE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(ModelError, match="--cache"):
        cache_dir()
    with pytest.raises(ModelError, match="--cache"):
        cache_dir("~/weights")
    assert cache_dir("/weights") == Path("/weights")
    assert expand_home("~/x") == Path("~/x")
    for name in ("~/model.gguf", "~nobody/model"):
        with pytest.raises(ModelError):
            resolve(name, kind="gguf")
    from crossover.reports.devices.device_catalog import user_file

    assert not user_file().exists()
