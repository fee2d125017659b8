"""Reads the header of a GGUF file without loading it: metadata, tensor table, ModelSpec.

    header = read_header(Path("model.gguf"))
    header.spec("model").parameters, header.weight_format     # (134515008, 'Q4_0')

A model that gguf-split has divided into several files (`x-00001-of-00003.gguf`) is read as a whole,
by the name of any part. If a tensor does not lie within its file, BrokenWeights is raised.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFValueType, LlamaFileType, ReaderTensor

from crossover.models.errors import BrokenWeights
from crossover.models.gguf.header import is_of_experts, spec_of_header
from crossover.models.shape.model_spec import ModelSpec

MAX_ARRAY = 1024  # values; longer arrays are the tokenizer's, and are read as empty ones
MAX_PARTS = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"


def is_gguf_file(path: Path) -> bool:
    """Return whether a file begins like a GGUF file, whatever its name is."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split model, in order, if `name` is one of them; otherwise
    only `name`. It may be a path or a name on the hub, whose folders are kept."""
    folder, slash, file = name.rpartition("/")
    match = _PART.fullmatch(file)
    if match is None or not 1 <= int(match["count"]) <= MAX_PARTS:
        return [name]
    count = int(match["count"])
    stem = f"{folder}{slash}{match['stem']}"
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def model_name(path: Path) -> str:
    """Return the name of a file's model: the file's name without its suffix and the number of a
    part."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match is not None else path.stem


class GgufHeader(NamedTuple):
    """The metadata (without long arrays) and the tensors of a GGUF model, from all its files."""

    files: tuple[Path, ...]  # the parts of a split model, in order; llama.cpp loads the first
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def weight_format(self) -> str:
        """llama.cpp's name of the file type ("Q4_K_M"), or else the type of the largest tensor."""
        with suppress(ValueError):
            kind = str(LlamaFileType(self.metadata.get("general.file_type")).name)
            return kind.removeprefix("ALL_").removeprefix("MOSTLY_")
        largest = max(self.tensors.values(), key=lambda tensor: int(tensor.n_bytes))
        return str(largest.tensor_type.name)

    def spec(self, name: str) -> ModelSpec:
        """Return the model's shape, as `spec_of_header` does. Raises UnsupportedModel,
        BrokenWeights."""
        shapes = {tensor.name: tensor.shape.tolist() for tensor in self.tensors.values()}
        expert_bytes = sum(
            int(tensor.n_bytes) for tensor in self.tensors.values() if is_of_experts(tensor.name)
        )
        return spec_of_header(self.metadata, shapes, name, expert_bytes)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, or of all parts of a split model.

    Raises BrokenWeights if it is not a GGUF file, is damaged or truncated, or lacks a part.
    """
    files = [Path(name) for name in part_names(str(path))]
    for number, file in enumerate(files, 1):
        if not file.is_file():
            raise BrokenWeights(
                f"{path.name} is one of {len(files)} files of a model, but part {number}, "
                f"{file.name}, is missing from its folder"
            )
    contents = [_read(file) for file in files]
    metadata = contents[0][0]
    parts = metadata.get("split.count", 1)
    if parts > 1 and parts != len(files):
        raise BrokenWeights(
            f"{path.name} is one of {parts} files of a model by its header, but not by its name. "
            f"llama.cpp finds the other parts only by names such as x-00001-of-{parts:05}.gguf."
        )
    if len(files) > 1:
        for index, (part_metadata, _) in enumerate(contents):
            count, own_index = part_metadata.get("split.count"), part_metadata.get("split.no")
            if (count, own_index) != (parts, index):
                raise BrokenWeights(
                    f"The name of {files[index].name} is wrong: its header says that it is part "
                    f"{part_metadata.get('split.no', 0) + 1} of "
                    f"{part_metadata.get('split.count', 1)}"
                )
    tensors = {tensor.name: tensor for _, part_tensors in contents for tensor in part_tensors}
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BrokenWeights(f"{path.name} has {len(tensors)} tensors in all its parts, not {total}")
    return GgufHeader(tuple(files), metadata, tensors)


def _read(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    """Return the metadata and the tensors of one file. Raises BrokenWeights."""
    # What the gguf package raises for damaged files.
    errors = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error)
    try:
        reader = _Reader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except errors as problem:
        raise BrokenWeights(
            f"{str(path)!r} is not a GGUF file, or is damaged or truncated: {problem}"
        ) from problem


class _Reader(GGUFReader):  # type: ignore[misc]  # shipped without types
    """The gguf package's reader, which takes seconds for a vocabulary of 128,000 tokens. This one
    skips arrays that are longer than MAX_ARRAY."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type == GGUFValueType.ARRAY:
            # An array is a uint32 with the type of its values, a uint64 with their number, and the
            # values. A string is a uint64 with its length, and its bytes.
            value_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > MAX_ARRAY:
                offset = orig_offs + 12
                if value_type in self.gguf_scalar_to_np:
                    scalar = self.gguf_scalar_to_np[GGUFValueType(value_type)]
                    offset += count * np.dtype(scalar).itemsize
                else:
                    for _ in range(count):
                        offset += 8 + struct.unpack_from("<Q", self.data, offset)[0]
                return offset - orig_offs, [], [], [GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
