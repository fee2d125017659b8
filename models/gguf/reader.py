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

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.gguf.layers import cached_layers, state_bytes
from crossover.models.shape.model_spec import Experts, ModelSpec, whole_number

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

    @property
    def family(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    @property
    def own_metadata(self) -> dict[str, Any]:
        """The keys of the architecture, without its name in front."""
        start = f"{self.family}."
        return {
            key.removeprefix(start): value
            for key, value in self.metadata.items()
            if key.startswith(start)
        }

    def spec(self, name: str) -> ModelSpec:
        """Return the model's shape, as far as it is needed to serve the model with llama.cpp. It
        does not tell whether llama.cpp can load the file; only trying it does.

        Raises UnsupportedModel if the model does not generate text, BrokenWeights.
        """
        self.check_generates_text(name)
        family, keys = self.family, self.own_metadata

        def count(key: str, default: int | None = None, minimum: int = 1) -> int:
            value = keys.get(key, default)
            if isinstance(value, list):
                value = max(value, default=0)  # one for each layer
            maximum = 10_000 if key == "block_count" else 1 << 31
            return whole_number(value, name, f"{family}.{key}", maximum, minimum)

        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BrokenWeights(f"{name} has no embedding matrix token_embd.weight")
        all_layers, hidden = count("block_count"), count("embedding_length")
        # Some layers only draft tokens for speculative decoding.
        draft_layers = min(all_layers - 1, count("nextn_predict_layers", 0, minimum=0))
        layers = all_layers - draft_layers
        heads = count("attention.head_count", 0, minimum=0)  # 0: no attention (Mamba, RWKV)
        key_dim = count("attention.key_length", hidden // heads if heads else 0, minimum=0)
        value_dim = count("attention.value_length", key_dim, minimum=0)
        tensors = self.tensors.values()
        shapes = {tensor.name: tensor.shape.tolist() for tensor in tensors}
        is_tied = "output.weight" not in self.tensors
        idle_tensors = [tensor for tensor in tensors if _is_idle(tensor.name, layers, is_tied)]
        return ModelSpec(
            name=name,
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=count("attention.head_count_kv", heads, minimum=0),
            head_dim=(key_dim + value_dim + 1) // 2,
            intermediate=count("feed_forward_length", 4 * hidden, minimum=0),
            vocabulary=int(embedding.shape[1]),
            context=count("context_length"),
            tied=is_tied,
            rope_theta=float(keys.get("rope.freq_base", 10_000.0)),
            counted_parameters=sum(int(tensor.n_elements) for tensor in tensors),
            idle_parameters=sum(int(tensor.n_elements) for tensor in idle_tensors),
            experts=self._experts(
                count=count("expert_count", 0, minimum=0),
                used=count("expert_used_count", 0, minimum=0),
            ),
            cached_layers=cached_layers(family, keys, shapes, layers),
            state_bytes_per_slot=state_bytes(keys, shapes, layers),
        )

    def check_generates_text(self, name: str) -> None:
        """Raise UnsupportedModel for a file that is not a model which generates text.

        Converters write `general.type` "mmproj" and "adapter"; files from before 2025 lack it, and
        are known by the architecture "clip" and by the key "adapter.type".
        """
        metadata, family = self.metadata, self.family
        kind = metadata.get("general.type", "model")
        if kind == "mmproj" or family == "clip":
            raise UnsupportedModel(
                f"{name} is a multimodal projector (mmproj), which is only one part of a model. "
                "Give the GGUF file of the language model that it belongs to, which is then served "
                "without images and audio."
            )
        if kind == "adapter" or "adapter.type" in metadata:
            adapter = "LoRA" if metadata.get("adapter.type", "lora") == "lora" else "control"
            base = metadata.get("general.base_model.0.name")
            raise UnsupportedModel(
                f"{name} is a {adapter} adapter of the architecture {family!r}, not a model. Merge "
                f"it into its base model{f' {base}' if base else ''} with llama.cpp's "
                "llama-export-lora, and give the merged GGUF file."
            )
        if kind != "model":
            raise UnsupportedModel(f"{name} is a GGUF file of the type {kind!r}, not a model")
        if "general.architecture" not in metadata:
            raise UnsupportedModel(f"{name} does not have general.architecture, so it is no model")
        if not self.own_metadata.get("attention.causal", True):
            raise UnsupportedModel(
                f"{name} is a GGUF file of the architecture {family!r}, which generates no text"
            )

    def _experts(self, count: int, used: int) -> Experts | None:
        """Return the experts with their sizes; None: a dense model. `count`, `used`: see
        Routing."""
        tensors = [
            tensor for tensor in self.tensors.values() if re.search(r"_(ch)?exps\.", tensor.name)
        ]
        if not (tensors and count and used):
            return None
        return Experts(
            count=count,
            used=min(used, count),
            parameters=sum(int(tensor.n_elements) for tensor in tensors),
            weight_bytes=sum(int(tensor.n_bytes) for tensor in tensors),
        )


def _is_idle(tensor: str, layers: int, is_tied: bool) -> bool:
    """Return whether generating a token multiplies nothing with this tensor.

    That is so for embeddings, which are looked up row by row, and for the layers after the first
    `layers`, which only draft tokens. `is_tied`: the token embeddings are the output matrix too.
    """
    if tensor == "token_embd.weight":
        return not is_tied
    if tensor.startswith("blk."):
        return int(tensor.split(".")[1]) >= layers
    return tensor in ("per_layer_token_embd.weight", "position_embd.weight")


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
