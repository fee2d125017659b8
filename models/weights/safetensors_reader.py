"""Reads the safetensors of a folder: names, shapes, types, completeness, and rows as floats."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.stand_in_file import stand_in_words

Floats = npt.NDArray[np.float32]
# (name, first, last) -> rows first..last-1 of a matrix, or elements of a vector. `name`: the tensor
# by its Hugging Face name. If head and embedding are tied, lm_head.weight is the embedding.
Rows = Callable[[str, int, int], Floats]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Starts of the names of files that are not the model's weights: LoRA adapters, and Mistral's second
# copy of the same weights.
_NO_WEIGHTS = ("adapter_", "consolidated")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the folder's weights.

    Those are the files that the index names, or else model.safetensors, or else all safetensors
    except adapters and second copies of the weights. Raises BrokenWeights.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            text = index.read_bytes().removeprefix(codecs.BOM_UTF8)
            file_names = set(msgspec.json.decode(text, type=_Index).weight_map.values())
        except (ValueError, OSError) as problem:
            raise BrokenWeights(f"{str(index)!r} cannot be read: {problem}") from problem
        for name in file_names:
            if Path(name).name != name:
                raise BrokenWeights(
                    f"{str(index)!r} names {name[:200]!r}, which is not a file name"
                )
        if file_names:
            return sorted(file_names)
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    return [name for name in names if not name.startswith(_NO_WEIGHTS)]


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the folder's weights, by name. Raises UnsupportedModel,
    BrokenWeights."""
    files = [folder / name for name in weight_files(folder)]
    if not files:
        raise UnsupportedModel(
            f"{str(folder)!r} has no *.safetensors. Other weights (.bin, .pt) can contain code, so "
            "they are not read."
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise BrokenWeights(f"{INDEX} of {folder.name} names {file.name}, which is missing")
        file.open("rb").close()  # without read permission, the library reports a missing file
        try:
            with safe_open(file, "np") as opened:  # compares the header with itself and the size
                for name in opened.keys():
                    tensor = opened.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    tensors[name] = StoredTensor(file, tensor.get_dtype(), shape)
        except SafetensorError as problem:
            raise BrokenWeights(
                stand_in_words(file)
                or f"{str(file)!r} is not a complete safetensors file: {problem}"
            ) from problem
    return tensors


def check_tensors(folder: Path, spec: ModelSpec) -> str:
    """Check that the folder has all tensors of a model of this shape. Return the format of the
    embedding: fp32, fp16 or bf16.

    Raises BrokenWeights, which names the missing or different tensor, and UnsupportedModel.
    """
    tensors = read_tensors(folder)
    for tensor in spec.tensors():
        stored = tensors.get(tensor.name)
        if stored is None or stored.shape != tensor.shape:
            has = "missing" if stored is None else f"of shape {stored.shape}"
            raise BrokenWeights(
                f"The tensor {tensor.name} of {folder.name} is {has}, but config.json says "
                f"{tensor.shape}"
            )
        if stored.dtype not in FORMATS:
            raise UnsupportedModel(
                f"The tensor {tensor.name} of {folder.name} is of type {stored.dtype}; supported: "
                f"{', '.join(FORMATS)}"
            )
    return FORMATS[tensors[EMBEDDING].dtype]


def stored_rows(folder: Path, spec: ModelSpec) -> Rows:
    """Return a function that reads rows of the folder's tensors. The files are memory-mapped, and
    no rows are kept."""
    import ml_dtypes  # noqa: F401  # adds bfloat16 to numpy

    files = {name: tensor.file for name, tensor in read_tensors(folder).items()}
    opened: dict[Path, Any] = {file: safe_open(file, "np") for file in set(files.values())}

    def rows(name: str, first: int, last: int) -> Floats:
        name = EMBEDDING if spec.tied and name == HEAD else name
        floats: Floats = opened[files[name]].get_slice(name)[first:last].astype(np.float32)
        return floats

    return rows
