"""Read a GGUF header without loading the file: metadata, tensor table, ModelSpec; and its floats.

    header = read_header(Path("model.gguf"))
    header.spec("model").parameters, header.weight_format     # (134515008, 'Q4_0')

Every tensor must lie within the file, else BrokenWeights.
"""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, LlamaFileType, dequantize

from models.errors import BrokenWeights, UnsupportedModel
from models.formats import gguf_file_formats, gguf_name
from models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows
from models.spec import ModelSpec, RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3")
MOST_LAYERS = 10_000
_KEPT_ARRAY = 64  # longer arrays are the tokenizer, and come back empty


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
        family = str(self.metadata.get("general.architecture"))
        own = {
            key.removeprefix(f"{family}."): value
            for key, value in self.metadata.items()
            if key.startswith(f"{family}.")
        }
        self._refuse_other_kinds(name, family, own)

        def count(key: str, default: int | None = None) -> int:
            value = own.get(key, default)
            if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
                value = max(value)  # one for each layer
            # A file from anywhere must not make a reader count to a billion.
            most = MOST_LAYERS if key == "block_count" else 1 << 31
            if not isinstance(value, int) or not 1 <= value <= most:
                raise UnsupportedModel(
                    f"{name} has {family}.{key} = {value!r}; it must be a whole number from 1 to "
                    f"{most}"
                )
            return value

        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BrokenWeights(f"{name} has no embedding matrix token_embd.weight")
        heads, hidden = count("attention.head_count"), count("embedding_length")
        key_dim = count("attention.key_length", hidden // heads)
        epsilons = [own.get(f"attention.layer_norm_{kind}epsilon") for kind in ("rms_", "")]
        spec = ModelSpec(
            name=name,
            family=family,
            layers=count("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=count("attention.head_count_kv", heads),
            head_dim=(key_dim + count("attention.value_length", key_dim) + 1) // 2,
            intermediate=count("feed_forward_length", 4 * hidden),
            vocabulary=embedding.shape[1],
            context=count("context_length"),
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

    def _refuse_other_kinds(self, name: str, family: str, own: dict[str, Any]) -> None:
        is_text = self.metadata.get("general.type", "model") == "model"
        recurrent = next((key for key in own if key.startswith(("ssm", "wkv"))), None)
        parts = self.metadata.get("split.count", 1)
        if not is_text or not own.get("attention.causal", True):
            raise UnsupportedModel(f"{name} is a GGUF file of {family!r} that writes no text")
        if parts > 1:
            raise UnsupportedModel(
                f"{name} is one part of {parts}; join them with llama.cpp's gguf-split first"
            )
        if recurrent is not None:
            raise UnsupportedModel(
                f"{name} keeps a recurrent state ({family}.{recurrent}), which cannot be cut back "
                "to a shared beginning as a KV cache can"
            )

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
        divisors = np.fromfile(self.path, "<f4", entry.bytes // 4, offset=entry.start)
        return RopeScaling(
            float(divisors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
        )


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header. Raises BrokenWeights (no GGUF, damaged, cut off)."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise BrokenWeights(f"{str(path)!r} is no GGUF file: it begins with {magic!r}")
    try:
        found = _Reader(path)
        metadata = {name: field.contents() for name, field in found.fields.items()}
    except (
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
        struct.error,
    ) as problem:
        raise BrokenWeights(f"{str(path)!r} is damaged or cut off: {problem}") from problem
    tensors = {
        one.name: TensorEntry(
            tuple(one.shape.tolist()), one.tensor_type.name, int(one.data_offset), int(one.n_bytes)
        )
        for one in found.tensors
    }
    return GgufHeader(str(path), metadata, tensors)


class _Reader(GGUFReader):  # type: ignore[misc]  # shipped without types
    """The gguf package's, which takes seconds for a vocabulary of 128,000: that is skipped here."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        of, count = struct.unpack_from("<IQ", self.data, orig_offs)
        if count <= _KEPT_ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        at = orig_offs + 12
        if of in self.gguf_scalar_to_np:
            at += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(of)]).itemsize
        else:
            for _ in range(count):
                at += 8 + struct.unpack_from("<Q", self.data, at)[0]
        return at - orig_offs, [], [], [GGUFValueType.ARRAY]


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
