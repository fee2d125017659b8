"""Read a GGUF header without loading the file: metadata, tensor table, ModelSpec.

    header = read_header(Path("model.gguf"))
    header.spec("model").parameters, header.weight_format     # (134515008, 'Q4_0')

A model that gguf-split has cut into several files (`x-00001-of-00003.gguf`) is read whole, by the
name of any part. Every tensor must lie within its file, else BrokenWeights.
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
from crossover.models.gguf_layers import cached_layers, state_bytes
from crossover.models.model_spec import Experts, ModelSpec, whole_number

MAX_ARRAY = 1024  # values; longer arrays are the tokenizer's and come back empty
MAX_PARTS = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"


def is_gguf_file(path: Path) -> bool:
    """Return whether a file begins as a GGUF file does, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def part_names(name: str) -> list[str]:
    """Return the file names of all parts of a split model, the first one first; of any other file,
    its own name. A path or a name on the hub keeps its folders."""
    folder, slash, file = name.rpartition("/")
    match = _PART.fullmatch(file)
    if match is None or not 1 <= int(match["count"]) <= MAX_PARTS:
        return [name]
    count = int(match["count"])
    numbered = (f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    return [f"{folder}{slash}{one}" for one in numbered]


def model_name(path: Path) -> str:
    """Return what a file's model is called: the file's name without suffix and number of its
    part."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match is not None else path.stem


class GgufHeader(NamedTuple):
    """Metadata (long arrays left out) and tensors of a GGUF model, whose files hold them all."""

    files: tuple[Path, ...]  # the parts of a split model in order; llama.cpp is given the first
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def weight_format(self) -> str:
        """llama.cpp's name of the file's mixture ("Q4_K_M"), or the type of the largest tensor."""
        with suppress(ValueError):
            kind = str(LlamaFileType(self.metadata.get("general.file_type")).name)
            return kind.removeprefix("ALL_").removeprefix("MOSTLY_")
        largest = max(self.tensors.values(), key=lambda one: int(one.n_bytes))
        return str(largest.tensor_type.name)

    @property
    def family(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    @property
    def own_metadata(self) -> dict[str, Any]:
        """Return the keys of the architecture, without its name."""
        start = f"{self.family}."
        return {
            key.removeprefix(start): value
            for key, value in self.metadata.items()
            if key.startswith(start)
        }

    def spec(self, name: str) -> ModelSpec:
        """Return the model's sizes, as far as serving it with llama.cpp needs them. Whether
        llama.cpp can load the file, only llama.cpp knows (models.gguf_trial).

        Raises UnsupportedModel (no text comes out of it), BrokenWeights.
        """
        self.check_generates_text(name)
        family, keys = self.family, self.own_metadata

        def count(key: str, default: int | None = None, least: int = 1) -> int:
            value = keys.get(key, default)
            if isinstance(value, list):
                value = max(value, default=0)  # one for each layer
            max_value = 10_000 if key == "block_count" else 1 << 31
            return whole_number(value, name, f"{family}.{key}", max_value, least)

        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BrokenWeights(f"{name} has no embedding matrix token_embd.weight")
        layers, hidden = count("block_count"), count("embedding_length")
        layers -= min(layers - 1, count("nextn_predict_layers", 0, least=0))  # they only draft
        heads = count("attention.head_count", 0, least=0)  # 0: no layer attends (Mamba, RWKV)
        key_dim = count("attention.key_length", hidden // heads if heads else 0, least=0)
        value_dim = count("attention.value_length", key_dim, least=0)
        shapes = {tensor.name: tensor.shape.tolist() for tensor in self.tensors.values()}
        is_tied = "output.weight" not in self.tensors
        return ModelSpec(
            name=name,
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=count("attention.head_count_kv", heads, least=0),
            head_dim=(key_dim + value_dim + 1) // 2,
            intermediate=count("feed_forward_length", 4 * hidden, least=0),
            vocabulary=int(embedding.shape[1]),
            context=count("context_length"),
            tied=is_tied,
            rope_theta=float(keys.get("rope.freq_base", 10_000.0)),
            counted_parameters=sum(int(tensor.n_elements) for tensor in self.tensors.values()),
            idle_parameters=sum(
                int(tensor.n_elements)
                for tensor in self.tensors.values()
                if _is_idle(tensor.name, layers, is_tied)
            ),
            experts=self._experts(count),
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

    def _experts(self, count: Any) -> Experts | None:
        """None: a dense model."""
        tensors = [
            tensor for tensor in self.tensors.values() if re.search(r"_(ch)?exps\.", tensor.name)
        ]
        experts, used = count("expert_count", 0, least=0), count("expert_used_count", 0, least=0)
        if not (tensors and experts and used):
            return None
        return Experts(
            count=experts,
            used=min(used, experts),
            parameters=sum(int(tensor.n_elements) for tensor in tensors),
            weight_bytes=sum(int(tensor.n_bytes) for tensor in tensors),
        )


def _is_idle(tensor: str, layers: int, is_tied: bool) -> bool:
    """Return whether a pass multiplies with nothing of a tensor but single rows."""
    if tensor == "token_embd.weight":
        return not is_tied
    if tensor.startswith("blk."):
        return int(tensor.split(".")[1]) >= layers
    return tensor in ("per_layer_token_embd.weight", "position_embd.weight")


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, or of all parts of a split model.

    Raises BrokenWeights (no GGUF, damaged, cut off, a part is missing).
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
    for number, (part_metadata, _) in enumerate(contents):
        if len(files) > 1 and (part_metadata.get("split.count"), part_metadata.get("split.no")) != (
            parts,
            number,
        ):
            raise BrokenWeights(
                f"The name of {files[number].name} is wrong: its header says that it is part "
                f"{part_metadata.get('split.no', 0) + 1} of {part_metadata.get('split.count', 1)}"
            )
    tensors = {tensor.name: tensor for _, part_tensors in contents for tensor in part_tensors}
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BrokenWeights(f"{path.name} has {len(tensors)} tensors in all its parts, not {total}")
    return GgufHeader(tuple(files), metadata, tensors)


def _read(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    broken = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error)
    try:
        reader = _Reader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except broken as problem:
        raise BrokenWeights(
            f"{str(path)!r} is not a GGUF file, or is damaged or truncated: {problem}"
        ) from problem


class _Reader(GGUFReader):  # type: ignore[misc]  # shipped without types
    """The gguf package's, which takes seconds for a vocabulary of 128,000: that is skipped here."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type == GGUFValueType.ARRAY:
            of, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > MAX_ARRAY:
                at = orig_offs + 12
                if of in self.gguf_scalar_to_np:
                    at += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(of)]).itemsize
                else:
                    for _ in range(count):
                        at += 8 + struct.unpack_from("<Q", self.data, at)[0]
                return at - orig_offs, [], [], [GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
