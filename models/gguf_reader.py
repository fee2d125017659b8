"""Read a GGUF header without loading the file: metadata, tensor table, ModelSpec.

    header = read_header(Path("model.gguf"))
    header.spec("model").parameters, header.weight_format     # (134515008, 'Q4_0')

Every tensor must lie within the file, else BrokenWeights.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFValueType, LlamaFileType, ReaderTensor

from models.errors import BrokenWeights, UnsupportedModel
from models.model_spec import ModelSpec, whole_number

_KEPT_ARRAY = 64  # longer arrays are the tokenizer, and come back empty


class GgufHeader(NamedTuple):
    """Metadata (long arrays left out) and tensors of a GGUF file that holds them all."""

    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @property
    def weight_format(self) -> str:
        """llama.cpp's name of the file's mixture ("Q4_K_M"), or the type of the largest tensor."""
        with suppress(ValueError):
            kind = str(LlamaFileType(self.metadata.get("general.file_type")).name)
            return kind.removeprefix("ALL_").removeprefix("MOSTLY_")
        largest = max(self.tensors.values(), key=lambda one: int(one.n_bytes))
        return str(largest.tensor_type.name)

    def spec(self, name: str) -> ModelSpec:
        """The model's sizes, as far as serving it with llama.cpp needs them; what its tensors mean
        only llama.cpp knows. Raises UnsupportedModel (no text comes out of it), BrokenWeights."""
        family = str(self.metadata.get("general.architecture"))
        keys = [key for key in self.metadata if key.startswith(f"{family}.")]
        own = {key.removeprefix(f"{family}."): self.metadata[key] for key in keys}
        is_text = self.metadata.get("general.type", "model") == "model"
        if not is_text or not own.get("attention.causal", True):
            raise UnsupportedModel(f"{name} is a GGUF file of {family!r} that writes no text")
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(f"{name} is one part of several; join them by gguf-split first")
        if any(key.startswith(("ssm", "wkv")) for key in own):
            raise UnsupportedModel(
                f"{name} keeps a recurrent state, which cannot be cut back to a shared beginning "
                "as a KV cache can"
            )

        def count(key: str, default: int | None = None) -> int:
            value = own.get(key, default)
            if isinstance(value, list):
                value = max(value, default=0)  # one for each layer
            most = 10_000 if key == "block_count" else 1 << 31
            return whole_number(value, f"{name} has {family}.{key} =", most)

        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BrokenWeights(f"{name} has no embedding matrix token_embd.weight")
        heads, hidden = count("attention.head_count"), count("embedding_length")
        key_dim = count("attention.key_length", hidden // heads)
        return ModelSpec(
            name=name,
            family=family,
            layers=count("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=count("attention.head_count_kv", heads),
            head_dim=(key_dim + count("attention.value_length", key_dim) + 1) // 2,
            intermediate=count("feed_forward_length", 4 * hidden),
            vocabulary=int(embedding.shape[1]),
            context=count("context_length"),
            tied="output.weight" not in self.tensors,
            rope_theta=float(own.get("rope.freq_base", 10_000.0)),
            counted_parameters=sum(int(one.n_elements) for one in self.tensors.values()),
        )


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header. Raises BrokenWeights (no GGUF, damaged, cut off)."""
    broken = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error)
    try:
        found = _Reader(path)
        metadata = {name: field.contents() for name, field in found.fields.items()}
    except broken as problem:
        raise BrokenWeights(
            f"{str(path)!r} is no GGUF file, damaged or cut off: {problem}"
        ) from problem
    return GgufHeader(metadata, {one.name: one for one in found.tensors})


class _Reader(GGUFReader):  # type: ignore[misc]  # shipped without types
    """The gguf package's, which takes seconds for a vocabulary of 128,000: that is skipped here."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type == GGUFValueType.ARRAY:
            of, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > _KEPT_ARRAY:
                at = orig_offs + 12
                if of in self.gguf_scalar_to_np:
                    at += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(of)]).itemsize
                else:
                    for _ in range(count):
                        at += 8 + struct.unpack_from("<Q", self.data, at)[0]
                return at - orig_offs, [], [], [GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
