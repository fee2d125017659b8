"""Read a GGUF header without loading the file: metadata, tensor table, ModelSpec.

    header = read_header(Path("model.gguf"))
    header.spec("model").parameters, header.weight_format     # (134515008, 'Q4_0')

Every length is checked before use, every tensor must lie within the file; else BrokenWeights with
the position. Layout: ggml/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, dequantize

from models.errors import BrokenWeights, UnsupportedModel
from models.formats import gguf_file_formats, gguf_name
from models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows
from models.spec import ModelSpec, RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3")
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # struct's codes
_STRING, _ARRAY = 8, 9
MOST_LAYERS = 10_000
_MOST_ENTRIES = 1 << 24  # of one array, and of the metadata and tensor tables
_KEPT_ARRAY = 64  # longer arrays are the tokenizer


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor: shape (row length first), ggml type, place in the file in bytes."""

    shape: tuple[int, ...]
    type: str
    start: int
    bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """Metadata (long arrays left out) and tensors of a GGUF file that holds them all."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def weight_format(self) -> str:
        """llama.cpp's name of the file's mixture ("Q4_K_M"), or the type that most bytes have."""
        with suppress(ValueError):
            kind = LlamaFileType(self.metadata.get("general.file_type"))
            name = str(kind.name).removeprefix("ALL_").removeprefix("MOSTLY_")
            if name in gguf_file_formats():
                return name
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.bytes
        return max(sizes, key=sizes.__getitem__)

    def spec(self, name: str) -> ModelSpec:
        """The model's shape, as far as serving it with llama.cpp needs it.

        `counted_parameters` is set where only llama.cpp knows what the tensors mean. Raises
        UnsupportedModel (no text comes out of it), BrokenWeights (contradiction).
        """
        family = str(self._need("general.architecture"))
        own = {
            key.removeprefix(f"{family}."): value
            for key, value in self.metadata.items()
            if key.startswith(f"{family}.")
        }
        is_text = self.metadata.get("general.type", "model") == "model"
        if not is_text or not own.get("attention.causal", True):
            raise UnsupportedModel(f"{name} is a GGUF file of {family!r} that writes no text")
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(
                f"{name} is one part of {self.metadata['split.count']}; join them with llama.cpp's "
                "gguf-split first"
            )
        recurrent = next((key for key in own if key.startswith(("ssm", "wkv"))), None)
        if recurrent is not None:
            raise UnsupportedModel(
                f"{name} keeps a recurrent state ({family}.{recurrent}), which cannot be cut back "
                "to a shared beginning as a KV cache can"
            )
        heads = self._count(f"{family}.attention.head_count")
        hidden = self._count(f"{family}.embedding_length")
        key_dim = self._count(f"{family}.attention.key_length", hidden // heads)
        value_dim = self._count(f"{family}.attention.value_length", key_dim)
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BrokenWeights(f"{name} has no embedding matrix token_embd.weight")
        epsilons = [own.get(f"attention.layer_norm_{kind}epsilon") for kind in ("rms_", "")]
        spec = ModelSpec(
            name=name,
            family=family,
            layers=self._count(f"{family}.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._count(f"{family}.attention.head_count_kv", heads),
            head_dim=(key_dim + value_dim + 1) // 2,
            intermediate=self._count(f"{family}.feed_forward_length", 4 * hidden),
            vocabulary=embedding.shape[1],
            context=self._count(f"{family}.context_length"),
            tied="output.weight" not in self.tensors,
            rope_theta=float(own.get("rope.freq_base", 10_000.0)),
            norm_epsilon=float(f"{next(filter(None, epsilons), 1e-5):.6g}"),
            qkv_bias="blk.0.attn_q.bias" in self.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.tensors,
            rope_scaling=self._rope_scaling(),
        )
        if family in FAMILIES and not own.get("expert_count"):
            shapes = {name: one.shape[::-1] for name, one in self.tensors.items()}
            spec.check_shapes(shapes, "its metadata", gguf_name)
        if self.unknown_part(spec) is None:
            return spec
        counted = sum(math.prod(tensor.shape) for tensor in self.tensors.values())
        return msgspec.structs.replace(spec, counted_parameters=counted)

    def unknown_part(self, spec: ModelSpec) -> str | None:
        """What transformers' classes of FAMILIES do not have; None: nothing."""
        if spec.family not in FAMILIES:
            return f"the architecture {spec.family!r}"
        known = {gguf_name(tensor.name) for tensor in spec.tensors()} | {"rope_freqs.weight"}
        others = (name for name in self.tensors if name not in known)
        return next(
            (f"the tensor {name}" for name in others if not name.endswith("rot_embd")), None
        )

    def _rope_scaling(self) -> RopeScaling | None:
        """Llama 3's scaling. The file holds divisors: the largest is the factor."""
        entry = self.tensors.get("rope_freqs.weight")
        if entry is None or entry.type != "F32":
            return None
        with Path(self.path).open("rb") as stream:
            stream.seek(entry.start)
            factors = struct.unpack(f"<{entry.bytes // 4}f", stream.read(entry.bytes))
        return RopeScaling(
            factor=max(factors), low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
        )

    def _need(self, key: str) -> Any:
        if key not in self.metadata:
            raise BrokenWeights(f"{Path(self.path).name} lacks the metadata key {key}")
        return self.metadata[key]

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._need(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            value = max(value)  # one for each layer
        # A file from anywhere must not make a reader count to a billion.
        most = MOST_LAYERS if key.endswith(".block_count") else 1 << 31
        if not isinstance(value, int) or not 1 <= value <= most:
            raise UnsupportedModel(
                f"{Path(self.path).name} has {key} = {value!r}; it must be a whole number from 1 "
                f"to {most}"
            )
        return value


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header. Raises BrokenWeights (no GGUF, damaged, cut off)."""
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _read(path, _Cursor(path, data))
    except ValueError as problem:  # an empty file cannot be mapped
        raise BrokenWeights(f"{str(path)!r} is no GGUF file: {problem}") from problem


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise BrokenWeights(f"{str(path)!r} is no GGUF file: it begins with {magic!r}")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise BrokenWeights(f"{str(path)!r} is GGUF version {version}; versions 2 and 3 are known")
    tensor_count, metadata_count = cursor.count(), cursor.count()
    metadata = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = dict(_tensor_entry(cursor) for _ in range(tensor_count))
    if len(tensors) != tensor_count:
        raise BrokenWeights(f"{str(path)!r} has two tensors of one name")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise BrokenWeights(f"{str(path)!r} has general.alignment = {alignment!r}")
    first = -(-cursor.position // alignment) * alignment
    for name, entry in tensors.items():
        start = first + entry.start
        if start + entry.bytes > cursor.size:
            raise BrokenWeights(
                f"{str(path)!r} is cut off: tensor {name} ends at byte {start + entry.bytes}, the "
                f"file at {cursor.size}"
            )
        tensors[name] = msgspec.structs.replace(entry, start=start)
    return GgufHeader(str(path), metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, TensorEntry]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= 4:
        raise cursor.broken(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    number, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.broken(f"tensor {name} is of type {number}, which is not known") from None
    weights, size = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if not 0 < elements < 1 << 48 or shape[0] % weights:
        raise cursor.broken(f"tensor {name} of type {kind.name} has the impossible shape {shape}")
    return name, TensorEntry(shape, kind.name, offset, elements // weights * size)


def gguf_rows(header: GgufHeader, spec: ModelSpec) -> Rows:
    """Reads the floats that the file's blocks stand for, in transformers' order of rows.

    Raises UnsupportedModel where transformers' classes have not all parts of the model.
    """
    part = header.unknown_part(spec)
    if part is not None:
        raise UnsupportedModel(
            f"{Path(header.path).name} has {part}, which is served by llama_cpp only; for another "
            "engine give the model's folder of safetensors"
        )
    is_rotated = header.metadata["general.architecture"] == "llama"

    def rows(name: str, first: int, last: int) -> Floats:
        entry = header.tensors[gguf_name(EMBEDDING if spec.tied and name == HEAD else name)]
        at = np.arange(first, last)
        if is_rotated and name.endswith(("q_proj.weight", "k_proj.weight")):
            at = paired_rows(at, spec.head_dim)
        width = entry.shape[0] if len(entry.shape) == 2 else 1
        kind = GGMLQuantizationType[entry.type]
        count = math.prod(entry.shape) // width
        raw = np.memmap(header.path, np.uint8, "r", entry.start, (count, entry.bytes // count))
        try:
            values: Floats = dequantize(raw[at], kind).astype(np.float32, copy=False)
        except NotImplementedError as problem:
            raise UnsupportedModel(
                f"tensor {name} of {Path(header.path).name} is of type {entry.type}, whose floats "
                "only llama.cpp can read"
            ) from problem
        return values if len(entry.shape) == 2 else values.reshape(-1)

    return rows


def paired_rows(at: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """Where llama.cpp has these rows of a query or key matrix: it rotates neighbours of a head,
    transformers the head's first half with its second."""
    half = head_dim // 2
    head, inside = np.divmod(at, head_dim)
    there: npt.NDArray[np.int64] = head * head_dim + 2 * (inside % half) + inside // half
    return there


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.size = len(data)
        self.position = 0

    def broken(self, what: str) -> BrokenWeights:
        return BrokenWeights(f"{str(self._path)!r} is damaged near byte {self.position}: {what}")

    def skip(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        if size > self.size - self.position:
            raise BrokenWeights(
                f"{str(self._path)!r} is cut off within its header at byte {self.size}"
            )
        self.position += size
        return self.position - size

    def take(self, size: int) -> bytes:
        begin = self.skip(size)
        return self._data[begin : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        found: int = self.scalar("Q")
        if found > _MOST_ENTRIES:
            raise self.broken(f"it claims {found} entries")
        return found

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """A metadata value; long arrays are walked over and come back as None."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.broken(f"metadata of type {kind}, which is not known")
        of, count = self.scalar("I"), self.count()
        is_kept = count <= _KEPT_ARRAY
        if of in _SCALARS:
            code = f"<{count}{_SCALARS[of]}"
            raw = self.take(struct.calcsize(code))
            return list(struct.unpack(code, raw)) if is_kept else None
        if of != _STRING:
            raise self.broken(f"an array of type {of}, which is not known")
        if is_kept:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.skip(self.scalar("Q"))
        return None
