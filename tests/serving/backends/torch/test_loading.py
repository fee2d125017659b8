"""Loading a folder with torch: shards, memory, options, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.serving.errors import Unsupported
from tests.serving.backends.backend_steps import Make, generate, prompt_of
from tests.serving.backends.hf_folders import generated, hf_folder
from tests.shapes import TINY_LLAMA3


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


def test_torch_has_the_private_operators_that_are_called() -> None:
    """Without them, bf16 weights take float32 on every CPU, and GPUs the slower attention."""
    assert callable(torch.ops.mkldnn._is_mkldnn_bf16_supported)
    assert callable(torch.ops.aten._flash_attention_forward)


def test_sharded_folders_are_read_whole(make: Make, tmp_path: Path) -> None:
    source = hf_folder("tiny-llama3")
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    for shard, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{shard}.safetensors")
    backend = make(folder)
    prompt = prompt_of(backend, 20, 9)
    assert generate(backend, prompt, 4) == generated(source)(prompt, 4)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(BrokenWeights, match="sharded lacks the tensor"):
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
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(UnsupportedModel, match="'mixtral'"):
        make(folder)
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "mistral", "sliding_window": None})
    )
    (folder / "crossover.json").unlink()
    prompt = [5, 9, 100, 33]
    assert generate(make(folder), prompt, 5) == generated(hf_folder("tiny-llama"))(
        prompt, 5
    )  # the same mathematics


def test_settings_that_it_cannot_do_are_refused(make: Make) -> None:
    folder = hf_folder("tiny-llama")
    for settings, words in (
        ({"weight_format": "Q4_0"}, "'Q4_0'"),
        ({"weight_format": "fp16"}, "'fp16' on this device. Formats: fp32, bf16"),
        ({"context_tokens": 4096}, "4096"),
        ({"kv_dtype": "q8_0"}, "q8_0"),
        ({"weight_format": "fp32", "kv_dtype": "fp16"}, "kv_dtype fp16 is not available; .* fp32"),
        ({"options": {"graph": "true"}}, "no option 'graph'"),
    ):
        with pytest.raises(Unsupported, match=words):
            make(folder, **settings)
