"""Predicted memory of an engine: weights + KV cache as the backend stores it + overhead."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from models.formats import weight_bytes as format_bytes
from models.spec import ModelSpec
from serving.backends.backend_table import spec_of

LEAST_CONTEXT = 2048  # where nobody says one and memory is short


class Forecast(msgspec.Struct, frozen=True):
    """Predicted bytes of one engine."""

    weight_bytes: int
    kv_bytes: int
    kv_dtype: str  # as the backend stores it
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


class Sizes(msgspec.Struct, frozen=True):
    """What decides the memory of an engine beside its backend."""

    model: ModelSpec
    slots: int
    context_tokens: int  # of a slot
    kv_tokens: int  # of all slots together
    kv_dtype: str  # as asked for
    weight_bytes: int | None = None  # of the file; None: there is none yet
    isa: Collection[str] = ()  # CPU flags


def forecast(sizes: Sizes, backend: str, device: str, weight_format: str) -> Forecast:
    """Predict the memory of this backend on this device.

    Weights: the file's size, else the format's. KV: tokens x ModelSpec.kv_bytes_per_token in the
    type and the row lengths that the backend holds. Overhead: the backend's row in the table, and
    matrices that it holds twice.
    """
    spec, model = spec_of(backend), sizes.model
    kv_dtype = spec.kv_dtype(sizes.kv_dtype, weight_format, device, sizes.isa)
    tokens = sizes.kv_tokens
    if not spec.shares_kv or tokens == sizes.slots * sizes.context_tokens:
        # Each slot has a row of its own.
        tokens = sizes.slots * spec.kv_row_tokens(sizes.context_tokens)
    weights, kv_bytes = sizes.weight_bytes, tokens * model.kv_bytes_per_token(kv_dtype)
    if not spec.has_weights:
        weights = weights or 0
        kv_bytes = 0
    elif weights is None:
        try:
            weights = format_bytes(model, weight_format)
        except KeyError:  # a format that is not ours counts as 16 bits a weight
            weights = model.weight_bytes("fp16")
    overhead = spec.overhead_on(device).total_bytes(model, weight_format, weights, sizes.slots)
    if device == "cpu" and spec.extra_bytes is not None:
        overhead += spec.extra_bytes(model, weight_format, sizes.isa)
    return Forecast(weights, kv_bytes, kv_dtype, overhead)
