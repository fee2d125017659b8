"""Predicted memory of an engine: weights + KV cache as the backend stores it + overhead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from models.formats import weight_bytes as format_bytes
from models.spec import ModelSpec
from serving.backends.backend_table import spec_of

LEAST_CONTEXT = 2048  # where nobody says one and memory is short
KV_SHARE = 0.25  # of the free memory, where nobody says how long a context may be


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
    file: str = ""  # a GGUF file that is there, whose header has its tensors
    isa: Collection[str] = ()  # CPU flags


def forecast(sizes: Sizes, backend: str, device: str, weight_format: str) -> Forecast:
    """Predict the memory of this backend on this device.

    Weights: the file's size, else the format's. KV: tokens x ModelSpec.kv_bytes_per_token in the
    type and the row lengths that the backend holds. Overhead: the backend's row in the table.
    """
    spec, model = spec_of(backend), sizes.model
    kv_dtype = spec.kv_dtype(sizes.kv_dtype, weight_format, device, sizes.isa)
    weights = sizes.weight_bytes
    if weights is None:
        weights = _nominal_bytes(model, weight_format) if spec.has_weights else 0
    tokens = sizes.kv_tokens
    if not spec.shares_kv or tokens == sizes.slots * sizes.context_tokens:
        # Each slot has a row of its own.
        tokens = sizes.slots * spec.kv_row_tokens(sizes.context_tokens)
    kv_bytes = tokens * model.kv_bytes_per_token(kv_dtype) if spec.has_weights else 0
    overhead = overhead_bytes(
        backend, device, weight_format, weights, model, sizes.slots, sizes.isa, sizes.file
    )
    return Forecast(weights, kv_bytes, kv_dtype, overhead)


def default_context(most: int, kv_shares: Callable[[int], Mapping[str, float]]) -> int:
    """Tokens of a context where nobody says how many: `most`, the model's own, halved until every
    engine's KV cache takes at most KV_SHARE of its free memory.

    `kv_shares(context)`: that share, for each device where the model fits with this context.
    """
    context = most
    usable = kv_shares(min(most, LEAST_CONTEXT)).keys()
    while context > LEAST_CONTEXT:
        shares = kv_shares(context)
        if shares.keys() == usable and all(share <= KV_SHARE for share in shares.values()):
            break
        context = max(LEAST_CONTEXT, context // 2)
    return context


def overhead_bytes(
    backend: str,
    device: str,
    weight_format: str,
    weight_bytes: int,
    model: ModelSpec,
    slots: int,
    isa: Collection[str] = (),
    file: str = "",
) -> int:
    """Bytes of everything but weights and KV cache. `isa`: CPU flags; `file`: as in Sizes."""
    table = spec_of(backend).overhead_on(device)
    total = table.total_bytes(model, weight_format, weight_bytes, slots)
    return total + extra_weight_bytes(backend, device, weight_format, model, isa, file)


def extra_weight_bytes(
    backend: str,
    device: str,
    weight_format: str,
    model: ModelSpec,
    isa: Collection[str],
    file: str = "",
) -> int:
    """Bytes that the weights take beyond their file: matrices that are held twice."""
    extra_bytes = spec_of(backend).extra_bytes
    if device != "cpu" or extra_bytes is None:
        return 0
    return extra_bytes(model, weight_format, isa, file)


def _nominal_bytes(model: ModelSpec, weight_format: str) -> int:
    """Bytes before there is a file; a format that is not ours counts as 16 bits a weight."""
    try:
        return format_bytes(model, weight_format)
    except KeyError:
        return model.weight_bytes("fp16")
