"""Reads the header of a GGUF file without loading it: metadata, tensor table, ModelSpec.

    header = read_header(Path("model.gguf"))
    header.spec("model").parameters, header.weight_format     # (134515008, 'Q4_0')

A model that gguf-split has divided into several files (`x-00001-of-00003.gguf`) is read as a whole,
by the name of any part. If a tensor does not lie within its file, BrokenWeights is raised.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from crossover.models.errors import BrokenWeights
from crossover.models.gguf.header import is_of_experts, spec_of_header
from crossover.models.shape.model_spec import ModelSpec, whole_number
from crossover.models.stand_in_file import stand_in_words

if TYPE_CHECKING:  # each server and engine starts without it, if its model is no GGUF file
    from gguf import GGMLQuantizationType

# Bounds of a header, since it comes from a stranger and is read in this process. Published files
# have less than 100 keys, 2,000 tensors, 20 MB, and 800,000 strings of a tokenizer with its merges.
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 4_000_000  # in arrays
MAX_ARRAY = 1024  # values; longer arrays are read as empty ones, and so are all arrays of strings
MAX_TEXT_BYTES = 4096  # the rest of a longer text is not read
MAX_NAME_BYTES = 256  # of a key or tensor
MAX_DIMENSIONS = 4
MAX_PARTS = 1000
_VERSIONS = (2, 3)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9  # types of values, as _SCALARS has the others
_DEFAULT_ALIGNMENT = 32
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"


def is_gguf_file(path: Path) -> bool:
    """Return whether a file begins like a GGUF file, whatever its name is."""
    try:
        if not path.is_file():  # opening a pipe waits for its writer, and a device may act
            return False
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


class GgufTensor(NamedTuple):
    """One entry of the tensor table. `shape`: the length of a row comes first."""

    name: str
    shape: tuple[int, ...]
    tensor_type: GGMLQuantizationType

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        block_elements: int
        block_bytes: int
        block_elements, block_bytes = GGML_QUANT_SIZES[self.tensor_type]
        return self.n_elements // block_elements * block_bytes


class GgufHeader(NamedTuple):
    """The metadata (without long arrays and texts) and the tensors of a GGUF model, from all its
    files."""

    files: tuple[Path, ...]  # the parts of a split model, in order; llama.cpp loads the first
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def weight_format(self) -> str:
        """llama.cpp's name of the file type ("Q4_K_M"), or else the type of the largest tensor."""
        from gguf import LlamaFileType

        with suppress(ValueError):
            kind = str(LlamaFileType(self.metadata.get("general.file_type")).name)
            return kind.removeprefix("ALL_").removeprefix("MOSTLY_")
        largest = max(self.tensors.values(), key=lambda tensor: tensor.n_bytes)
        return str(largest.tensor_type.name)

    def spec(self, name: str) -> ModelSpec:
        """Return the model's shape, as `spec_of_header` does. Raises UnsupportedModel,
        BrokenWeights."""
        tensors = self.tensors.values()
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        expert_bytes = sum(tensor.n_bytes for tensor in tensors if is_of_experts(tensor.name))
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
    parts = _part_number(metadata, "split.count", 1)
    if parts > 1 and parts != len(files):
        raise BrokenWeights(
            f"{path.name} is one of {parts} files of a model by its header, but not by its name. "
            f"llama.cpp finds the other parts only by names such as x-00001-of-{parts:05}.gguf."
        )
    if len(files) > 1:
        for index, (part_metadata, _) in enumerate(contents):
            count = _part_number(part_metadata, "split.count", 1)
            own_index = _part_number(part_metadata, "split.no", 0)
            if (count, own_index) != (parts, index):
                raise BrokenWeights(
                    f"The name of {files[index].name} is wrong: its header says that it is part "
                    f"{own_index + 1} of {count}"
                )
    tensors = {tensor.name: tensor for _, part_tensors in contents for tensor in part_tensors}
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BrokenWeights(f"{path.name} has {len(tensors)} tensors in all its parts, not {total}")
    return GgufHeader(tuple(files), metadata, tensors)


def _part_number(metadata: dict[str, Any], key: str, default: int) -> int:
    """Return a number of a split model's header. Raises UnsupportedModel."""
    return whole_number(metadata.get(key, default), "The header", key, 65_535, 0)


def _read(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Return the metadata and the tensors of one file. Raises BrokenWeights."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except (ValueError, struct.error) as problem:
        raise BrokenWeights(
            stand_in_words(path)
            or f"{str(path)!r} is not a GGUF file, or is damaged or truncated: {problem}"
        ) from problem


class _Reader:
    """Reads a header from the start of a file. Its methods raise ValueError and struct.error.

    Unlike the reader of the gguf package, which makes several arrays of each value, it counts
    before it reads and skips the tokenizer. A file of 16 MiB can have a million keys.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._strings_left = MAX_STRINGS

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        """Return the metadata and the tensors, all of which lie in the file."""
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._position = len(_MAGIC)
        version, tensor_count, key_count = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        _check("tensors", tensor_count, MAX_TENSORS)
        _check("keys", key_count, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name()
            if key in metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind)
        tensors: dict[str, GgufTensor] = {}
        end = 0  # of the data of all tensors
        for _ in range(tensor_count):
            tensor, offset = self._tensor()
            if tensor.name in tensors:
                raise ValueError(f"the tensor {tensor.name!r} occurs twice")
            tensors[tensor.name] = tensor
            end = max(end, offset + tensor.n_bytes)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        alignment = whole_number(alignment, "The header", "general.alignment", 1 << 16)
        start = -(-self._position // alignment) * alignment
        if tensors and start + end > len(self._data):
            raise ValueError(
                f"its tensors end at byte {start + end}, but it has {len(self._data)} bytes"
            )
        return metadata, list(tensors.values())

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._skip(struct.calcsize(layout))
        return values

    def _skip(self, size: int) -> None:
        self._position += size
        if self._position > min(len(self._data), MAX_HEADER_BYTES):
            raise ValueError(f"its header ends neither in the file nor in {MAX_HEADER_BYTES} bytes")

    def _name(self) -> str:
        (size,) = self._unpack("<Q")
        _check("bytes of a name", size, MAX_NAME_BYTES)
        start = self._position
        self._skip(size)
        return self._data[start : self._position].decode()

    def _text(self) -> str:
        (size,) = self._unpack("<Q")
        start = self._position
        self._skip(size)
        return self._data[start : start + min(size, MAX_TEXT_BYTES)].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"a value has the type {kind}, which does not exist")
        return self._unpack(f"<{_SCALARS[kind]}")[0]

    def _array(self) -> list[Any]:
        """Return an array; [] if it is long, or has strings."""
        kind, count = self._unpack("<IQ")
        if kind == _STRING:
            self._strings_left -= count
            if self._strings_left < 0:
                raise ValueError(f"its arrays have more than {MAX_STRINGS} strings")
            for _ in range(count):
                self._skip(self._unpack("<Q")[0])
            return []
        if kind not in _SCALARS:
            raise ValueError(f"an array has values of the type {kind}")
        if count > MAX_ARRAY:
            self._skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            return []
        return list(self._unpack(f"<{count}{_SCALARS[kind]}"))

    def _tensor(self) -> tuple[GgufTensor, int]:
        """Return an entry of the tensor table, and where its data begins."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._name()
        (dimensions,) = self._unpack("<I")
        _check("dimensions of a tensor", dimensions, MAX_DIMENSIONS)
        *shape, kind, offset = self._unpack(f"<{dimensions}QIQ")
        tensor = GgufTensor(name, tuple(shape), GGMLQuantizationType(kind))
        block_elements, _ = GGML_QUANT_SIZES[tensor.tensor_type]
        if tensor.n_elements % block_elements:
            raise ValueError(f"{name!r} has no whole blocks of the type {tensor.tensor_type.name}")
        return tensor, offset


def _check(what: str, count: int, maximum: int) -> None:
    if count > maximum:
        raise ValueError(f"it has {count} {what}; the maximum is {maximum}")
