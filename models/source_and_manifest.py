"""Both ends of a conversion: the source's shape, and the finished files with their manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec

from models.compare_logits import Comparison
from models.errors import BrokenWeights
from models.hf_config import read_config, spec_of, v4_config
from models.manifest import Manifest, converter, file_facts, read_manifest, write_manifest
from models.spec import ModelSpec

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("generation_config.json", "special_tokens_map.json"),
)


class Result(msgspec.Struct, frozen=True):
    """What a conversion made: for the manifest."""

    kind: str  # gguf, hf, onnx
    weight_format: str
    spec: ModelSpec
    quality: Comparison | None  # with the float model, on text; None: not measured


def source_spec(source: Path, wanted: ModelSpec | None) -> ModelSpec:
    """The shape of the source folder. Raises BrokenWeights where it is not the `wanted` one."""
    found = spec_of(read_config(source), source.name)
    if wanted is None:
        return found
    differences = [
        f"{key} {getattr(found, key)} and not {getattr(wanted, key)}"
        for key in found.__struct_fields__
        if key != "name" and getattr(found, key) != getattr(wanted, key)
    ]
    if differences:
        raise BrokenWeights(
            f"{source.name} does not hold {wanted.name}: config.json says {', '.join(differences)}"
        )
    return wanted


def copy_texts(source: Path, folder: Path) -> None:
    """The config in transformers 4's words and the source's own tokenizer files, into `folder`."""
    config = json.dumps(v4_config(read_config(source)), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def manifest_of(source: Path, files: dict[str, Path], result: Result) -> Manifest:
    """The manifest of converted weights. `files`: name in the manifest -> file.

    Random weights say nothing of what a format costs trained ones: they get no quality.
    """
    before = read_manifest(source)
    quality = result.quality if before is None or before.seed is None else None
    return Manifest(
        kind=result.kind,
        spec=result.spec,
        weight_format=result.weight_format,
        source=before.source if before is not None else source.name,
        files={name: file_facts(file) for name, file in files.items()},
        generator=converter(result.kind),
        seed=before.seed if before is not None else None,
        quality_kl_nats=None if quality is None else quality.kl_nats,
        greedy_agreement=None if quality is None else quality.agreement,
    )


def write_folder_manifest(source: Path, folder: Path, result: Result) -> None:
    """The manifest of a converted folder, written last."""
    files = {file.name: file for file in sorted(folder.iterdir())}
    write_manifest(folder, manifest_of(source, files, result))
